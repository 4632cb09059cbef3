"""A program of vLLM's environment: whether plans can be served in it, and what ``kvcal doctor`` says."""

from __future__ import annotations

import json
import subprocess
import sys

from kvcal.engines.support import refusal

done = subprocess.run(
    [sys.executable, "-m", "kvcal", "doctor", "--engine", "vllm", "--json"], capture_output=True, text=True
)
(doctor,) = [one for one in json.loads(done.stdout)["findings"] if one["name"] == "plans in vllm"]
print("RESULT " + json.dumps({"refusal": refusal("vllm"), "doctor": doctor}), flush=True)
