"""Pages: how 128 tokens of some KV heads become records of bytes, and back.

``codec`` is the only torch encoder and decoder of pages: transforms (``rescale_and_rope``), then one layout
(``layout_protocol.Layout``: ``uniform``, and those of ``kvcal.systems``). It packs bits as ``packing``
defines, with codes that ``error_feedback`` may choose. ``hadamard`` is the rotation that several share.
"""
