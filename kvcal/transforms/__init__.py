"""Transforms: what a page goes through before it is quantized, and the inverse after it is decoded."""
