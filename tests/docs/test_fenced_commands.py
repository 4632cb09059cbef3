"""Every shell command in a fence of README and the guides: kvcal's are run, with the default recipe and real
stages, on the embedded model; scripts, torchrun and what needs a hub, hours or an engine have the options
that they are given."""

import contextlib
import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_ci_kit import require_launches
from test_claims import fenced, require_parses

from kvcal.data.tasks import problems

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(ROOT.glob("kvcal/systems/*/README.md"))]
# The folder's files come from the first of these pages; a line that was run is not run again.
FIRST = ("README.md", "which-bits.md", "commands.md")
OTHERS = {"pip", "git", "make", "vllm", "curl", "rm", ".", "python -m pip", "python -m venv", "python -m lm_eval",
          "python -m sglang.launch_server"}  # fmt: skip

# Fewer and shorter texts, the embedded model and its two KV heads, and one profile for two runs.
NAMES = {"MODEL": "reasoner-10m", "FOLDER": "reasoner-10m", "path/to/model": "reasoner-10m", "DIR": "artifacts/stages",
         "--tp 4": "--tp 2", "retrieval:4096": "retrieval:512", "artifacts/less": "artifacts/demo"}  # fmt: skip
CALIBRATION = (
    "--samples 2 --seq-len 300 --set profile.kl_samples=1 --set profile.kl_tokens=300"
    " --set basis.num_samples=2 --set basis.seq_len=300"
)
NO_TASKS = "--set evaluate.against=[] --set evaluate.tasks=[]"
SHORTER = {
    "plan": f"{CALIBRATION} --set allocate.fixed_widths=false",
    "run": f"{CALIBRATION} {NO_TASKS} --set evaluate.data.num_samples=2 --set evaluate.data.seq_len=300"
           " --set evaluate.data.min_len=300",
    "profile": "--samples 2 --seq-len 300 --set profile.kl_samples=1 --set profile.kl_tokens=300",
    "transform": "--samples 2 --seq-len 300 --set reparam.num_steps=2",
    "fit-predictors": "--samples 2 --seq-len 300",
    "eval": "--samples 1 --seq-len 300 --limit 1 --set evaluate.against=[]",
    "generate": "--max-new-tokens 4",
}  # fmt: skip
# Not run, with the reason: their options are parsed. tests/commands and tests/run run these with small recipes.
PARSED = {
    "search": "builds the plans of all systems", "compare": "builds the plans of several systems",
    "tune": "measures 30 trials", "gsm8k": "needs a data set of the hub", "aqua-kv": "fits predictors of all layers",
    "torchrun": "needs several processes", "kitty": "is no plan of the default recipe", "kvmix": "likewise",
    "pm-kvq": "likewise", "mixkvq-capped": "likewise",
}  # fmt: skip
ENDS = {"doctor --engine": 2}  # without an engine


def lines(path: Path) -> list[str]:
    """Shell lines of the fences without a language, continued ones joined, without comments."""
    found = []
    for block in fenced(path.read_text(), ""):
        for line in re.sub(r"\\\n\s*|\n  +(?=\")", " ", block).splitlines():
            if line := re.sub(r"(^| +)# .*$", "", line).strip():
                found.append(line)
    return found


def words_of(line: str) -> list[str]:
    """Without redirections and variables before the command."""
    words = shlex.split(line.partition(" < ")[0].partition(" && ")[0])
    return [word for number, word in enumerate(words) if number or not re.match(r"[A-Z_]+=", word)]


def kvcal_lines(path: Path) -> list[str]:
    return [line for line in lines(path) if line.startswith("kvcal ")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_fenced_line_is_a_command_that_is_checked(path: Path) -> None:
    for line in lines(path):
        words = words_of(re.sub(r"^([A-Z_]+=(\"[^\"]*\"|\S+) )+", "", line))
        if words[0] == "torchrun":
            module = "-m" in words
            given = require_launches(words[1:]) if module else None
            assert given is not None or any((ROOT / word).exists() for word in words), line
        elif words[0] == "python" and words[1].startswith("lab/"):
            text = "".join((ROOT / path).read_text() for path in (words[1], "lab/real.py", "lab/turns.py"))
            for option in (word for word in words[2:] if word.startswith("--")):
                assert f'"{option}"' in text, line
        elif words[0] not in ("kvcal", "ci/plan.sh"):
            known = {words[0], " ".join(words[:3])}
            assert known & OTHERS, line


def shortened(line: str) -> str:
    for name, value in NAMES.items():
        line = re.sub(rf"(?<![\w/-]){re.escape(name)}(?![\w/.-])", value, line)
    command = line.split()[1]
    if command == "plan" and "--for-engine" in line and "--context" not in line:
        line += " --batch 8 --context 32768"
    if command == "plan" and "--closest" in line:
        line += " --context 2048"
    given, _, redirected = line.partition(" < ")
    given = f"{given} {SHORTER.get(command, '')}".strip()
    if command == "eval" and "--tasks" not in line:
        given += " --set evaluate.tasks=[]"
    return f"{given} < {redirected}" if redirected else given


def furnish(folder: Path) -> None:
    records = [{"text": one.text, "prompt": one.text[:99], "reply": one.text[99:]} for one in problems("ledger", 96, 5)]
    for name in ("texts.jsonl", "support.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, records)) + "\n")
    (folder / "prompt.txt").write_text("Times. 12 x 34")
    (folder / "prompt-and-more.txt").write_text("Times. 12 x 34\nQuestion")
    (folder / "plans").mkdir()


@contextlib.contextmanager
def standard_input(line: str) -> Iterator[str]:
    """The line without its redirection, and the file as stdin."""
    given, _, name = line.partition(" < ")
    before = sys.stdin
    sys.stdin = io.StringIO(Path(name).read_text()) if name else before
    try:
        yield given
    finally:
        sys.stdin = before


@pytest.mark.filterwarnings("ignore:.*")
def test_commands_of_kvcal_in_fences_run_as_printed_but_for_shorter_texts() -> None:
    pages = sorted(PAGES, key=lambda path: (FIRST.index(path.name) if path.name in FIRST else len(FIRST), path.name))
    done = set()
    with generate.workplace() as folder:
        furnish(folder)
        for line in (line for page in pages for line in kvcal_lines(page)):
            if any(word in re.split(r"[ ,:=]", line) for word in PARSED):
                require_parses(words_of(line)[1:])
                continue
            short = shortened(line)
            if short in done:
                continue
            done.add(short)
            with standard_input(short) as given:
                output = generate.run(given)
            code = next((code for start, code in ENDS.items() if given.startswith(f"kvcal {start}")), 0)
            assert (f"[exit {code}]" in output) if code else "[exit" not in output, f"{short}\n{output}"
            if " -o plan.safetensors" in given and (folder / "plan.safetensors").exists():
                for name in ("a.safetensors", "b.safetensors", "plans/plan.safetensors"):
                    (folder / name).write_bytes((folder / "plan.safetensors").read_bytes())
