"""Measuring the GPU runtime: kernels, one layer's cache work, and whole decode steps, kept apart.

What makes a figure honest is decided once, here: replayed CUDA graphs over several caches of random codes that together
exceed the L2 cache, medians with their spread, the fastest 16-bit baseline of the same run, and beside every factor the
share of the read bandwidth that was measured minutes before. All of it imports without a GPU.
"""
