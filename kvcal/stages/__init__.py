"""The stages of a run: each takes an artifact and gives an artifact."""
