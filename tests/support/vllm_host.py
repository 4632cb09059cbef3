"""A program of vLLM's environment: serves the requests of one scenario, given as JSON on its input, and
prints what the engine did as JSON, so that all of it can be computed again without vLLM (engine_replay).

    {"llm": arguments of LLM,
     "requests": [{"prompt": [id, ...], "tokens": 40, "at": step, "abort": step, "temperature": 0, "n": 1,
                   "lora": folder of an adapter, "after": number of a request, whose prompt and answer come before
                   this prompt}, ...]}
    -> {"steps": [[[request, first token, count, [block of each page], drafts, tokens that the engine took for
    right],
                   ...] of each step],
        "requests": {request: [[prompt], [output]]}, "outputs": {request: [[output], [log-probability of
        each]]}, "log": [lines of kvcal's], "blocks": vLLM's}
    or {"error": name of the class, "message": text, "trace": text} where vLLM does not start

or only starts vLLM: {"starts": [arguments of LLM, ...]} -> {"starts": [error, ...]}
"""

from __future__ import annotations

import json
import logging
import sys
import traceback

from vllm_recorder import record


class Lines(logging.Handler):
    """The log of kvcal."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def serve(scenario: dict) -> dict:
    from vllm import LLM, SamplingParams

    lines = Lines()
    steps: list = []
    seen = record(steps.append)
    engine = LLM(**scenario["llm"]).llm_engine
    logging.getLogger("vllm.kvcal").addHandler(lines)  # vLLM sets up logging while it starts
    waiting, outputs, step = dict(enumerate(scenario["requests"])), {}, 0
    while waiting or engine.has_unfinished_requests():
        for number, given in list(waiting.items()):
            if given.get("at", 0) <= step:
                sampling = SamplingParams(
                    temperature=given.get("temperature", 0.0), max_tokens=given["tokens"], ignore_eos=True,
                    detokenize=False, n=given.get("n", 1), logprobs=0,
                )  # fmt: skip
                prompt = given["prompt"]
                if "after" in given:
                    before = given["after"]
                    prompt = scenario["requests"][before]["prompt"] + outputs[str(before)][0] + prompt
                engine.add_request(
                    str(number), {"prompt_token_ids": prompt}, sampling, lora_request=_adapter(given.get("lora"))
                )
                del waiting[number]
        aborted = [str(n) for n, given in enumerate(scenario["requests"]) if given.get("abort") == step]
        if aborted:
            engine.abort_request(aborted)
        for output in engine.step():
            is_one = scenario["requests"][int(output.request_id)].get("n", 1) == 1
            for sample in output.outputs:
                name = output.request_id if is_one else f"{sample.index}_{output.request_id}"
                if sample.finish_reason is not None:
                    outputs[name] = _tokens_of(sample)
        step += 1
    requests = {name: [list(r.prompt_token_ids), list(r.output_token_ids)] for name, r in seen.items()}
    blocks = engine.vllm_config.cache_config.num_gpu_blocks
    return {"steps": steps, "requests": requests, "outputs": outputs, "log": lines.lines, "blocks": blocks}


def _adapter(folder: str | None) -> object:
    from vllm.lora.request import LoRARequest

    return None if folder is None else LoRARequest(folder, 1 + sum(map(ord, folder)), folder)


def _tokens_of(sample: object) -> list:
    ids = list(sample.token_ids)
    return [ids, [chances[token].logprob for token, chances in zip(ids, sample.logprobs, strict=True)]]


def answer(scenario: dict) -> dict:
    try:
        return serve(scenario)
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        return {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}


def main() -> None:
    scenario = json.load(sys.stdin)
    if "starts" in scenario:
        found = {"starts": [answer({"llm": given, "requests": []}) for given in scenario["starts"]]}
    else:
        found = answer(scenario)
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
