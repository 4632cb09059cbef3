"""Streamed layers: the same bits as with the whole model in memory, within the memory that was given."""

import os
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from tiny_models import TINY_MODELS, VOCAB_SIZE
from torch import nn

from kvcal.data.sequences import TokenDataset
from kvcal.errors import UnsupportedModel, UsageError
from kvcal.models import streamed
from kvcal.models.load import LoadedModel, load, weight_bytes
from kvcal.models.projections import output_weights
from kvcal.models.residence import Residence, Shapes, residence
from kvcal.models.streamed import _Streamer, stream
from kvcal.models.taps import Captured, tap
from kvcal.progress import Silent
from kvcal.recipe import CacheSpec, ProfileSpec
from kvcal.stages import checkpoint, divergence
from kvcal.stages.checkpoint import host_bytes
from kvcal.stages.divergence import deviations, one_side_plan, unquantized_plan
from kvcal.stages.profile import stage as profile_stage

# (layers that stay, places of the others) for one of each kind: tied embeddings, sliding layers, sinks and
# merged experts, experts that transformers merges, a fused projection, Conv1D, a state.
FAMILIES = {"tied": (0, 1), "gemma3": (1, 2), "gpt_oss": (0, 2), "qwen3_moe": (0, 1), "phi3": (0, 1), "gpt2": (0, 1),
            "qwen3_next": (0, 2)}  # fmt: skip
NUM_TOKENS = 200
SPEC = ProfileSpec(num_bits=(2, 4), group_sizes=(32,), kl_num_bits=(2,), kl_samples=1, kl_tokens=150)
CACHE = CacheSpec(num_sink_tokens=4, k_recent_window=16, v_recent_window=8)
# 12 bytes a token in a layer, 16 after the last: 1,600 a sequence, so that the least memory is 106,600.
SHAPES = Shapes(
    num_layers=10, num_tokens=100, fixed=5000, layer=100_000, activations=4, scores=0, hidden=2, logits=0, vocab_size=1
)


def data_of(*lengths: int) -> TokenDataset:
    generator = torch.Generator().manual_seed(5)
    sequences = tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in lengths)
    return TokenDataset(sequences, tuple(torch.arange(length) >= 7 for length in lengths), "f", "random tokens")


DATA = data_of(150, 60, 160)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a family's checkpoint, in many shards with an index."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def folder(family: str) -> Path:
        model = TINY_MODELS["qwen2" if family == "tied" else family]()
        if family == "tied":
            model.config.tie_word_embeddings = True
            model.tie_weights()
        model.save_pretrained(root / family, max_shard_size="50KB")
        assert (root / family / "model.safetensors.index.json").exists()
        return root / family

    return folder


def open_model(folder: Path, memory: int | None = None, num_tokens: int = NUM_TOKENS) -> LoadedModel:
    return load(str(folder), device="cpu", need_tokenizer=False, memory=memory, num_tokens=num_tokens)


def shapes_of(folder: Path, num_tokens: int = NUM_TOKENS) -> Shapes:
    found = open_model(folder, 1 << 40, num_tokens).residence
    assert found is not None and (found.num_kept, found.num_places) == (found.shapes.num_layers, 0)
    return found.shapes


def with_places(folder: Path, num_kept: int, num_places: int) -> LoadedModel:
    """A model with as many layers that stay, and that take turns."""
    shapes = shapes_of(folder, 10 if num_kept else NUM_TOKENS)
    memory = shapes.least + (num_places - 1) * shapes.layer
    if num_kept:
        memory = shapes.fixed + shapes.working(10) + (num_places + num_kept) * shapes.layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcal.models.residence.BATCH_TOKENS", 10)
        loaded = open_model(folder, memory, 10 if num_kept else NUM_TOKENS)
    found = loaded.residence
    assert found is not None and (found.num_kept, found.num_places) == (num_kept, num_places)
    return loaded


