"""A program of SGLang's environment: serves rounds of prompts with a plan, given as JSON on its input, and
prints what came out.

    {"engine": arguments of Engine, "rounds": [[[id, ...], ...] of each round], "tokens": 40, "together":
    false,
     "weights": null, or a folder: those from the second round on}
    -> {"rounds": [[{"output": [id, ...], "chances": [log-probability, ...], "cached": tokens, "verified": steps that
    verified drafts} of each prompt] of each
        round], "steps": what SGLang computed (sglang_recorder); request p of round r has the name "r.p"}

A round's prompts are served one after the other, or all ``together``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from sglang_recorder import VARIABLE


def main() -> None:
    from sglang.srt.entrypoints.engine import Engine

    given = json.load(sys.stdin)
    engine = Engine(**given["engine"])
    sampling = {"temperature": 0.0, "max_new_tokens": given["tokens"]}
    rounds = []
    for number, prompts in enumerate(given["rounds"]):
        if number == 1 and given.get("weights"):
            engine.update_weights_from_disk(given["weights"])
        names = [f"{number}.{prompt}" for prompt in range(len(prompts))]
        options = {"sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}
        if given["together"]:
            found = engine.generate(input_ids=prompts, rid=names, **options)
        else:
            found = [
                engine.generate(input_ids=prompt, rid=name, **options)
                for name, prompt in zip(names, prompts, strict=True)
            ]
        rounds.append([
            {
                "output": one["output_ids"], "cached": one["meta_info"]["cached_tokens"],
                "verified": one["meta_info"].get("spec_verify_ct", 0),
                "chances": [chance for chance, *_ in one["meta_info"]["output_token_logprobs"]],
            }
            for one in found
        ])  # fmt: skip
    path = Path(os.environ[VARIABLE])
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    print("RESULT " + json.dumps({"rounds": rounds, "steps": steps}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
