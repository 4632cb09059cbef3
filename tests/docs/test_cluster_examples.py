"""The jobs for clusters are well-formed, and give torchrun and kvcal options that they have."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml
from test_claims import require_parses
from torch.distributed.run import get_args_parser

from kvcal.__main__ import RANKED

CLUSTER = Path(__file__).parents[2] / "examples/cluster"


def require_launches(words: list[str]) -> Any:
    """torchrun's options; the rest are options of a kvcal command that takes several ranks."""
    given = get_args_parser().parse_args(words)
    assert given.module and given.training_script == "kvcal"
    assert given.training_script_args[0] in RANKED
    require_parses(given.training_script_args)
    return given


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()))


def test_every_job_is_tested_here() -> None:
    assert {path.name for path in CLUSTER.iterdir()} == {"slurm.sh", "kubernetes.yaml"}


def test_the_slurm_job_is_bash_and_starts_a_rank_for_every_gpu() -> None:
    path = CLUSTER / "slurm.sh"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.M))
    assert options["ntasks-per-node"] == "1"
    values = {"SLURM_NNODES": options["nodes"], "SLURM_GPUS_PER_NODE": options["gpus-per-node"]}
    command = text.replace("\\\n", " ").partition(" torchrun ")[2].splitlines()[0]
    command = re.sub(r"\$\{?(\w+)\}?", lambda found: values.get(found[1], "x"), command)
    given = require_launches(shlex.split(command))
    assert (given.nnodes, given.nproc_per_node) == (options["nodes"], options["gpus-per-node"])


def test_the_kubernetes_job_starts_a_rank_for_every_gpu_of_its_pods() -> None:
    service, job = documents()
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    program, *words = container["command"]
    assert program == "torchrun"
    rank = "$(JOB_COMPLETION_INDEX)"
    assert f"--node-rank={rank}" in words and "JOB_COMPLETION_INDEX" in {one["name"] for one in container["env"]}
    given = require_launches([word.replace(rank, "1") for word in words])
    assert given.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(given.nnodes) == spec["completions"]
    assert int(given.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    options = dict(word.split("=") for word in given.training_script_args if word.startswith("--"))
    assert options["--out"].startswith(mounts["artifacts"]) and options["--model"].startswith(mounts["models"])
