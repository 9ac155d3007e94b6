"""`thinking_token_budget`: from the request to what the engines hold an output to."""

from moed.server.api.bodies.chat import ChatBody
from moed.server.messages import ReasoningLimit
from moed.server.parsers.registry import HARMONY_REASONING, ReasoningFormat
from moed.server.tokenizer import TextTokenizer

PARAMETER = "thinking_token_budget"


def reasoning_limit(
    body: ChatBody,
    reasoning: ReasoningFormat | None,
    tokenizer: TextTokenizer,
    *,
    starts_inside: bool,
) -> tuple[ReasoningLimit | None, tuple[str, ...]]:
    """None without a budget, or where none can be held; then, a note for the client says why."""
    if body.thinking_token_budget is None:
        return None, ()
    if reasoning is None:
        return None, (f"{PARAMETER} has no effect: this answer holds no reasoning",)
    begin, end = reasoning.tags
    begin_id = tokenizer.token_id(begin)
    found = [tokenizer.token_id(text) for text in (end, *reasoning.also_ends)]
    end_ids = [token_id for token_id in found if token_id is not None]
    is_single = len(end_ids) == len(found) and (starts_inside or begin_id is not None)
    if reasoning.name == HARMONY_REASONING or not is_single:
        note = f"{PARAMETER} is not held: this model marks its reasoning with several tokens"
        return None, (note,)
    limit = ReasoningLimit(None if starts_inside else begin_id, end_ids, body.thinking_token_budget)
    return limit, ()
