"""Connections: uvicorn's protocol, with bounds on the head of a request, errors in the envelope,
and no loss of a body that comes with an offer to change the protocol.
"""

import asyncio
import logging
import socket
import struct

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from moed.server.api.errors import ApiError, HeadTimeout, HeadTooLarge, InvalidRequest, envelope

logger = logging.getLogger(__name__)

# Far above what clients and proxies send, and below what a parser should collect for one peer.
MAX_HEAD_BYTES = 64 * 1024
# From the first byte of a connection to the end of its first head; then between two requests.
HEAD_TIMEOUT_S = 60.0
TLS_HANDSHAKE = b"\x16\x03"
# What a refused offer to change the protocol leaves out when the request is read again.
UPGRADE_HEADERS = frozenset((b"upgrade", b"connection", b"http2-settings"))


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    Some HTTP/1.1 clients offer HTTP/2 with every request (`Upgrade: h2c`). A server may go on in
    HTTP/1.1, but the parser takes the body for the new protocol's: the request is read again
    without the offer.
    """

    _is_in_head = True
    _num_heads = 0
    """Complete ones."""
    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    stall_timeout_s: float
    """How long the client may read nothing of what waits for it."""

    @classmethod
    def patient_for(cls, stall_timeout_s: float) -> "type[HttpProtocol]":
        """The class, for a server whose clients may stop reading for that long."""
        return type(cls.__name__, (cls,), {"stall_timeout_s": stall_timeout_s})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More waits for the client than the transport likes: answers wait until it reads."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        position = self._num_heads, self._is_in_head
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_again(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            is_tls = position == (0, True) and data.startswith(TLS_HANDSHAKE)
            hint = "it is TLS, and this port speaks plain http://" if is_tls else error
            self.send_400_response(f"this is no valid HTTP request: {hint}")
            return
        if not self._is_in_head:
            return
        if position == (self._num_heads, True):
            # All of it, and no end yet.
            self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                HeadTooLarge(
                    f"the request's headers are larger than {MAX_HEAD_BYTES} bytes, the most that "
                    "this server takes"
                )
            )
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._start_head_timer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(msg, code="invalid_http"))

    # Parser callbacks ----------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_head_timer()
        self._is_in_head, self._num_head_bytes = False, 0
        self._num_heads += 1
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_head = True
        super().on_message_complete()

    # ---------------------------------------------------------------------------------------------

    def _read_again(self, rest: bytes) -> None:
        """The head once more without its offer, and what follows it, by a parser of its own."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("this server is no proxy: CONNECT has no meaning here")
            return
        lines = [method + b" " + self.url + b" HTTP/1.1"]
        lines += [
            name + b": " + value for name, value in self.headers if name not in UPGRADE_HEADERS
        ]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_reader(self) -> None:
        self._stop_stall_timer()
        num_unread = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(
            self.stall_timeout_s, self._on_stall_timeout, num_unread
        )

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _on_stall_timeout(self, num_unread_before: int) -> None:
        if self.transport.get_write_buffer_size() < num_unread_before:
            self._watch_reader()
            return
        self._stall_timer = None
        logger.warning(
            "a client was cut off: it has read nothing of its answer for %g s "
            "(slow_reader_timeout)",
            self.stall_timeout_s,
        )
        self._drop()

    def _drop(self) -> None:
        """With what lies in the kernel for a client that reads nothing, and so would stay there."""
        if (connection := self.transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._is_answering:
            self._start_head_timer()
        elif self._num_head_bytes:
            self._refuse(HeadTimeout(f"the request did not arrive within {HEAD_TIMEOUT_S:g} s"))
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; only close where that would land inside another answer."""
        self._stop_head_timer()
        logger.info("a connection was refused: %s", error.message)
        if not (self._is_answering and self.cycle.response_started):
            body = envelope(error)
            self.transport.write(
                STATUS_LINE[error.status]
                + b"content-type: application/json\r\n"
                + b"content-length: %d\r\n" % len(body)
                + b"connection: close\r\n\r\n"
                + body
            )
        self.transport.close()
