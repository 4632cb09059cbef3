"""A program of vLLM's environment: what the installed version lacks of the contract, and what ``kvcal doctor`` says."""

from __future__ import annotations

import json
import subprocess
import sys

from kvcal.engines.contract import missing_parts

done = subprocess.run(
    [sys.executable, "-m", "kvcal", "doctor", "--engine", "vllm", "--json"], capture_output=True, text=True
)
(doctor,) = [one for one in json.loads(done.stdout)["findings"] if one["name"] == "plans in vllm"]
print("RESULT " + json.dumps({"missing": missing_parts("vllm"), "doctor": doctor}), flush=True)
