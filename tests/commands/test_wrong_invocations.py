"""Wrong invocations: an exit code and a line for people, never a traceback, a hang, or a stage that runs in
vain."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from types import FrameType
from unittest.mock import Mock

import pytest
from cli_cases import RECIPE, Outcome, run_kvcal

FIFO, ABSENT = object(), object()
DEEP = "[" * 100_000
SECONDS = 200  # far beyond any case: a hang


@pytest.fixture(autouse=True)
def no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # where a command that gets far leaves its folder

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still running after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(path: Path, content: object) -> None:
    """Write text or bytes, merge a mapping into a JSON file, make a pipe, or remove the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.unlink(missing_ok=True)
    if content is FIFO:
        os.mkfifo(path)
    elif content is not ABSENT:
        path.write_bytes(content if isinstance(content, bytes) else str(content).encode())


def wrong(places: dict[str, Path], command: str | tuple[str, ...], code: int, says: str) -> Outcome:
    words = command.split() if isinstance(command, str) else command
    done = run_kvcal(*(word.format(**places) for word in words))
    assert done.code == code, done
    assert says.format(**places) in " ".join(done.err.replace("│", " ").split()), done.err
    assert "Traceback" not in done.err and (code != 2 or "hint: " in done.err), done.err
    return done


CONFIG = {  # what config.json says: exit code, what the error names
    '{"hidden_size": "big"}': (2, "cannot build a model from it: Validation error for field 'hidden_size'"),
    '{"num_hidden_layers": -1}': (2, "config.json: num_hidden_layers = -1; allowed: 1 to 10000"),
    '{"num_attention_heads": 0}': (2, "num_attention_heads = 0; allowed: 1 to"),
    '{"pad_token_id": 1000000000}': (2, "config.json"),
    '{"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}': (2, "KeyError: 'spiral'"),
    '{"model_type": 7}': (4, "model type `7`"),
    '{"model_type": "t5"}': (4, "'t5'"),
    '{"model_type": "vit"}': (4, "'vit'"),
    '{"dtype": "float64"}': (4, "float64; supported: bfloat16, float16, float32"),
    '{"quantization_config": "x"}': (2, "config.json"),
    '{"num_key_value_heads": 3}': (2, "the weights cannot be read (model.safetensors)"),
}  # fmt: skip


@pytest.mark.parametrize("edit", CONFIG)
def test_a_configuration_that_builds_no_model(edit: str, made: Path, tmp_path: Path) -> None:
    code, says = CONFIG[edit]
    shutil.copytree(made / "model", tmp_path / "m")
    put(tmp_path / "m" / "config.json", json.loads(edit))
    wrong({"m": tmp_path / "m", "tmp": tmp_path}, "profile {m} --data tasks --out {tmp}/o", code, says)


INDEX = "model.safetensors.index.json"
PICKLE = b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."
MODEL_FILES: list[tuple[dict[str, object], int, str]] = [
    ({"config.json": DEEP}, 2, "config.json cannot be read: maximum recursion depth"),
    ({"config.json": ABSENT}, 2, "has no config.json"),
    ({"config.json": "[1]"}, 2, "config.json"),
    ({"model.safetensors": FIFO}, 2, "has no weights"),
    ({"tokenizer.json": FIFO}, 2, "has no tokenizer"),
    ({"tokenizer.json": DEEP}, 2, "the tokenizer cannot be read: maximum recursion"),
    ({"tokenizer.json": "{}"}, 2, "the tokenizer cannot be read"),
    ({"tokenizer_config.json": "[]"}, 2, "the tokenizer cannot be read"),
    ({"model.safetensors": b"\xff" * 64}, 2, "the weights cannot be read (model.safetensors)"),
    ({"model.safetensors": ABSENT, "pytorch_model.bin": PICKLE}, 2, "(pytorch_model.bin): not a file of tensors alone"),
    ({"model.safetensors": ABSENT, "pytorch_model.bin": b"PK\3\4" + b"\0" * 99}, 2, "(pytorch_model.bin): Pytorch"),
    ({"model.safetensors": ABSENT, INDEX: "{}"}, 2, f"{INDEX} has the weight_map None"),
    ({"model.safetensors": ABSENT, INDEX: '{"weight_map": {"a": 5}}'}, 2, "names of tensors and of files"),
    ({"model.safetensors": ABSENT, INDEX: '{"weight_map": {"a": "b"}}'}, 2, "names 1 missing files: ['b']"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "code", "says"), MODEL_FILES)
