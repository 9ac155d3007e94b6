"""What arrives on a connection before it is a request: broken, endless, stalled, or an offer to
change the protocol.
"""

import json
import socket
import time
from typing import Any

import pytest

from moed.server.api import http_protocol
from tests.server.http.served import Served

BODY = b'{"prompt": "a", "max_tokens": 1}'


def talk(served: Served, *parts: bytes, timeout_s: float = 10.0) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=timeout_s) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(0.02)
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionError:
            pass  # closed while there was more to send
        return received


def answer(response: bytes) -> tuple[int, Any]:
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def post(*headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: x", *headers]
    return b"\r\n".join(lines) + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY)


H2C = (
    b"Connection: Upgrade, HTTP2-Settings",
    b"Upgrade: h2c",
    b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA",
)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_offer_of_another_protocol_is_passed_over_and_the_body_kept(
    served: Served, parts: int
) -> None:
    # Connection: close is in the second request.
    request = post(*H2C) + BODY + post(b"Connection: close") + BODY
    step = -(-len(request) // parts)
    pieces = [request[start : start + step] for start in range(0, len(request), step)]
    response = talk(served, *pieces)
    assert response.count(b"HTTP/1.1 200 OK") == 2, response


def test_offer_without_a_body_and_with_a_chunked_one(served: Served) -> None:
    probe = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n"
        b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    )
    response = talk(served, probe, chunked, post(b"Connection: close") + BODY)
    assert response.count(b"HTTP/1.1 200 OK") == 3, response


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"BREW / HTTP/1.1\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_broken_requests_get_the_envelope(served: Served, garbage: bytes) -> None:
    status, body = answer(talk(served, garbage))
    assert status == 400
    assert body["error"]["code"] in ("invalid_http", "unknown_url"), body
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_client_that_speaks_tls_is_told_in_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    talk(served, b"\x16\x03\x01\x02\x00\x01\x00")
    assert "plain http://" in caplog.text


def test_garbage_behind_a_request_does_not_land_in_its_answer(served: Served) -> None:
    for engine in served.engines:
        engine.step_s = 0.05
    body = b'{"prompt": "a", "max_tokens": 20, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        connection.sendall(head + body)
        received = connection.recv(65536)
        connection.sendall(b"\x00garbage")
        while chunk := connection.recv(65536):
            received += chunk
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b"invalid_http" not in received


def test_long_body_that_comes_with_its_head_is_no_long_head(served: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "x" * 200_000: 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    last = b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n"
    response = talk(served, (head + body) * 3 + last)
    assert response.count(b"HTTP/1.1 200 OK") == 4


@pytest.mark.parametrize("head", [b"GET /livez HTTP/1.1\r\nX-A: ", b"GET /"], ids=["header", "url"])
def test_endless_head_is_refused(served: Served, head: bytes) -> None:
    status, body = answer(talk(served, head, *[b"a" * 10_000] * 8))
    assert status == 431
    assert str(http_protocol.MAX_HEAD_BYTES) in body["error"]["message"]


def test_connections_that_stall_are_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    assert talk(served) == b""
    status, body = answer(talk(served, b"GET /livez HTTP/1.1\r\nHo"))
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    # An answer that takes longer than a head may is not cut.
    for engine in served.engines:
        engine.step_s = 0.6
    response = talk(served, post(b"Connection: close") + BODY)
    assert response.startswith(b"HTTP/1.1 200 OK"), response
