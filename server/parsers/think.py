"""Reasoning between two tags at the beginning of an answer."""

from collections.abc import Sequence

from moed.server.parsers.reader import Reader, Steps
from moed.server.parsers.sink import Sink


def think(
    reader: Reader,
    sink: Sink,
    tags: tuple[str, str],
    starts_inside: bool,
    also_ends: Sequence[str],
) -> Steps[None]:
    """Read the reasoning, if there is any. `starts_inside`: the prompt holds the opening tag.
    `also_ends`: marks of what comes after it, where a model may leave the closing tag out.
    """
    begin, end = tags
    opened_at = reader.offset
    if not (yield from reader.accept_after_space(begin)) and not starts_inside:
        return
    sink.begin_reasoning(opened_at)
    mark = yield from reader.until((end, *also_ends), sink.reasoning)
    if mark is not None and mark != end:
        reader.put_back(mark)
    if mark is not None:
        sink.end_reasoning(reader.offset)