def test_a_damaged_folder_of_a_model(
    files: dict[str, object], code: int, says: str, made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made / "model", tmp_path / "m")
    for name, content in files.items():
        put(tmp_path / "m" / name, content)
    wrong({"m": tmp_path / "m", "run": made / "run"}, "inspect {run}/plan.safetensors --model {m}", code, says)


@pytest.mark.parametrize(
    "template", ["{% zap", "{{ messages[7].x }}", "{{ 1 + messages }}", '{{ raise_exception("no") }}']
)
def test_a_broken_chat_template(template: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "model", tmp_path / "m")
    put(tmp_path / "m" / "chat_template.jinja", template)
    command = "generate --model {m} --plan {run}/plan.safetensors --prompt a --chat"
    wrong({"m": tmp_path / "m", "run": made / "run"}, command, 2, "the chat template fails")


BUDGET = 'same_bytes_as = "kivi-2"'
AGAINST = 'against = ["16-bit", "kivi-2"]'
EVALUATED = "num_samples = 2, seq_len = 224"
KEYS = """
[formats]
v = {{ num_bits = 2 }}
k = {{ num_bits = 2, boost = {{ score = "magnitude", tiers = [{{ {} }}] }} }}
[cache]
"""
RECIPES: list[tuple[str, str, str]] = [  # old, new, what the error says
    ("num_samples = 2\n", "num_samples = 0\n", "{recipe}: data.num_samples = 0"),
    ("num_bits = [2, 4]", "num_bits = 2", "Input should be a valid array hint: a list is written [2, 4]"),
    ("kl_tokens = 256", "kl_tokens = 129", "profile.kl_tokens = 129: the sinks and windows of [cache]"),
    ("num_sink_tokens = 2", "num_sink_tokens = 512", "cache.num_sink_tokens = 512 leaves nothing to quantize"),
    (BUDGET, 'same_bytes_as = "default"', "allocate.same_bytes_as: recipe 'default' has no [formats]"),
    (BUDGET, 'budget = "zap"', "allocate: budget = 'zap': cannot read 'zap' as a number of bytes"),
    (BUDGET, 'budget = "24GB"\nworkspace = "zap"', "allocate: workspace = 'zap'"),
    ('tasks = ["chain"]', 'tasks = ["chain", "chain"]', "tasks = ['chain', 'chain'], expected each one once"),
    (AGAINST, 'against = ["/dev/zero"]', "/dev/zero is a device or a socket; expected a regular file"),
    ("[allocate]", "[search]\nkl_tokens = 50\n[allocate]", "search.kl_tokens = 50: the sinks"),
    ("[allocate]", "[search]\nsystems = ['best']\n[allocate]", "search.systems: recipe 'best' has [search]"),
    ("[allocate]", "[search]\nsystems = []\n[allocate]", "systems = [], expected one or more, each once"),
    ("[allocate]", "[search]\n[reparam]\n[allocate]", "[search] and ['reparam']: expected [allocate], whose budget"),
    ("[allocate]", "[tune]\nlow = 3.0\n[allocate]", "expected low = 3.0 < high = 2.0"),
    (RECIPE, "[importance]\nmin_window = 9\nmax_window = 5", "expected min_window = 9 <= max_window = 5"),
    (RECIPE, "[formats]\nk = { num_bits = 2, num_sink_tokens = 9_999_999 }\nv = { num_bits = 2 }", "tokens = 9999999"),
    ("context = 512", "contxt = 512", "hint: did you mean 'context'?"),
    (EVALUATED, "num_sampels = 2", "hint: did you mean 'num_samples'?"),
    ("[cache]", KEYS.format("bits = 4"), "hint: did you mean 'num_bits'?"),
    (BUDGET, "", "exactly one of"),
    ("max_size = 20", "max_size = 12", "max_size = 12: Input should be greater than or equal to 20"),
    (RECIPE, "", "nothing given; expected one of [formats], [importance], [allocate]"),
    (RECIPE, "a = " + DEEP, "not TOML: maximum recursion depth"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "says"), RECIPES)
