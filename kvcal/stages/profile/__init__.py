"""What every format costs in every layer: sensitivities, gradient norms and KL."""
