"""From pydantic's list of errors to one sentence for a person, and the parameter's name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What pydantic puts into a location beside names and indexes: the branch of a union.
BRANCHES = frozenset({"str", "dict[str,any]"})
MAX_QUOTED_CHARACTERS = 80

JSON_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}

EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}

COMPARISONS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


@dataclass(frozen=True)
class Problem:
    message: str
    param: str | None
    code: str


def first_problem(errors: Sequence[Any]) -> Problem:
    """One of pydantic's errors: a client corrects one thing at a time."""
    error = errors[0]
    location = error["loc"]
    param = parameter_name(location)
    kind, context = str(error["type"]), error.get("ctx", {})
    if kind == "json_invalid":
        reason = str(context.get("error", ""))
        return Problem(f"the body is not valid JSON: {reason}", None, "invalid_json")
    if kind == "missing":
        if param is None:
            return Problem("the request needs a JSON body", None, "missing_required_parameter")
        return Problem(f"{param} is missing", param, "missing_required_parameter")
    code = "invalid_type" if kind in EXPECTED else "invalid_value"
    where = param or "the body"
    if location[-1] in BRANCHES and kind in EXPECTED:
        kinds = [EXPECTED[e["type"]] for e in errors if e["loc"][:-1] == location[:-1]]
        wanted = f"must be {' or '.join(kinds)}, not {_quote(error.get('input'))}"
        return Problem(f"{where} {wanted}", param, code)
    return Problem(f"{where} {_complaint(kind, context, error)}", param, code)


def parameter_name(location: Sequence[int | str]) -> str | None:
    """`messages[2].content` for ("body", "messages", 2, "content")."""
    name = ""
    for part in location[1:]:
        if part in BRANCHES:
            continue
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    return name or None


def _complaint(kind: str, context: Mapping[str, Any], error: Mapping[str, Any]) -> str:
    given = _quote(error.get("input"))
    if kind in EXPECTED:
        return f"must be {EXPECTED[kind]}, not {given}"
    if kind in COMPARISONS:
        key, words = COMPARISONS[kind]
        return f"must be {words} {context[key]}, not {given}"
    if kind == "finite_number":
        return "must be a finite number"
    if kind == "literal_error":
        return f"must be {context['expected']}, not {given}"
    if kind == "too_long":
        return f"may have at most {_entries(context['max_length'])}"
    if kind == "too_short":
        return f"needs at least {_entries(context['min_length'])}"
    if kind == "string_too_long":
        return f"may have at most {context['max_length']} characters"
    if kind == "string_too_short":
        return f"needs at least {context['min_length']} characters"
    return str(error["msg"])


def _entries(number: int) -> str:
    return "one entry" if number == 1 else f"{number} entries"


def _quote(value: Any) -> str:
    """A given value, short."""
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return JSON_NAMES[type(value)]
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number with thousands of digits"
    return text if len(text) <= MAX_QUOTED_CHARACTERS else text[:MAX_QUOTED_CHARACTERS] + "…"