def test_a_recipe_is_checked_whole_before_anything_runs(
    old: str, new: str, says: str, made: Path, tmp_path: Path
) -> None:
    assert old in RECIPE
    recipe = tmp_path / "wrong.toml"
    recipe.write_text(RECIPE.replace(old, new, 1))
    command = "run {recipe} --model {made}/no-model --out {out}"  # a model would be looked for later
    wrong({"recipe": recipe, "made": made, "out": tmp_path / "out"}, command, 2, says)
    assert not (tmp_path / "out").exists()


FILES: dict[str, object] = {
    "fifo": FIFO, "bin": b"\xff\x00" * 99, "fd/allocation.safetensors": FIFO, "tuned/study.log": FIFO,
    "fifo.txt": FIFO,
}  # fmt: skip
GENERATE = "generate --model {model} --plan {plan} --max-new-tokens 1 "
EVAL = "eval {plan} --model {model} --recipe {recipe} --out {tmp}/o "
PACK = "generate --model {model} --plan {plan} --pack {tmp}/x.kv "
PROFILE = "profile {model} --recipe {recipe} --out {tmp}/o "
TUNE = "tune mixkvq --model {model} --out {tmp}/t "
COMPARE = "compare {recipe} --model {model} --recipe {recipe} --batch 2 --context 4096 --out {tmp}/o "
COMMANDS: list[tuple[str | tuple[str, ...], int, str]] = [
    # plans, and what is none
    ("inspect {tmp}/none", 5, "does not exist hint: check the path, or make it first: kvcal compile"),
    ("inspect {tmp}/fifo", 5, "{tmp}/fifo is a pipe; expected a regular file"),
    ("inspect {run}/profile.safetensors", 5, 'expected "kv-quantization-plan"'),
    ("inspect {model}/model.safetensors", 5, "is not a kvcal artifact"),
    ("inspect " + "a" * 5000, 5, "File name too long"),
    ("inspect {plan} --zap", 2, "No such option"),
    ("inspect {plan} --why 0 --provenance", 2, "--why with --provenance or --model: it is an answer of its own"),
    ("inspect {plan} --model ./" + "a" * 300, 5, "File name too long"),
    # generate
    (GENERATE + f"--prompt a --seed {2**70}", 2, "--seed"),
    (GENERATE + "--prompt a --temperature 1e-320", 2, "--temperature 1e-320; allowed: 0 (greedy), or 0.001 to 100"),
    ((*GENERATE.split(), "--prompt", " \n"), 2, "the prompt is empty"),
    (GENERATE + "--prompt a --chat", 2, "no chat template"),
    (GENERATE + "--prompt a --max-new-tokens 4000", 2, "exceed the model's context"),
    (GENERATE + "--prompt a --prefix {tmp}/fifo", 5, "is a pipe"),
    (GENERATE + "--prompt a --device cuda:" + "9" * 30, 2, "this machine has"),
    (PACK, 2, "expected exactly one of --prompt and --prompt-file"),
    (PACK + "--prompt-file {tmp}/bin", 2, "{tmp}/bin is no text in UTF-8"),
    ((*PACK.split(), "--prompt", "3 x 4 " * 3000), 2, "prompt tokens exceed the model's context of 1024"),
    # evaluate
    (EVAL + '--set evaluate.tasks=["foo"]', 2, "tasks ['foo'] unknown, expected some of ['chain', 'ledger', 'times', "),
    (EVAL + "--min-accuracy times=0.9", 2, "'times' is not measured; allowed: chain, all"),
    (EVAL + "--min-accuracy chain=good", 2, "'good' is no number"),
    (EVAL + "--max-bytes 1zap", 2, "unknown unit 'zap'"),
    # profile, and its data
    ("profile ./no/such/model --out {tmp}/o", 2, "no/such/model"),
    (PROFILE + "--seq-len 5000", 2, "greater than the model's context"),
    (PROFILE + "--data {tmp}/none.txt", 2, "none.txt: no such file"),
    (PROFILE + "--data {tmp}/fifo.txt", 2, "is a pipe"),
    (PROFILE + "--data tasks --data tasks", 2, "'tasks'"),
    # knobs
    (PROFILE + "--set data.sed=1", 2, "--set data.sed=1: unknown key 'sed' of [data]; allowed: source, num_samples"),
    (PROFILE + "--set kl_samples=1", 2, "did you mean --set profile.kl_samples=1?"),
    ("run kiti --out {tmp}/n", 2, "hint: did you mean 'kitty'"),
    (PROFILE + "--set profile.kl_samples", 2, "--set profile.kl_samples: expected section.key=value"),
    (PROFILE + "--set profile=3", 2, "profile = 3: Input should be an object"),
    # allocate, compile
    ("allocate {tmp} --bits 3", 5, "does not exist hint: check the path, or make it first: kvcal profile"),
    ("compile {tmp}", 5, "does not exist hint: check the path, or make it first: kvcal allocate"),
    ("allocate {run} --bits 3 --set allocate.granularity=head", 2, "layer"),
    ("allocate {run} --bits inf", 2, "bits = inf: Input should be a finite number"),
    ("allocate {run} --bits 3 --set allocate.workspace=x", 2, "workspace = 'x'"),
    ("allocate {run} --bits 3 --set cache.num_sink_tokens=4", 2, "only knobs of [allocate] are used here"),
    ("compile {tmp}/fd", 5, "is a pipe"),
    ("compile {run} -o /dev/null", 5, "/dev/null is a device or a socket; expected a regular file"),
    ("allocate {run} --bits 4 --kv-budget 1GB", 2, "--kv-budget and --bits; expected one of --budget, "),
    # plan
    ("plan {model} --out {tmp}/o", 2, "no budget given; expected one of --budget, --kv-budget and --bits"),
    ("plan {model} --out {tmp}/o --bits 3 --name ../up", 2, "--name '../up'; allowed: letters"),
    # tune, search, compare, run
    (TUNE + "--out {tmp}/tuned", 5, "study.log is a pipe"),
    ("compare best --model {model} --set allocate.bits=3", 2, "use --bits, --batch and --context"),
    (COMPARE + "--bits 3 --bits 3.0", 2, "given twice"),
    (("run", ""), 2, "recipe '' is neither a file nor one of"),
    ("run kivi-2 --model {model} --device cuda:7", 2, "this machine has"),
    ("zap", 2, "No such command"),
    # what typer finds, in a line
    ("size {model} --context x", 2, "error: --context: cannot read 'x' as a number of tokens; allowed: 1 to "),
    ("size {model} --batch 2.5", 2, "error: --batch 2.5: expected a whole number hint: did you mean --batch 2?"),
    ("size {model} --batch=0", 2, "error: --batch 0: expected a value greater than or equal to 1 hint: `"),
    ("size {model} --memory 800", 2, "error: --memory: '800' is 800 bytes, less than any device has hint: did you "),
    ("plan {model} --bits 3b", 2, "error: --bits 3b: expected a number hint: did you mean --bits 3?"),
    ("plan {model} --for-engine zap", 2, "error: --for-engine zap: 'zap' is not one of 'vllm', 'sglang' hint: `"),
    ("plan {model} --budget 24gb", 2, "error: --budget: cannot read '24gb' as a number of bytes: unknown unit 'gb'"),
    ("plan {model} --bits 3 --budget 1GB", 2, "error: --budget and --bits; expected one of --budget, --kv-budget and"),
    ("plan {model} --bits 3 --set allocate.batch=foo", 2, "error: --set allocate.batch: allocate.batch = 'foo': Input"),
    ("generate --model {model}", 2, "error: Missing option '--plan'. hint: `"),
    ("diff {plan}", 2, "No such command 'diff'."),
    ("list models {plan}", 2, "only recipes are printed"),
    ("transform {run} --model {model} --recipe kivi-2", 2, "recipe 'kivi-2' transforms no chosen formats"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "code", "says"), COMMANDS, ids=lambda value: str(value)[:60])
