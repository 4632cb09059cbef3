"""``kvcal bench``: what the GPU runtime takes, kernel by kernel, layer by layer, and end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcal.commands import options
from kvcal.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcal.bench.kernels import Job
    from kvcal.bench.plan_layers import TimedPlan
    from kvcal.bench.shape import Heads, Point, Stored
    from kvcal.progress import Reporter


bench = typer.Typer(
    help="Measure the GPU runtime: kernels, one layer's cache work, and whole decode steps.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

FORMATS_HELP = """Bits; 2-window (32 sinks, the 128 most recent tokens); kitty; 16 (through the same kernel); 2-uneven
(32 sinks of keys alone: decode_plain); 2-rotated, kitty-rotated (rotated pages, of K and V, or of V); 2-lattice
(points of a lattice for each head); pre-rope (keys before RoPE), higgs (a lattice for all heads) or aqua (residuals of
predictors on it): dequantised in every step. May be repeated."""
OUT = Path("artifacts/bench")


@dataclass(frozen=True)
class PairOptions(options.OutputOptions):
    """K and V formats to measure, and the lengths of their texts."""

    formats: Annotated[list[str] | None, typer.Option("--format", help=FORMATS_HELP)] = None
    recipe: Annotated[
        list[str] | None, typer.Option(help="A recipe with [formats], predictors included: path or name; repeatable.")
    ] = None
    context: Annotated[list[int] | None, typer.Option(help="Tokens of each sequence; may be repeated.", min=1)] = None
    plan: Annotated[
        Path | None, typer.Option(help="Time this plan's layers instead of formats; layers alike share a measurement.")
    ] = None

    def stored(self, default: Sequence[str]) -> tuple[tuple[Stored, ...], TimedPlan | None]:
        """The pairs to be timed, and the plan that they belong to. UsageError: a plan and formats."""
        from kvcal.bench.plan_layers import timed_plan
        from kvcal.bench.shape import chosen_pairs

        if self.plan is None:
            return chosen_pairs(self.formats or (), self.recipe or (), default), None
        if self.formats or self.recipe:
            raise UsageError(
                "--plan and --format or --recipe: a plan has its own formats",
                hint="time formats in a run of their own",
            )
        plan = timed_plan(self.plan)
        return plan.kinds, plan


@dataclass(frozen=True)
class GridOptions(PairOptions):
    """Of which sizes."""

    batch: Annotated[list[int] | None, typer.Option(help="Sequences; may be repeated.", min=1)] = None
    heads: Annotated[int | None, typer.Option(help="KV heads; 8, or the plan's.", min=1)] = None
    head_dim: Annotated[
        int | None,
        typer.Option(help="Size of a head, K and V: a multiple of 8 up to 512; 128, or the plan's.", min=1),
    ] = None
    group: Annotated[int | None, typer.Option(help="Query heads for each KV head; 4, or the plan's.", min=1)] = None

    def chosen_heads(self, plan: TimedPlan | None) -> Heads:
        """The plan's, or those asked for. UsageError: both, or a head size that no kernel takes."""
        from kvcal.bench.shape import Heads, chosen_heads

        if plan is None:
            usual = Heads()
            return chosen_heads(
                self.heads or usual.num_kv_heads, self.head_dim or usual.head_dim, self.group or usual.group
            )
        if (self.heads, self.head_dim, self.group) != (None, None, None):
            raise UsageError("--plan and --heads, --head-dim or --group: a plan has its own heads")
        return plan.heads


@bench.command()
@options.needs_compile
@options.spread
def kernels(
    given: GridOptions,
    out: options.Out = OUT,
    quick: Annotated[bool, typer.Option("--quick", help="Two sizes, four formats, fewer replays.")] = False,
    search: Annotated[
        str | None,
        typer.Option(help="A recipe with [search]: time all pairs of formats that it may choose for decoding."),
    ] = None,
) -> None:
    """Time decode attention over a packed cache, against the fastest 16-bit attention of this machine.

    Baselines (every backend of torch's SDPA, FlexAttention, FlashInfer where installed) run in the same run on the same
    sizes; beside every factor stand what its bytes allow, the target, and the share of the measured read bandwidth.

    Every row names its kernel. `decode` runs on tensor cores, for heads of 64, 96, 128, 192 and 256; `decode_plain`
    takes every other head size, and keys and values with different sinks; `reconstruct +` stands before it where pages
    are not read as they are stored: in every step they become pages of 16 bits, and both are timed together.

    Example: `kvcal bench kernels --out bench`

    Example: `kvcal bench kernels --format 2 --recipe mixkvq-capped --batch 16 --context 65536 --group 8`

    Example: `kvcal bench kernels --format 2 --head-dim 96 --batch 8 --context 32768` (decode_plain)

    Example: `kvcal bench kernels --plan plan.safetensors` (all of a plan's layers, at its workload)

    Example: `kvcal bench kernels --search best --batch 8 --context 32768` (the table for `kvcal search --step-times`)

    Example: `kvcal bench kernels --quick --format higgs --format aqua --batch 8 --context 8192` (reconstruct + decode)
    """
    from kvcal.bench.kernels import PICTURE, bench_kernels
    from kvcal.bench.plan_layers import search_pairs
    from kvcal.bench.shape import DEFAULT_PAIRS, POINTS, QUICK_PAIRS, QUICK_POINTS
    from kvcal.charts.kernels import draw_kernels
    from kvcal.stages.search.step_times import FILE

    if search is not None and given.plan is not None:
        raise UsageError("--plan and --search: a plan has its own formats", hint="time them in runs of their own")
    pairs, points = (QUICK_PAIRS, QUICK_POINTS) if quick else (DEFAULT_PAIRS, POINTS)
    with given.reporting() as reporter:
        job = _job("kernels", given, out, () if search else pairs, points, reporter, quick)
        if search is not None:
            job = replace(job, pairs=(*job.pairs, *search_pairs(search, job.heads)))
        report = bench_kernels(job)
    given.show(report.document(), *(table.text() for table in report.tables()))
    reporter.say(f"table: {job.folder / report.file}")
    if report.plan is None and search is None:  # which are no curves over the context, or too many
        draw_kernels(report, job.folder / PICTURE)
        reporter.say(f"picture: {job.folder / PICTURE}")
    if (job.folder / FILE).exists():
        reporter.say(f"step times, for `kvcal search --step-times`: {job.folder / FILE}")


