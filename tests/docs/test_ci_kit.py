"""The CI kit: its templates are well-formed and fit the script, the container installs what it says, the job
runs. The jobs for clusters give torchrun and kvcal options that they have."""

import json
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvcal_server import installed
from test_claims import require_parses
from torch.distributed.run import get_args_parser

from kvcal import load_plan
from kvcal.__main__ import RANKED

ROOT = Path(__file__).parents[2]
CI = ROOT / "ci"
SCRIPT = (CI / "plan.sh").read_text()
VARIABLES = set(re.findall(r"^# ([A-Z_]+)  ", SCRIPT, re.M))


def template(name: str) -> dict[str, Any]:
    return yaml.safe_load((CI / name).read_text())


def test_the_script_is_bash_and_uses_what_it_documents() -> None:
    subprocess.run(["bash", "-n", CI / "plan.sh"], check=True)
    assert os.access(CI / "plan.sh", os.X_OK)
    assert set(re.findall(r"\$\{?([A-Z_]+)", SCRIPT.partition("set -euo")[2])) == VARIABLES


def test_the_action_gives_the_script_its_variables() -> None:
    action = template("action.yml")
    assert action["runs"]["using"] == "composite" and {"name", "description", "inputs"} <= set(action)
    steps = action["runs"]["steps"]
    assert all(("run" in step) == ("shell" in step) != ("uses" in step) for step in steps)
    assert all(re.fullmatch(r"actions/[\w/-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    (plan,) = [step for step in steps if "plan.sh" in step.get("run", "")]
    assert set(plan["env"]) == VARIABLES
    used = set(re.findall(r"inputs\.([\w-]+)", (CI / "action.yml").read_text()))
    assert used == set(action["inputs"])
    assert all("${{" not in step["run"] for step in steps if "run" in step)  # inputs are never part of a script
    assert all("description" in one and ("default" in one or one["required"]) for one in action["inputs"].values())
    always = [step["uses"].partition("@")[0] for step in steps if step.get("if") == "always()" and "uses" in step]
    assert always == ["actions/cache/save", "actions/upload-artifact"]
    for step in steps:
        if "run" in step:
            subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)


def require_matrix(entries: list[dict[str, str]], keys: set[str]) -> None:
    """Every entry has the keys, and its options are options of the commands."""
    assert len(entries) > 1
    for entry in entries:
        given = {key.lower(): value for key, value in entry.items()}
        assert set(given) == keys
        require_parses(["plan", given["model"], *given["budget"].split()])
        require_parses(["eval", "plan.safetensors", "--model", given["model"], *given["gates"].split()])
    assert len({next(iter(entry.values())) for entry in entries}) == len(entries)


def test_the_workflow_calls_the_action_for_a_matrix() -> None:
    workflow = template("github-workflow.yml")
    job = workflow["jobs"]["plan"]
    require_matrix(job["strategy"]["matrix"]["include"], {"name", "model", "budget", "gates"})
    (call,) = [step for step in job["steps"] if step["uses"] == "./ci"]
    inputs = template("action.yml")["inputs"]
    assert {name for name, one in inputs.items() if one.get("required")} <= set(call["with"]) <= set(inputs)
    assert workflow["permissions"] == {"contents": "read"} and set(workflow[True]) == {"workflow_dispatch", "push"}


def test_the_gitlab_job_runs_the_script_for_a_matrix() -> None:
    job = template("gitlab.yml")["plan"]
    require_matrix(job["parallel"]["matrix"], {"name", "model", "budget", "gates"})
    assert job["script"][-1] == "ci/plan.sh" and "OUT" in job["variables"]
    assert job["cache"]["when"] == job["artifacts"]["when"] == "always"
    assert all(path.startswith("artifacts/ci/$NAME/") for path in job["artifacts"]["paths"])


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, continued lines joined."""
    lines = [line for line in (CI / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def test_the_container_copies_what_is_there_and_runs_the_command() -> None:
    names = [name for name, _ in instructions()]
    assert set(names) <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert names.index("USER") > max(i for i, (_, rest) in enumerate(instructions()) if "pip install" in rest)
    for name, rest in instructions():
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
        if name == "RUN":
            subprocess.run(["bash", "-n"], input=rest, text=True, check=True)
        if name == "ENTRYPOINT":
            assert json.loads(rest) == ["kvcal"]
    assert ("RUN", "kvcal doctor") in instructions()


# A kvcal that writes its words down, whose plan is $ANSWER, and whose evaluation ends with $CODE.
STUB = """#!/bin/sh
for word in "$@"; do printf '%s|' "$word"; done >> calls; echo >> calls
if [ "$1" = plan ] && [ -n "$ANSWER" ]; then echo "$ANSWER"; else echo "output of $1"; fi
if [ "$1" = eval ]; then exit "${CODE:-0}"; fi
if [ "$1" = card ]; then mkdir -p "$2"; echo a card > "$2/README.md"; exit "${WORSE:-0}"; fi
"""


def run_script(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "kvcal").write_text(STUB)
    (folder / "kvcal").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    return subprocess.run([CI / "plan.sh"], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("failing", ["CODE", "WORSE"])
def test_the_script_makes_a_plan_and_ends_as_its_gates_do(failing: str, code: int, tmp_path: Path) -> None:
    variables = {"MODEL": "a/model", "BUDGET": "--bits 4 --batch 8", "OUT": "out", "PLAN_OPTIONS": "--recipe default",
                 "EVAL_OPTIONS": "--samples 2", "GATES": "--max-kl 1 --max-bytes 60MB", failing: str(code)}  # fmt: skip
    done = run_script(tmp_path, **variables)
    assert done.returncode == code, done.stderr
    calls = [line.split("|")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert [words[0] for words in calls] == ["doctor", "size", "plan", "eval", "card", "inspect", "eval"]
    for words in calls:
        require_parses(words)
    assert {"--bits", "default", "out/plan.safetensors"} <= set(calls[2]) and {"--max-kl", "--json"} <= set(calls[3])
    assert "--max-kl" in calls[4] and "--against" not in calls[4]
    last = tmp_path / "out" / "made" / "last.md"
    assert last.is_file() == (code == 0)  # the next plan is held against one that passed
    files = {path.name: path.read_text() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert files == {
        "size.json": "output of size\n", "plan.json": "output of plan\n", "evaluation.json": "output of eval\n",
        "report.txt": "output of inspect\noutput of eval\n", "card.json": "output of card\n", "README.md": "a card\n",
    }  # fmt: skip


def test_the_script_ends_well_without_a_plan_where_16_bits_fit(tmp_path: Path) -> None:
    answer = json.dumps({"plan": None, "verdict": "16-bit-fits"}, indent=2)  # as kvcal plan --json prints it
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.safetensors").write_text("of an earlier budget")
    done = run_script(tmp_path, MODEL="a/model", BUDGET="--bits 16", OUT="out", ANSWER=answer)
    assert done.returncode == 0, done.stderr
    calls = [line.partition("|")[0] for line in (tmp_path / "calls").read_text().splitlines()]
    files = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert calls == ["doctor", "size", "plan"] and set(files) == {"size.json", "plan.json", "report.txt"}
    assert "16 bits fit: a/model needs no plan for --bits 16" in files["report.txt"]


# Shorter texts for the example of docs/ci.md.
SHORTER = {
    "PLAN_OPTIONS": "--samples 2 --seq-len 300 --set basis.num_samples=2 --set basis.seq_len=300"
    " --set profile.kl_samples=1 --set profile.kl_tokens=220 --set allocate.fixed_widths=false",
    "EVAL_OPTIONS": "--samples 1 --seq-len 300 --set evaluate.against=[] --set evaluate.tasks=[]",
}  # fmt: skip


def test_the_example_of_the_page_makes_a_plan_within_its_gates(tmp_path: Path) -> None:
    (line,) = re.findall(r"^(MODEL=.*) ci/plan\.sh$", (ROOT / "docs/ci.md").read_text(), re.M)
    given = dict(word.split("=", 1) for word in shlex.split(line))
    with tempfile.TemporaryDirectory() as name, installed(Path(name)) as program:
        environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"} | SHORTER | given
        done = subprocess.run([CI / "plan.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "artifacts/ci"
    assert json.loads((out / "plan.json").read_text())["verdict"] == "made"
    gates = json.loads((out / "evaluation.json").read_text())["gates"]
    assert len(gates) == 2 and all(gate["passed"] for gate in gates)
    card = json.loads((out / "card.json").read_text())
    assert card["verdict"] == "accept" and (out / "README.md").read_text() == (out / "made" / "last.md").read_text()
    assert load_plan(out / "plan.safetensors").bits_per_value() <= 3.5


def test_the_script_names_what_is_missing(tmp_path: Path) -> None:
    assert "set MODEL, such as" in run_script(tmp_path, MODEL="").stderr
    assert "set BUDGET, such as" in run_script(tmp_path, MODEL="reasoner-10m").stderr


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
