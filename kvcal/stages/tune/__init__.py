"""The tune stage: the study of a plan's score thresholds, what it measures, and its record."""
