"""A program of vLLM's environment: serves the requests of one scenario, given as JSON on its input, and prints what the
engine did as JSON, so that all of it can be computed again without vLLM (engine_replay).

    {"llm": arguments of LLM,
     "requests": [{"prompt": [id, ...], "tokens": 40, "at": step, "abort": step, "temperature": 0, "n": 1,
                   "after": number of a request, whose prompt and answer come before this prompt}, ...]}
    -> {"steps": [[[request, first token, count, [block of each page], drafts, tokens that the engine took for right],
                   ...] of each step],
        "requests": {request: [[prompt], [output]]},
        "outputs": {request: [[output], [log-probability of each]]}, "log": [lines of kvcal's]}
    or {"error": name of the class, "message": text, "trace": text} where vLLM does not start

or only starts vLLM: {"starts": [arguments of LLM, ...]} -> {"starts": [error, ...]}
"""

from __future__ import annotations

import json
import logging
import sys
import traceback


class Lines(logging.Handler):
    """What kvcal logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def serve(scenario: dict) -> dict:
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    lines = Lines()
    steps, seen, by_output = [], {}, {}
    schedule, update = Scheduler.schedule, Scheduler.update_from_output

    def recorded(self: Scheduler, *args: object, **kwargs: object) -> object:
        found = schedule(self, *args, **kwargs)
        new = {request.req_id: request.num_computed_tokens for request in found.scheduled_new_reqs}
        cached = found.scheduled_cached_reqs
        starts = new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = {name: len(ids) for name, ids in found.scheduled_spec_decode_tokens.items()}
        steps.append(
            [
                [name, starts[name], count, pages_of(self, name), drafts.get(name, 0), count]
                for name, count in found.num_scheduled_tokens.items()
            ]
        )
        by_output[id(found)] = found, steps[-1]
        seen.update({name: self.requests[name] for name in found.num_scheduled_tokens})
        return found

    def answered(self: Scheduler, scheduled: object, output: object) -> object:
        for entry in by_output.pop(id(scheduled))[1]:
            name, _, count, _, drafts, _ = entry
            if drafts:  # of the request's new tokens, one is the model's own
                entry[-1] = count - drafts - 1 + len(output.sampled_token_ids[output.req_id_to_index[name]])
        return update(self, scheduled, output)

    Scheduler.schedule, Scheduler.update_from_output = recorded, answered
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
                engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
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
    # vLLM adds a random ending to a request's name.
    steps = [[[name.rsplit("-", 1)[0], *numbers] for name, *numbers in one] for one in steps]
    requests = {n.rsplit("-", 1)[0]: [list(r.prompt_token_ids), list(r.output_token_ids)] for n, r in seen.items()}
    return {"steps": steps, "requests": requests, "outputs": outputs, "log": lines.lines}


def pages_of(scheduler: object, name: str) -> list[int]:
    """The blocks of a request's pages; those of its rings are in other groups."""
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    firsts = [next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec for spec in specs]
    (number,) = [n for n, spec in enumerate(firsts) if not isinstance(spec, CircularBufferSpec)]
    return list(scheduler.kv_cache_manager.get_block_ids(name)[number])


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
