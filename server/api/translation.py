"""Bodies of other protocols become a chat's: one path serves them all."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from moed.server.api.bodies.chat import ChatBody
from moed.server.api.errors import InvalidRequest, UnsupportedParameter
from moed.server.api.validation import first_problem

# What a chat's body may say and these protocols do not name: taken under the chat's name.
SHARED_EXTRAS = frozenset(
    (
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "request_id",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "thinking_token_budget",
        "top_k",
    )
)


def chat_body(translated: Mapping[str, Any], extras: Mapping[str, Any]) -> ChatBody:
    """`extras`: fields that the protocol does not name. Raises `InvalidRequest`."""
    values = {name: value for name, value in translated.items() if value is not None}
    for name, value in extras.items():
        if name in ChatBody.model_fields and name not in SHARED_EXTRAS and value is not None:
            raise UnsupportedParameter(
                f"{name} is a parameter of /v1/chat/completions, not of this route", param=name
            )
        values.setdefault(name, value)
    try:
        return ChatBody.model_validate(values)
    except ValidationError as error:
        problem = first_problem([{**e, "loc": ("body", *e["loc"])} for e in error.errors()])
        raise InvalidRequest(problem.message, param=problem.param, code=problem.code) from None


def joined_text(parts: list[str]) -> str:
    return "\n".join(parts)
