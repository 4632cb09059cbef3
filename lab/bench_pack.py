"""Time of the launches that pack rotated pages, with error feedback and without: `append` and `pack`.

    python lab/bench_pack.py
    python lab/bench_pack.py --step-tokens 128 64 32 --prompt-tokens 64 32 --bits 2 3 --prompt 32768
    python lab/bench_pack.py --stripe-tokens 16 32 128
    python lab/bench_pack.py --stripe-tokens 16 --with-feedback --prompt --cold

Needs a CUDA device. One layer of 8 KV heads of 128 channels, bf16, 8 sinks, a window of 64. For `append`:
microseconds of a launch in a CUDA graph of 20, each of which packs the pages, or the stripes, that so many of all
sequences complete. ``--cold``: also behind a pass over 128 MiB, whose own time is taken off, so that neither code
nor factors are in caches, as in a step of a model. ``--step-tokens``, ``--prompt-tokens``: of a part that a block
packs, at most. Factors are random: which codes are chosen takes no time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvcal.kernels import ops, packing
from kvcal.kernels.operands import NOTHING, Memory, PageTransform, Place, QueryStatistic
from kvcal.kernels.variants import Variant
from kvcal.pages.hadamard import random_signs
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import SIDES, Format, Side

HEADS, DIM, GROUP, LAUNCHES, REPLAYS = 8, 128, 4, 20, 15
STEPS = ((1, 0), (1, 1), (8, 0), (8, 1), (8, 8), (8, 2), (8, 4), (38, 0), (38, 1), (38, 38), (152, 0), (152, 152))


@functools.cache
def swept() -> Tensor:
    return torch.zeros(2**27, dtype=torch.uint8, device="cuda")


def cold_us(launch: Callable[[], None]) -> float:
    """Microseconds of a launch that finds nothing of its own in caches."""

    def sweep() -> None:
        swept().add_(1)

    def both() -> None:
        sweep()
        launch()

    return graph_us(both) - graph_us(sweep)


def graph_us(launch: Callable[[], None]) -> float:
    """Microseconds of a launch: the median of replays of LAUNCHES in a graph."""
    launch()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / LAUNCHES)
    return statistics.median(times)


def transform_of(has_feedback: bool) -> PageTransform:
    generator = torch.Generator().manual_seed(1)

    def factor(has_gain: bool) -> Tensor:
        numbers = torch.randn(HEADS, DIM * (DIM + 1) // 2, generator=generator) * 0.1
        gains = torch.ones(HEADS, DIM * has_gain)
        return torch.cat([numbers, gains], 1).half().cuda() if has_feedback else NOTHING.cuda()

    nothing, signs = NOTHING.cuda(), random_signs(DIM, 2).cuda()
    return PageTransform(nothing, nothing, factor(False), factor(True), signs, signs)


def append_us(variant: Variant, batch: int, complete: int, is_cold: bool) -> str:
    """Such as "11.7", or "11.7 (18.2 cold)"."""

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def memory(side: Side) -> Memory:
        fmt, record = variant.format(side), variant.layout(side).record_bytes
        pages = torch.zeros(batch, HEADS, record, dtype=torch.uint8, device="cuda")
        sinks, ring = (tensor(batch, HEADS, count, DIM) for count in (fmt.num_sink_tokens, fmt.ring_tokens()))
        return Memory(sinks, ring, pages)

    k, v = map(memory, SIDES)
    lengths = torch.full((batch,), 255, dtype=torch.int32, device="cuda")
    lengths[complete:] = 270
    table = torch.arange(batch, dtype=torch.int32, device="cuda").repeat(4, 1).t().contiguous()
    nothing, error = NOTHING.cuda(), torch.zeros(1, dtype=torch.int32, device="cuda")
    place = Place(lengths, table, nothing, nothing, nothing)
    new, queries = tensor(batch, HEADS, DIM), tensor(batch, HEADS * GROUP, DIM)
    statistic = QueryStatistic(nothing, nothing)
    transform = transform_of(variant.k_feedback)

    def launch() -> None:
        ops.launch_append(new, new, queries, k, v, statistic, place, transform, error, variant)

    found = f"{graph_us(launch):.1f}" + (f" ({cold_us(launch):.1f} cold)" if is_cold else "")
    assert int(error) == 0
    return found


def prompt_ms(variant: Variant, tokens: int) -> float:
    """Of a layer: its keys and its values."""
    x = torch.randn(1, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    slots = torch.arange(tokens // 128, dtype=torch.int32, device="cuda").view(1, -1)
    error, transform = torch.zeros(1, dtype=torch.int32, device="cuda"), transform_of(variant.k_feedback)
    pages = [
        torch.zeros(tokens // 128, HEADS, variant.layout(side).record_bytes, dtype=torch.uint8, device="cuda")
        for side in SIDES
    ]

    def launch() -> None:
        for side, of_side in zip(SIDES, pages, strict=True):
            ops.launch_pack(x, of_side, slots, 0, NOTHING.cuda(), transform, error, side, variant)

    launch()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-tokens", type=int, nargs="+", default=list(packing.STEP_TOKENS[:1]))
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=list(packing.PROMPT_TOKENS[:1]))
    parser.add_argument("--stripe-tokens", type=int, nargs="+", default=[16, 32, 128])
    parser.add_argument("--bits", type=int, nargs="+", default=[2])
    parser.add_argument("--prompt", type=int, nargs="*", default=[2048, 32768])
    parser.add_argument("--with-feedback", action="store_true", help="with it alone")
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    print(torch.cuda.get_device_name())
    feedback = (True,) if given.with_feedback else (True, False)
    for bits, stripe, fed in itertools.product(given.bits, given.stripe_tokens, feedback):
        fmt = Format(bits, "token", 128, 8, 64, quantizer="rotated", stripe_tokens=stripe)
        variant = Variant(fmt, fmt, DIM, "bfloat16", GROUP, False, False, k_feedback=fed, v_feedback=fed, v_gain=fed)
        print(f"{bits} bits, {'with' if fed else 'without'} feedback, {stripe} tokens at once")
        for tokens in given.step_tokens if stripe == PAGE_TOKENS else [packing.FEW]:
            packing.STEP_TOKENS = (tokens,)  # of pages: stripes are packed by eights
            ops._append_kernel.cache_clear()
            kernel, shape, _ = ops._append_kernel(variant, False, 0)
            times = (
                f"{done}/{batch} {append_us(variant, batch, done, given.cold)}"
                for batch, done in STEPS[: None if fed else 5]
            )
            needs = f"{shape.shared_bytes} bytes, {kernel.registers} registers"
            print(
                f"  append, up to {tokens} tokens a part, {needs}; us by complete/all: {', '.join(times)}", flush=True
            )
        for tokens in given.prompt_tokens if given.prompt else []:
            packing.PROMPT_TOKENS = (tokens,)
            ops._side_kernel.cache_clear()
            prompts = (f"{count} {prompt_ms(variant, count):.3f}" for count in given.prompt)
            print(
                f"  ms of pack, {tokens} tokens a part, keys and values of a prompt: {', '.join(prompts)}", flush=True
            )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
