"""Command lines of docs/engines.md and docs/offload.md: the engines' own parsers take them. ``make engines`` runs these
tests."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from sglang_environment import STAND_INS, python_with_sglang, variables_in_sglang
from vllm_environment import answer_of, needed, python_with_vllm, variables_in

from kvcal.engines.support import TESTED

pytestmark = pytest.mark.engines

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("engines.md", "offload.md"))
PROGRAMS = {"vllm": "vllm serve ", "sglang": "python -m sglang.launch_server "}


def lines(engine: str) -> list[list[str]]:
    """Words after the server's name; "…" stands for the model and what the page's first line has."""
    fences = "".join(text for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S) if not name)
    joined = re.sub(r"\\\n\s*|\n +(?=\")", " ", fences)
    found = re.findall(rf"{re.escape(PROGRAMS[engine])}(.+)", joined)
    in_sentences = re.findall(rf"`{re.escape(PROGRAMS[engine])}([^`\n]+)`", PAGE)
    return [shlex.split(line.replace("…", "MODEL")) for line in [*found, *in_sentences]]


@pytest.mark.parametrize("engine", PROGRAMS)
def test_the_engines_take_the_options_of_the_page(engine: str, tmp_path: Path) -> None:
    page = lines(engine)
    given = [engine, [*page, [*page[0], "--no-such-option", "1"]]]
    python = needed(python_with_vllm if engine == "vllm" else python_with_sglang, TESTED[engine][0])
    variables = variables_in(tmp_path)
    if engine == "sglang":
        variables = variables_in_sglang(tmp_path, (STAND_INS,)) | {"KVCAL_PLAN": "plan.safetensors"}
    *said, wrong = answer_of(python, tmp_path, "engine_arguments.py", given, variables)
    assert not any(said), list(zip(page, said, strict=True))
    assert "no-such-option" in wrong
