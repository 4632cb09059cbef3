"""Pages: how 128 tokens of some KV heads become records of bytes, and back.

``codec`` is the only torch encoder and decoder of pages: transforms (``transforms``), then one of ``layouts``,
which pack bits as ``packing`` defines, with codes that ``feedback`` may choose. ``scores`` choose the channels of
``tiered`` pages, ``shrink`` halves bits of ``uniform`` ones.
"""
