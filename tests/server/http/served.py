"""A real front end on a loopback port, in a thread, with fake engines and a launcher's pipe."""

import asyncio
import contextlib
import json
import multiprocessing
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import openai
import uvloop

from moed.config.engine_config import EngineConfig
from moed.server.api.state import AppState
from moed.server.ended_requests import EndedRequest
from moed.server.frontend import Frontend
from moed.server.lifecycle import FrontendPlace
from moed.server.messages import Active, AddRequest, FromFrontend, ToFrontend, TokenOutput
from moed.server.wire import Wire
from tests.server.http.fake_engine import FakeEngine

_decoder = msgspec.msgpack.Decoder(FromFrontend)


class Served:
    """Use as a context; every wait is bounded."""

    def __init__(self, config: EngineConfig, *, ready: bool = True) -> None:
        self.config = config
        self._folder = tempfile.TemporaryDirectory(prefix="moed-test-")
        address = f"ipc://{self._folder.name}/engines"
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._socket.getsockname()[1]
        tls = config.server.tls
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        trust = ssl.create_default_context(cafile=None if tls is None else tls.certfile)
        limits = httpx.Limits(max_connections=200)
        self.http = httpx.Client(base_url=self.url, timeout=20, limits=limits, verify=trust)
        self.pipe, far_end = multiprocessing.Pipe()
        place = FrontendPlace(Wire(address), 0, 0)
        self._frontend = Frontend(config, self._socket, place, far_end)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = ready
        self.arrivals: list[AddRequest] = []
        self.engines = [
            FakeEngine(address, rank, config.model.vocab_size, self.arrivals)
            for rank in range(config.parallel.data_parallel_size)
        ]

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._frontend.serve())
        except BaseException as error:
            self.error = error

    def __enter__(self) -> "Served":
        self._thread.start()
        for engine in self.engines:
            engine.start()
        if self._ready:
            self.make_ready()
        return self

    @contextlib.contextmanager
    def seen_by_template(self) -> Iterator[dict[str, Any]]:
        """What the chat template is given while the context is open: messages, tools, options."""
        seen: dict[str, Any] = {}
        template = self.state.tools.chat_template
        assert template is not None
        render = template.render

        def spy(messages: Any, tools: Any, **options: Any) -> str:
            seen.update(messages=messages, tools=tools, **options)
            return render(messages, tools, **options)

        template.render = spy  # type: ignore[method-assign]
        try:
            yield seen
        finally:
            del template.render

    @property
    def request_listeners(self) -> list[Callable[[EndedRequest], None]]:
        """Called in the front end's thread with each request that has ended."""
        return self._frontend._engine.on_request_end

    def make_ready(self) -> None:
        for engine in self.engines:
            engine.become_ready()
        self.wait(lambda: self.get("/readyz").status_code == 200)

    def __exit__(self, *exception: object) -> None:
        self.http.close()
        self.pipe.close()
        self._thread.join(10)
        for engine in self.engines:
            engine.stop()
        self._socket.close()
        self._folder.cleanup()
        assert not self._thread.is_alive(), "the front end did not stop"
        assert self.error is None or isinstance(exception[1], AssertionError), self.error

    @property
    def state(self) -> AppState:
        """The front end's own state, for what cannot be seen from outside."""
        return self._frontend._state

    def tell(self, message: ToFrontend) -> None:
        self.pipe.send_bytes(msgspec.msgpack.encode(message))

    def hear(self, timeout_s: float = 5.0) -> FromFrontend:
        """The next message to the launcher, but for `Active`, which follows requests."""
        while True:
            assert self.pipe.poll(timeout_s), "the front end said nothing"
            message = _decoder.decode(self.pipe.recv_bytes())
            if not isinstance(message, Active):
                return message

    def wait(self, is_true: Callable[[], bool], timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert self.error is None, self.error
            assert time.monotonic() < deadline, "it did not become true in time"
            time.sleep(0.01)

    def wait_stopped(self, timeout_s: float = 5.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, **body: Any) -> Any:
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, **body: Any) -> Any:
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **body: Any) -> list[Any]:
        """The events of a streamed answer, `[DONE]` as that string."""
        return list(self.events(path, **body))

    def events(self, path: str, **body: Any) -> Iterator[Any]:
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    payload = line.removeprefix("data: ")
                    yield payload if payload == "[DONE]" else json.loads(payload)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20, **options
        )

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20, **options
        )

    def fail_all(self) -> None:
        """Every running request ends with an error of its engine."""
        for engine in self.engines:
            for request_id, (request, _, done) in list(engine._running.items()):
                engine.inject(
                    TokenOutput(
                        request_id=request_id,
                        epoch=request.epoch,
                        output_index=done,
                        token_ids=[],
                        finish_reason="error",
                    )
                )

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self.engines)

    @property
    def last_request(self) -> AddRequest:
        """The request that reached an engine last."""
        return self.arrivals[-1]
