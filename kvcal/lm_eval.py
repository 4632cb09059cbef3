"""The lm-evaluation-harness's command line, with the model "kvcal" next to its own:

    python -m kvcal.lm_eval run --model kvcal --model_args pretrained=MODEL,plan=plan.safetensors --tasks
    gsm8k

The harness (0.4.13) looks for no models outside of itself: this module registers ours, then hands all
arguments over. In Python: ``register()``, then ``lm_eval.simple_evaluate(model="kvcal", ...)``.
"""

from __future__ import annotations

import sys

from kvcal.console import print_error
from kvcal.errors import KvcalError
from kvcal.stages.evaluate.harness import require_lm_eval


def register() -> None:
    """Make the model known to the harness. UsageError where it is not installed."""
    require_lm_eval()
    import kvcal.stages.evaluate.packed_lm  # noqa: F401


def main() -> None:
    """Run the harness; an error of kvcal ends with its exit code."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except KvcalError as error:
        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
