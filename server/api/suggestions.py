"""`; did you mean …?` for names that are nearly right."""

import difflib
from collections.abc import Sequence

MAX_COMPARED_CHARACTERS = 200


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The rest of a sentence, or nothing."""
    short = name[:MAX_COMPARED_CHARACTERS].lower()
    by_lower = {entry.lower(): entry for entry in known}
    close = difflib.get_close_matches(short, by_lower, n=1, cutoff=0.5)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
