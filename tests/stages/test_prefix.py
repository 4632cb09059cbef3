"""A prompt's cache on disk: generation from the file is generation from the prompt, and other files are refused."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from cache_cases import feed
from cli_cases import run_kvcal, save_llama
from predictor_runs import (
    BOOSTED,
    REST,
    aqua_layers,
    as_loaded,
    fit,
    fitted_llama,
    loaded_llama,
    plan_with,
    prompt,
    sequences,
)
from tiny_models import VOCAB_SIZE as TINY_VOCAB
from tiny_models import built
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvcal import PlanCache, artifact, save_plan
from kvcal.cache.attached import attached_for
from kvcal.errors import ArtifactError, UnsupportedModel, UsageError
from kvcal.models.load import LoadedModel, load
from kvcal.plan.layer import LayerPlan, bare_layers
from kvcal.plan.page_format import RAW
from kvcal.plan.plan import Plan
from kvcal.stages.generate import prompt_tokens
from kvcal.stages.prefix import (
    KIND,
    SCHEMA,
    PrefixLoader,
    complete_prefix,
    held_tensors,
    load_prefix,
    pack_prefix,
)


def generated(
    loaded: LoadedModel, plan: Plan, tokens_T: Tensor, count: int, cache: PlanCache | None = None
) -> list[int]:
    """What the model generates for the prompt itself, with ``cache``, an empty one."""
    cache, ids = cache or PlanCache(plan, loaded.model.config), tokens_T.unsqueeze(0)
    with torch.no_grad(), attached_for(loaded.model, plan):
        output = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=count, do_sample=False
        )
    return output[0, len(tokens_T) :].tolist()


def aqua() -> tuple[LoadedModel, Plan]:
    layers, record = fitted_llama()
    return loaded_llama(), plan_with(loaded_llama(), layers, record)


@pytest.mark.parametrize("length", [1, 127, 380])
def test_generation_goes_on_from_the_file_as_from_the_prompt(tmp_path: Path, length: int) -> None:
    """Through a new page, predicted as the prompt's are; at the end both caches hold the same bits."""
    loaded, plan = aqua()
    tokens_T, path = prompt(length), tmp_path / "p.kv"
    pack_prefix(loaded, plan, tokens_T, path)
    prefix = load_prefix(loaded, plan, path)
    assert torch.equal(prefix.tokens_T, tokens_T) and prefix.cache.lengths == [length]
    assert prefix.cache.nbytes == plan.nbytes([length])
    new = complete_prefix(loaded, prefix, 20).tolist()
    cache = PlanCache(plan, loaded.model.config)
    assert new == generated(loaded, plan, tokens_T, 20, cache)
    found, expected = dict(held_tensors(prefix.cache)), dict(held_tensors(cache))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert prefix.cache.nbytes == plan.nbytes([length + 19])


@pytest.mark.parametrize("length", [240, 372])
def test_reconstructed_pages_give_the_same_generation(tmp_path: Path, length: int) -> None:
    """Until the plan would write its next page; the new cache holds 16-bit pages and no predictors."""
    loaded, plan = aqua()
    tokens_T, path = prompt(length), tmp_path / "p.kv"
    pack_prefix(loaded, plan, tokens_T, path)
    prefix = load_prefix(loaded, plan, path, into=plan.unquantized())
    assert prefix.cache.plan.layers == bare_layers(plan.geometry)
    assert prefix.cache.nbytes == plan.unquantized().nbytes([length])
    free = 128 - (length - 4) % 128
    assert complete_prefix(loaded, prefix, free).tolist() == generated(loaded, plan, tokens_T, free)


def test_reconstructed_pages_are_what_predicted_ones_read(tmp_path: Path) -> None:
    """Also re-packed into a plan of 8 bits, from which 8-bit pages of exact keys would differ."""
    loaded, plan = aqua()
    tokens_T, path = prompt(390), tmp_path / "p.kv"
    pack_prefix(loaded, plan, tokens_T, path)
    read = {}
    eight = replace(REST, num_bits=8)
    coarse = tuple(LayerPlan(layer.geometry, (eight,), (eight,)) for layer in plan.layers)
    for name, into in (("stored", None), ("16", plan.unquantized()), ("8", plan_with(loaded, coarse))):
        cache = load_prefix(loaded, plan, path, into).cache
        empty = torch.zeros(1, 2, 0, 8)
        read[name] = [layer.update(empty, empty) for layer in cache.layers]
    for stored, raw, packed in zip(*read.values(), strict=True):
        for side in range(2):
            assert torch.equal(stored[side], raw[side])
            error = (packed[side] - stored[side]).abs().max()
            assert 0 < error < 0.05 * stored[side].abs().max()


