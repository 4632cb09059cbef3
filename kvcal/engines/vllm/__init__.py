"""vLLM's plug-in (0.32 and newer): ``--additional-config '{"kvcal_plan": "plan.safetensors"}' --block-size
128``.

plugin.py     the entry point, of every process of vLLM, and the constructor of its attention layer, which is wrapped
serving.py    the plan of a process: what is checked at start, and this rank's share
backend.py    the attention backend: from vLLM's metadata to the core's step
rings.py      the rings of requests, and the sinks that they share
connectors.py the KV connectors with which it is served, and their options
nixl.py       the one that reads a request's blocks from another engine
"""

BACKEND = "KVCAL"  # its name in vLLM
PEERS, PEERS_MODULE = "PlanNixlConnector", "kvcal.engines.vllm.nixl"  # a KV connector, and where vLLM loads it from
