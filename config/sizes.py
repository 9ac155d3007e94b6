"""Sizes as people write them: `8k` tokens, `4GiB` of memory.

As elsewhere, a small letter is decimal and a capital one binary: 8k is 8000, 8K is 8192; in bytes,
4GB is decimal and 4GiB (or 4G) is binary.
"""

import re

DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(iB|ib|B|b|)")


def parse_tokens(text: str) -> int:
    """A count such as `4096`, `8k` (8000) or `8K` (8192). Raises `ValueError`."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise ValueError("must be a whole number, or a size such as 8k (8000) or 8K (8192)")
    number, suffix = match.groups()
    return _whole(number, DECIMAL.get(suffix) or BINARY[suffix])


def parse_bytes(text: str) -> int:
    """A size such as `1073741824`, `4GiB`, `4G` (both binary) or `4GB` (decimal). Raises
    `ValueError`.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None or (match[2] == "" and match[3].lower() == "ib"):
        raise ValueError("must be a size in bytes, such as 4GiB or 4294967296")
    number, suffix, tail = match.groups()
    if tail.lower() == "ib":
        factor = BINARY[suffix.upper()]
    elif tail:
        factor = DECIMAL[suffix.lower()]
    else:
        factor = DECIMAL.get(suffix) or BINARY[suffix]
    return _whole(number, factor)


def _whole(number: str, factor: int) -> int:
    if "." not in number:
        return int(number) * factor
    value = float(number) * factor
    if not value.is_integer():
        raise ValueError("must be a whole number")
    return int(value)


def format_bytes(count: float) -> str:
    """`count` for a person: 2.0 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
