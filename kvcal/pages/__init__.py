"""Pages: how 128 tokens of some KV heads become records of bytes, and back.

``codec`` is the only torch encoder and decoder of pages: transforms (``transforms``), or what a ``predictor`` leaves,
then one layout (``uniform``, ``rotated``, ``tiered``, ``lattice``; all are ``record_layout.Layout``), which packs bits
as ``packing`` defines, with codes that ``feedback`` may choose. Tokens come in a ``basis`` where the plan has one.
``scores`` choose the channels of ``tiered`` pages, ``shrink`` halves bits of ``uniform`` ones.
"""
