"""Command lines of docs/engines.md that start an engine are those that ``kvcal serve-args`` prints;
tests/engines/test_page.py asks the engines themselves."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from cli_cases import ran_well
from test_claims import fenced

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/engines.md").read_text()
PLAN = ROOT / "artifacts/plans/schema-3-basis/plan.safetensors"


def started(program: str) -> list[str]:
    """Words of the page's first line with this program, variables before it among them."""
    joined = re.sub(r"\\\n\s*", " ", "\n".join(fenced(PAGE, "")))
    return shlex.split(next(line for line in joined.splitlines() if program in line))


@pytest.mark.parametrize(("engine", "program"), [("vllm", "vllm serve"), ("sglang", "sglang.launch_server")])
def test_servers_are_started_as_serve_args_says(
    engine: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plans").mkdir()
    shutil.copy(PLAN, tmp_path / "plans/plan.safetensors")
    monkeypatch.chdir(tmp_path)
    done = ran_well("serve-args", "plans/plan.safetensors", "--engine", engine, "--model", "MODEL", "--json")
    words = [word.replace(f"{tmp_path}/", "") for word in json.loads(done.out)["arguments"]]
    assert [word for word in words if word != "env"] == started(program)
