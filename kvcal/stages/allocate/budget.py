"""Budgets: the four ways to state one, in bytes; what a plan takes of one; and the errors when it does not
fit.

A budget covers the plan as it is compiled: the cache at its largest, the tensors of transforms, and, of a
whole device, the weights and the workspace of a decode step. Formats are chosen before the tensors are there,
so bytes are reserved for these. Compilation puts the allocated layers, with their transforms and tensors,
into the plan, and holds it against the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version

from torch import Tensor

from kvcal.errors import InfeasibleBudget, UsageError
from kvcal.geometry import CacheDtype
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.layer import LayerPlan, describe_parts, fixed_layers, parts_of
from kvcal.plan.page_format import num_pages
from kvcal.plan.plan import Plan, Workload
from kvcal.plan.tensors import tensors_nbytes
from kvcal.quantities import format_bytes, parse_bytes
from kvcal.recipe import AllocateSpec
from kvcal.recipe_files import load_recipe
from kvcal.records import refusing
from kvcal.stages.allocate.record import Allocation, BudgetSplit, layer_bytes, num_values
from kvcal.stages.memory_needs import budget_bits
from kvcal.store.workspace import FLOAT_BYTES, logits_bytes, step_workspace

# The libraries that can change what a plan does or how it was measured.
LIBRARIES = ("cvxpy", "highspy", "kvcal", "safetensors", "torch", "transformers")


def workload_of(spec: AllocateSpec) -> Workload:
    """The load whose bytes the budget holds: for an engine, of full pages."""
    pages = num_pages(spec.context + PAGE_TOKENS - 1)
    return Workload(spec.batch, spec.context if spec.engine is None else PAGE_TOKENS * pages)


def workspace_bytes(layers: Sequence[LayerPlan], cache_dtype: CacheDtype, workload: Workload) -> int:
    """The workspace of one decode step besides its logits: kvcal.store.workspace. A long prompt that is fed
    in one piece needs more: state ``workspace`` then."""
    return step_workspace(layers, cache_dtype, workload.batch, workload.context).nbytes


def resolve_budget(
    spec: AllocateSpec,
    layers: tuple[LayerPlan, ...],
    cache_dtype: CacheDtype,
    weight_bytes: int,
    vocab_size: int,
    reserved: int = 0,
) -> BudgetSplit:
    """The budget in bytes, before pages are chosen. ``layers``: in the formats, among those to be chosen
    from, that need the most workspace; ``weight_bytes``: in the checkpoint's dtype. Bits per value do not
    count bounded layers and states."""
    workload = workload_of(spec)
    fixed, _ = layer_bytes(layers, cache_dtype, workload)
    unspent = {"fixed": fixed, "paged": 0, "reserved": reserved}
    if spec.budget is not None:
        total = parse_bytes(spec.budget)
        if spec.workspace != "auto":
            return BudgetSplit(total, weight_bytes, parse_bytes(spec.workspace), **unspent, kind="budget")
        logits = logits_bytes(workload.batch, vocab_size)
        workspace = logits + workspace_bytes(layers, cache_dtype, workload)
        return BudgetSplit(total, weight_bytes, workspace, **unspent, kind="budget", logits=logits)
    if spec.kv_budget is not None:
        return BudgetSplit(parse_bytes(spec.kv_budget), None, None, **unspent, kind="kv_budget")
    if spec.bits is not None:
        total = int(spec.bits * num_values(layers, workload) / 8) + fixed
        return BudgetSplit(total, None, None, **unspent, kind="bits")
    assert spec.same_bytes_as is not None
    other = load_recipe(spec.same_bytes_as)
    if other.formats is None or not other.is_baseline:
        raise UsageError(
            f"same_bytes_as = {spec.same_bytes_as!r} is no recipe of [formats] alone, its bytes are not known before",
            hint="name a recipe with [formats], such as kivi-2",
        )
    total = sum(layer_bytes(fixed_layers(other.formats, layers), cache_dtype, workload))
    return BudgetSplit(total, None, None, **unspent, kind="same_bytes_as")


def transform_bytes(allocation: Allocation, layers: Sequence[LayerPlan], tensor_bytes: int) -> int:
    """Bytes that the transforms of ``layers`` take of the allocation's budget: tensors, and the workspace
    that they need beyond what was counted (below zero where the plan needs less)."""
    split = allocation.split
    if split.logits is None or split.workspace is None:
        return tensor_bytes
    needed = split.logits + workspace_bytes(layers, allocation.cache_dtype, allocation.workload)
    return tensor_bytes + needed - split.workspace


def bytes_left(allocation: Allocation, layers: tuple[LayerPlan, ...], tensor_bytes: int) -> int | None:
    """Bytes that the allocation's ``layers``, with transforms by now, and their tensors leave of its budget;
    below zero beyond it, None without a budget."""
    split, workload = allocation.split, allocation.workload
    if split.kind is None:
        return None
    # Where pages get fewer bits, the bytes are most right before they do.
    ends = {at - 1 for layer in layers for fmt in layer.formats for at in fmt.changes_at}
    counts = {workload.context, *(end for end in ends if 0 < end < workload.context)}
    most = max(sum(layer_bytes(layers, allocation.cache_dtype, Workload(workload.batch, count))) for count in counts)
    return split.for_cache - most - transform_bytes(allocation, layers, tensor_bytes)


def compile_plan(
    allocation: Allocation, layers: tuple[LayerPlan, ...] | None = None, tensors: Mapping[str, Tensor] | None = None
) -> Plan:
    """The plan of an allocation, or of its ``layers`` with transforms and their ``tensors``, with the
    versions of the libraries that made it (local build tags such as +cpu left out)."""
    libraries = {name: version(name).split("+")[0] for name in LIBRARIES}
    with refusing("the artifacts do not make a plan", hint="run the stages again that made them"):
        plan = Plan(
            model=allocation.model,
            cache_dtype=allocation.cache_dtype,
            layers=allocation.layers if layers is None else layers,
            workload=allocation.workload,
            provenance={**allocation.provenance, "libraries": libraries},
            tensors=tensors or {},
        )
    require_budget(allocation, plan)
    return plan


def require_budget(allocation: Allocation, plan: Plan) -> None:
    """InfeasibleBudget where the plan takes more than the budget that its allocation was made for."""
    tensor_bytes = tensors_nbytes(plan.tensors)
    left = bytes_left(allocation, plan.layers, tensor_bytes)
    if left is None or left >= 0:
        return
    budget, taken = allocation.split.budget, transform_bytes(allocation, plan.layers, tensor_bytes)
    raise InfeasibleBudget(
        f"the plan takes {budget - left} bytes, {-left} more than the budget of {format_bytes(budget)} = {budget} "
        f"bytes: its transforms take {taken}, and the allocation left {taken + left} for them",
        budget - left,
        hint=reserve_hint(taken + spared_lambdas(plan.layers)),
    )


def spared_lambdas(layers: Sequence[LayerPlan]) -> int:
    """Bytes of λ of layers without it, where others have it: with other formats, these may gain by it,
    too."""
    post = [layer for layer in layers if layer.takes_transforms and layer.k_pages == "post"]
    without = [layer.attention.num_kv_heads * layer.head_dim("k") for layer in post if not layer.k_rescale]
    return FLOAT_BYTES * sum(without) if len(without) < len(post) else 0


def reserve_hint(nbytes: int) -> str:
    return (
        f"repeat `kvcal allocate`, with its options and --reserve {nbytes}, then `kvcal transform`, whose results are "
        "made for the chosen formats"
    )


def infeasible(
    spec: AllocateSpec, split: BudgetSplit, layers: tuple[LayerPlan, ...], cache_dtype: CacheDtype
) -> InfeasibleBudget:
    """The error where the smallest ``layers`` are beyond the budget: what it would have to be, in bytes and
    in bits per cached value (rounded up, so that it is feasible), and what takes it."""
    workload = workload_of(spec)
    others = {"transforms": split.reserved, "engine": split.engine}
    device = {"weights": split.weights or 0, "workspace": split.workspace or 0}
    parts = dict(parts_of(layers, cache_dtype, workload.lengths, workload.context)) | others | device
    parts = {name: nbytes for name, nbytes in parts.items() if nbytes}
    smallest, values = sum(parts.values()), num_values(layers, workload)
    bits = budget_bits(smallest - sum(device.values()) - split.fixed, values)
    way = "--context, over which windows, sinks and open pages spread" if spec.bits else "the budget, or lower --batch"
    return InfeasibleBudget(
        f"a budget of {format_bytes(split.budget)} is too small for batch {spec.batch} x {spec.context} tokens: the "
        f"smallest feasible one is {format_bytes(smallest)} = {smallest} bytes, {bits:.2f} bits per cached value"
        f": {describe_parts(parts)}",
        smallest,
        f"take that, or raise {way}",
        bits,
        parts,
    )
