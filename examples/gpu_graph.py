"""Captures a decode step over a packed cache in a CUDA graph, and replays it.

    python examples/gpu_graph.py

A static cache (``max_tokens``) allocates all its memory once and keeps its lengths on the device, so that one captured
step serves every token: a replay neither allocates nor waits. Without a GPU, the example says so and ends.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcal import PlanCache, attached, load_plan
from kvcal.embedded import model_folder

PLAN = sorted((Path(__file__).parents[1] / "artifacts/plans").iterdir())[-1] / "plan.safetensors"
PROMPT = "<eos>Times. 314 x 159\nQuestion: product?\n<think>\n"  # <eos> begins every text of this model
NEW_TOKENS = 256


@torch.inference_mode()
def main() -> None:
    if not torch.cuda.is_available():
        print("no GPU here: this example needs one")
        return
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.bfloat16).cuda().eval()
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"].cuda()

    cache = PlanCache(load_plan(PLAN), model.config, max_tokens=1024)
    cache.allocate(batch=1, device="cuda")
    token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    position = torch.zeros(1, 1, dtype=torch.long, device="cuda")

    def step() -> None:
        logits = model(token, position_ids=position, past_key_values=cache).logits[:, -1]
        token.copy_(logits.argmax(-1, keepdim=True))
        position.add_(1)

    with attached(model):
        stream = torch.cuda.Stream()  # what initialises itself on first use must do so before the capture
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

        cache.reset()
        logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        token.copy_(logits.argmax(-1, keepdim=True))
        position.fill_(prompt.shape[1])
        tokens = [token.clone()]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(NEW_TOKENS - 1):
            graph.replay()
            tokens.append(token.clone())
        end.record()
        cache.check()  # waits, and raises what the steps met

    ids = torch.cat(tokens, dim=1)[0].tolist()
    text = tokenizer.decode(ids[: ids.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in ids else ids)
    print(PROMPT + text)
    milliseconds = start.elapsed_time(end) / (NEW_TOKENS - 1)
    print(f"{NEW_TOKENS} tokens, {milliseconds:.3f} ms a step; {cache.nbytes} bytes of cache for 1024 tokens")


if __name__ == "__main__":
    main()
