"""Loading: what is found where, in which dtype, under which identity, and every way to be refused."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers as hf
from cache_cases import model_plan
from safetensors.torch import load_file, save_file
from tiny_models import TINY_MODELS

from kvcal.embedded import MODEL_NAME, model_folder
from kvcal.errors import ArtifactError, KvcalError, UnsupportedModel, UsageError
from kvcal.models.files import embedded_models
from kvcal.models.load import identity_of, load, weight_bytes
from kvcal.progress import Silent
from kvcal.stages.verify import require_same_model, verify_plan


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny Qwen2 in bf16 with a tokenizer, as save_pretrained writes it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    TINY_MODELS["qwen2"]().to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder() / name, folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_multimodal_checkpoint_is_of_the_type_of_its_language_model(tmp_path: Path) -> None:
    """The type that a cache compares with its plan's."""
    text = TINY_MODELS["gemma3"]().config
    vision = hf.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    hf.Gemma3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma3"
    loaded = load(str(tmp_path), need_tokenizer=False)
    assert loaded.identity.model_type == loaded.geometry.model_type == "gemma3_text"
    plan = replace(model_plan(loaded.model), model=loaded.identity, cache_dtype="bfloat16")
    assert len(verify_plan(plan, loaded, 200, Silent())) > 2


def test_a_plan_of_other_layers_is_refused_with_the_dtype_that_may_be_the_reason(saved: Path) -> None:
    loaded = load(str(saved))
    plan = replace(model_plan(loaded.model), model=loaded.identity)  # its cache is in float32
    with pytest.raises(ArtifactError, match="are not those that") as caught:
        require_same_model(plan, loaded)
    assert "leave out --dtype" in caught.value.hint


def refused(source: Path | str, kind: type[KvcalError], *parts: str, **options) -> KvcalError:
    with pytest.raises(kind) as error:
        load(str(source), device="cpu", **options)
    assert type(error.value) is kind
    for part in parts:
        assert part in error.value.message
    return error.value


def test_embedded_model():
    assert MODEL_NAME in embedded_models()
    loaded = load(MODEL_NAME, device="cpu")
    assert loaded.identity.id == loaded.source == MODEL_NAME
    assert loaded.identity.model_type == loaded.geometry.model_type == "llama"
    assert loaded.geometry.cache_dtype == "bfloat16"
    assert loaded.model.dtype == torch.float32  # bf16 is slow on a CPU
    assert not loaded.model.training
    assert loaded.tokenizer is not None and len(loaded.tokenizer) == 4096
    tensors = {id(p): p for p in loaded.model.parameters()}.values()
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight  # tied: once
    inverse_frequencies = sum(buffer.nbytes for buffer in loaded.model.buffers())
    assert weight_bytes(loaded.model) == 2 * sum(t.numel() for t in tensors) + inverse_frequencies
    # The file: the same numbers and a header.
    file_bytes = (model_folder() / "model.safetensors").stat().st_size
    assert 0 < file_bytes - (weight_bytes(loaded.model) - inverse_frequencies) < 20_000


def test_folder_and_dtypes(saved: Path):
    fp32, bf16 = load(str(saved), device="cpu"), load(str(saved), device="cpu", dtype="bfloat16")
    assert fp32.identity == bf16.identity
    assert fp32.geometry == bf16.geometry
    assert fp32.identity.id == "tiny-qwen2"
    assert (fp32.model.dtype, bf16.model.dtype) == (torch.float32, torch.bfloat16)
    assert weight_bytes(fp32.model) == weight_bytes(bf16.model)
    assert bf16.geometry.cache_dtype == "bfloat16"


def test_identity_ignores_the_place_and_volatile_keys(saved: Path, folder: Path):
    first = identity_of(saved, "x")
    edit_json(folder / "config.json", transformers_version="0.0", _name_or_path="/somewhere")
    assert identity_of(folder, "x") == first
    edit_json(folder / "config.json", rms_norm_eps=0.5)
    assert identity_of(folder, "x").config_sha256 != first.config_sha256
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    changed = identity_of(folder, "x")
    assert changed.weights_sha256 != first.weights_sha256
    assert changed.tokenizer_sha256 == first.tokenizer_sha256
    (folder / "tokenizer.json").write_text("{}")
    assert identity_of(folder, "x").tokenizer_sha256 != first.tokenizer_sha256