def test_a_wrong_command(
    command: str | tuple[str, ...], code: int, says: str, made: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name, content in FILES.items():
        put(tmp_path / name, content)
    places = {"tmp": tmp_path, "model": made / "model", "recipe": made / "small.toml", "run": made / "run"}
    done = wrong(places | {"plan": made / "run" / "plan.safetensors"}, command, code, says)
    assert done.out == "" and not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.glob("o/*"))


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("$KVCAL inspect $PLAN > /dev/full", 5, "error: cannot write to stdout: No space left on device"),
        ("$KVCAL --help > /dev/full", 5, "error: stdout: No space left on device"),
        ("$KVCAL inspect $PLAN >&-", 5, "error: cannot write to stdout: it is closed"),
        ("$KVCAL inspect $'\\xff\\xfe'", 5, "does not exist"),
    ],
)
def test_stdout_that_takes_nothing(command: str, code: int, says: str, made: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=SECONDS,
        env={**os.environ, "KVCAL": f"{sys.executable} -m kvcal", "PLAN": str(made / "run" / "plan.safetensors"),
             "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, says in done.stderr) == (code, True), done
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "command", [GENERATE + "--prompt a", PACK + "--prompt a", EVAL, "inspect {plan} --model {model}"]
)
def test_another_model_is_told_before_its_weights_are_read(
    command: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcal.models.load.load", Mock(side_effect=AssertionError("the weights are read")))
    places = {"plan": made / "run" / "plan.safetensors", "recipe": made / "small.toml", "tmp": tmp_path}
    says = (
        "is for 'model' (llama, 2 layers with a cache), and 'reasoner-10m' has another config.json (llama, 10 layers)"
    )
    wrong(places | {"model": Path("reasoner-10m")}, command, 5, says)


def test_memory_that_is_not_there(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made / "run" / "plan.safetensors"
    refusal = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4480000000000000 bytes."
    monkeypatch.setattr("kvcal.plan.plan.load_plan", Mock(side_effect=RuntimeError(refusal)))
    wrong({"plan": plan}, "inspect {plan}", 2, "error: not enough memory: DefaultCPUAllocator")
    monkeypatch.setattr("kvcal.plan.plan.load_plan", Mock(side_effect=RuntimeError("a mistake in the program")))
    with pytest.raises(RuntimeError, match="a mistake in the program"):
        run_kvcal("inspect", plan)


def test_a_line_of_megabytes_is_read_in_parts(tmp_path: Path) -> None:
    from kvcal.data.pools import MAX_PIECE_CHARS, PURPOSES, Purpose
    from kvcal.data.sources import Piece, Source, read_source

    def texts(name: str, purpose: Purpose) -> list[str]:
        pieces = list(read_source(Source(str(tmp_path / name)), 0, purpose))
        return [piece.text for piece in pieces if isinstance(piece, Piece)]

    text = "".join(f"word{number} " for number in range(150_000))
    assert len(text) > 1_500_000
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text[:1_000_000]}) + "\n" + '{"text": "next"}\n')
    by_pool = [texts("long.txt", purpose) for purpose in PURPOSES]
    first = next(number for number, pieces in enumerate(by_pool) if text.startswith(pieces[0]))
    in_turn = zip_longest(*by_pool[first:], *by_pool[:first], fillvalue="")
    assert "".join(chain.from_iterable(in_turn)) == text
    assert max(len(piece) for pieces in by_pool for piece in pieces) <= MAX_PIECE_CHARS
    records = [texts("long.jsonl", purpose) for purpose in PURPOSES]
    assert sum(len(piece) for pieces in records for piece in pieces) == 1_000_000 + len("next")
