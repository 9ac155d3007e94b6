"""Anything in any place of a request body, for the fuzz tests."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def same_every_time(num_examples: int, **more: Any) -> settings:
    """For examples that are requests: as slow as a server may be, and drawn alike in every run."""
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -1, 0, 2**63, 1e308, "", "\0", "user", "text", "function", "auto"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
# What only hostile clients write: no JSON at all, or no text in Unicode.
WILD_LEAVES = st.one_of(
    LEAVES,
    st.floats(),
    st.sampled_from(["\ud800", "a\udfff", 10**400, -(2**63) - 1, 1e-320, "\u202e\u0000😀"]),
    st.text(max_size=20),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
WILD_VALUES = st.recursive(
    WILD_LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in entries:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value
