"""`POST /tokenize` and `POST /detokenize`."""

from typing import Annotated, Any

from pydantic import Field

from moed.server.api.bodies.body import Body
from moed.server.api.bodies.conversation import Messages, Tools


class TokenizeBody(Body):
    """`POST /tokenize`: `prompt`, or `messages` as a chat request has them."""

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: Annotated[list[int], Field(fail_fast=True)]
