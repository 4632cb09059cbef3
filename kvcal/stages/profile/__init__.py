"""Costs of every format in every layer: sensitivities, gradient norms and KL."""
