"""The tutorial: every command works in its order and prints tables of the quoted form; its Python runs."""

import os
import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from test_claims import require_parses

from kvcal.data.sequences import prefix_ids

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tutorial.md").read_text()
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402

# The page's commands, with fewer and shorter texts.
SHORTER = {
    "--samples 4 --seq-len 1024": "--samples 2 --seq-len 520 --set profile.kl_samples=1 --set profile.kl_tokens=256",
    "--samples 2 --set": "--samples 2 --seq-len 400 --set",
    "num_problems=4": "num_problems=1 --set evaluate.max_new_tokens=20",
    "--max-new-tokens 200": "--max-new-tokens 20",
}


def form(output: str) -> list[str]:
    """An output's words: no rules of tables, and # for every number, unit, digest and the axis that a side's
    groups take, since they depend on the machine."""
    text = re.sub(r"[┏━┳┓┡╇┩└─┴┘]+", "", output)
    text = re.sub(r"[0-9a-f]{64}|[0-9a-f]+…|\d+([.,]\d+)*(e[+-]?\d+)?( [kMG]?B\b)?", "#", text)
    text = re.sub(r"# (channel|token) g#", "# axis g#", text)
    text = text.replace("# (# to #)", "# ± #")  # where an error would lead out of 0 to 100 %
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def layer_bits(output: str) -> list[tuple[int, int]]:
    """(of keys, of values) in the rows of a table of layers."""
    rows = re.findall(r"^│ \d+ +│ +(\d+) │ +(\d+) │ +[a-z]+", output, re.M)
    return [(int(keys), int(values)) for keys, values in rows]


def quoted_outputs() -> dict[str, str]:
    """By command line, what the page shows after it."""
    pairs = re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", "".join(generate.BLOCK.findall(PAGE)), re.M)
    assert len(pairs) == 7
    return dict(pairs)


def test_the_first_users_way_is_whole() -> None:
    """`make first-user` runs it; here, that its commands can be parsed, and that each has its output."""
    page = (DOCS / "first-user.md").read_text()
    [block] = re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S)
    pairs = re.findall(r"^\$ kvcal (.+)\n((?:(?!\$ ).*\n)*)", block, re.M)
    assert [line.split()[0] for line, _ in pairs] == ["size", "plan", "inspect", "inspect", "card", "eval"]
    for line, output in pairs:
        require_parses(shlex.split(line))
        assert output.strip() and ("[exit 7]" in output) == line.startswith("eval") and "Traceback" not in output
    script = (DOCS.parent / "lab/first_user.sh").read_text()
    assert "docs/first-user.md" in script and os.access(DOCS.parent / "lab/first_user.sh", os.X_OK)
    subprocess.run(["bash", "-n", DOCS.parent / "lab/first_user.sh"], check=True)


@pytest.mark.filterwarnings("ignore:.*")
def test_the_tutorial_from_profile_to_evaluation() -> None:
    assert all(PAGE.count(long) == 1 for long in SHORTER)
    with generate.workplace() as folder:
        for line, quoted in quoted_outputs().items():
            for long, short in SHORTER.items():
                line = line.replace(long, short)
            output = generate.run(line, must_work=True)
            if "generate" in line:  # a model's text may differ on another machine, the closing line not
                assert form(output)[-1] == form(quoted)[-1]
            else:
                assert form(output) == form(quoted), line
            if layers := layer_bits(quoted):  # one budget: other formats in some layers, as many bits in all
                found = layer_bits(output)
                assert len(found) == len(layers)
                assert fmean(chain(*found)) == pytest.approx(fmean(chain(*layers)), abs=0.5)
        assert (folder / "artifacts/first/plan.safetensors").stat().st_size < 2_000_000  # bases
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
            names: dict[str, Any] = {}
            exec(compile(block, "tutorial.md", "exec"), names)
            assert names["cache"].nbytes == names["cache"].plan.nbytes(names["cache"].lengths)
            start = prefix_ids(names["tokenizer"])  # as the command's prompt has
            assert start and names["output"][0, : len(start)].tolist() == start
