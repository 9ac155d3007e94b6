"""Every error that a client can get, in OpenAI's envelope, and the one place that maps to it."""

import math
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moed.server.api.request_ids import SCOPE_KEY
from moed.server.api.validation import first_problem
from moed.server.api.wrong_paths import meant_path
from moed.server.chat_template import TemplateFailed
from moed.server.engine_client import (
    GenerationFailed,
    QueueFull,
    RequestImpossible,
    RequestTimedOut,
)

# Clients show messages to people and put them in logs; one never quotes a whole request. Bytes of
# JSON: with everything around it, a body stays below 4 kB.
MAX_MESSAGE_BYTES = 3000
MAX_PARAM_BYTES = 300
# Clients would send the same again by themselves.
NOT_AGAIN = {"x-should-retry": "false"}
MESSAGES_PATH = "/v1/messages"
# Where Anthropic's words for a status are not OpenAI's.
MESSAGES_ERROR_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    504: "timeout_error",
}


class ErrorBody(msgspec.Struct, frozen=True):
    """The four keys of OpenAI's envelope; all are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """An answer that is not a success."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.headers = dict(headers or {})


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InvalidApiKey(ApiError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ApiError):
    status = 403
    type = "permission_error"
    code = "admin_key_required"


class NotFound(InvalidRequest):
    status = 404


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class Conflict(InvalidRequest):
    status = 409
    code = "conflict"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=NOT_AGAIN)


class BodyTimeout(InvalidRequest):
    status = 408
    code = "request_timeout"


class HeadTimeout(InvalidRequest):
    status = 408
    code = "request_timeout"


class HeadTooLarge(InvalidRequest):
    status = 431
    code = "headers_too_large"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class InternalError(ApiError):
    status = 500
    code = "internal_error"


class TimedOut(ApiError):
    status = 504
    code = "request_timeout"


class Unavailable(ApiError):
    status = 503
    type = "overloaded_error"

    def __init__(self, message: str, retry_after_s: float, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.headers["Retry-After"] = str(math.ceil(retry_after_s))
        # What `openai` and `anthropic` look at first.
        self.headers["retry-after-ms"] = str(math.ceil(1000 * retry_after_s))


def envelope(error: ApiError) -> bytes:
    """The JSON body."""
    message = shorten(error.message, MAX_MESSAGE_BYTES)
    param = None if error.param is None else shorten(error.param, MAX_PARAM_BYTES)
    return msgspec.json.encode(ErrorEnvelope(ErrorBody(message, error.type, param, error.code)))


def is_messages_path(path: str) -> bool:
    """True for the routes that speak Anthropic's protocol."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def messages_envelope(error: ApiError, request_id: str | None) -> bytes:
    """The JSON body in Anthropic's protocol."""
    kind = MESSAGES_ERROR_TYPES.get(error.status, error.type)
    body = {"type": kind, "message": shorten(error.message, MAX_MESSAGE_BYTES)}
    return msgspec.json.encode({"type": "error", "error": body, "request_id": request_id})


def shorten(text: str, max_bytes: int) -> str:
    """`text`, or its beginning, in at most `max_bytes` of JSON (and a mark that it was cut)."""
    text = text.encode(errors="replace").decode()
    if _num_json_bytes(text) <= max_bytes:
        return text
    text = text[:max_bytes]
    while _num_json_bytes(text) > max_bytes:
        text = text[: min(len(text) - 1, len(text) * max_bytes // _num_json_bytes(text))]
    return text + "…"


def _num_json_bytes(text: str) -> int:
    return len(msgspec.json.encode(text)) - 2


class ErrorResponse(Response):
    """In the shape that clients of the route expect."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(
            envelope(error), error.status, headers=error.headers, media_type="application/json"
        )
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_messages_path(scope["path"]):
            self.body = messages_envelope(self._error, scope.get(SCOPE_KEY))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: ApiError) -> Response:
    return ErrorResponse(error)


def to_api_error(
    error: Exception, method: str = "", path: str = "", meant: str = ""
) -> ApiError | None:
    """The answer for an exception, or None for one that nobody foresaw. `meant`: of the path, where
    nobody serves it.
    """
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            problem = first_problem(error.errors())
            return InvalidRequest(problem.message, param=problem.param, code=problem.code)
        case TemplateFailed():
            return InvalidRequest(
                f"the chat template refused the conversation: {error}", param="messages"
            )
        case QueueFull():
            return Unavailable(str(error), error.retry_after_s)
        case RequestTimedOut():
            return TimedOut(str(error), headers=NOT_AGAIN)
        case RequestImpossible():
            return InvalidRequest(f"{error}; loosen one of them", code="invalid_value")
        case GenerationFailed():
            # The same request would fail again, or has cost its work already.
            return ApiError(str(error), code="engine_error", headers=NOT_AGAIN)
        case HTTPException(status_code=404):
            return NotFound(f"there is no route {method} {path}{meant}", code="unknown_url")
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "")
            return MethodNotAllowed(
                f"{path} does not answer {method}; allowed: {allowed}", headers=error.headers
            )
        case HTTPException(status_code=status) if status < 500:
            return InvalidRequest(str(error.detail), headers=error.headers)
    return None


def install_error_handlers(app: FastAPI) -> None:
    """Map what routes raise. `UnexpectedErrors` (a middleware) answers for everything else."""

    async def handle(request: Request, error: Exception) -> Response:
        method, path, meant = request.method, request.url.path, ""
        if isinstance(error, HTTPException) and error.status_code == 404:
            meant = meant_path(app.routes, method, path)
        mapped = to_api_error(error, method, path, meant)
        if mapped is None:
            raise error
        return error_response(mapped)

    for kind in (
        ApiError,
        RequestValidationError,
        TemplateFailed,
        QueueFull,
        GenerationFailed,
        HTTPException,
    ):
        app.add_exception_handler(kind, handle)
