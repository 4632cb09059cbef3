"""Numbers of bytes and of tokens as a user writes and reads them, one spelling for the whole program; and how
large a batch may be.

A budget decides what fits on a device, so decimal and binary units must never be mixed up silently: GB is
10^9 bytes and GiB is 2^30, units are case-sensitive (a lower-case ``b`` could mean bits), and a fraction is
computed exactly and rounded down, so that a parsed budget never exceeds what was written. A short form is
read as the one that fits either way: G as the smaller GB, 32k tokens as the larger 32,768. Left out on
purpose: exponents (``1e9``), thousands separators and bit units.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from kvcal.errors import UsageError

# Sequences of a workload: beyond any machine, and their bytes are still summed in seconds.
MAX_BATCH = 1_000_000
# Tokens of a sequence: beyond any model, and their bytes are still 64-bit integers.
MAX_CONTEXT = 1_000_000_000
# Seeds that torch, numpy and Python all take.
MAX_SEED = 2**32 - 1

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
EXAMPLES = "for example 24GB or 24G (10^9 bytes each), 1.5GiB (2^30 bytes each) or 123456"
# Of a device's memory: who types fewer, without a unit, has left it out.
LEAST_BARE = 100_000
_QUANTITY = re.compile(r"([0-9]{1,40})(\.[0-9]{1,18})? ?([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Bytes of ``24GB`` or ``24G``, ``1.5GiB``, ``800MB``, ``123456B`` or ``123456``; at least 1, rounded
    down.

    Raises UsageError, naming the text and what is allowed, on anything else.
    """
    match = _QUANTITY.fullmatch(text.strip(" "))
    if match is None:
        raise _refusal(text, "not a positive decimal number with an optional unit")
    whole, fraction, unit = match.group(1), match.group(2) or "", match.group(3) or "B"
    if unit not in UNITS:
        alike = [f"{whole}{fraction}{other}" for other in UNITS if other.lower() == unit.lower()]
        raise _refusal(text, f"unknown unit '{unit}'", f"did you mean {alike[0]}?" if alike else EXAMPLES)
    if unit == "B" and fraction:
        raise _refusal(text, "a fraction of a byte")
    nbytes = int(Fraction(whole + fraction) * UNITS[unit])
    if nbytes < 1:
        raise _refusal(text, "less than one byte")
    return nbytes


def parse_memory(text: str) -> int:
    """``parse_bytes`` of a device's memory. UsageError for a small number without a unit, which was left
    out."""
    nbytes = parse_bytes(text)
    if nbytes < LEAST_BARE and text.strip(" ").isdecimal():
        unit = "MB" if nbytes >= 256 else "GB"
        raise UsageError(f"'{text}' is {nbytes} bytes, less than any device has", f"did you mean {nbytes}{unit}?")
    return nbytes


def parse_tokens(text: str, least: int = 1) -> int:
    """Tokens of ``4096``, ``32k`` or ``32K`` (times 1,024) or ``1M`` (times 1,048,576), from ``least`` to
    MAX_CONTEXT.

    Raises UsageError, naming the text and what is allowed, on anything else.
    """
    match = re.fullmatch(r"([0-9]{1,12})([kKM]?)", text.strip(" "))
    tokens = int(match.group(1)) * {"": 1, "k": 2**10, "K": 2**10, "M": 2**20}[match.group(2)] if match else 0
    if not least <= tokens <= MAX_CONTEXT:
        raise UsageError(
            f"cannot read '{text}' as a number of tokens; allowed: {least} to {MAX_CONTEXT}, whole",
            hint="for example 4096, 32k (1,024 each) or 1M (1,048,576 each)",
        )
    return tokens


def format_seconds(seconds: float) -> str:
    """For people: "0.42 s", "95 s", "12.3 min" or "5.1 h"."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def format_measured(value: float, error: float | None, digits: int = 4, error_digits: int = 2) -> str:
    """A value with its standard error, such as "0.05123 ± 0.0012"; the value alone without one."""
    return f"{value:.{digits}g}" + ("" if error is None else f" ± {error:.{error_digits}g}")


def format_kl(kl: float, error: float | None) -> str:
    """A KL without powers of ten, its first two digits: "0.0025 ± 0.0003"."""
    if kl < 1e-4:
        return "below 0.0001"
    digits = max(0, 1 - math.floor(math.log10(kl)), -math.floor(math.log10(error)) if error else 0)
    digits = min(digits, 5)
    return f"{kl:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def format_bytes(nbytes: int) -> str:
    """``nbytes`` for people: exact below 100,000 (``12345 B``), else 4 digits and a decimal unit.

    ``parse_bytes`` reads the result back, within half a unit of the last digit. Where a user will copy the
    figure as a budget, print the exact bytes next to it: a rounded figure may be just too small.
    """
    if abs(nbytes) < 100_000:
        return f"{nbytes} B"
    for unit in ("KB", "MB", "GB"):
        if float(f"{abs(nbytes) / UNITS[unit]:.4g}") < 1000:
            return f"{nbytes / UNITS[unit]:.4g} {unit}"
    terabytes = nbytes / UNITS["TB"]
    return f"{terabytes:.4g} TB" if abs(terabytes) < 1000 else f"{terabytes:.0f} TB"


def _refusal(text: str, reason: str, hint: str = EXAMPLES) -> UsageError:
    return UsageError(
        f"cannot read '{text}' as a number of bytes: {reason}; allowed: a positive number, then one of "
        f"{', '.join(UNITS)} or nothing (bytes)",
        hint,
    )
