"""The CUDA kernels: sources in csrc/, the macros of a variant, compiling, and launching."""
