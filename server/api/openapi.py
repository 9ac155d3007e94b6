"""`/openapi.json`: what FastAPI knows of the routes and bodies, completed by what is sent back."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from moed.server.api import errors
from moed.server.api.aborting import ABORT_PATH, Aborted
from moed.server.api.errors import ApiError, ErrorEnvelope, is_messages_path
from moed.server.api.generation import RANK_HEADER
from moed.server.api.middleware.api_keys import ADMIN_PREFIX, is_admin_path
from moed.server.api.probes import PROBE_PATHS
from moed.server.api.responses import Answer, ChatChoice, CompletionChoice

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
SCHEMAS = "#/components/schemas/"
PREFIX = "answer."
# What FastAPI says of its own error bodies, which are never sent here.
FRAMEWORK_STATUS = "422"
FRAMEWORK_SCHEMAS = ("HTTPValidationError", "ValidationError")

# Any request can end so; a connection that breaks HTTP's rules is answered before any route.
COMMON_STATUSES = frozenset({400, 401, 408, 429, 431, 500, 503})
BODY_STATUSES = frozenset({404, 413, 415})
PATH_STATUSES = frozenset({404})
PROBE_STATUSES = frozenset({400, 408, 431})
GENERATION_STATUSES = frozenset({504})
ADMIN_STATUSES = frozenset({403})
CONFLICT_STATUSES = frozenset({409})


class ChatAnswer(Answer):
    choices: list[ChatChoice]


class CompletionAnswer(Answer):
    choices: list[CompletionChoice]


class HealthReport(msgspec.Struct):
    status: str
    reason: str | None
    ranks: list[dict[str, Any]]


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    prompt: str


class Models(msgspec.Struct):
    object: str
    data: list[dict[str, Any]]


class Card(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str


class Counted(msgspec.Struct):
    input_tokens: int


class MessagesError(msgspec.Struct):
    type: str
    error: dict[str, str]
    request_id: str | None


# Bodies of status 200 by path; any JSON object where a path is not named.
ANSWERS: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatAnswer,
    "/v1/completions": CompletionAnswer,
    "/v1/messages/count_tokens": Counted,
    "/v1/responses/input_tokens": Counted,
    "/v1/models": Models,
    "/v1/models/{model_id}": Card,
    "/tokenize": Tokenized,
    "/detokenize": Detokenized,
    ABORT_PATH: Aborted,
    **dict.fromkeys(PROBE_PATHS, HealthReport),
}
STREAMED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
SERVED_AS_TEXT = frozenset({"/metrics"})


def install_openapi(app: FastAPI) -> None:
    """Made at the first request for it, when all routes are there."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = described(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def described(app: FastAPI) -> dict[str, Any]:
    """The whole document."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for name in FRAMEWORK_SCHEMAS:
        components.pop(name, None)
    structs = {*ANSWERS.values(), ErrorEnvelope, MessagesError}
    _, sent = msgspec.json.schema_components(
        sorted(structs, key=lambda struct: struct.__name__),
        ref_template=SCHEMAS + PREFIX + "{name}",
    )
    components.update({PREFIX + name: schema for name, schema in sent.items()})
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation)
    return document


def _complete(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop(FRAMEWORK_STATUS, None)
    if "200" in responses:
        responses["200"]["content"] = _content(path)
    for status in _error_statuses(path, operation):
        responses.setdefault(str(status), _error(path, status))
    if path in STREAMED:
        operation.setdefault("parameters", []).append(
            {
                "name": RANK_HEADER,
                "in": "header",
                "required": False,
                "description": "The rank that a router in front has chosen.",
                "schema": {"type": "integer", "minimum": 0},
            }
        )


def _content(path: str) -> dict[str, Any]:
    if path in SERVED_AS_TEXT:
        return {TEXT: {"schema": {"type": "string"}}}
    struct = ANSWERS.get(path)
    body = {"type": "object"} if struct is None else {"$ref": _ref(struct)}
    content: dict[str, Any] = {JSON: {"schema": body}}
    if path in STREAMED:
        content[EVENTS] = {"schema": {"type": "string"}}
    return content


def _ref(struct: type[msgspec.Struct]) -> str:
    return SCHEMAS + PREFIX + struct.__name__


def _error_statuses(path: str, operation: Mapping[str, Any]) -> Iterable[int]:
    if path in PROBE_PATHS:
        return sorted(PROBE_STATUSES | {503} if path != "/livez" else PROBE_STATUSES)
    statuses = COMMON_STATUSES
    if "requestBody" in operation:
        statuses |= BODY_STATUSES
    if "{" in path:
        statuses |= PATH_STATUSES
    if path in STREAMED:
        statuses |= GENERATION_STATUSES
    if is_admin_path(path) or path == ABORT_PATH:
        statuses |= ADMIN_STATUSES
    if path.startswith(ADMIN_PREFIX):
        statuses |= CONFLICT_STATUSES
    return sorted(statuses)


def _error(path: str, status: int) -> dict[str, Any]:
    if path in PROBE_PATHS and status == 503:
        return {
            "description": "Not now",
            "content": {JSON: {"schema": {"$ref": _ref(HealthReport)}}},
        }
    struct = MessagesError if is_messages_path(path) else ErrorEnvelope
    return {
        "description": DESCRIPTIONS.get(status, "An error"),
        "content": {JSON: {"schema": {"$ref": _ref(struct)}}},
    }


def _descriptions() -> dict[int, str]:
    """Of each status that an error class has, by the class's name."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    found: dict[int, str] = {}
    for kind in kinds:
        if issubclass(kind, ApiError) and kind is not ApiError:
            found.setdefault(kind.status, _words(kind.__name__))
    return found


def _words(name: str) -> str:
    """`BodyTooLarge` as `Body too large`."""
    spaced = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name)
    return spaced.strip().capitalize()


DESCRIPTIONS = {429: "Too many requests wait", **_descriptions()}
