"""SGLang's plug-in (0.5.23 and newer): ``KVCAL_PLAN=plan.safetensors``, ``--attention-backend kvcal
--page-size 128``.

plugin.py          the entry point, of every process of SGLang, and the functions of SGLang that are wrapped
serving.py         the plan of a process: what is checked at start, this rank's share and pool, and shared sinks
hierarchy.py       pages on the host and in files (HiCache)
backend.py         the attention backend: from SGLang's batch to the core's step, and the rings of requests
windows.py         layers with a sliding window: SGLang's pool for them
window_backend.py  and SGLang's attention
"""

BACKEND, PLAN_VARIABLE = "kvcal", "KVCAL_PLAN"
