"""vLLM's plug-in (0.32 and newer): ``--additional-config '{"kvcal_plan": "plan.safetensors"}' --block-size 128``.

plugin.py     the entry point, of every process of vLLM
hooks.py      the two methods of vLLM's attention layer that are wrapped
serving.py    the plan of a process: what is checked at start, and this rank's share
ring.py       a layer of vLLM's that owns the ring of requests
flash.py      vLLM's FlashAttention, for prompts
backend.py    the attention backend: from vLLM's metadata to the core's step
"""

BACKEND = "KVCAL"  # its name in vLLM
