"""Caches that evaluation and profiles measure plans with: what a dynamic ``PlanCache`` gives, in less time.

cache.py            ``DenseCache``, ``DecodedCache``
dense_layer.py      a layer without records, whose pages are encoded with those of other caches
decoded_layer.py    a layer with its records and a dense copy of what they read as
"""
