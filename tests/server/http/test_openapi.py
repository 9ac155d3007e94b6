"""`/openapi.json` against what is served: schemathesis makes requests from it, seeded and bounded,
and judges every answer by it.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import Phase, given
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from moed.server.api.aborting import ABORT_PATH
from moed.server.api.app import create_app
from moed.server.api.middleware.api_keys import ADMIN_PATHS
from moed.server.api.openapi import STREAMED
from tests.server.http.anything import same_every_time
from tests.server.http.served import Served

CHECKS: list[Callable[..., Any]] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
TIMEOUT_S = 20


@pytest.fixture(scope="module")
def schema(shared: Served) -> Any:
    return schemathesis.openapi.from_url(f"{shared.url}/openapi.json")


def try_all(schema: Any, mode: GenerationMode, num_examples: int) -> None:
    """`num_examples` requests to each operation. Raises schemathesis' `FailureGroup`."""
    limits = same_every_time(num_examples, phases=[Phase.generate])
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing could be wrong with it

        @limits
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_S)

        call()


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_as_described(served: Served, schema: Any, mode: GenerationMode) -> None:
    try_all(schema, mode, 3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_very_many_answers_are_as_described(
    served: Served, schema: Any, mode: GenerationMode
) -> None:
    try_all(schema, mode, 100)
    served.wait(functools.partial(is_at_rest, served))


def is_at_rest(served: Served) -> bool:
    return served.num_running == 0 and served.state.engine.num_open == 0


def test_every_route_is_described(served: Served) -> None:
    app = create_app(served.state)
    described = served.get("/openapi.json").json()["paths"]
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            path = route.path_format
            assert {method.lower() for method in route.methods or ()} == set(described[path])
    for path in STREAMED:
        assert "text/event-stream" in described[path]["post"]["responses"]["200"]["content"]


def test_statuses_of_some_routes_only_are_described_there(served: Served) -> None:
    """403: not governed by everybody; 409: a drain that cannot be undone; 504: took too long."""
    described = served.get("/openapi.json").json()["paths"]
    statuses: dict[str, set[str]] = {
        path: {status for operation in operations.values() for status in operation["responses"]}
        for path, operations in described.items()
    }
    admin = {path for path in statuses if path.startswith("/admin/")}
    assert admin and {p for p in statuses if "409" in statuses[p]} == admin
    assert {p for p in statuses if "403" in statuses[p]} == {*admin, *ADMIN_PATHS, ABORT_PATH}
    assert {path for path in statuses if "504" in statuses[path]} == STREAMED


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/v1/models/x"]
)
def test_errors_are_described_in_the_envelope_of_the_route(served: Served, path: str) -> None:
    document = served.get("/openapi.json").json()
    described = document["paths"]["/v1/models/{model_id}" if path.endswith("x") else path]
    (operation,) = described.values()
    answer = served.get(path) if "get" in described else served.post(path, {})
    schema = operation["responses"][str(answer.status_code)]["content"]["application/json"]
    name = schema["schema"]["$ref"].rpartition("/")[2]
    required = document["components"]["schemas"][name]["required"]
    assert set(answer.json()) == set(required)
    assert "422" not in operation["responses"]