def profile_bytes(loaded: LoadedModel, folder: Path, data: TokenDataset = DATA, spec: ProfileSpec = SPEC) -> bytes:
    folder.mkdir(exist_ok=True)
    path = folder / "profile.safetensors"
    profile_stage.run_profile(loaded, data, spec, CACHE, {"data.fingerprint": "f"}, path, Silent())
    return path.read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_profile_is_the_same_bytes(family: str, saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = profile_bytes(open_model(saved(family)), tmp_path / "whole")
    if family == "phi3":
        monkeypatch.setattr(streamed, "PIECE_BYTES", 999)  # which divides none of the matrices
    loaded = with_places(saved(family), *FAMILIES[family])
    assert profile_bytes(loaded, tmp_path / "streamed") == whole
    if family == "tied":
        assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight


def copied_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the layers that are copied to a place from now on."""
    copies, copy = [], _Streamer._copy

    def counted(streamer: _Streamer, place: object, number: int) -> None:
        copies.append(number)
        copy(streamer, place, number)

    monkeypatch.setattr(_Streamer, "_copy", counted)
    return copies


@pytest.mark.parametrize(("family", "num_kept", "num_places"), [("gemma3", 1, 2), ("qwen3_next", 0, 1)])
def test_batches_share_the_loads_of_a_layer(
    family: str, num_kept: int, num_places: int, saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of three and one of two give the bytes of one batch after the other on the whole model."""
    monkeypatch.setitem(profile_stage.BATCH_TOKENS, "cpu", 140)  # one sequence in a batch
    data, spec, copies = data_of(130, 90, 140, 140, 80), replace(SPEC, kl_samples=0), copied_layers(monkeypatch)
    whole = profile_bytes(open_model(saved(family)), tmp_path / "whole", data=data, spec=spec)
    loads = []
    for at_once in (1, 3):
        monkeypatch.setattr(profile_stage, "batches_at_once", lambda *_, number=at_once: number)
        copies.clear()
        loaded = with_places(saved(family), num_kept, num_places)
        assert profile_bytes(loaded, tmp_path / str(at_once), data=data, spec=spec) == whole
        loads.append(len(copies))
    # A forward and a backward of each batch, or group; the last layers of one are there when the other
    # begins.
    num_loads = 2 * (loaded.model.config.num_hidden_layers - num_kept - num_places)
    assert num_loads > 0 and loads[0] - loads[1] == (5 - 2) * num_loads


def test_as_many_batches_at_once_as_memory_holds(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 1,000 tokens takes 16,000 bytes, and 4,000 while another is in a layer; its layers' inputs,
    20,000 of the host's. Shares: 0.85 and 0.25."""
    loaded = with_places(saved("llama"), 0, 2)
    for working, host, expected in ((40_000, 10**6, 5), (40_000, 240_000, 3), (20_000, 10**6, 1), (40_000, 1, 1)):
        monkeypatch.setattr(profile_stage, "host_bytes", lambda host=host: host)
        found = replace(loaded, residence=Residence(5000 + 200_000 + working, SHAPES, 0, 2))
        assert profile_stage.batches_at_once(found, 1000) == expected
        assert profile_stage.gradient_bytes(found, 1000) == 205_000 + 16_000
    assert profile_stage.batches_at_once(open_model(saved("llama")), 1000) == 1
    assert profile_stage.batches_at_once(open_model(saved("llama"), 1 << 40), 1000) == 1


def test_ranks_share_the_memory_that_a_container_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "size_on_node", lambda: 2)
    monkeypatch.setattr(checkpoint, "LIMITS", (tmp_path / "none", tmp_path / "limit"))
    (tmp_path / "limit").write_text("max\n")
    assert host_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    (tmp_path / "limit").write_text("1000\n")
    assert host_bytes() == 500


@pytest.mark.parametrize(("family", "num_kept"), [("gemma3", 1), ("qwen3_next", 0)])
def test_plans_share_the_loads_of_a_layer(family: str, num_kept: int, saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as a plan at a time on the whole model; the first forward comes alone."""
    whole, loaded = open_model(saved(family)), with_places(saved(family), num_kept, 2)
    reference = unquantized_plan(whole.identity, whole.geometry)
    paged = [layer.geometry.index for layer in reference.layers if layer.is_paged]
    plans = [
        one_side_plan(reference, index, side, CACHE.format(side, 2, "token", 32)) for index in paged for side in "kv"
    ]
    texts = (torch.stack(data_of(180, 180).sequences), torch.arange(180).expand(2, -1) > 150)
    expected, chunks = deviations(whole.model, reference, plans, *texts), []
    copies, fed = copied_layers(monkeypatch), divergence._fed

    def noted(*given: object) -> torch.Tensor:
        chunks.append(given[-1])
        return fed(*given)

    monkeypatch.setattr(divergence, "_fed", noted)
    found = deviations(loaded.model, reference, plans, *texts)
    for part, other in zip(found, expected, strict=True):
        assert torch.equal(part, other)
    assert found.kl_Pn.amax(1).min() > 0
    num_chunks = len(chunks) // (len(plans) + 1)
    assert num_chunks > 1
    streamed_layers = range(num_kept, loaded.model.config.num_hidden_layers)
    assert {copies.count(number) for number in streamed_layers} <= {num_chunks + 1, num_chunks + 2}


@pytest.mark.parametrize("num_places", [1, 2])
def test_no_more_layers_than_places_are_on_the_device(num_places: int, saved) -> None:
    """Also while gradients are taken; each layer's are gone before the next layer's come."""
    loaded = with_places(saved("gemma3"), 0, num_places)
    layers = loaded.model.model.layers
    present, graded = set(), set()

    def look(*_: object) -> None:
        is_here = [layer.mlp.up_proj.weight.untyped_storage().nbytes() > 4 for layer in layers]
        present.add(sum(is_here))
        graded.add(sum(layer.mlp.up_proj.weight.grad is not None for layer in layers))

    def free(parameter: nn.Parameter) -> None:
        look()
        parameter.grad = None

    for layer in layers:
        layer.mlp.register_forward_hook(look)
        layer.mlp.up_proj.weight.register_post_accumulate_grad_hook(free)
    loaded.model(input_ids=torch.arange(3, 9)[None], use_cache=False).logits.square().mean().backward()
    assert max(present) == num_places
    assert max(graded) == 1


def test_taps_observe_a_layer_again_in_the_backward(saved) -> None:
    """Without a graph in the forward, in order; with one in the backward, in the reverse order."""
    loaded = with_places(saved("llama"), 0, 2)
    seen: list[Captured] = []
    with tap(loaded.model, seen.append, loaded.geometry):
        logits = loaded.model(input_ids=torch.arange(3, 19).view(2, 8), use_cache=False).logits
        assert [captured.layer for captured in seen] == [0, 1, 2]
        logits.square().mean().backward()
    assert [captured.layer for captured in seen] == [0, 1, 2, 2, 1, 0]
    for first, again in zip(seen[:3], seen[:2:-1], strict=True):
        assert not first.v_BNTD.requires_grad and again.v_BNTD.requires_grad
        for name in ("q_post_BHTD", "k_pre_BNTD", "k_post_BNTD", "v_BNTD"):
            assert torch.equal(getattr(first, name), getattr(again, name))


def test_a_hook_may_begin_the_graph_within_a_layer(saved) -> None:
    """No parameter is trained, and no input needs a gradient."""
    gradients = []
    for loaded in (open_model(saved("llama")), with_places(saved("llama"), 0, 1)):
        loaded.model.requires_grad_(False)
        found = {}

        def begin(number: int, module: nn.Module, args: tuple, output: torch.Tensor, found: dict = found) -> None:
            if not output.requires_grad:
                output.requires_grad_()
            output.register_hook(partial(found.__setitem__, number))

        for number, layer in enumerate(loaded.model.model.layers):
            layer.self_attn.k_proj.register_forward_hook(partial(begin, number))
        loaded.model(input_ids=torch.arange(3, 9)[None], use_cache=False).logits.square().mean().backward()
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys() == {0, 1, 2}
    assert all(torch.equal(gradients[0][number], gradients[1][number]) for number in range(3))


def test_weights_that_are_read_beside_a_forward(saved) -> None:
    whole, loaded = open_model(saved("tied")), with_places(saved("tied"), 0, 1)
    expected, found = (output_weights(one.model, one.geometry) for one in (whole, loaded))
    assert expected.keys() == found.keys() and expected
    assert all(torch.equal(found[index], weight) for index, weight in expected.items())
    assert weight_bytes(loaded.model) == weight_bytes(whole.model)


def test_the_least_memory_is_named_and_suffices(saved) -> None:
    least = shapes_of(saved("gpt_oss")).least
    with pytest.raises(UsageError, match=rf"holds not one of 3 layers: {least} bytes are needed") as error:
        open_model(saved("gpt_oss"), least - 1)
    assert f"--memory {least}B" in str(error.value.hint)
    assert open_model(saved("gpt_oss"), least).residence.num_places == 1


@pytest.mark.parametrize(
    ("memory", "num_kept", "num_places"),
    [
        (106_600, 0, 1), (206_599, 0, 1), (206_600, 0, 2),
        (567_143, 0, 2), (567_144, 1, 2), (1_006_599, 5, 2),
        (1_006_600, 10, 0),
    ],
)  # fmt: skip
def test_residence_by_hand(memory: int, num_kept: int, num_places: int) -> None:
    """Two places, then a batch of 16,384 tokens in 262,144 bytes, then layers that stay; at last, all."""
    assert SHAPES.least == 106_600
    found = residence(SHAPES, memory)
    assert (found.num_kept, found.num_places) == (num_kept, num_places)
    assert 1600 <= found.working == memory - 5000 - 100_000 * (num_kept + num_places)


def test_an_input_that_needs_a_gradient_of_its_own_is_refused(saved) -> None:
    loaded = with_places(saved("llama"), 0, 1)
    hidden, other = torch.zeros(1, 2, 64, requires_grad=True), torch.zeros(1, 2, 16, requires_grad=True)
    with pytest.raises(UnsupportedModel, match="several inputs that need gradients"):
        loaded.model.model.layers[0](hidden, position_embeddings=(other, other))


def test_a_backward_through_a_cache_is_refused(saved) -> None:
    logits = with_places(saved("llama"), 0, 1).model(input_ids=torch.arange(3, 9)[None], use_cache=True).logits
    with pytest.raises(UsageError, match="no backward through a cache"):
        logits.mean().backward()


def test_a_model_without_a_list_of_layers_is_refused(saved) -> None:
    model = open_model(saved("llama")).model
    model.config.num_hidden_layers = 4
    with pytest.raises(UnsupportedModel, match="has no list of 4 decoder layers"):
        stream(model, torch.device("cpu"), 1 << 40)


@pytest.mark.gpu
@pytest.mark.parametrize("num_places", [1, 2])
def test_a_gpu_gives_the_bits_of_the_whole_model(num_places: int, saved) -> None:
    folder = saved("gemma3")
    least, layer = shapes_of(folder).least, shapes_of(folder).layer
    ids = torch.randint(3, VOCAB_SIZE, (4, NUM_TOKENS), generator=torch.Generator().manual_seed(2)).cuda()
    results = []
    try:
        for memory in (None, least + (num_places - 1) * layer):
            given = {"device": "cuda", "need_tokenizer": False, "memory": memory, "num_tokens": NUM_TOKENS}
            loaded = load(str(folder), **given)
            assert memory is None or (loaded.residence.num_kept, loaded.residence.num_places) == (0, num_places)
            model = loaded.model.requires_grad_(True)
            torch.cuda.set_per_process_memory_fraction(1.0)  # less than torch's smallest block
            for _ in range(2):  # the second one finds the places as the first backward left them
                model.zero_grad()
                logits = model(input_ids=ids, use_cache=False).logits
                logits.square().mean().backward()
            names = ("k_proj", "up_proj")
            results.append([logits, *(p.grad for name, p in model.named_parameters() if any(n in name for n in names))])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(results[0]) == 9
    for whole, other in zip(*results, strict=True):
        assert torch.equal(whole, other)


def test_layers_that_read_another_ones_keys_are_refused() -> None:
    """The gradient of their reads would be lost, and with it a part of the sensitivity."""
    model = TINY_MODELS["gemma3n"]()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(UnsupportedModel, match="layer 2 of Gemma3nForCausalLM reads another layer's keys and values"):
        stream(model, torch.device("cpu"), 1 << 30)
    assert before == [parameter.data_ptr() for parameter in model.parameters()]
