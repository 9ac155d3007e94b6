"""Fixtures of all tests of the engine."""

import pytest

from tests.server.engine.fakes import Harness


@pytest.fixture(params=[False, True], ids=["plain", "ahead"])
def any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both orders of the engine's loop; the scheduler's harness follows."""
    monkeypatch.setattr(Harness, "step_ahead", request.param)
    return bool(request.param)
