"""The operators of a decoding step: CUDA kernels, their torch reference, and the choice between them.

ops.py, operands.py             ``append``, ``decode``, ``pack``, ``unpack``, ``append_window``; operands, in groups
reference.py                    the same in torch: what the kernels must give
variants.py, choice.py          what a kernel is compiled for; which kernel serves it, what none takes
decode.py                       launches of ``decode``
compile.py                      from a source in csrc/ and the macros of a variant to a kernel on a GPU
"""
