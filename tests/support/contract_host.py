"""A program of vLLM's environment: what the installed version lacks of the contract."""

from __future__ import annotations

import json

from kvcal.engines.contract import missing_parts

print("RESULT " + json.dumps({"missing": missing_parts("vllm")}), flush=True)
