"""Who may ask and who may govern, over TLS or from a browser, and how long an answer may take."""

import pathlib
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from moed.config.cors import CorsConfig
from moed.server.api.errors import MAX_MESSAGE_BYTES, ApiError, envelope, messages_envelope
from moed.server.api.middleware.api_keys import ApiKeys
from moed.server.drain_rate import MAX_RETRY_AFTER_S, DrainRate
from tests.server.http.configs import frontend_config
from tests.server.http.served import Served
from tests.server.http.tls_files import tls_files

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]
GOVERNED = "/admin/nothing"
"""Behind the guard there is no such route: a 404 says that the guard has let it through."""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(checkpoint: pathlib.Path) -> Iterator[Served]:
    """With two tenants and an administrator."""
    keys: dict[str, Any] = {"api_keys": ("alpha", "beta"), "admin_api_keys": ("root",)}
    with Served(frontend_config(checkpoint, **keys)) as served:
        yield served


def test_admin_routes_need_the_admin_key(keyed: Served) -> None:
    for path in (GOVERNED, "/server_info", "/reset_prefix_cache"):
        missing = keyed.get(path)
        assert missing.status_code == 401
        assert missing.json()["error"]["code"] == "invalid_api_key"
        for key in ("alpha", "beta"):
            refused = keyed.get(path, headers=bearer(key))
            assert refused.status_code == 403
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("permission_error", "admin_key_required")
            assert key not in refused.text and "root" not in refused.text
    assert keyed.get(GOVERNED, headers=bearer("root")).status_code == 404
    assert keyed.get(GOVERNED, headers={"x-api-key": "root"}).status_code == 404
    assert keyed.get("/v1/models", headers=bearer("root")).status_code == 200


def test_everything_else_takes_any_key_and_probes_take_none(keyed: Served) -> None:
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json"):
        assert keyed.get(path).status_code == 401
        assert keyed.get(path, headers=bearer("beta")).status_code == 200
    for path in ("/livez", "/readyz", "/health"):
        assert keyed.get(path).status_code == 200


def test_an_admin_key_alone_leaves_the_model_open(checkpoint: pathlib.Path) -> None:
    with Served(frontend_config(checkpoint, admin_api_keys=("root",))) as served:
        assert served.complete(prompt="a", max_tokens=1)["choices"]
        assert served.get(GOVERNED).status_code == 401
        assert served.get(GOVERNED, headers=bearer("wrong")).status_code == 401
        assert served.get(GOVERNED, headers=bearer("root")).status_code == 404


def test_without_an_admin_key_an_api_key_governs(checkpoint: pathlib.Path) -> None:
    with Served(frontend_config(checkpoint, api_keys=("alpha",))) as served:
        assert served.get(GOVERNED).status_code == 401
        assert served.get(GOVERNED, headers=bearer("alpha")).status_code == 404


def test_without_any_key_only_this_machine_governs(served: Served) -> None:
    assert served.get(GOVERNED).status_code == 404
    for name in ("X-Forwarded-For", "Forwarded", "Origin", "Via"):
        refused = served.get(GOVERNED, headers={name: "127.0.0.1"})
        assert refused.status_code == 403
        assert "--admin-api-key-file" in refused.json()["error"]["message"]
        assert served.get("/v1/models", headers={name: "127.0.0.1"}).status_code == 200