def test_shards(folder: Path):
    model = load(str(folder), device="cpu", dtype="bfloat16").model
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = load(str(folder), device="cpu")
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight.float())
    before = loaded.identity.weights_sha256
    with shards[-1].open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    assert identity_of(folder, "x").weights_sha256 != before
    shards[1].unlink()
    refused(folder, UsageError, "model.safetensors.index.json", shards[1].name)


def test_path_that_does_not_exist():
    error = refused("./no/such/folder", UsageError, "'./no/such/folder'", MODEL_NAME, "no hub id")
    assert error.exit_code == 2 and error.hint is not None


def test_hub_that_cannot_be_reached():
    error = refused("nobody/nothing", UsageError, "'nobody/nothing'", "the hub gives no config.json")
    assert "HF_TOKEN" in str(error.hint)
    refused("nothing.gguf", UsageError, "'nothing.gguf'", "no hub id")
    variables = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-X", "importtime", "-m", "kvcal", "plan", "nobody", "--bits", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 2 and "'nobody' was not found" in done.stderr
    assert "Retrying" not in done.stderr and " torch\n" not in done.stderr  # asked once, before torch is imported


def test_hub_id_from_the_local_hub_cache(saved: Path, tmp_path: Path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--tiny"
    shutil.copytree(saved, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    loaded = load("owner/tiny", device="cpu")
    assert loaded.identity.id == "owner/tiny"
    assert loaded.identity.weights_sha256 == identity_of(saved, "x").weights_sha256
    assert loaded.tokenizer is not None
    (repository / "snapshots" / commit / "tokenizer.json").unlink()
    assert "tokenizer.json" in str(refused("owner/tiny", UsageError, "owner/tiny has no tokenizer").hint)
    loaded = load("owner/tiny", device="cpu", need_tokenizer=False)
    assert loaded.tokenizer is None and loaded.identity.tokenizer_sha256 == ""


def test_weights_of_another_shape_or_depth(folder: Path):
    edit_json(folder / "config.json", num_hidden_layers=4, layer_types=None)
    refused(folder, UsageError, "lacks 12 of the model's tensors")
    edit_json(folder / "config.json", num_hidden_layers=3, intermediate_size=112)
    with pytest.raises(KvcalError, match="copy"):
        load(str(folder), device="cpu")


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The log of transformers meanwhile, at its own verbosity."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    hf.utils.logging.add_handler(handler)
    yield found
    hf.utils.logging.remove_handler(handler)


def test_a_refusal_is_one_line_without_transformers_tables(folder: Path, tmp_path: Path, heard: list[str]) -> None:
    """Of a checkpoint that lacks weights, and of encoders: models of masked tokens, and with a decoder next
    to them."""
    before = hf.utils.logging.get_verbosity()
    weights = load_file(folder / "model.safetensors")
    weights.pop(next(name for name in weights if "mlp" in name))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, UsageError, "lacks 1 of the model's tensors")
    small = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    bert = hf.BertForMaskedLM(hf.BertConfig(**small, num_attention_heads=2))
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=99, d_model=32, d_ff=32, num_layers=1, num_heads=2))
    for name, model, reason, hint in (
        ("bert", bert, "is not causal", "an encoder has no cache"),
        ("t5", t5, "no decoder-only causal language model", "generate text token by token"),
    ):
        model.save_pretrained(tmp_path / name)
        error = refused(tmp_path / name, UnsupportedModel, reason, need_tokenizer=False)
        assert hint in (error.hint or "")
    assert not heard and hf.utils.logging.get_verbosity() == before


def test_wrong_dtype_and_device(monkeypatch: pytest.MonkeyPatch):
    refused(MODEL_NAME, UsageError, "'int8'", "auto, bfloat16, float16, float32", dtype="int8")
    with pytest.raises(UsageError, match="allowed: auto, cpu, cuda"):
        load(MODEL_NAME, device="tpu")
    for count, device, hint in (
        (0, "cuda", "leave it out; `kvcal doctor` tells why"),
        (2, "cuda:2", "cuda:0 to cuda:1"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(UsageError, match=f"has {count} CUDA devices") as caught:
            load(MODEL_NAME, device=device)
        assert hint in (caught.value.hint or "")
