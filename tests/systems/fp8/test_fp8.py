"""fp8 pages are torch's e4m3 of what they were given, and a plan of them reads as an engine's fp8 cache does."""

from pathlib import Path

import pytest
import torch
from cli_cases import save_llama
from transformers import DynamicCache, PreTrainedTokenizerBase

from kvcal import PlanCache, load_recipe
from kvcal.geometry import AttentionGeometry
from kvcal.kernels.choice import refusals
from kvcal.models.load import load
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import Format
from kvcal.plan.plan import Workload
from kvcal.stages.formats import formats_plan

FP8 = Format(8, quantizer="fp8")


def test_pages_are_torchs_e4m3_and_large_values_its_largest() -> None:
    x = torch.randn(2, 3, 128, 20, generator=torch.Generator().manual_seed(0)) * 100
    x[0, 0, 0, :4] = torch.tensor([1e6, -1e6, 448.0, 2.0**-9])
    layout = FP8.layout("k", 3, 20, "bfloat16", 8)
    again = layout.decode_pages(layout.encode_pages(x, {}), 3, {})
    assert torch.equal(again, x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert again[0, 0, 0, :4].tolist() == [448.0, -448.0, 448.0, 2.0**-9]
    assert layout.record_bytes == layout.code_bytes == 128 * 20


@pytest.mark.parametrize(
    "wrong", [{"num_bits": 4}, {"num_bits": 8, "axis": "channel"}, {"num_bits": 8, "group_size": 64}]
)
def test_it_takes_8_bits_alone(wrong: dict) -> None:
    with pytest.raises(ValueError, match="quantizer = 'fp8' takes 8 bits, and no axis or group_size"):
        Format(quantizer="fp8", **wrong)


def test_no_kernel_reads_it() -> None:
    layer = LayerPlan(AttentionGeometry(0, 4, 2, 64, 64), FP8, FP8)
    assert "pages of fp8: no kernel reads them as they are stored" in " ".join(refusals(layer, "bfloat16"))


def test_a_plan_of_the_recipe_attends_to_rounded_pages(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """After two pages, transformers' own cache with rounded keys and values gives the same logits."""
    loaded = load(str(save_llama(tmp_path / "model", tokenizer, dtype=torch.float32)), device="cpu")
    plan = formats_plan(load_recipe("fp8"), loaded, Workload(8, 4096))
    assert 8 < plan.bits_per_value() < 9.01  # the newest page has the cache's own, 32
    ids = torch.randint(0, 400, (1, 270), generator=torch.Generator().manual_seed(1))
    cache, native = PlanCache(plan, loaded.model.config), DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        for one in (cache, native):
            loaded.model(ids[:, :256], past_key_values=one)
        for layer in native.layers:
            layer.keys, layer.values = (
                x.clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (layer.keys, layer.values)
            )
        found, expected = (loaded.model(ids[:, 256:], past_key_values=one).logits for one in (cache, native))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
