"""The model's own samples: from its distribution, the same again, resumed, and never in two pools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB_SIZE, built
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcal import artifact
from kvcal.data import samples
from kvcal.data.mixture import KINDS
from kvcal.data.pools import PURPOSES, Purpose
from kvcal.data.samples import BATCH, Sampler, draws, openings, sample
from kvcal.data.sequences import DataSpec, load_sequences
from kvcal.errors import ArtifactError, NonFiniteActivations, UsageError
from kvcal.folder import Folder, sequences
from kvcal.models.load import LoadedModel, load
from kvcal.progress import Silent

SPEC = DataSpec("samples", num_samples=5, seq_len=48, seed=3)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("reasoner-10m", device="cpu")


def tiny() -> PreTrainedModel:
    return deepcopy(built("llama"))


def rows_of(model: PreTrainedModel, folder: Path | None, num_rows: int = 20, length: int = 12) -> tuple[Tensor, Tensor]:
    opening: list[Iterator[list[int]]] = [repeat([5, 6 + row]) for row in range(num_rows)]
    seeds = [f"seed {row}" for row in range(num_rows)]
    return Sampler(model, {"model": "tiny"}, folder).rows({"purpose": "fit"}, opening, seeds, length, [2])


def test_a_token_is_drawn_from_the_models_distribution() -> None:
    """The token whose share of the cumulative distribution holds the uniform number, in fp64, without a cache."""
    model, uniform_BT = tiny(), draws(["a", "b"], 40)
    tokens_BT, written_BT = sample(model, [repeat([5, 6]), repeat([7])], uniform_BT, [2], Silent())
    assert not written_BT[0, :2].any() and not written_BT[1, 0] and bool(written_BT[:, 2:].sum() > 60)
    with torch.no_grad():
        cumulative_BTV = model(input_ids=tokens_BT).logits.double().softmax(-1).cumsum(-1)
    for row, t in written_BT.nonzero().tolist():
        token, drawn = int(tokens_BT[row, t]), float(uniform_BT[row, t])
        low = float(cumulative_BTV[row, t - 1, token - 1]) if token else 0.0
        assert low - 1e-5 <= drawn <= float(cumulative_BTV[row, t - 1, token]) + 1e-5


def test_temperature_1_gives_the_models_own_frequencies() -> None:
    """Of 4,000 first tokens, each as often as the model says, within five standard errors."""
    model, num_rows = tiny(), 4000
    tokens_BT, _ = sample(model, [repeat([5])] * num_rows, draws([str(i) for i in range(num_rows)], 2), [], Silent())
    with torch.no_grad():
        expected_V = model(input_ids=torch.tensor([[5]])).logits[0, -1].double().softmax(-1)
    found_V = torch.bincount(tokens_BT[:, 1], minlength=VOCAB_SIZE) / num_rows
    error_V = (expected_V * (1 - expected_V) / num_rows).sqrt()
    assert bool(((found_V - expected_V).abs() <= 5 * error_V + 1 / num_rows).all())


def test_a_text_that_ends_is_followed_by_the_next_opening() -> None:
    ends = list(range(0, VOCAB_SIZE, 2))
    opening = iter([[5, 7], [9, 11, 13], [15], *([17],) * 40])
    tokens_BT, written_BT = sample(tiny(), [opening], draws(["a"], 30), ends, Silent())
    tokens, written = tokens_BT[0].tolist(), written_BT[0].tolist()
    assert tokens[:2] == [5, 7] and written[:2] == [False, False]
    first = next(t for t, token in enumerate(tokens) if written[t] and token % 2 == 0)
    assert tokens[first + 1 : first + 4] == [9, 11, 13] and written[first + 1 : first + 4] == [False] * 3
    assert all(written[2 : first + 1]) and written[first + 4]


def test_logits_that_are_not_finite_are_refused() -> None:
    model = tiny()
    next(iter(model.parameters())).data.fill_(float("nan"))
    with pytest.raises(NonFiniteActivations, match="token 0"):
        sample(model, [repeat([5])], draws(["a"], 4), [], Silent())


def test_rows_are_kept_and_resumed_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    whole = rows_of(tiny(), tmp_path / "whole")
    (path,) = (tmp_path / "whole").glob("samples-*.safetensors")
    calls: list[int] = []
    original = samples.sample

    def stopping(model: PreTrainedModel, opening: list[Iterator[list[int]]], *rest: object) -> tuple[Tensor, Tensor]:
        calls.append(len(opening))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(model, opening, *rest)  # type: ignore[arg-type]

    (tmp_path / "parts").mkdir()
    monkeypatch.setattr(samples, "sample", stopping)
    with pytest.raises(KeyboardInterrupt):
        rows_of(tiny(), tmp_path / "parts")
    resumed = rows_of(tiny(), tmp_path / "parts")
    assert calls == [BATCH, 20 - BATCH, 20 - BATCH]
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert (tmp_path / "parts" / path.name).read_bytes() == path.read_bytes()
    again = rows_of(tiny(), tmp_path / "parts")  # another model object, nothing sampled
    assert len(calls) == 3 and torch.equal(again[0], whole[0])


def test_a_second_stage_samples_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    first = rows_of(model, None)
    monkeypatch.setattr(samples, "sample", lambda *given: pytest.fail("sampled again"))
    assert rows_of(model, None)[0] is first[0]


@pytest.mark.parametrize("change", ["shape", "dtype", "rows", "negative", "inputs", "extra"])
def test_a_file_of_other_samples_is_refused(change: str, tmp_path: Path) -> None:
    rows_of(tiny(), tmp_path)
    (path,) = tmp_path.glob("samples-*.safetensors")
    found = artifact.read(path, samples.KIND, samples.SCHEMA)
    tokens, written = found.tensors["tokens"], found.tensors["written"]
    tensors = {
        "shape": {"tokens": tokens[:, :5], "written": written[:, :5]},
        "dtype": {"tokens": tokens.to(torch.int32), "written": written},
        "rows": {"tokens": tokens[:7], "written": written[:7]},
        "negative": {"tokens": -tokens, "written": written},
        "inputs": found.tensors,
        "extra": {**found.tensors, "more": written},
    }[change]
    inputs = {**found.inputs, "seq_len": 11} if change == "inputs" else found.inputs
    artifact.write(path, replace(found, tensors=tensors, inputs=inputs))
    with pytest.raises(ArtifactError) as caught:
        rows_of(tiny(), tmp_path)
    assert path.name in caught.value.message and caught.value.hint


def test_openings_are_dealt_to_one_pool_each() -> None:
    for is_chat in (False, True):
        for kind in KINDS:
            seen: dict[str, set[str]] = {}
            for purpose in PURPOSES:
                drawn = openings(kind, purpose, "0", is_chat)
                seen[purpose] = {next(drawn) for _ in range(60)}
                assert len(seen[purpose]) > 4
            assert sum(map(len, seen.values())) == len(set.union(*seen.values()))


def test_samples_of_every_kind_in_no_two_pools(loaded: LoadedModel) -> None:
    digests: list[str] = []
    for purpose in PURPOSES:
        for seed in (0, 1):
            data = sequences(replace(SPEC, num_samples=6, seq_len=40, seed=seed), loaded, purpose)
            assert data.kinds == (*KINDS, KINDS[0]) and data.description.startswith(f"samples (pool {purpose})")
            digests += data.digests
    assert len(set(digests)) == len(digests) == 48
    prose = sequences(replace(SPEC, source="samples:prose"), loaded)
    assert set(prose.kinds) == {"prose"}


def test_what_the_model_wrote_is_in_the_loss(loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    data = sequences(SPEC, loaded)
    for tokens_T, mask_T in zip(data.sequences, data.loss_masks, strict=True):
        opening = loaded.tokenizer.decode(tokens_T[: int(mask_T.nonzero()[0])])
        assert tokens_T.numel() == mask_T.numel() == 48 and opening.startswith("<eos>") and len(opening) > 8
        assert bool(mask_T[-5:].any())


PRINT = """
from kvcal.data.sequences import DataSpec
from kvcal.models.load import load
from kvcal.folder import sequences
print(sequences(DataSpec("samples", 5, 48, 3), load("reasoner-10m", device="cpu")).fingerprint)
"""


def test_samples_are_the_same_in_another_process(loaded: LoadedModel) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "7"}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    run = subprocess.run([sys.executable, "-c", PRINT], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [sequences(SPEC, loaded).fingerprint]


def test_a_chat_model_is_asked_by_its_template(loaded: LoadedModel, tmp_path: Path) -> None:
    from test_data import chat_tokenizer

    chat = replace(loaded, tokenizer=chat_tokenizer())
    data = sequences(SPEC, chat, folder=Folder(tmp_path))
    assert chat.tokenizer is not None
    for tokens_T, mask_T in zip(data.sequences, data.loss_masks, strict=True):
        opening = chat.tokenizer.decode(tokens_T[: int(mask_T.nonzero()[0])])
        assert opening.startswith("<user>") and opening.endswith("</user>\n<assistant>")
    assert len(list(tmp_path.glob("samples-*.safetensors"))) == 1


@pytest.mark.parametrize("purpose", ["fit", "report"])
def test_samples_need_a_model_and_room(
    purpose: Purpose, loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UsageError, match="source = samples needs the model"):
        load_sequences(SPEC, tokenizer, None, purpose)
    with pytest.raises(UsageError, match="ends within a sample's opening"):
        sequences(replace(SPEC, seq_len=4), loaded, purpose)
