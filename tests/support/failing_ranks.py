"""The kvcal command, one of whose ranks fails: `torchrun ... failing_ranks.py HOW ARGUMENT...`.

It ends with the second sequence of rank 1, when the statistics of λ hold one sequence of each rank:

    item     an error of the sequence, which is every rank's
    alone    an error of the rank alone, outside of a sequence's measurement
    killed   the system kills the process
"""

import os
import signal
import sys

from kvcal import __main__ as cli
from kvcal import distributed
from kvcal.errors import NonFiniteActivations
from kvcal.systems.pm_kvq import lambda_candidates as search
from kvcal.systems.pm_kvq import reparam as reparam_stage

how = sys.argv.pop(1)
measure, calls = search.key_magnitudes, []


def failing(*args):
    calls.append(args)
    if distributed.rank() == 1 and len(calls) == 2:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "alone":
            raise OSError(5, "Input/output error", "weights.safetensors")
        raise NonFiniteActivations("keys of layer 1 hold NaN or infinity", "check the checkpoint")
    return measure(*args)


reparam_stage.key_magnitudes = failing
cli.main()
