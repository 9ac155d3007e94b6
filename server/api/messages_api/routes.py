"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from moed.server.api.chat import ChatGeneration, rendered_chat, start_chat
from moed.server.api.errors import MESSAGES_PATH, ApiError
from moed.server.api.generation import served_model
from moed.server.api.json_route import JsonRoute
from moed.server.api.messages_api.answer import message_error, stream_message, whole_message
from moed.server.api.messages_api.body import CountBody, MessagesBody
from moed.server.api.messages_api.conversation import to_chat
from moed.server.api.parameters import Defaults
from moed.server.api.request_ids import SCOPE_KEY
from moed.server.api.respond import respond
from moed.server.api.state import AppState


def messages_router(state: AppState) -> APIRouter:
    router = APIRouter(tags=["messages"], route_class=JsonRoute)
    defaults = Defaults.of(state.config)
    timeout_s = state.config.server.request_timeout_s

    @router.post(MESSAGES_PATH)
    async def create_message(body: MessagesBody, request: Request) -> Response:
        """Answer a conversation, in Anthropic's protocol."""

        async def start() -> ChatGeneration:
            return await start_chat(
                state, request, to_chat(body), defaults, "msg_", is_cut_to_context=True
            )

        def error_event(error: ApiError) -> bytes:
            return message_error(error, request.scope.get(SCOPE_KEY))

        events = stream_message if body.stream else None
        return await respond(request, start(), events, whole_message, timeout_s, error_event)

    @router.post(MESSAGES_PATH + "/count_tokens")
    async def count_tokens(body: CountBody, request: Request) -> Response:
        """How many tokens a conversation has as a prompt."""
        served_model(body.model, state)
        _, prompt = await rendered_chat(to_chat(body), state)
        counted = {"input_tokens": len(prompt.token_ids)}
        return Response(msgspec.json.encode(counted), media_type="application/json")

    return router
