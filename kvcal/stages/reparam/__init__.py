"""λ and offsets of keys, calibrated at far positions."""
