import pytest

from moed.config.sizes import format_bytes, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [("7", 7), ("8k", 8000), ("8K", 8192), ("2m", 2_000_000), ("2M", 2_097_152), ("1.5k", 1500)],
)
def test_tokens(text: str, count: int) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4_294_967_296),
        ("4G", 4_294_967_296),
        ("4GB", 4_000_000_000),
        ("4gb", 4_000_000_000),
        ("512 MiB", 536_870_912),
        ("0.5KiB", 512),
        ("100", 100),
        ("100B", 100),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "k", "8kk", "-1", "1e3", "8 q", "1.0001k", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_tokens(text)
    with pytest.raises(ValueError, match="must be"):
        parse_bytes(text)


def test_bytes_without_a_unit_letter() -> None:
    with pytest.raises(ValueError, match="4GiB"):
        parse_bytes("4iB")


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (7, 1536, 2**20, 3 * 2**30, 2**42)] == [
        "7 B",
        "1.5 KiB",
        "1.0 MiB",
        "3.0 GiB",
        "4096.0 GiB",
    ]
