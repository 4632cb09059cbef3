"""``kvcal verify``: a plan, its model, and its bytes."""

from __future__ import annotations

from kvcal.commands.options import Device, Dtype, Json, ModelOption, PlanArgument, Quiet, load


def verify(
    plan: PlanArgument,
    model: ModelOption,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a plan is sound, is this model's, and that the cache allocates exactly the bytes it predicts.

    Example: `kvcal verify plan.safetensors --model Qwen/Qwen3-8B`
    """
    from kvcal import console
    from kvcal import tables as views
    from kvcal.plan.plan import load_plan
    from kvcal.run.transform import max_context
    from kvcal.stages.verify import verify_plan

    loaded_plan = load_plan(plan)
    with console.TerminalReporter(quiet).running() as reporter:
        loaded = load(model, dtype, device)
        checks = verify_plan(loaded_plan, loaded, max_context(loaded), reporter)
    if json:
        console.print_json(views.checks_json(checks))
    else:
        console.print_table(*views.checks_table(checks))
