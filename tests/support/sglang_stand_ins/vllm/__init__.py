"""A stand-in for vLLM, of which SGLang imports one operator on CPUs without AMX, and does not call it
there."""
