"""Profiling: what every candidate format costs in every layer, measured on calibration data."""
