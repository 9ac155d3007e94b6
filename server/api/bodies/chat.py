"""`POST /v1/chat/completions`."""

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from moed.server.api.bodies.body import INT64_MAX, Count
from moed.server.api.bodies.conversation import Conversation, ToolChoice, check_tool_choice
from moed.server.api.bodies.sampling import SamplingBody


class ChatBody(Conversation, SamplingBody):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tool_choice: Annotated[
        ToolChoice, PlainValidator(check_tool_choice, json_schema_input_type=ToolChoice)
    ] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """Passed to the chat template."""
    thinking_token_budget: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    """Most tokens of the reasoning; then its end is written for the model."""
