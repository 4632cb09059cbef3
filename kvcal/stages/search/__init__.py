"""Search: compositions of all systems, chosen layer by layer under one budget, on measured KL."""
