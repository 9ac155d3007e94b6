"""`POST /v1/responses`, and what can be done with an answer that was stored."""

from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.callers import caller_of
from moed.server.api.chat import ChatGeneration, rendered_chat, start_chat
from moed.server.api.errors import InvalidRequest
from moed.server.api.generation import served_model
from moed.server.api.json_route import JsonRoute
from moed.server.api.parameters import Defaults
from moed.server.api.respond import respond
from moed.server.api.responses_api.answer import ResponseAnswer
from moed.server.api.responses_api.body import InputBody, ResponsesBody
from moed.server.api.responses_api.conversation import to_chat
from moed.server.api.responses_api.store import MAX_RESPONSES, MAX_STORED_BYTES, ResponseStore
from moed.server.api.state import AppState

PATH = "/v1/responses"


def responses_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["responses"], route_class=JsonRoute)
    defaults = Defaults.of(state.config)
    timeout_s = state.config.server.request_timeout_s
    store = ResponseStore(MAX_RESPONSES, MAX_STORED_BYTES)

    def history(body: InputBody, owner: str) -> list[dict[str, Any]]:
        if body.previous_response_id is None:
            return []
        return store.get(owner, body.previous_response_id, "previous_response_id").history

    @router.post(PATH)
    async def create_response(body: ResponsesBody, request: Request) -> Response:
        """Answer input items, behind those of an earlier response where one is named."""
        owner = caller_of(request.scope).name
        earlier = history(body, owner)

        async def start() -> ChatGeneration:
            return await start_chat(state, request, to_chat(body, earlier), defaults, "resp_")

        answer = ResponseAnswer(body, earlier, partial(store.put, owner))
        events = answer.stream if body.stream else None
        return await respond(request, start(), events, answer.whole, timeout_s, answer.error_event)

    @router.post(PATH + "/input_tokens")
    async def count_input_tokens(body: InputBody, request: Request) -> Response:
        """How many tokens the input has as a prompt."""
        served_model(body.model, state)
        earlier = history(body, caller_of(request.scope).name)
        _, prompt = await rendered_chat(to_chat(body, earlier), state)
        return _json({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})

    @router.get(PATH + "/{response_id}")
    async def get_response(response_id: str, request: Request) -> Response:
        """A stored answer."""
        found = store.get(caller_of(request.scope).name, response_id, None)
        return Response(found.answer, media_type="application/json")

    @router.delete(PATH + "/{response_id}")
    async def delete_response(response_id: str, request: Request) -> Response:
        """Forget a stored answer; those that came after it stay whole."""
        store.delete(caller_of(request.scope).name, response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @router.post(PATH + "/{response_id}/cancel")
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Nothing runs in the background here; closing the connection ends what runs."""
        store.get(caller_of(request.scope).name, response_id, None)
        raise InvalidRequest(
            "only background responses can be cancelled, and this one has ended; close the "
            "connection to end one that runs",
            code="invalid_value",
        )

    return router


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
