"""``kvcal inspect``: a plan in tables."""

from __future__ import annotations

from kvcal.commands.options import Batch, Context, Json, PlanArgument


def inspect(plan: PlanArgument, batch: Batch = None, context: Context = None, json: Json = False) -> None:
    """Show a plan: formats and bytes of every layer, all-in bits, where it came from.

    Example: `kvcal inspect plan.safetensors --batch 32 --context 8192`
    """
    from kvcal import console
    from kvcal import tables as views
    from kvcal.plan.plan import Workload, load_plan

    loaded = load_plan(plan)
    workload = Workload(batch or loaded.workload.batch, context or loaded.workload.context)
    if json:
        console.print_json(views.plan_json(loaded, workload))
        return
    console.print_table(*views.plan_table(loaded, workload))
    console.print_table(*views.layer_table(loaded.layers, loaded.cache_dtype, workload))
