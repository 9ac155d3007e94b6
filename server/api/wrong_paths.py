"""What a path that nobody serves was probably meant to be: many a client has a base URL without
`/v1`, or with two.
"""

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match

VERSION = "/v1"


def meant_path(routes: Sequence[BaseRoute], method: str, path: str) -> str:
    """The rest of a sentence, or nothing."""
    clean = "/" + "/".join(part for part in path.split("/") if part)
    while clean.startswith(f"{VERSION}{VERSION}/"):
        clean = clean.removeprefix(VERSION)
    for meant in (clean, VERSION + clean):
        scope = {"type": "http", "method": method, "path": meant, "root_path": ""}
        if any(route.matches(scope)[0] is Match.FULL for route in routes):
            return f"; did you mean {meant}?"
    return ""
