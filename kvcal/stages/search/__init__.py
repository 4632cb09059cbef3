"""Compositions of formats, compared by their measured KL."""