@pytest.mark.parametrize(
    ("client", "status"),
    [
        (("127.0.0.1", 5), 200),
        (("127.8.8.8", 5), 200),
        (("::1", 5), 200),
        (("::ffff:127.0.0.1", 5), 200),
        (("10.0.0.7", 5), 403),
        (("::ffff:10.0.0.7", 5), 403),
        (("localhost.evil", 5), 403),
        (None, 403),
    ],
)
async def test_clients_of_other_machines_do_not_govern(client: Any, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/server_info", "headers": [], "client": client}
    await ApiKeys(app, [], [])(scope, None, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == status


def test_stored_responses_belong_to_their_key(keyed: Served) -> None:
    made = keyed.post("/v1/responses", {"input": "hi"}, headers=bearer("alpha")).json()
    path = f"/v1/responses/{made['id']}"
    for stranger in ("beta", "root"):
        assert keyed.get(path, headers=bearer(stranger)).status_code == 404
        assert keyed.http.delete(path, headers=bearer(stranger)).status_code == 404
        for route in ("/v1/responses", "/v1/responses/input_tokens"):
            body = {"input": "on", "previous_response_id": made["id"]}
            refused = keyed.post(route, body, headers=bearer(stranger))
            assert refused.json()["error"]["code"] == "previous_response_not_found"
    assert keyed.get(path, headers=bearer("alpha")).json()["id"] == made["id"]
    assert keyed.get(path, headers={"x-api-key": "alpha"}).status_code == 200
    body = {"input": "on", "previous_response_id": made["id"]}
    assert keyed.post("/v1/responses", body, headers=bearer("alpha")).status_code == 200


def test_head_is_answered_wherever_get_is(served: Served) -> None:
    for path in ("/v1/models", "/v1/models/org/tiny-moe", "/metrics", "/version", "/openapi.json"):
        get, head = served.get(path), served.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
        assert int(head.headers["content-length"]) > 0
    missing = served.http.head("/nope")
    assert (missing.status_code, missing.content) == (404, b"")
    wrong = served.http.head(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_tls(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tls = tls_files(tmp_path)
    with Served(frontend_config(checkpoint, tls=tls)) as served:
        assert served.url.startswith("https://")
        with httpx.Client(verify=False) as careless, httpx.Client() as careful:
            assert careless.get(f"{served.url}/livez").status_code == 200
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                careful.get(f"{served.url}/livez")
        trusting = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=tls.certfile))
        options: dict[str, Any] = {"api_key": "none", "http_client": trusting}
        with openai.OpenAI(base_url=f"{served.url}/v1", **options) as client:
            stream = client.completions.create(
                model="tiny", prompt=[5, 6], max_tokens=3, stream=True
            )
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        with socket.create_connection(("127.0.0.1", served.port), 5) as plain:
            plain.settimeout(5)
            plain.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP/1.1 200" not in plain.recv(1000)
        assert served.get("/livez").status_code == 200


PREFLIGHT = {
    "Origin": "https://chat.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-arch",
}


def test_no_web_page_may_call_unless_asked(served: Served) -> None:
    preflight = served.http.options(CHAT, headers=PREFLIGHT)
    assert preflight.status_code == 405
    answer = served.get("/v1/models", headers={"Origin": "https://chat.example"})
    for response in (preflight, answer):
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_named_pages_may_call(checkpoint: pathlib.Path) -> None:
    cors = CorsConfig(("https://chat.example",), False, ("*",), ("*",))
    with Served(frontend_config(checkpoint, cors=cors, api_keys=("alpha",))) as served:
        preflight = served.http.options(CHAT, headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = served.get("/v1/models", headers={"Origin": "https://chat.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
        other = {**PREFLIGHT, "Origin": "https://other.example"}
        assert served.http.options(CHAT, headers=other).status_code == 400


@pytest.fixture(scope="module")
def hurried(checkpoint: pathlib.Path) -> Iterator[Served]:
    """An answer may take 0.2 s, and a token takes 0.02 s."""
    with Served(frontend_config(checkpoint, request_timeout_s=0.2)) as served:
        for engine in served.engines:
            engine.step_s = 0.02
        yield served


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/messages", "/v1/responses"])
def test_an_answer_that_takes_too_long_is_an_error(hurried: Served, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 400, "prompt": "a", "messages": HELLO}
    del body["messages" if path == COMPLETIONS else "prompt"]
    if path == "/v1/responses":
        body = {"input": "hi", "max_output_tokens": 400}
    begun = time.monotonic()
    whole = hurried.post(path, body)
    assert 0.15 < time.monotonic() - begun < 3
    assert whole.status_code == 504
    assert whole.headers["x-should-retry"] == "false"
    assert "0.2 s" in whole.json()["error"]["message"]
    streamed = hurried.post(path, {**body, "stream": True})
    assert streamed.status_code == 200 and "0.2 s" in streamed.text
    assert "[DONE]" not in streamed.text and '"length"' not in streamed.text
    hurried.wait(lambda: hurried.num_running == 0)
    assert hurried.state.engine.num_open == 0


def test_clients_are_told_in_their_own_words(hurried: Served) -> None:
    before = len(hurried.arrivals)
    options: dict[str, Any] = {"api_key": "none", "max_retries": 2}
    with openai.OpenAI(base_url=f"{hurried.url}/v1", **options) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny", prompt="a", max_tokens=100)
    assert caught.value.code == "request_timeout"
    with anthropic.Anthropic(base_url=hurried.url, **options) as other:
        with pytest.raises(anthropic.APIStatusError) as met:
            other.messages.create(model="tiny", messages=HELLO, max_tokens=100)
    assert met.value.status_code == 504
    assert len(hurried.arrivals) == before + 2, "nobody has tried again"


def test_a_quick_answer_is_not_touched_by_the_limit(hurried: Served) -> None:
    assert hurried.complete(prompt="a", max_tokens=2)["choices"][0]["finish_reason"] == "length"
    assert hurried.stream(COMPLETIONS, prompt="a", max_tokens=2)[-1] == "[DONE]"


DEEP_PLACES: dict[str, tuple[int, Any]] = {
    # Levels above it, and a body with a value of some depth there.
    "unknown": (1, lambda deep: {"x": deep}),
    "metadata": (1, lambda deep: {"metadata": deep}),
    "template": (2, lambda deep: {"chat_template_kwargs": {"x": deep}}),
    "message": (3, lambda deep: {"messages": [{**HELLO[0], "x": deep}]}),
    "schema": (2, lambda deep: {"structured_outputs": {"json": {"x": deep}}}),
}


@pytest.mark.parametrize("place", DEEP_PLACES)
def test_depth_of_bodies(served: Served, place: str) -> None:
    num_above, fill = DEEP_PLACES[place]
    num_above += 1 if place == "schema" else 0
    for make in (lambda inner: {"a": inner}, lambda inner: [inner]):
        for depth, is_good in ((128, True), (129, False), (400, False)):
            deep: Any = 1
            for _ in range(depth - num_above):
                deep = make(deep)
            body = {"messages": HELLO, "max_tokens": 1, **fill(deep)}
            response = served.post(CHAT, body)
            if is_good:
                assert response.status_code in (200, 400), response.text
                assert "levels" not in response.text
            else:
                assert response.status_code == 400
                assert "128 levels" in response.json()["error"]["message"]


@pytest.mark.parametrize("character", ["x", "\x01", "é", "\U0001f600", "\\", '"', "\ud800"])
def test_error_bodies_stay_below_4_kb(character: str) -> None:
    text = character * 100_000
    error = ApiError(text, param=text)
    for body in (envelope(error), messages_envelope(error, "r" * 200)):
        assert MAX_MESSAGE_BYTES / 2 < len(body) < 4096
    short = ApiError("short" + character, param="p")
    assert len(envelope(short)) < 100


def test_refused_clients_are_told_to_come_as_fast_as_others_leave() -> None:
    rate = DrainRate()
    assert rate.retry_after_s(1, 100.0) == 1.0, "nothing is known yet"
    for end in range(10):
        rate.on_end(100.0 + end)
    # Ten ends in ten seconds: a place a second, each promised once.
    assert rate.retry_after_s(2, 110.0) == pytest.approx(2.0)
    assert rate.retry_after_s(1, 110.0) == pytest.approx(3.0)
    assert rate.retry_after_s(1, 111.0) == pytest.approx(3.1, abs=0.2)
    assert rate.retry_after_s(1000, 111.0) == MAX_RETRY_AFTER_S
    for end in range(100):
        rate.on_end(200.0 + end / 1000)
    assert rate.retry_after_s(1, 200.1) == pytest.approx(0.1, abs=0.02)


def test_full_queue_names_the_time_in_both_headers(checkpoint: pathlib.Path) -> None:
    config = frontend_config(checkpoint, max_num_seqs=1, max_num_queued_requests=1)
    with Served(config) as own, own.client() as client:
        own.complete(prompt="a", max_tokens=1)
        own.complete(prompt="a", max_tokens=1)
        for engine in own.engines:
            engine.step_s = 0.05
        open_streams = [
            client.completions.create(model="tiny", prompt="a", max_tokens=100, stream=True)
            for _ in range(3)
        ]
        own.wait(lambda: own.num_running == 3)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny", prompt="a")
        headers = caught.value.response.headers
        assert 100 <= int(headers["retry-after-ms"]) <= 1000 * int(headers["retry-after"]) <= 60_000
        for stream in open_streams:
            stream.close()
        own.wait(lambda: own.num_running == 0)
