"""Signs, rotations, windows, rooms and query means of pages, and the mirror's check in an evaluation."""

from __future__ import annotations

import itertools

import pytest
import torch
from cache_cases import KIVI_2
from evaluation_cases import make_plan
from predictor_runs import loaded_llama, sequences
from test_evaluate_generation import spec
from torch import Tensor

from kvcal.errors import ArtifactError
from kvcal.formats import Boost, Format, Side, Tier, WindowRule
from kvcal.geometry import AttentionGeometry
from kvcal.layer_plan import LayerPlan
from kvcal.models.load import LoadedModel, load
from kvcal.models.rotary import rotary_maps
from kvcal.models.taps import tap
from kvcal.progress import Silent
from kvcal.quantizers.tiers import TieredLayout
from kvcal.runtime.page_codec import PageCodec
from kvcal.runtime.rows import Rows
from kvcal.stages.generation import measure_tasks
from kvcal.stages.lattice_tensors import lattice_tensors
from kvcal.stages.mirror import MirroredLayer
from kvcal.stages.reconstruct import Reconstruction, Wanted, read_pages
from kvcal.transforms.rotation import rotate, unrotate

BOOSTED = Format(2, "channel", 32, boost=Boost("query_range", (Tier(4, 0.25),)))


def test_every_layers_keys_and_values_have_random_signs_of_their_own() -> None:
    fmt = Format(2, lattice_dim=2)
    layers = [LayerPlan(AttentionGeometry(index, 4, 4, 64, 64), (fmt,), (fmt,)) for index in range(4)]
    tensors = lattice_tensors(layers)
    signs = {name: tensor.double() for name, tensor in tensors.items() if name.endswith("_signs")}
    assert len(signs) == 8
    for tensor in signs.values():
        assert tensor.abs().eq(1).all() and tensor.mean().abs() < 0.25  # 4 standard deviations of 256 fair coins
    for one, other in itertools.combinations(signs, 2):
        assert (signs[one] * signs[other]).mean().abs() < 0.25, (one, other)
    again = lattice_tensors(layers[:1])
    assert all(torch.equal(tensors[name], again[name]) for name in again)


def test_keys_turn_as_complex_numbers_and_back() -> None:
    """Pairs (0, 3) and (5, 1) with amplitudes as of YaRN; channels 2 and 4 in no pair."""
    table = torch.tensor([[0, 3, 0.7, 1.25], [5, 1, 0.01, 0.8]], dtype=torch.float64)
    positions = torch.tensor([0, 1, 17, 4000])
    keys = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    expected = keys.double().clone()
    for a, b, angle, amplitude in table.tolist():
        turn = amplitude * torch.exp(1j * angle * positions.double())
        turned = torch.complex(keys[..., int(a)].double(), keys[..., int(b)].double()) * turn
        expected[..., int(a)], expected[..., int(b)] = turned.real, turned.imag
    found = rotate(keys, table, positions)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(unrotate(found, table, positions), keys, rtol=1e-6, atol=1e-6)


def test_a_window_is_a_share_of_the_tokens_as_written() -> None:
    rule = WindowRule("clamped", 0.29, max_tokens=500, min_tokens=3)
    assert [rule.window(count) for count in (5, 100, 200, 1700, 10_000)] == [3, 29, 58, 493, 500]


def test_a_tier_has_room_for_its_share_of_the_channels_rounded() -> None:
    rooms = {
        (0.125, 128): 16,
        (0.125, 64): 8,
        (0.1, 16): 2,
        (0.3, 8): 2,
        (0.125, 100): 13,
        (0.01, 16): 1,
        (1.0, 80): 80,
    }
    assert {(share, dim): Tier(4, share).num_channels(dim) for share, dim in rooms} == rooms


def codec(k_rescale: bool, tensors: dict[str, Tensor]) -> PageCodec:
    plan = LayerPlan(AttentionGeometry(0, 4, 2, 16, 16), (BOOSTED,), (Format(2),), k_rescale=k_rescale)
    return PageCodec(plan, "k", BOOSTED, slice(0, 2), "float32", tensors)


def test_lambda_does_not_change_which_channels_count() -> None:
    """Keys are divided by it and queries multiplied: their product, the score, is what it was."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 2, 128, 16, generator=generator)
    query_mean = torch.rand(3, 2, 16, generator=generator)
    lambdas = 2.0 ** torch.randint(-4, 5, (2, 16), generator=generator)
    ordinals = torch.arange(3)
    plain, divided = codec(False, {}), codec(True, {"layers.0.k_rescale": lambdas})
    layout = BOOSTED.layout("k", 2, 16, "float32", 2)
    assert isinstance(layout, TieredLayout)
    bits = [layout.channel_bits(one.encode(keys, ordinals, 2, query_mean)) for one in (plain, divided)]
    assert torch.equal(*bits) and set(bits[0].flatten().tolist()) == {2, 4}
    alone = layout.channel_bits(plain.encode(keys / lambdas[:, None], ordinals, 2, query_mean))
    assert not torch.equal(alone, bits[0])


def test_pages_to_predict_from_are_scored_by_the_mean_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all tokens and the heads of the group, as far as the calibration goes."""
    loaded = loaded_llama(2)
    layer = LayerPlan(loaded.geometry.layers[0], (BOOSTED,), (Format(2),))
    tokens_T = sequences([300]).sequences[0]
    tables = {index: one.tensor() for index, one in rotary_maps(loaded.model, loaded.geometry).items()}
    way = Reconstruction([layer], {"layers.0.rotary": tables[0]}, "float32")
    means: list[Tensor] = []
    encode = PageCodec.encode

    def noted(self, x, ordinals, num_bits, query_mean=None, prediction=None):
        means.append(query_mean)
        return encode(self, x, ordinals, num_bits, query_mean, prediction)

    monkeypatch.setattr(PageCodec, "encode", noted)
    wanted = [Wanted(layer, ("k",))]
    read_pages(loaded.model, loaded.geometry, wanted, [way], tables, tokens_T, lambda *args: None)
    seen = []
    with torch.no_grad(), tap(loaded.model, seen.append, loaded.geometry):
        loaded.model(input_ids=tokens_T[None], use_cache=False)
    q_HTD = seen[0].q_post_BHTD[0].double().numpy()
    for page, head, channel in itertools.product(range(2), range(2), range(8)):
        of_group = abs(q_HTD[4 * head : 4 * head + 4, :, channel])
        assert float(means[0][page, head, channel]) == pytest.approx(of_group.mean(), rel=1e-5)


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load("reasoner-10m", device="cpu")


def test_an_evaluation_fails_where_the_mirror_is_not_the_packed_cache(
    embedded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refresh = MirroredLayer._refresh

    def spoiled(self: MirroredLayer, side: Side, rows: Rows) -> None:
        is_stale = bool(self.stale)
        refresh(self, side, rows)
        if is_stale and side == "k":
            self.dense[side][0, 0, 0, 0] += 1.0

    monkeypatch.setattr(MirroredLayer, "_refresh", spoiled)
    problems = spec(tasks=("times",), num_problems=1, max_digits=7, max_new_tokens=130)
    with pytest.raises(ArtifactError, match="the decoded k differ from the packed cache by 1"):
        measure_tasks(embedded, make_plan(embedded, KIVI_2), problems, Silent())
