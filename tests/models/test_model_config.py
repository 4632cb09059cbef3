"""Sizes read from config.json are those that running the model measures, and what loading refuses is
refused."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from cli_cases import save_llama
from safetensors.torch import load_file
from tiny_models import SUPPORTED, TINY_MODELS, UNSUPPORTED, built, measured
from transformers import PreTrainedTokenizerBase

from kvcal.embedded import model_folder
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.geometry import StateGeometry
from kvcal.models import config as model_config
from kvcal.models.config import DIRECT, checkpoint_bytes, read_sizes
from kvcal.models.files import locate
from kvcal.models.supported_layers import geometry_of

UNCALIBRATED = {"bloom": "bypasses transformers", "falcon": "bypasses", "mpt": "bypasses", "zamba2": "same attention"}


def saved(name: str, folder: Path) -> str:
    """A folder with the configuration of a tiny model and nothing else."""
    TINY_MODELS[name]().config.save_pretrained(folder / name)
    return str(folder / name)


@pytest.mark.filterwarnings("ignore")  # transformers' own, about models without an optional package
@pytest.mark.parametrize("name", SUPPORTED)
def test_the_configuration_tells_what_running_the_model_measures(name: str, tmp_path: Path) -> None:
    sizes = read_sizes(saved(name, tmp_path))
    assert sizes.geometry == measured(name)
    assert sizes.vocab_size == built(name).config.vocab_size
    assert sizes.weight_bytes is None and sizes.is_tested


@pytest.mark.parametrize("name", SUPPORTED)
def test_plain_keys_and_transformers_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(name, tmp_path)
    content = json.loads((Path(source) / "config.json").read_text())
    if not model_config._is_direct(content):
        pytest.skip(f"{content['model_type']} is read by transformers")
    directly = read_sizes(source)
    monkeypatch.setattr(model_config, "DIRECT", {})
    assert read_sizes(source) == directly


def test_most_families_are_read_without_transformers(tmp_path: Path) -> None:
    configs = {name: json.loads((Path(saved(name, tmp_path)) / "config.json").read_text()) for name in SUPPORTED}
    direct = {content["model_type"] for content in configs.values() if model_config._is_direct(content)}
    assert direct == set(DIRECT)


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2}, [None] * 4),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, [None, None, 64, 64]),
    ],
)
def test_windows_that_a_configuration_switches(
    change: dict[str, object], windows: list[object], tmp_path: Path
) -> None:
    """As published configurations state them, without layer_types."""
    content = {"model_type": "qwen2", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
               "hidden_size": 64, "vocab_size": 96, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    geometry = read_sizes(str(tmp_path)).geometry
    assert [layer.window for layer in geometry.layers] == windows and geometry.cache_dtype == "bfloat16"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(UNSUPPORTED - set(UNCALIBRATED)))
def test_what_is_not_served_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    reasons = "is not causal|keeps a state|sparse-attention indexer"
    with pytest.raises(UnsupportedModel, match=reasons):
        read_sizes(saved(name, tmp_path))


@pytest.mark.parametrize("kind", [hf.BertConfig, hf.RobertaConfig])
def test_an_encoder_is_served_as_a_decoder_alone(kind: type[hf.PreTrainedConfig], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    if kind is hf.BertConfig:  # RoBERTa's positions go by the values of tokens
        kind(**sizes, is_decoder=True).save_pretrained(tmp_path)
        assert len(read_sizes(str(tmp_path)).geometry.layers) == 2
    kind(**sizes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="is not causal") as caught:
        read_sizes(str(tmp_path))
    assert "is_decoder = true" in str(caught.value.hint)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNCALIBRATED)
def test_what_fails_in_calibration_alone_has_its_sizes(name: str, tmp_path: Path) -> None:
    sizes = read_sizes(saved(name, tmp_path))
    assert sizes.geometry == geometry_of(built(name))
    assert sizes.uncalibrated is not None and UNCALIBRATED[name] in sizes.uncalibrated


@pytest.mark.parametrize(("multi_query", "is_new"), [(True, False), (True, True), (False, True)])
def test_a_falcon_caches_one_head_or_a_copy_for_each_query(multi_query: bool, is_new: bool, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    heads = {"multi_query": multi_query, "new_decoder_architecture": is_new, "num_kv_heads": 2}
    model = hf.FalconForCausalLM(hf.FalconConfig(**shape, **heads, alibi=False)).eval()
    model.config.save_pretrained(tmp_path)
    assert read_sizes(str(tmp_path)).geometry.layers == geometry_of(model).layers


@pytest.mark.parametrize("config", [hf.MambaConfig, hf.Mamba2Config, hf.FalconMambaConfig, hf.RwkvConfig])
def test_models_of_states_alone_have_nothing_to_quantize(config: type[hf.PreTrainedConfig], tmp_path: Path) -> None:
    """And no advice to load them."""
    config(hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, vocab_size=96).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="has no key-value cache") as caught:
        read_sizes(str(tmp_path))
    assert caught.value.hint is None


def test_a_configuration_without_its_layers(tmp_path: Path) -> None:
    hf.BltConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="does not tell what each layer caches: .*num_hidden_layers"):
        read_sizes(str(tmp_path))


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # transformers 5.17 calls it
def test_heads_that_a_configuration_hides(tmp_path: Path) -> None:
    model = hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(n_layer=2, n_head=4, n_embd=32, vocab_size=96)).eval()
    model.config.save_pretrained(tmp_path)
    assert read_sizes(str(tmp_path)).geometry.layers == geometry_of(model).layers


@pytest.mark.filterwarnings("ignore")
def test_states_take_what_a_bfloat16_model_keeps(tmp_path: Path) -> None:
    model = TINY_MODELS["qwen3_next"]().to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(tmp_path)
    states = [layer for layer in read_sizes(str(tmp_path)).geometry.layers if isinstance(layer, StateGeometry)]
    assert states and states == [layer for layer in geometry_of(model).layers if isinstance(layer, StateGeometry)]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"num_hidden_layers": 10**9}, UsageError, "num_hidden_layers = 1000000000; allowed: 1 to 10000"),
        ({"num_attention_heads": "eight"}, UsageError, "num_attention_heads = 'eight'; expected a positive integer"),
        ({"num_key_value_heads": 3}, UnsupportedModel, "8 query heads over 3 KV heads"),
        ({"dtype": "float8_e4m3fn"}, UnsupportedModel, "checkpoint dtype float8_e4m3fn; supported: bfloat16"),
        ({"layer_types": ["full_attention", "magic"]}, UnsupportedModel, "layer 1 is of the type 'magic'"),
        ({"model_type": "t5"}, UnsupportedModel, "no decoder-only causal language model"),
        ({"model_type": "qwen2_5_vl"}, UnsupportedModel, "no decoder-only causal language model"),
        ({"model_type": "magic"}, UnsupportedModel, "magic"),
    ],
)
def test_a_wrong_configuration_is_named(
    change: dict[str, object], error: type[Exception], says: str, tmp_path: Path
) -> None:
    content = json.loads((model_folder() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(error, match=re.escape(says)):
        read_sizes(str(tmp_path))


def test_weights_are_counted_by_headers_or_the_index(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    folder = save_llama(tmp_path / "model", tokenizer)
    location = locate(str(folder))
    expected = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert checkpoint_bytes(location) == expected
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="model.safetensors ends within its header"):
        checkpoint_bytes(location)
    (folder / "model.safetensors").unlink()
    assert checkpoint_bytes(location) is None
    index = {"metadata": {"total_size": 16060522496}, "weight_map": {"a": "model-00001-of-00004.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_bytes(location) == 16060522496
