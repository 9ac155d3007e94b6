"""Ranks that stay up and run function after function of the tests, joined in a gloo group."""

import importlib.util
import inspect
import multiprocessing
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from moed.dist.launch import LaunchEnvironment
from moed.server.lifecycle import describe_exit, die_with_parent
from tests.server.engine.configs import engine_config

START_S = 180.0  # torch takes long to import on a busy machine
JOB_S = 60.0
# After one rank's failure: how long the others may take to say what they got from it.
GRACE_S = 10.0


class WorkersFailed(Exception):
    """A job did not return on every rank."""

    def __init__(self, errors: dict[int, str], results: dict[int, Any]) -> None:
        super().__init__("\n".join(f"rank {rank}: {errors[rank]}" for rank in sorted(errors)))
        self.errors = errors
        """By rank: a traceback, or how the process ended."""
        self.results = results
        """By rank, of those that did return."""


class WorkerPool:
    """`world_size` processes. Every wait is bounded; a failed job closes the pool."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.is_closed = False
        self._processes = []
        self._pipes: list[Connection] = []
        spawn = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0), backlog=world_size + 8) as store_socket:
            for rank in range(world_size):
                environment = LaunchEnvironment(
                    rank=rank,
                    world_size=world_size,
                    local_rank=rank,
                    local_world_size=world_size,
                    store_host="127.0.0.1",
                    store_port=store_socket.getsockname()[1],
                    launcher="moed",
                )
                pipe, far_end = spawn.Pipe()
                own_socket = store_socket if rank == 0 else None
                process = spawn.Process(
                    target=serve, args=(environment, own_socket, far_end), daemon=True
                )
                process.start()
                far_end.close()
                self._processes.append(process)
                self._pipes.append(pipe)
        self._collect(START_S)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(groups, *args)` on every rank; its results by rank.

        `function` stands at the top level of its file; `args` and results can be pickled. Raises
        `WorkersFailed`.
        """
        assert not self.is_closed, "a job has failed here: ask for another pool"
        path = inspect.getsourcefile(function)
        address = (function.__module__, path, function.__qualname__)
        for pipe in self._pipes:
            pipe.send(address)
            pipe.send_bytes(pickle.dumps(args))
        return self._collect(JOB_S)

    def _collect(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        errors: dict[int, str] = {}
        results: dict[int, Any] = {}
        waiting = set(range(self.world_size))
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            wait([self._pipes[rank] for rank in waiting], remaining)
            for rank in sorted(waiting):
                if not self._pipes[rank].poll():
                    continue
                waiting.remove(rank)
                try:
                    is_error, value = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_S)
                    is_error, value = True, describe_exit(self._processes[rank].exitcode)
                (errors if is_error else results)[rank] = value
                if is_error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        errors |= dict.fromkeys(waiting, "no answer in time")
        if errors:
            self.close()
            raise WorkersFailed(errors, results)
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        if self.is_closed:
            return
        self.is_closed = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(GRACE_S)
            process.close()


def serve(
    environment: LaunchEnvironment, store_socket: socket.socket | None, pipe: Connection
) -> None:
    """Target of a rank's process: join, then run jobs until the pipe closes or one fails."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import torch

        from moed.dist.groups import init_groups
        from moed.dist.rendezvous import open_store

        torch.set_num_threads(1)
        parallel = engine_config(ranks=environment.world_size).parallel
        listen_fd = None if store_socket is None else store_socket.detach()
        store = open_store(environment, listen_fd, parallel.distributed_timeout_s)
        groups = init_groups(environment, parallel, store, None)
        pipe.send((False, None))
        while True:
            try:
                address = pipe.recv()
            except EOFError:
                return
            function = find(*address)
            result = function(groups, *pickle.loads(pipe.recv_bytes()))
            pipe.send((False, result))
    except Exception:
        # The process ends with this, so that the other ranks do not wait for it.
        pipe.send((True, traceback.format_exc()))


def find(module_name: str, path: str, qualified_name: str) -> Callable[..., Any]:
    """Look up a function of a file, which is loaded under its name in the test process."""
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Any = sys.modules[module_name]
    for name in qualified_name.split("."):
        found = getattr(found, name)
    function: Callable[..., Any] = found
    return function
