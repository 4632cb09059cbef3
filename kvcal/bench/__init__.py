"""Measures the GPU runtime: kernels, one layer's cache work, and whole decode steps, kept apart.

    shape.py       what is measured: formats, sizes, the bytes that a step must move
    device.py      the machine, its read bandwidth, and the time of CUDA graphs
    case.py        plans and caches of random content: one layer's decode step, ready to be timed
    baselines.py   16-bit attention of other libraries
    rivals.py      their attention over fp8 and int4
    plan_layers.py a plan's layers, those alike together; what a search may choose for decoding
    record.py      results, saved after every measurement
    kernels.py     ``kvcal bench kernels`` and ``kvcal bench layer``
    model.py       models of public shapes, their whole decode steps, and their prompts, packed or not
    e2e.py         ``kvcal bench e2e``

All of it imports without a GPU.
"""
