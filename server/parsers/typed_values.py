"""Arguments that a model writes as plain text, and their types from the tool's schema."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
TYPE_OF: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


@dataclass(frozen=True)
class ToolTypes:
    """The properties of each tool's parameters."""

    properties: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def types(self, tool: str, argument: str) -> frozenset[str]:
        """Allowed JSON types; empty when the schema does not say."""
        return types_of(self.properties.get(tool, {}).get(argument))


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema names."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(entry for entry in named if isinstance(entry, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(TYPE_OF.get(type(value), "string") for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            return frozenset().union(*map(types_of, parts))
    return frozenset()


def is_text(types: frozenset[str]) -> bool:
    """True when whatever is written is the string itself."""
    return types == {"string"}


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value: as written where that is JSON of an allowed type, else a string."""
    if is_text(types):
        return quote(text)
    literal = PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(literal)
    except (ValueError, RecursionError):
        return quote(text)
    kind = TYPE_OF[type(value)]
    allowed = not types or kind in types or (kind == "integer" and "number" in types)
    # A number with a fraction of zero is an integer too.
    allowed = allowed or (kind == "number" and "integer" in types)
    return literal if allowed or "string" not in types else quote(text)


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """Within a JSON string; pieces may be put together."""
    return quote(text)[1:-1]
