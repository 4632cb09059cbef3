"""Bytes and tokens: exact values, the refusals, and that what we print we can read."""

import random

import pytest

from kvcal.errors import UsageError
from kvcal.quantities import MAX_CONTEXT, UNITS, format_bytes, parse_bytes, parse_memory, parse_tokens


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1.5GiB", 1_610_612_736), ("800MB", 800_000_000), ("123456", 123_456), ("0.5 KiB", 512),
        ("0.3GiB", 322_122_547), ("1.9999999999KB", 1999), ("24G", 24 * 10**9), ("24GiB", 24 * 2**30), ("1.5K", 1500),
    ],
)  # fmt: skip
def test_exact_values(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1GB",
        "0",
        "0.0001KB",
        "nan",
        "1e9",
        "1,5GB",
        ".5GB",
        "24gb",
        "24g",
        "24Gib",
        "1.5B",
        "24  GB",
        "٣GB",
        "9" * 99,
    ],
)
def test_anything_else_is_refused_with_the_allowed_set(text):
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert text in caught.value.message
    assert all(unit in caught.value.message for unit in UNITS)
    meant = {"24gb": "24GB", "24Gb": "24GB", "24g": "24G", "24Gib": "24GiB", "24  GB": None}.get(text)
    assert (f"did you mean {meant}?" if meant else "1.5GiB") in caught.value.hint


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (99_999, "99999 B"), (100_000, "100 KB"), (999_960, "1 MB"), (1_610_612_736, "1.611 GB"),
        (3_456 * 10**12, "3456 TB"), (-2_500_000, "-2.5 MB"),
    ],
)  # fmt: skip
def test_what_people_read(nbytes, text):
    assert format_bytes(nbytes) == text


def test_printed_quantities_read_back():
    rng = random.Random(0)
    for _ in range(3000):
        nbytes = rng.randint(1, 10 ** rng.randint(1, 17))
        again = parse_bytes(format_bytes(nbytes))
        assert abs(again - nbytes) <= 0.0005 * nbytes
        if nbytes < 100_000:
            assert again == nbytes


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("32k", 32_768), ("128K", 131_072), (" 1M", 1 << 20), ("1000000000", MAX_CONTEXT)],
)
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5k", "32kB", "32m", "1000000001", "9999M", "k", "٣", "0x10", "1_000"]
)
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_tokens(text)
    assert f"'{text}'" in caught.value.message and "1 to 1000000000" in caught.value.message
    assert "32k" in str(caught.value.hint)


def test_a_memory_without_its_unit_is_asked_about() -> None:
    for text, meant in (("800", "800MB"), ("24", "24GB"), ("80", "80GB")):
        with pytest.raises(UsageError) as caught:
            parse_memory(text)
        assert caught.value.hint == f"did you mean {meant}?"
    assert parse_memory("19474944") == 19_474_944 and parse_memory("800B") == 800 and parse_memory("2G") == 2 * 10**9
