"""Anything in any place of both completion routes' bodies, with real engines: never a server error;
the shared daemon's fixture then asks every rank and reads every gauge.
"""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moed.config.model import BUNDLED_NAME
from tests.daemon import Daemon
from tests.server.http.anything import places, same_every_time
from tests.server.http.test_completion_fuzz import PATHS, place_anything

# A fuzzed body may ask for all of the context: leaving ends it.
PATIENCE_S = 3.0


def fuzz(daemon: Daemon, path: str, num_examples: int) -> None:
    body: dict[str, Any] = {**PATHS[path], "model": BUNDLED_NAME}
    everywhere = list(places(body))
    headers = {"Content-Type": "application/json"}

    @same_every_time(num_examples)
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        content = json.dumps(place_anything(body, everywhere, data))
        try:
            answer = client.post(path, content=content, headers=headers)
        except httpx.ReadTimeout:
            return
        assert answer.status_code < 500, (content, answer.text)

    with httpx.Client(base_url=daemon.url, timeout=PATIENCE_S) as client:
        one()


@pytest.mark.parametrize("path", PATHS)
def test_anything_anywhere(daemon: Daemon, path: str) -> None:
    fuzz(daemon, path, 40)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_anything_anywhere_for_long(daemon: Daemon, path: str) -> None:
    fuzz(daemon, path, 1000)
