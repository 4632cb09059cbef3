"""A program of SGLang's environment: serves rounds of prompts with a plan, given as JSON on its input, and prints what
came out.

    {"engine": arguments of Engine, "rounds": [[[id, ...], ...] of each round], "tokens": 40, "together": false}
    -> [[{"output": [id, ...], "cached": tokens} of each prompt] of each round]

A round's prompts are served one after the other, or all ``together``.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from sglang.srt.entrypoints.engine import Engine

    given = json.load(sys.stdin)
    engine = Engine(**given["engine"])
    sampling = {"temperature": 0.0, "max_new_tokens": given["tokens"], "ignore_eos": True}
    rounds = []
    for prompts in given["rounds"]:
        if given["together"]:
            found = engine.generate(input_ids=prompts, sampling_params=sampling)
        else:
            found = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
        rounds.append([{"output": one["output_ids"], "cached": one["meta_info"]["cached_tokens"]} for one in found])
    print("RESULT " + json.dumps(rounds), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