@bench.command()
@options.needs_compile
@options.spread
def layer(
    given: GridOptions,
    out: options.Out = OUT,
) -> None:
    """Time one layer's cache work in a decode step: storing the token, packing (amortised), attention.

    Against transformers' StaticCache (its update, then the fastest SDPA), at batch 32 and 8192 and 32768 tokens if
    nothing else is asked for. Also: what packing a whole prompt takes. Every row names its kernel, as in `bench
    kernels`; where pages are reconstructed, every step does that for all of them.

    Example: `kvcal bench layer --format 2 --format kitty --batch 32 --context 32768`

    Example: `kvcal bench layer --format 2 --format higgs --recipe aqua-kv --batch 1 --context 32768`
    """
    from kvcal.bench.kernels import bench_layer
    from kvcal.bench.shape import LAYER_POINTS, QUICK_PAIRS

    with given.reporting() as reporter:
        job = _job("layer", given, out, QUICK_PAIRS, LAYER_POINTS, reporter)
        report = bench_layer(job)
    given.show(report.document(), *(table.text() for table in report.tables()))
    reporter.say(f"table: {job.folder / report.file}")


def _job(
    kind: str, given: GridOptions, out: Path, pairs: Sequence[str], points: Sequence[Point], reporter: Reporter,
    quick: bool = False,
) -> Job:  # fmt: skip
    """The work of ``bench kernels`` or ``layer``; ``pairs`` and ``points``: unless others are asked for."""
    from kvcal.bench.device import require_gpu
    from kvcal.bench.kernels import Job
    from kvcal.bench.shape import chosen_points
    from kvcal.folder import Folder

    chosen, plan = given.stored(pairs)
    sizes = chosen_points(given.batch or (), given.context or (), points if plan is None else plan.points)
    heads = given.chosen_heads(plan)
    device = require_gpu(kind)
    return Job(device, chosen, sizes, heads, Folder.create(out).path, reporter, quick, plan)


@bench.command()
@options.needs_compile
@options.spread
def e2e(
    given: PairOptions,
    shape: Annotated[
        str, typer.Option(help="llama-3.1-8b, qwen3-8b, qwen3-4b, a config.json, or (with weights) a model.")
    ] = "llama-3.1-8b",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Fill the shape with random weights, on the GPU.")
    ] = False,
    memory: Annotated[
        list[str] | None, typer.Option(help="Device memory to fill, such as 24GB, or all; may be repeated.")
    ] = None,
    out: options.Out = OUT,
) -> None:
    """Time whole decode steps of a model as CUDA graphs, with the batch grown until the memory is full.

    16-bit StaticCache with SDPA, as transformers calls it and with the fastest backend, against plans; at the same
    batch and with the same memory (24GB, 80GB and all if nothing else is asked for, as far as the device has it).
    Caches hold random contents at the context's length instead of a prompt's. Every row names its kernel, as in
    `bench kernels`.

    Example: `kvcal bench e2e --shape llama-3.1-8b --random-weights --memory 24GB --context 8192 --context 32768`

    Example: `kvcal bench e2e --shape qwen3-4b --random-weights --recipe aqua-kv --memory 12GB --context 8192`
    """
    from kvcal.bench.device import machine_of, require_gpu
    from kvcal.bench.e2e import StepJob, bench_e2e, memory_limits
    from kvcal.bench.plan_layers import whole_plan
    from kvcal.bench.shape import CONTEXTS, STEP_PAIRS, chosen_points
    from kvcal.folder import Folder

    pairs, plan = given.stored(STEP_PAIRS)
    pairs = pairs if given.plan is None else (whole_plan(given.plan),)
    contexts = [point.context for point in chosen_points((1,), given.context or CONTEXTS, ())]
    memory_limits(memory or (), 0)  # a wrong text fails before a device is looked for
    limits = memory_limits(memory or (), machine_of(require_gpu("e2e")).memory_bytes)
    folder = Folder.create(out).path
    with given.reporting() as reporter:
        reporter.say(f"bench: {shape}")
        model, weights = _model(shape, random_weights)
        report = bench_e2e(StepJob(model, shape, weights, pairs, contexts, limits, folder, reporter, plan))
    given.show(report.document(), *(table.text() for table in report.tables()))
    reporter.say(f"table: {folder / report.file}")


def _model(shape: str, random_weights: bool) -> tuple[PreTrainedModel, str]:
    """The model, and what its weights are."""
    from kvcal.bench.device import require_gpu
    from kvcal.bench.model import SHAPES, random_model, shape_config

    if random_weights:
        return random_model(shape_config(shape), require_gpu("e2e")), "random weights"
    if shape in SHAPES:
        raise UsageError(
            f"--shape {shape} is a shape without weights",
            hint="add --random-weights, or name a model: its folder or hub id",
        )
    return options.ModelOptions(dtype="bfloat16", device="cuda").load(shape).model, "its own weights"
