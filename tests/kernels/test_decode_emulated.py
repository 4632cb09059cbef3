"""``decode`` emulated on a CPU, against attention in fp64 over the decoded pages. Needs no GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decode_cases import CASES, TOLERANCE, Case, relative_error, variant_of
from emulated import EmulatedKernel, emulate
from test_draft_steps import DraftCase, drafts

from kvcal.kernels import decode
from kvcal.kernels.choice import pass_heads

LENGTHS = (0, 127, 300, 700)


class EmulatedCase(Case):
    device = "cpu"


class EmulatedDrafts(DraftCase):
    device = "cpu"


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("name", "dim", "group"),
    (
        ("2 bits", 128, 1), ("2 bits", 128, 7), ("2 bits", 96, 16), ("3 bits", 64, 8), ("4 bits", 128, 8),
        ("Kitty", 128, 4), ("Kitty", 64, 8), ("odd slots", 96, 4), ("MixKVQ", 64, 4), ("K per token", 128, 8),
        ("rotated 2 bits", 128, 4), ("rotated 2 bits", 128, 8), ("K 2 V 16", 64, 4), ("sinks and windows", 128, 8),
        ("stripes", 128, 4), ("stripes", 64, 8), ("stripes, 3 and 4 bits", 128, 8),
        ("stripes, sinks beyond a page", 64, 2), ("stripes of 32", 64, 4), ("stripes", 256, 8),
        ("rotated 2 bits", 256, 1), ("rotated V", 256, 4), ("rotated 2 bits", 192, 2), ("stripes of 3 bits", 256, 2),
    ),
)  # fmt: skip
def test_formats_and_shapes(name: str, dim: int, group: int) -> None:
    case = EmulatedCase(variant_of(*CASES[name], dim=dim, group=group), LENGTHS, heads=1, seed=1)
    assert relative_error(case.run(0.4 * dim**-0.5), case.expected(0.4 * dim**-0.5)) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "group", "tokens"), (("2 bits", 4, 2), ("rotated 2 bits", 3, 2), ("stripes", 4, 2), ("stripes", 2, 2))
)
def test_drafts(name: str, group: int, tokens: int) -> None:
    case = EmulatedDrafts(drafts(name, group, tokens), (0, 125, 127, 383), heads=1, seed=tokens)
    assert relative_error(case.run(0.06), case.expected(0.06)) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "group", "tokens", "dim"),
    (
        ("stripes", 4, 3, 128), ("stripes of 4 bits", 3, 6, 128), ("rotated 2 bits", 6, 3, 64),
        ("K per token", 16, 2, 96), ("stripes of 3 bits", 4, 4, 128), ("K per token, groups of 64", 5, 2, 128),
    ),
)  # fmt: skip
def test_passes_of_two_tiles_of_columns(
    name: str, group: int, tokens: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 15 KV heads, less than pays for two tiles, and of 16."""
    taken: list[int] = []
    launch = EmulatedKernel.launch

    def noted(self: EmulatedKernel, *args: Any, **options: Any) -> None:
        taken.append(self.defines["HEADS"])
        launch(self, *args, **options)

    monkeypatch.setattr(EmulatedKernel, "launch", noted)
    variant = drafts(name, group, tokens, dim, rescale=group == 6, offset=group == 6)
    assert pass_heads(variant) == 16 and pass_heads(replace(variant, few_heads=True)) == 8
    for lengths, heads in (((125, 127, 383), 5), ((0, 125, 127, 383), 4)):
        case = EmulatedDrafts(variant, lengths, heads, seed=tokens)
        assert relative_error(case.run(0.06), case.expected(0.06)) <= TOLERANCE
    assert taken == [8, 16]


def test_drafts_of_a_large_head() -> None:
    case = EmulatedDrafts(drafts("stripes", 2, 4, 256), (0, 127, 383), heads=1, seed=4)
    assert relative_error(case.run(0.04), case.expected(0.04)) <= TOLERANCE


def test_the_largest_code_in_all_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes at the top of their bytes would add up to more than their sum has room for."""
    case = EmulatedCase(variant_of(*CASES["2 bits"], dim=192, group=4), (300,), heads=1, seed=18, alike=True)
    expected = case.expected(8 / 192)
    assert relative_error(case.run(8 / 192), expected) <= TOLERANCE
    monkeypatch.setattr(decode, "key_lift", lambda variant: 6)
    assert relative_error(case.run(8 / 192), expected) > 0.1
