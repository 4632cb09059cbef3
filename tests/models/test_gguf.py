"""A GGUF file is a model like any other: sizes, loading, identity, and a plan of its own."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_cases import KIVI_2, plan_of
from transformers import AutoTokenizer

from kvcal.errors import UsageError
from kvcal.models.config import read_sizes
from kvcal.models.files import locate
from kvcal.models.load import load, weight_bytes
from kvcal.plan.plan import save_plan

HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY = 64, 2, 4, 2, 261


def write(path: Path, architecture: str = "llama") -> dict[str, torch.Tensor]:
    """A tiny Llama with a byte-level vocabulary, in fp16; its tensors under transformers' names. The header
    alone may say that it is of another architecture."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    if architecture == "qwen3":
        writer.add_key_length(128)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in visible] + [chr(256 + n) for n in range(256 - len(visible))]
    writer.add_token_list([*letters, "ab", "cab", "<s>", "</s>", "<pad>"])
    writer.add_token_types([1] * 258 + [3] * 3)
    writer.add_token_merges(["a b", "c ab"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_pad_token_id(260)
    generator, kept = torch.Generator().manual_seed(0), {}
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[str, tuple[int, ...]]]
    shapes = {"attn_v": ("self_attn.v_proj", (kv, HIDDEN)), "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN))}
    shapes |= {"attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)), "attn_k": ("self_attn.k_proj", (kv, HIDDEN))}
    shapes |= {"ffn_gate": ("mlp.gate_proj", (96, HIDDEN)), "ffn_up": ("mlp.up_proj", (96, HIDDEN))}
    shapes |= {"ffn_down": ("mlp.down_proj", (HIDDEN, 96)), "attn_norm": ("input_layernorm", (HIDDEN,))}
    shapes |= {"ffn_norm": ("post_attention_layernorm", (HIDDEN,))}
    names = {f"blk.{n}.{k}": (f"model.layers.{n}.{v}", s) for n in range(LAYERS) for k, (v, s) in shapes.items()}
    names |= {"token_embd": ("model.embed_tokens", (VOCABULARY, HIDDEN)), "output_norm": ("model.norm", (HIDDEN,))}
    names |= {"output": ("lm_head", (VOCABULARY, HIDDEN))}
    for name, (ours, shape) in names.items():
        tensor = torch.randn(shape, generator=generator).half() * 0.1 + (len(shape) == 1)
        kept[f"{ours}.weight"] = tensor.float()
        writer.add_tensor(f"{name}.weight", (tensor.float() if len(shape) == 1 else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_a_gguf_file_is_loaded_as_a_plain_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    written = write(tmp_path / "tiny.gguf")
    loaded = load(str(tmp_path / "tiny.gguf"))
    found = loaded.model.state_dict()
    # Queries and keys of a llama lie in another order of rows in the file.
    plain = [name for name in written if ".q_proj" not in name and ".k_proj" not in name]
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], written[name]) for name in plain)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer("cab", add_special_tokens=False)["input_ids"]) == "cab"
    assert (loaded.tokenizer.bos_token, loaded.tokenizer.eos_token) == ("<s>", "</s>")
    assert getattr(loaded.model.config, "quantization_config", None) is None
    assert (loaded.identity.id, loaded.identity.model_type, loaded.geometry.cache_dtype) == (
        "tiny", "llama", "bfloat16",
    )  # fmt: skip

    sizes = read_sizes(str(tmp_path / "tiny.gguf"))
    assert sizes.geometry == loaded.geometry and sizes.vocab_size == VOCABULARY
    assert sizes.weight_bytes == 2 * sum(tensor.numel() for tensor in written.values())
    assert weight_bytes(loaded.model) - sizes.weight_bytes < 1024  # rotary frequencies

    (tmp_path / "other").mkdir()
    copy = shutil.copy(tmp_path / "tiny.gguf", tmp_path / "other" / "renamed.gguf")
    again = load(str(copy)).identity
    assert again.id == "renamed" and again.weights_sha256 == loaded.identity.weights_sha256
    save_plan(replace(plan_of(loaded.geometry, *KIVI_2), model=loaded.identity), tmp_path / "plan.safetensors")
    command = [sys.executable, "-m", "kvcal", "generate", "--model", copy, "--plan", tmp_path / "plan.safetensors"]
    command += ["--prompt", "c", "--max-new-tokens", "3", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "it/s" not in done.stderr  # transformers shows a bar, but for --quiet


def test_a_gguf_file_says_which_tokens_begin_and_end_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 read a vocabulary's own ones, and no bos."""
    pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    write(tmp_path / "tiny.gguf")
    read = AutoTokenizer.from_pretrained

    def read_as_before(*args: Any, **options: Any) -> Any:
        tokenizer = read(*args, **options)
        tokenizer.bos_token, tokenizer.eos_token = None, "<pad>"
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", read_as_before)
    tokenizer = load(str(tmp_path / "tiny.gguf")).tokenizer
    assert tokenizer is not None and (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_header_states_what_transformers_reads(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write(tmp_path / "m.gguf", architecture)
    code = "import sys; from kvcal.models.config import read_sizes; read_sizes(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "m.gguf"], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "gguf"} & set(done.stdout.split())
    sizes = read_sizes(str(tmp_path / "m.gguf"))
    assert sizes.weight_bytes == 2 * sum(tensor.numel() for tensor in written.values())
    monkeypatch.setattr("kvcal.models.config.GGUF_HEAD_DIM", {})  # as of any other architecture
    assert read_sizes(str(tmp_path / "m.gguf")) == sizes


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGUF\1\0\0\0" + bytes(16), "is no GGUF file of version 2 or 3"),
        (b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7) + b"\xff" * 12, "ends within its header, or is damaged"),
        (b"GGUF\3\0\0\0" + bytes(8) + b"\1" + bytes(7), "ends within its header, or is damaged"),
    ],
)
def test_a_damaged_header_is_told(content: bytes, says: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UsageError, match=says):
        read_sizes(str(tmp_path / "m.gguf"))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("kvcal.models.files.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="transformers needs gguf and accelerate") as caught:
        locate(str(tmp_path / "m.gguf"))
    assert caught.value.hint == "pip install gguf accelerate"