def test_bytes_on_disk(tmp_path: Path) -> None:
    loaded, plan = aqua()
    packed = pack_prefix(loaded, plan, prompt(390), tmp_path / "p.kv")
    # 4 sinks, 3 pages, 6 tokens behind them; 2 heads of 8 channels, K and V, 3 layers, fp32. A page: codes of 8
    # channels padded to 16, 2 or 4 bits, and a scale and a zero of 2 bytes for each of 128 tokens.
    unquantized = 3 * 2 * 2 * (4 + 6) * 8 * 4
    pages = 3 * 2 * 2 * sum(128 * 16 * bits // 8 + 128 * 4 for bits in (4, 2, 2))
    assert packed.packed_bytes == unquantized + pages
    assert packed.raw_bytes == 3 * 2 * 2 * 8 * 390 * 4
    assert packed.bits_per_value == 8 * packed.packed_bytes / (3 * 2 * 2 * 8 * 390)
    assert packed.file_bytes == (tmp_path / "p.kv").stat().st_size
    assert packed.packed_bytes + 390 * 4 + 64 * 4 < packed.file_bytes < packed.packed_bytes + 8000
    again = pack_prefix(loaded, plan, prompt(390), tmp_path / "q.kv")
    assert again == packed and (tmp_path / "q.kv").read_bytes() == (tmp_path / "p.kv").read_bytes()


def test_a_plan_that_hears_queries(tmp_path: Path) -> None:
    """The running query statistic is part of the cache: the next page's channels depend on it."""
    loaded = loaded_llama(2)
    layers = tuple(replace(layer, k=(BOOSTED,)) for layer in aqua_layers(loaded))
    plan = plan_with(loaded, layers)
    tokens_T = prompt(250)
    pack_prefix(loaded, plan, tokens_T, tmp_path / "p.kv")
    new = complete_prefix(loaded, load_prefix(loaded, plan, tmp_path / "p.kv"), 20).tolist()
    assert new == generated(loaded, plan, tokens_T, 20)
    with pytest.raises(UsageError, match="chooses channels by queries"):
        load_prefix(loaded, plan, tmp_path / "p.kv", into=plan)


@pytest.mark.parametrize("length", [3, 40])
def test_sliding_windows(tmp_path: Path, length: int) -> None:
    loaded = as_loaded(built("gemma3"), "bfloat16")
    plan = plan_with(loaded, aqua_layers(loaded))
    tokens_T = prompt(length, TINY_VOCAB)
    pack_prefix(loaded, plan, tokens_T, tmp_path / "p.kv")
    expected = generated(loaded, plan, tokens_T, 12)
    assert complete_prefix(loaded, load_prefix(loaded, plan, tmp_path / "p.kv"), 12).tolist() == expected
    raw = load_prefix(loaded, plan, tmp_path / "p.kv", into=plan.unquantized())
    assert raw.cache.nbytes == plan.unquantized().nbytes([length])
    assert complete_prefix(loaded, raw, 12).tolist() == expected


def test_predicted_layers_between_sliding_windows(tmp_path: Path) -> None:
    """Full attention in every second layer: predictors reach over the others."""
    config = built("gemma3").config.__class__(**{**built("gemma3").config.to_dict(), "layer_types": [
        "full_attention", "sliding_attention", "full_attention", "sliding_attention"]})  # fmt: skip
    torch.manual_seed(0)
    loaded = as_loaded(type(built("gemma3"))(config).eval())
    layers = aqua_layers(loaded)
    record = fit(loaded, layers, sequences([140] * 4, vocab_size=TINY_VOCAB))
    assert [(f.layer, f.source) for f in record.kept] == [(2, 0), (2, 0)]
    plan, tokens_T = plan_with(loaded, layers, record), prompt(125, TINY_VOCAB)
    pack_prefix(loaded, plan, tokens_T, tmp_path / "p.kv")
    new = complete_prefix(loaded, load_prefix(loaded, plan, tmp_path / "p.kv"), 20).tolist()
    assert new == generated(loaded, plan, tokens_T, 20)


def test_states_are_refused(tmp_path: Path) -> None:
    loaded = as_loaded(built("qwen3_next"))
    with pytest.raises(UnsupportedModel, match=r"layers \[0, 2\] keep a state"):
        pack_prefix(loaded, plan_with(loaded, aqua_layers(loaded)), prompt(9), tmp_path / "p.kv")


def test_one_new_token_and_the_end_of_the_text(tmp_path: Path) -> None:
    loaded, plan = aqua()
    tokens_T = prompt(20)
    pack_prefix(loaded, plan, tokens_T, tmp_path / "p.kv")
    (first,) = complete_prefix(loaded, load_prefix(loaded, plan, tmp_path / "p.kv"), 1).tolist()
    assert first == generated(loaded, plan, tokens_T, 1)[0]
    config = loaded.model.generation_config
    before, config.eos_token_id = config.eos_token_id, first
    try:
        assert complete_prefix(loaded, load_prefix(loaded, plan, tmp_path / "p.kv"), 9).tolist() == [first]
    finally:
        config.eos_token_id = before


# --- refusals ---


def test_a_prefix_of_another_plan_or_model_is_refused(tmp_path: Path) -> None:
    loaded, plan = aqua()
    path = tmp_path / "p.kv"
    pack_prefix(loaded, plan, prompt(140), path)
    with pytest.raises(ArtifactError, match="was packed with the plan"):
        load_prefix(loaded, plan_with(loaded, aqua_layers(loaded)), path)
    with pytest.raises(ArtifactError, match="was packed with the plan"):
        PrefixLoader(loaded, plan_with(loaded, aqua_layers(loaded))).load(PrefixLoader(loaded, plan).read(path))
    nudged = dict(plan.tensors)
    nudged["layers.1.k_predictor.bias"] = nudged["layers.1.k_predictor.bias"] + 1.0
    with pytest.raises(ArtifactError, match="was packed with the plan"):
        load_prefix(loaded, replace(plan, tensors=nudged), path)
    assert load_prefix(loaded, replace(plan, provenance={"recipe": "other"}), path).cache.lengths == [140]
    other = replace(plan.model, id="other", weights_sha256="9")
    elsewhere = replace(loaded, identity=other)
    with pytest.raises(ArtifactError, match="prefix of the model 'tiny', the plan is for 'other'"):
        load_prefix(elsewhere, replace(plan, model=other), path)
    with pytest.raises(ArtifactError, match="weights_sha256"):
        load_prefix(elsewhere, plan, path)
    with pytest.raises(ArtifactError, match="weights_sha256"):
        pack_prefix(elsewhere, plan, prompt(9), tmp_path / "q.kv")


@pytest.mark.parametrize("place", [0.2, 0.5, 0.99])
def test_a_flipped_bit_is_refused(tmp_path: Path, place: float) -> None:
    loaded, plan = aqua()
    path = tmp_path / "p.kv"
    pack_prefix(loaded, plan, prompt(300), path)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError):
        load_prefix(loaded, plan, path)
    path.write_bytes(bytes(data[: len(data) // 2]))
    with pytest.raises(ArtifactError, match="truncated"):
        load_prefix(loaded, plan, path)
    with pytest.raises(ArtifactError, match="does not exist"):
        load_prefix(loaded, plan, tmp_path / "none.kv")


@pytest.mark.parametrize("name", ["tokens", "layers.0.k.0.recent", "layers.1.v.0.pages", "layers.2.v.0.sinks"])
def test_a_flipped_bit_is_refused_by_the_name_of_its_tensor(tmp_path: Path, name: str) -> None:
    """Before anything is loaded; from disk and into memory."""
    loaded, plan = aqua()
    path = tmp_path / "p.kv"
    pack_prefix(loaded, plan, prompt(300), path)
    with artifact.opened(path, KIND, SCHEMA) as (_, tensors):
        place = tensors[name].start + tensors[name].nbytes // 2
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))
    loader = PrefixLoader(loaded, plan, plan.unquantized())
    for use in (loader.load_file, loader.read):
        with pytest.raises(ArtifactError, match=f"p.kv is corrupt: the tensor '{name}' has the digest") as refused:
            use(path)
        assert refused.value.place == str(path)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """Whatever lies in the memory that it is read into."""
    loaded, plan = aqua()
    path = tmp_path / "p.kv"
    pack_prefix(loaded, plan, prompt(300), path)
    with artifact.opened(path, KIND, SCHEMA) as (_, tensors):
        last = max(tensors.values(), key=lambda tensor: tensor.start)
        memory = np.empty(last.nbytes, np.uint8)
        last.read_into(memory)
        os.truncate(path, last.start + last.nbytes - 1)
        with pytest.raises(ArtifactError, match=f"is truncated: it ends within the tensor '{last.name}'"):
            last.read_into(memory)


@pytest.mark.parametrize("change", [os.unlink, lambda path: os.truncate(path, 100), lambda path: os.truncate(path, 0)])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_file_that_changes_before_its_header_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], is_late: bool
) -> None:
    loaded, plan = aqua()
    path, safe_open = tmp_path / "p.kv", safetensors.safe_open
    pack_prefix(loaded, plan, prompt(140), path)

    def changed(*given: Any, **options: Any) -> Any:
        if not is_late:
            change(path)
        found = safe_open(*given, **options)
        if is_late:
            change(path)
        return found

    monkeypatch.setattr(safetensors, "safe_open", changed)
    if is_late and change is os.unlink:
        assert load_prefix(loaded, plan, path).cache.lengths == [140]
        return
    with pytest.raises(ArtifactError, match="is truncated|does not exist") as refused:
        load_prefix(loaded, plan, path)
    assert refused.value.place == str(path)


