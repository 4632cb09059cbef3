"""Steps of several tokens through the fast kernel, on a GPU: against fp64, and against the same tokens one by
one.

Rows begin where a page fills, or comes to be read, before, among and after the tokens of the step. What no
token lies in is poisoned.
"""

import math
from dataclasses import replace

import pytest
import torch
from decode_cases import CASES, TOLERANCE, Case, relative_error, variant_of
from kernel_oracle import Paged, pair_variant, states
from torch import Tensor

from kvcal.kernels.choice import MAX_STEP_TOKENS, is_plain, pass_heads
from kvcal.kernels.variants import Variant
from kvcal.pages.layout_protocol import PAGE_TOKENS
from kvcal.plan.page_format import SIDES, Side

pytestmark = pytest.mark.gpu

LENGTHS = (0, 3, 121, 125, 127, 128, 300, 377, 380, 383, 384, 505)


class DraftCase(Case):
    """A cache after the ``append`` of S tokens after ``held`` of every row; rings have room for all
    drafts."""

    def __init__(self, variant: Variant, held: tuple[int, ...], heads: int, seed: int) -> None:
        tokens = variant.query_tokens
        self.held = held
        self.decoded: dict[tuple[Side, int, int], Tensor] = {}
        super().__init__(variant, tuple(length + tokens - 1 for length in held), heads, seed)
        self.place = self.place._replace(lengths=torch.tensor(held, dtype=torch.int32, device=self.device))
        shape = (len(held), tokens, heads * variant.group_heads, variant.head_dim)
        generator = torch.Generator(self.device).manual_seed(seed)
        self.q = torch.randn(shape, device=self.device, generator=generator).bfloat16().float()
        for side, memory in self.stores.items():
            size = variant.format(side).ring_tokens(variant.step_tokens)
            x = self.dense[side]
            ring = x.new_full((*memory.ring.shape[:2], size, variant.head_dim), math.nan)
            for row, length in enumerate(held):
                recent = torch.arange(max(0, length + tokens - size), length + tokens, device=self.device)
                ring[row, :, recent % size] = x[row, :, recent]
            self.stores[side] = memory._replace(ring=ring)

    def _packed(self, side: Side, row: int, page: int, record: Tensor, count: int) -> Tensor:
        self.decoded[side, row, page] = super()._packed(side, row, page, record, count)
        return self.decoded[side, row, page]

    def workspace(self) -> Tensor:
        from kvcal.kernels.decode import workspace_bytes

        shape = (self.heads, self.variant.group_queries, self.variant.head_dim)
        return torch.zeros(
            workspace_bytes(len(self.held), *shape, self.q.device), dtype=torch.uint8, device=self.device
        )

    def expected(
        self, scale: float, softcap: float = 0.0, s_aux: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        found = torch.zeros(self.q.shape, dtype=torch.float64, device=self.device)
        for row, length in enumerate(self.held):
            for number in range(self.variant.query_tokens):
                k, v = (self._seen(side, row, length + number) for side in SIDES)
                scores = (k @ self.q[row, number].to(dtype).double().unsqueeze(-1)).squeeze(-1) * scale
                scores = softcap * (scores / softcap).tanh() if softcap else scores
                if s_aux is not None:
                    scores = torch.cat([scores, s_aux.double().unsqueeze(-1)], -1)
                weights = scores.softmax(-1)[:, : length + number + 1]
                found[row, number] = (weights.unsqueeze(1) @ v).squeeze(1)
        return found

    def _seen(self, side: Side, row: int, before: int) -> Tensor:
        """fp64 [n G, before + 1, D]: what the query after so many tokens attends to."""
        fmt, x = self.variant.format(side), self.dense[side][row].double()[:, : before + 1].clone()
        read = fmt.tokens_read(before)
        for page in range(fmt.pages_read(before)):
            at = slice(page * PAGE_TOKENS, min(read, (page + 1) * PAGE_TOKENS))
            x[:, at] = self.decoded[side, row, page][:, : at.stop - at.start]
        x[:, : fmt.num_sink_tokens] = self.dense[side][row].double()[:, : min(fmt.num_sink_tokens, before + 1)]
        return x.repeat_interleave(self.variant.group_heads, 0)


def drafts(name: str, group: int, tokens: int, dim: int = 128, **more: bool) -> Variant:
    variant = replace(
        variant_of(*CASES[name], dim=dim, group=group, **more), query_tokens=tokens, step_tokens=MAX_STEP_TOKENS
    )
    assert not is_plain(variant)
    return variant


@pytest.mark.parametrize(
    ("group", "tokens"), ((1, 2), (1, 8), (4, 2), (4, 3), (4, 4), (4, 8), (5, 2), (7, 2), (7, 4), (8, 3), (16, 2))
)
@pytest.mark.parametrize("name", ("2 bits", "4 bits"))
def test_groups_and_tokens(name: str, group: int, tokens: int) -> None:
    case = DraftCase(drafts(name, group, tokens), LENGTHS, heads=2, seed=tokens)
    assert relative_error(case.run(0.06), case.expected(0.06)) <= TOLERANCE


@pytest.mark.parametrize("tokens", (2, 4))
@pytest.mark.parametrize(
    "name",
    (
        "3 bits", "16 bits", "groups of 32", "K per token", "sinks and windows", "sinks beyond a page", "Kitty",
        "MixKVQ", "bf16 params", "rotated 2 bits", "rotated V", "V window longer", "K 2 V 16",
        "stripes", "stripes, 3 and 4 bits",
    ),
)  # fmt: skip
def test_formats(name: str, tokens: int) -> None:
    case = DraftCase(drafts(name, 4, tokens), LENGTHS, heads=2, seed=1)
    assert relative_error(case.run(0.06), case.expected(0.06)) <= TOLERANCE


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize(("group", "tokens"), ((4, 3), (4, 4), (4, 8), (8, 2), (8, 4), (3, 7), (7, 4), (2, 8), (12, 2)))
@pytest.mark.parametrize(
    "name", ("stripes", "stripes of 3 bits", "stripes of 4 bits", "rotated 2 bits", "K per token, groups of 64")
)
def test_passes_of_two_tiles_of_columns(name: str, group: int, tokens: int, dim: int) -> None:
    """Codes of a page are expanded once for 16 query heads, but for 8 with few KV heads. Half of the cases
    have transforms of keys."""
    variant = drafts(name, group, tokens, dim, rescale=tokens % 2 == 0, offset=tokens % 2 == 0)
    assert pass_heads(variant) == 16
    for lengths in ((*LENGTHS, 2304), (383, 2304)):
        case = DraftCase(variant, lengths, heads=2, seed=tokens)
        first = case.run(0.5 * dim**-0.5)
        assert relative_error(first, case.expected(0.5 * dim**-0.5)) <= TOLERANCE
        assert torch.equal(case.run(0.5 * dim**-0.5), first)


@pytest.mark.parametrize(
    ("name", "dim", "group", "tokens"),
    (
        ("2 bits", 64, 4, 2), ("2 bits", 64, 4, 8), ("2 bits", 96, 4, 2), ("2 bits", 192, 4, 2), ("2 bits", 256, 8, 2),
        ("Kitty", 64, 4, 4), ("Kitty", 256, 4, 2), ("stripes", 256, 8, 2), ("stripes", 256, 8, 8),
        ("stripes", 256, 1, 8), ("rotated 2 bits", 256, 2, 4), ("stripes of 3 bits", 256, 8, 4),
    ),
)  # fmt: skip
def test_head_sizes(name: str, dim: int, group: int, tokens: int) -> None:
    case = DraftCase(drafts(name, group, tokens, dim), LENGTHS, heads=2, seed=3)
    assert relative_error(case.run(0.5 * dim**-0.5), case.expected(0.5 * dim**-0.5)) <= TOLERANCE


@pytest.mark.parametrize("name", ("2 bits", "sinks and windows", "stripes"))
def test_softcap_sink_logits_and_transforms(name: str) -> None:
    case = DraftCase(drafts(name, 4, 4, rescale=True, offset=True), LENGTHS, heads=2, seed=5)
    s_aux = torch.randn(8, device="cuda")
    assert relative_error(case.run(0.06, 20.0, s_aux), case.expected(0.06, 20.0, s_aux)) <= TOLERANCE


def test_long_rows_repeat_bit_for_bit() -> None:
    case = DraftCase(drafts("2 bits", 4, 4), (5000, 8191, 40, 2304), heads=3, seed=6)
    first = case.run(0.06)
    assert relative_error(first, case.expected(0.06)) <= TOLERANCE
    assert all(torch.equal(case.run(0.06), first) for _ in range(5))


@pytest.mark.parametrize("name", ("2 bits", "sinks"))
def test_appended_bytes_are_those_of_one_token_at_a_time(name: str) -> None:
    """Pages, sinks and rings, fed 1 to 8 tokens at a time, on the GPU and by the reference."""
    tokens, stores = 270, []
    for device, sizes in (("cuda", (8,)), ("cuda", (1, 5, 2, 7, 3)), ("cpu", (1,))):
        variant = replace(pair_variant(name, 64), step_tokens=MAX_STEP_TOKENS)
        paged = Paged(variant, 2, 3, device)
        k, v, q = (states(2, tokens, heads, 64, seed).to(device) for seed, heads in enumerate((2, 2, 4)))
        start, turn = 0, 0
        while start < tokens:
            stop = min(tokens, start + sizes[turn % len(sizes)])
            new = [x[:, start] if stop == start + 1 else x[:, start:stop] for x in (k, v, q)]
            paged.variant = replace(variant, query_tokens=stop - start)
            paged.append(slice(0, 2), *new)
            paged.place.lengths.add_(stop - start)
            start, turn = stop, turn + 1
        stores.append(paged)
    for paged in stores[:2]:
        for side in SIDES:
            ours, theirs = paged.memory[side], stores[2].memory[side]
            assert torch.equal(ours.ring.cpu(), theirs.ring) and torch.equal(ours.sinks.cpu(), theirs.sinks)
            for row in range(2):
                assert torch.equal(paged.records(side, row)[:2], stores[2].records(side, row)[:2])
