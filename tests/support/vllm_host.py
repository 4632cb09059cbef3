"""A program of vLLM's environment: serves one scenario, given as JSON on its input, and prints what came as JSON.

{"llm": arguments of LLM, "rounds": [{"prompts": [[id, ...], ...], "tokens": 40, "n": 1}, ...]}
-> {"rounds": [{"tokens": [[[id, ...] of each sample] of each prompt], "cached": [tokens of each prompt]}, ...]}
or {"error": name of the class, "message": text} where vLLM does not start
"""

from __future__ import annotations

import json
import sys
import traceback


def serve(scenario: dict) -> dict:
    from vllm import LLM, SamplingParams

    llm = LLM(**scenario["llm"])
    rounds = []
    for given in scenario["rounds"]:
        sampling = SamplingParams(
            temperature=given.get("temperature", 0.0), max_tokens=given["tokens"], ignore_eos=True, detokenize=False,
            n=given.get("n", 1), seed=given.get("seed"),
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in given["prompts"]], sampling, use_tqdm=False)
        rounds.append(
            {
                "tokens": [[list(sample.token_ids) for sample in output.outputs] for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
            }
        )
    return {"rounds": rounds}


def main() -> None:
    scenario = json.load(sys.stdin)
    try:
        found = serve(scenario)
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        traceback.print_exc()
        found = {"error": type(error).__name__, "message": str(error)}
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
