"""Byte quantities: exact values, the refusals, and that what we print we can read."""

import random

import pytest

from kvcal.errors import UsageError
from kvcal.quantities import UNITS, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1.5GiB", 1_610_612_736), ("800MB", 800_000_000), ("123456", 123_456), ("0.5 KiB", 512),
        ("0.3GiB", 322_122_547), ("1.9999999999KB", 1999),
    ],
)  # fmt: skip
def test_exact_values(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "-1GB", "0", "0.0001KB", "nan", "1e9", "1,5GB", ".5GB", "24gb", "24Gib", "1.5B", "24  GB", "٣GB", "9" * 99],
)
def test_anything_else_is_refused_with_the_allowed_set(text):
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert text in caught.value.message
    assert all(unit in caught.value.message for unit in UNITS)
    meant = {"24gb": "24GB", "24Gb": "24GB", "24Gib": "24GiB", "24  GB": None}.get(text)
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
