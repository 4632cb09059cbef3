"""The plan: its cost function, and its file, which is the same in any process, or in a repository of the hub.

Committed plans stay readable: each loads with its old bytes, or is refused by the name of its schema."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from evaluation_cases import make_plan, tiny
from huggingface_hub.errors import LocalEntryNotFoundError

from kvcal import load_plan, save_plan
from kvcal.embedded import model_folder
from kvcal.errors import ArtifactError, UsageError
from kvcal.geometry import AttentionGeometry, ModelIdentity, StateGeometry
from kvcal.models.load import identity_of
from kvcal.plan.page_format import num_pages
from kvcal.plan.plan import RAW, SCHEMA, Boost, Format, LayerPlan, Plan, Tier, Workload, plan_bytes
from kvcal.strict import parse
from kvcal.systems.kvmix.window_rule import WindowRule

GOLDEN = Path(__file__).parents[1] / "golden" / "plan.json"


def test_shares_are_the_numbers_as_written() -> None:
    """0.29 of 100 tokens are 29, which floats do not say; a share of channels is the nearest number of
    them."""
    assert WindowRule("clamped", 0.29, 1000).window(100) == 29
    assert [Tier(4, share).num_channels(64) for share in (0.2, 0.19, 0.001)] == [13, 12, 1]


def test_a_page_that_queries_choose_channels_for_comes_alone() -> None:
    boosted = Format(2, "channel", 32, recent_window=300, boost=Boost("query_range", (Tier(4, 0.2),)))
    assert [boosted.tokens_to_next_event(n, n) for n in (0, 100, 128)] == [128, 28, 128]
    assert replace(boosted, boost=None).tokens_to_next_event(100, 100) > 28


def test_a_window_holds_one_token_less_beside_the_one_that_reads_it() -> None:
    bounded = LayerPlan(AttentionGeometry(0, 4, 2, 16, 24, window=8))
    assert [bounded.nbytes("bfloat16", (n,), n) for n in (5, 7, 8, 20)] == [2 * 40 * 2 * n for n in (5, 7, 7, 7)]


def test_transforms_that_do_not_go_together_are_refused() -> None:
    before = {"k_pages": "pre"}
    k, v = Format(2, "channel", 32), Format(2)
    layer = LayerPlan(AttentionGeometry(1, 4, 2, 16, 16), k, v)
    with pytest.raises(ValueError, match="query score: queries are known after RoPE"):
        replace(layer, k=replace(k, boost=Boost("query_range", (Tier(4, 0.2),))), **before)
    rotated = replace(layer, v=Format(2, quantizer="rotated"), v_basis=True)
    with pytest.raises(ValueError, match="has a v_gain, which is for values in a basis"):
        replace(rotated, v_gain=True)
    for basis in ({"k_basis": True}, {"v_basis": True}):
        with pytest.raises(ValueError, match="is bounded and takes no transforms"):
            LayerPlan(AttentionGeometry(0, 4, 2, 16, 16, window=8), **basis)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("shift", "direct", "shift = 'direct': Input should be 'equivalent'"),
        ("boost", {"score": "random", "tiers": [{"num_bits": 4, "share": 0.1}]}, "'random', expected one of .*'range'"),
    ],
)
def test_formats_of_earlier_ablations_are_refused_with_those_there_are(key: str, value: object, allowed: str) -> None:
    with pytest.raises(ArtifactError, match=f"old.safetensors: .*{allowed}"):
        parse(Format, {"num_bits": 2, "axis": "channel", key: value}, "old.safetensors", ArtifactError)


def example() -> Plan:
    """One layer of each kind."""
    k = Format(2, "channel", 32, 4, 64)
    layers = (
        LayerPlan(StateGeometry(0, 640)),
        LayerPlan(AttentionGeometry(1, 4, 2, 64, 80), k, RAW),
        LayerPlan(AttentionGeometry(3, 4, 2, 64, 80, window=512)),
        LayerPlan(AttentionGeometry(4, 4, 2, 64, 80), RAW, Format(4, group_size=64, recent_window=128)),
    )
    identity = ModelIdentity("tests/tiny", "qwen3_next", "a" * 64, "b" * 64, "c" * 64)
    provenance = {"recipe": {"name": "é", "sha256": "d" * 64}, "seeds": [0, 1], "versions": {"torch": "2.13"}}
    return Plan(identity, "bfloat16", layers, Workload(batch=8, context=4096), provenance)


def body_of(plan: Plan) -> dict:
    raw = plan_bytes(plan)
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return json.loads(header["__metadata__"]["kvcal"])["body"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.safetensors"


def test_round_trip(path):
    save_plan(example(), path)
    assert load_plan(path) == example()
    assert os.listdir(path.parent) == [path.name]


def test_golden_bytes():
    """The file of ``example``, as hex: a plan that was compiled once must stay readable, byte for byte."""
    golden = json.loads(GOLDEN.read_text())
    raw = plan_bytes(example())
    assert raw.hex() == "".join(golden["hex"])
    assert hashlib.sha256(raw).hexdigest() == golden["sha256"]


def test_predicted_bytes_worked_out_by_hand():
    """Two bytes a value; sequences of 4096 tokens; per head and sequence sinks, ring and pages."""
    state = 640
    k_2 = (4 + 64 + 128) * 64 * 2 + 32 * (128 * 64 // 4 + 2 * 4 * 64 * 2)
    v_raw = 128 * 80 * 2 + 32 * 128 * 80 * 2
    sliding = 511 * 2 * (64 + 80) * 2
    k_raw = 128 * 64 * 2 + 32 * 128 * 64 * 2
    v_4 = (128 + 128) * 80 * 2 + 32 * (128 * 80 // 2 + 2 * 2 * 128 * 2)
    total = 8 * (state + 2 * k_2 + 2 * v_raw + sliding + 2 * k_raw + 2 * v_4)
    assert example().predicted_bytes == body_of(example())["predicted_bytes"] == total


def test_ragged_lengths_add_up_and_windows_hold_padding():
    plan = example()
    sliding = 2 * (64 + 80) * 2
    for lengths in ([1, 300, 600], [5], [4096, 4096]):
        columns = max(lengths)
        alone = sum(plan.nbytes([length], columns) for length in lengths)
        assert plan.nbytes(lengths) == plan.nbytes(lengths, columns) == alone
        more_padding = len(lengths) * sliding * (min(700, 511) - min(columns, 511))
        assert plan.nbytes(lengths, max(columns, 700)) == alone + more_padding


@pytest.mark.parametrize("fmt", [Format(2, "channel", 32), Format(3, "token", 64, 5, 33), RAW])
def test_pages_of_a_format(fmt):
    seen = [fmt.pages_read(tokens) for tokens in range(600)]
    first = fmt.recent_window + 128
    assert seen.index(1) == first and seen[first + 128 - 1] == 1 and seen[first + 128] == 2
    assert all(pages <= num_pages(tokens) for tokens, pages in enumerate(seen))  # only what is packed is read
    held = [tokens - 128 * pages for tokens, pages in enumerate(seen)]
    assert max(held) == fmt.ring_tokens() - 1
    assert all(count >= fmt.recent_window for count, pages in zip(held, seen, strict=True) if pages)


def test_bits_per_value_count_everything():
    """KIVI-2 at groups of 32 is 3 bits and its buffers; two-bit pages at groups of 128 are 2.25."""
    attention = AttentionGeometry(0, 8, 8, 128, 128)
    identity = ModelIdentity("m", "llama", "", "", "")
    for group_size, bits in ((32, 3.0), (128, 2.25)):
        formats = Format(2, "channel", group_size), Format(2, "token", group_size)
        plan = Plan(identity, "bfloat16", (LayerPlan(attention, *formats),), Workload(1, 128 * 1000), {})
        buffers = 16 * 128 / (128 * 1000)
        assert plan.bits_per_value() == pytest.approx(bits + buffers)
        assert plan.bits_per_value(Workload(4, 128)) == pytest.approx(bits + 16)


def test_a_plan_of_a_repository_at_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, asked = make_plan(tiny()), []
    save_plan(plan, tmp_path / "plan.safetensors")

    def download(repository: str, name: str, *, revision: str | None, library_name: str) -> str:
        asked.append((repository, name, revision))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load_plan("me/plans", revision="small") == plan == load_plan("me/plans")
    assert asked == [("me/plans", "plan.safetensors", "small"), ("me/plans", "plan.safetensors", None)]


def test_what_cannot_be_downloaded_is_told_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="plan me/none at revision 'main': ") as refused:
        load_plan("me/none")
    assert refused.value.hint and isinstance(refused.value.__cause__, LocalEntryNotFoundError)
    with pytest.raises(UsageError, match="Cannot have"):
        load_plan("me/a..b")


def test_files_are_not_asked_for(tmp_path: Path) -> None:
    for name in (str(tmp_path), "none.safetensors", "folder/none.safetensors"):
        with pytest.raises(UsageError, match="a file has none"):
            load_plan(name, revision="main")
    with pytest.raises(ArtifactError, match="does not exist"):
        load_plan(Path("me/plans"))


ROOT = Path(__file__).parents[2]
FOLDERS = sorted((ROOT / "artifacts/plans").iterdir())


def schema_of(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def plan_of(folder: Path) -> Plan:
    """The folder's plan; skips for a schema that this version does not read."""
    try:
        return load_plan(folder / "plan.safetensors")
    except ArtifactError as refused:
        assert schema_of(folder) != SCHEMA, f"a plan of the present schema must load: {refused}"
        assert f"schema version {schema_of(folder)}" in refused.message
        assert str(SCHEMA) in refused.message
        pytest.skip(f"refused with its reason: {refused.message}")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_committed_plan_loads_with_its_bytes_or_is_refused_by_schema(folder: Path) -> None:
    plan = plan_of(folder)
    report = json.loads((folder / "inspect.json").read_text())
    assert plan.predicted_bytes == report["bytes"] == report["predicted_bytes"]
    assert plan.bits_per_value() == report["bits_per_value"]
    layer_bytes = [
        layer.nbytes(plan.cache_dtype, plan.workload.lengths, plan.workload.context) for layer in plan.layers
    ]
    assert layer_bytes == report["layer_bytes"]
    bits = [(layer.k.num_bits, layer.v.num_bits) for layer in plan.layers]
    assert bits == [(layer["k"][0]["num_bits"], layer["v"][0]["num_bits"]) for layer in report["layers"]]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_committed_plan_is_the_embedded_models(folder: Path) -> None:
    assert plan_of(folder).model == identity_of(model_folder(), "reasoner-10m")


def test_the_readme_of_the_artifacts_names_every_folder_and_its_figures() -> None:
    text = (ROOT / "artifacts/README.md").read_text()
    for folder in FOLDERS:
        rows = {row["name"]: row for row in json.loads((folder / "evaluation.json").read_text())["body"]["rows"]}
        row = rows["default"]
        line = next(line for line in text.splitlines() if f"`plans/{folder.name}`" in line)
        assert f"| {row['bits_per_value']:.3f} |" in line
        assert f"| {row['total_bytes'] / 1e6:.2f} MB |" in line
        assert f"| {row['text']['kl']:.4f} ± {row['text']['kl_se']:.4f} |" in line
