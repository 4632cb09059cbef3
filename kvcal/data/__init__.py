"""Calibration and evaluation data: sources of text, token sequences, generated tasks, and pools by
purpose."""
