"""Pages: how 128 tokens of some KV heads become records of bytes, and back.

``codec`` is the only torch encoder and decoder of pages: transforms (``rescale_and_rope``), or what a
``predictor`` leaves, then one layout (``uniform``, ``rotated``, ``tiered``, ``lattice``; all are
``layout_protocol.Layout``). It packs bits as ``packing`` defines, with codes that ``error_feedback`` may
choose. Tokens come in a ``basis`` where the plan has one. ``scores`` choose the channels of ``tiered`` pages,
``shrink`` halves bits of ``uniform`` ones.
"""
