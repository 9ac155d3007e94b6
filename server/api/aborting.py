"""`POST /v1/abort`."""

from typing import Annotated

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.bodies.body import Body, ClientId
from moed.server.api.callers import caller_of
from moed.server.api.errors import InvalidRequest, NotFound
from moed.server.api.json_route import JsonRoute
from moed.server.api.open_generations import Found
from moed.server.api.state import AppState

ABORT_PATH = "/v1/abort"
MAX_ABORTED_IDS = 1000


class AbortBody(Body):
    """One of these."""

    request_ids: Annotated[list[ClientId], Field(max_length=MAX_ABORTED_IDS)] | None = None
    """As answers name themselves (`id`), or as `x-request-id` did."""
    all: bool | None = None


class Aborted(msgspec.Struct):
    """What became of each id."""

    object: str
    num_aborted: int
    """Ids that were ended; with `all`, requests."""
    aborted: list[str]
    finished: list[str]
    """They had ended already."""
    not_found: list[str]


def abort_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["control"], route_class=JsonRoute)

    @router.post(ABORT_PATH)
    async def abort(body: AbortBody, request: Request) -> Response:
        """End requests early: their answers so far end with finish_reason "abort". A client ends
        its own; an administrator anybody's, or `all`.
        """
        caller = caller_of(request.scope)
        if body.all:
            if body.request_ids is not None:
                raise InvalidRequest("give either request_ids or all", param="all")
            caller.check_admin()
            return _answer(state.generations.abort_all(), {})
        if not body.request_ids:
            raise InvalidRequest(
                "request_ids is missing: name what is to be aborted, or give all: true",
                param="request_ids",
                code="missing_required_parameter",
            )
        owner = None if caller.is_admin else caller.name
        found = {name: state.generations.abort(owner, name) for name in body.request_ids}
        if set(found.values()) == {Found.UNKNOWN}:
            raise NotFound(
                "there is no request with such an id: it has never been, or not under this key",
                param="request_ids",
                code="request_not_found",
            )
        num_aborted = sum(what is Found.ABORTED for what in found.values())
        return _answer(num_aborted, found)

    return router


def _answer(num_aborted: int, found: dict[str, Found]) -> Response:
    named = {
        what.value: [name for name, became in found.items() if became is what] for what in Found
    }
    body = Aborted("abort", num_aborted, **named)
    return Response(msgspec.json.encode(body), media_type="application/json")
