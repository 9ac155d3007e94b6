"""What the front end costs: streamed events per second against a bare Starlette app.

    python -m tests.benchmarks.frontend [--clients 64] [--tokens 256] [--rounds 3]

One front-end process with engines that only echo (a process of their own), and a bare app on the
same HTTP server and event loop that sends the same bytes; 64 clients each, in turns, in one run.
The goal is half of the bare app's rate. Then: how long `/livez` takes while a prompt of 1 MB is
tokenized (goal: a median of 20 under 100 ms). `--profile FILE` writes the front end's cProfile.
"""

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pathlib
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import httpx
import psutil
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from moed.config.engine_config import EngineConfig
from moed.server.frontend import Frontend
from moed.server.garbage import look_seldom
from moed.server.lifecycle import FrontendPlace
from moed.server.wire import Wire
from tests.server.http import fake_engine
from tests.server.http.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.server.http.configs import frontend_config

PATH = "/v1/completions"
START_S = 60.0
LONG_CONTEXT = 4_000_000
GOAL_SHARE, GOAL_LIVE_S = 0.5, 0.1


def serve_frontend(
    config: EngineConfig, http: socket.socket, address: str, pipe: Connection, profile: str
) -> None:
    """Target of the front end's process."""
    look_seldom()
    frontend = Frontend(config, http, FrontendPlace(Wire(address), 0, 0), pipe)
    # By CPU time, so that what others take of the machine is in nobody's account.
    profiler = cProfile.Profile(time.thread_time)
    if profile:
        profiler.enable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(frontend.serve())
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)


def serve_engine(address: str, vocab_size: int, pipe: Connection) -> None:
    """Target of the engine's process: one rank that repeats prompts as fast as it can."""
    fake_engine.MAX_MODEL_LEN = LONG_CONTEXT
    fake_engine.NUM_BLOCKS = LONG_CONTEXT // fake_engine.BLOCK_SIZE
    engine = fake_engine.FakeEngine(address, 0, vocab_size, [])
    engine.expert_rows, engine.load_interval_s = [1] * 8, 1.0
    engine.start()
    engine.become_ready()
    pipe.poll(None)
    engine.stop()


def serve_bare(http: socket.socket, events: list[bytes]) -> None:
    """Target of the bare app's process."""

    async def stream() -> AsyncIterator[bytes]:
        for event in events:
            yield event

    async def answer(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(stream(), media_type="text/event-stream")

    app = Starlette(routes=[Route(PATH, answer, methods=["POST"])])
    config = uvicorn.Config(app, http="httptools", loop="uvloop", lifespan="off", log_config=None)
    config.access_log = False
    uvicorn.Server(config).run(sockets=[http])


async def read_stream(port: int, request: bytes) -> tuple[int, bytes]:
    """Number of events of one answer, and its bytes; the client does as little as it can."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    writer.write(request)
    parts = []
    while part := await reader.read(2**20):
        parts.append(part)
    writer.close()
    answer = b"".join(parts)
    assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
    assert answer.count(b"[DONE]") == 1, answer[-500:]
    return answer.count(b"data: "), answer


def post(body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def measure(port: int, request: bytes, clients: int, pid: int) -> tuple[float, float]:
    """Events per second of all clients together, and microseconds of the server's CPU an event."""
    process = psutil.Process(pid)
    used = sum(process.cpu_times()[:2])
    started = time.perf_counter()
    answers = await asyncio.gather(*(read_stream(port, request) for _ in range(clients)))
    wall_s = time.perf_counter() - started
    num_events = sum(num for num, _ in answers)
    used = sum(process.cpu_times()[:2]) - used
    return num_events / wall_s, 1e6 * used / num_events


def wait_ready(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise RuntimeError("the front end was not ready in time")


def live_while_tokenizing(port: int) -> float:
    """Median seconds of 20 answers of `/livez` while prompts of 1 MB are tokenized."""
    url = f"http://127.0.0.1:{port}"
    is_over = threading.Event()

    def tokenize() -> None:
        text = "The quick brown fox jumps over the lazy dog. " * (2**20 // 45)
        with httpx.Client(timeout=60) as client:
            while not is_over.is_set():
                client.post(f"{url}/tokenize", json={"prompt": text}).raise_for_status()

    worker = threading.Thread(target=tokenize)
    worker.start()
    time.sleep(0.2)
    seconds = []
    with httpx.Client() as client:
        for _ in range(20):
            started = time.perf_counter()
            client.get(f"{url}/livez").raise_for_status()
            seconds.append(time.perf_counter() - started)
            time.sleep(0.05)
    is_over.set()
    worker.join()
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", default="", help="file for the front end's cProfile")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="moed-bench-") as folder:
        checkpoint = write_checkpoint(pathlib.Path(folder) / "tiny", byte_level_tokenizer())
        config = frontend_config(
            checkpoint, ranks=1, max_num_seqs=args.clients, max_request_bytes=2**22
        )
        address = f"ipc://{folder}/engines"
        http, bare_http = (socket.create_server(("127.0.0.1", 0), backlog=512) for _ in range(2))
        port, bare_port = http.getsockname()[1], bare_http.getsockname()[1]
        pipe, far_pipe = spawn.Pipe()
        engine_pipe, far_engine_pipe = spawn.Pipe()
        frontend = spawn.Process(
            target=serve_frontend, args=(config, http, address, far_pipe, args.profile)
        )
        engine = spawn.Process(
            target=serve_engine, args=(address, config.model.vocab_size, far_engine_pipe)
        )
        processes = [frontend, engine]
        for process in processes:
            process.start()
        far_pipe.close()
        try:
            wait_ready(port)
            body = {"prompt": [65, 66], "max_tokens": args.tokens, "stream": True}
            request = post(body)
            _, answer = asyncio.run(read_stream(port, request))
            events = [b"data: " + part for part in split_events(answer)]
            bare = spawn.Process(target=serve_bare, args=(bare_http, events))
            bare.start()
            processes.append(bare)
            time.sleep(3)
            shares: list[float] = []
            costs: list[float] = []
            print("          events/s   us of CPU an event")
            for _ in range(args.rounds):
                own = asyncio.run(measure(port, request, args.clients, frontend.pid or 0))
                plain = asyncio.run(measure(bare_port, request, args.clients, bare.pid or 0))
                shares.append(own[0] / plain[0])
                costs.append(plain[1] / own[1])
                print(f"moed      {own[0]:8.0f} {own[1]:10.1f}")
                print(f"bare app  {plain[0]:8.0f} {plain[1]:10.1f}   share {shares[-1]:.2f}")
            share, cost = statistics.median(shares), statistics.median(costs)
            live_s = live_while_tokenizing(port)
            print(f"share of the bare app: {share:.2f} (goal {GOAL_SHARE})")
            print(f"the same by CPU time, which others on the machine do not change: {cost:.2f}")
            print(
                f"/livez while tokenizing: {1000 * live_s:.1f} ms (goal {1000 * GOAL_LIVE_S:.0f})"
            )
        finally:
            pipe.close()
            engine_pipe.send(None)
            frontend.join(10)
            for process in processes:
                process.terminate()
                process.join(10)


def split_events(answer: bytes) -> list[bytes]:
    """Payloads of the events, each with the empty line behind it, out of a chunked body."""
    parts = answer.split(b"data: ")[1:]
    return [part[: part.index(b"\n\n") + 2] for part in parts]


if __name__ == "__main__":
    main()
