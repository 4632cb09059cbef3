"""Shares of biases of key projections in the keys' energy, which tell where λ has little to do."""

from __future__ import annotations

import pytest
import torch
from evaluation_cases import as_loaded
from reparam_cases import outlier_model
from transformers import Qwen2Config

from kvcal.models.key_bias import LARGE_BIAS, MOSTLY_BIAS, bias_findings
from kvcal.models.taps import tap


def test_share_is_the_bias_s_part_of_the_keys_energy() -> None:
    """Against the keys of the taps; small ones and none have no warning."""
    model = outlier_model(2, 1.0, Qwen2Config)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.fill_(30.0)
    loaded = as_loaded(model)
    tokens_T = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(5))
    keys = {}
    with torch.no_grad(), tap(model, lambda seen: keys.update({seen.layer: seen.k_post_BNTD[0]}), loaded.geometry):
        model(input_ids=tokens_T[None], use_cache=False)
    energy = {layer: float(k_post_NTD.double().square().sum() / 40) for layer, k_post_NTD in keys.items()}
    share, warning = bias_findings(loaded, energy)[0]
    assert share == pytest.approx(2 * 16 * 30.0**2 / energy[0]) and share > LARGE_BIAS
    assert warning == MOSTLY_BIAS
    assert bias_findings(loaded, energy)[1][0] < LARGE_BIAS and bias_findings(loaded, energy)[1][1] is None
    assert bias_findings(as_loaded(outlier_model(2, 1.0)), {0: 1.0}) == {0: (None, None)}
