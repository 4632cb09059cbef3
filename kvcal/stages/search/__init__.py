"""The choice among whole plans by measured KL: ``choose`` measures and chooses, ``record`` is the artifact."""