def test_a_disk_that_fails_is_named_with_its_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that come in small parts are all read; an error that comes once others were read leaves nothing open."""
    loaded, plan = aqua()
    path, preadv = tmp_path / "p.kv", os.preadv
    pack_prefix(loaded, plan, prompt(140), path)
    with artifact.opened(path, KIND, SCHEMA) as (_, tensors):
        broken = tensors["layers.2.v.0.sinks"]

    def in_parts(file: int, buffers: list[memoryview], start: int) -> int:
        if start == broken.start and is_broken:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(file, [buffers[0][:97]], start)

    monkeypatch.setattr(os, "preadv", in_parts)
    loader, is_broken = PrefixLoader(loaded, plan, plan.unquantized()), False
    assert loader.load_file(path).cache.lengths == loader.load(loader.read(path)).cache.lengths == [140]
    is_broken, threads, files = True, threading.active_count(), len(os.listdir("/proc/self/fd"))
    for use in (loader.load_file, loader.read):
        with pytest.raises(ArtifactError, match=f"cannot read the tensor '{broken.name}' of {path}: Input") as refused:
            use(path)
        assert refused.value.place == str(path)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


def test_a_prefix_that_was_read_is_loaded_as_its_file(tmp_path: Path) -> None:
    loaded, plan = aqua()
    pack_prefix(loaded, plan, prompt(300), tmp_path / "p.kv")
    loader = PrefixLoader(loaded, plan, plan.unquantized())
    with torch.inference_mode():
        held = loader.read(tmp_path / "p.kv")
        ways = [loader.load(held), loader.load_file(tmp_path / "p.kv")]
    (tmp_path / "p.kv").unlink()
    expected, found = (dict(held_tensors(prefix.cache)) for prefix in ways)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert torch.equal(ways[0].logits_V, ways[1].logits_V) and torch.equal(ways[0].tokens_T, prompt(300))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda body, tensors: tensors.pop("layers.1.k.0.pages"), "missing tensor 'layers.1.k.0.pages'"),
        (lambda body, tensors: tensors.update(extra=torch.ones(1)), "unknown tensor 'extra'"),
        (lambda body, tensors: tensors.update(logits=torch.ones(3)), r"'logits' is float32 \[3\]"),
        (lambda body, tensors: tensors["tokens"][0].fill_(9), "its tokens are not those"),
        (lambda body, tensors: tensors["tokens"].add_(1), "'tokens' holds values from 4 to 64, expected 0 to 63"),
        (lambda body, tensors: tensors["layers.1.k.0.pages"].fill_(255), "pages' holds NaN"),
        (lambda body, tensors: tensors["layers.0.v.0.recent"].fill_(3e38), "recent' holds values from 3e"),
        (lambda body, tensors: body["query_since"].update(x=1), "query_since of"),
        (lambda body, tensors: body.update(num_tokens=299), "num_tokens = 299, and it does not hold as many tokens"),
        (lambda body, tensors: body.update(num_tokens=True), "num_tokens"),
        (lambda body, tensors: body.pop("query_since"), "missing key 'query_since'"),
    ],
)
def test_content_that_does_not_fit_is_refused(tmp_path: Path, spoil: Callable, message: str) -> None:
    loaded, plan = aqua()
    path = tmp_path / "p.kv"
    pack_prefix(loaded, plan, prompt(300), path)
    stored = artifact.read(path, KIND, SCHEMA)
    tensors = dict(stored.tensors)
    spoil(stored.body, tensors)
    artifact.write(path, replace(stored, tensors=tensors))
    with pytest.raises(ArtifactError, match=message):
        load_prefix(loaded, plan, path)


def test_prompts_that_cannot_be_packed(tmp_path: Path) -> None:
    loaded, plan = aqua()
    with pytest.raises(UsageError, match="a prompt of 0 tokens, expected 1 to 2048"):
        pack_prefix(loaded, plan, prompt(9)[:0], tmp_path / "p.kv")
    with pytest.raises(UsageError, match="a prompt of 2049 tokens"):
        pack_prefix(loaded, plan, prompt(2049), tmp_path / "p.kv")
    with pytest.raises(UsageError, match="no tokenizer"):
        prompt_tokens(loaded, "text", False, 0)
    with pytest.raises(ArtifactError, match="cannot write"):
        pack_prefix(loaded, plan, prompt(9), tmp_path / "nowhere" / "p.kv")
    assert not list(tmp_path.iterdir())


# --- the command ---


def test_the_command(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = str(save_llama(tmp_path / "model", tokenizer))
    loaded = load(model, device="cpu")
    layers = tuple(LayerPlan(layer.geometry, (REST,), (RAW,)) for layer in bare_layers(loaded.geometry))
    plan = plan_with(loaded, layers)
    save_plan(plan, tmp_path / "plan.safetensors")
    text = "Times. 12 x 34 = ? " * 30
    (tmp_path / "prompt.txt").write_text(text)
    out = tmp_path / "p.kv"
    command = ("pack-prefix", "--model", model, "--plan", tmp_path / "plan.safetensors", "-o", out, "--quiet")
    shown = run_kvcal(*command, "--device", "cpu", "--prompt-file", tmp_path / "prompt.txt", "--json")
    assert f'"path": "{out}"' in shown.out
    tokens_T = prompt_tokens(loaded, text, False, 0)
    prefix = load_prefix(loaded, plan, out)
    assert torch.equal(prefix.tokens_T, tokens_T)
    assert complete_prefix(loaded, prefix, 5).tolist() == generated(loaded, plan, tokens_T, 5)
    assert "bits per value" in run_kvcal(*command, "--device", "cpu", "--prompt", "Times.").out
    for wrong in ((), ("--prompt", "a", "--prompt-file", out)):
        refused = run_kvcal(*command, *wrong)
        assert refused.code == 2 and "exactly one of --prompt" in refused.err
    refused = run_kvcal(*command, "--prompt-file", tmp_path / "none.txt")
    assert (
        refused.code == 2
        and f"cannot read {tmp_path / 'none.txt'}: No such file or directory\nhint: check the path" in refused.err
    )


def test_feeding_on_after_loading(tmp_path: Path) -> None:
    """A loaded cache takes further chunks as the one it was made from."""
    loaded, plan = aqua()
    ids = prompt(600).unsqueeze(0)
    cache = PlanCache(plan, loaded.model.config)
    feed(loaded.model, cache, ids[:, :390])
    pack_prefix(loaded, plan, ids[0, :390], tmp_path / "p.kv")
    again = load_prefix(loaded, plan, tmp_path / "p.kv").cache
    logits = [feed(loaded.model, each, ids[:, 390:], cuts=(40, 120)) for each in (cache, again)]
    assert torch.equal(*logits)
