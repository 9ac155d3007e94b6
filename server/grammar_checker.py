"""Grammars of requests, tried out before any engine sees them.

A process of its own tries them, started with the first one: whatever a grammar costs, it costs no
other request anything, and a try that takes too long or too much memory ends with that process.
"""

import asyncio
import contextlib
import hashlib
import math
import multiprocessing
import resource
import signal
import time
from collections import OrderedDict
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import msgspec
import psutil
from llguidance import LLTokenizer

from moed.config.engine_config import ModelConfig
from moed.server.grammar_library import (
    GrammarError,
    check_state,
    compile_grammar,
    make_vocabulary,
    to_llguidance,
)
from moed.server.lifecycle import die_with_parent

START_S = 60.0
# Until the process is ended.
TRY_S = 3.0
# Of one core. An engine compiles the same grammar again, beside its step.
MAX_COMPILE_S = 0.3
MAX_MEMORY_BYTES = 2**30
MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_REMEMBERED = 128
# How long a verdict holds that may be a busy machine's.
BAD_LUCK_S = 60.0


class Question(msgspec.Struct, frozen=True):
    """A grammar as the client gave it; see `to_llguidance`."""

    kind: str
    source: str
    outer: str = ""
    calls: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """One of the two is None."""

    grammar: str | None
    """For the engines."""
    error: str | None


class GrammarChecker:
    """Use from one event loop; `close` it."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._lock = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()
        self._tries: dict[bytes, _Try] = {}

    async def check(self, question: Question) -> str:
        """The grammar for the engines. Raises `GrammarError`."""
        size = len(question.source) + len(question.calls)
        if size > MAX_GRAMMAR_CHARACTERS:
            raise GrammarError(
                f"it has {size} characters; at most {MAX_GRAMMAR_CHARACTERS} are taken"
            )
        encoded = msgspec.msgpack.encode(question)
        key = hashlib.sha256(encoded).digest()
        verdict, known_until = self._verdicts.get(key, (None, 0.0))
        if verdict is None or time.monotonic() > known_until:
            verdict = await self._wait(key, encoded)
        if verdict.grammar is None:
            raise GrammarError(verdict.error or "")
        return verdict.grammar

    async def _wait(self, key: bytes, question: bytes) -> Verdict:
        """Join the try of this grammar, or start one. It goes on when who waits is cancelled: the
        process can be asked one thing at a time.
        """
        current = self._tries.get(key)
        if current is None:
            current = self._tries[key] = _Try()
            current.task = asyncio.create_task(self._try(key, question, current))
        current.num_waiting += 1
        assert current.task is not None
        try:
            return await asyncio.shield(current.task)
        finally:
            current.num_waiting -= 1

    async def _try(self, key: bytes, question: bytes, own: "_Try") -> Verdict:
        try:
            async with self._lock:
                if not own.num_waiting:
                    return Verdict(None, "nobody waits for it")
                verdict, is_final = await asyncio.to_thread(self._ask, question)
                remembered_s = math.inf if is_final else BAD_LUCK_S
                self._verdicts[key] = verdict, time.monotonic() + remembered_s
                if len(self._verdicts) > MAX_REMEMBERED:
                    self._verdicts.popitem(last=False)
                return verdict
        finally:
            del self._tries[key]

    def _ask(self, question: bytes) -> tuple[Verdict, bool]:
        """The verdict, and False when it may be the machine's fault."""
        for _ in range(2):
            pipe = self._pipe
            if self._process is None or pipe is None or not self._process.is_alive():
                pipe = self._start()
            try:
                pipe.send_bytes(question)
                if pipe.poll(TRY_S):
                    return msgspec.msgpack.decode(pipe.recv_bytes(), type=Verdict), True
            except (EOFError, OSError):
                # Whoever ended it, it may have been for another reason: once more.
                self.close()
                continue
            self.close()
            return Verdict(None, f"it takes more than {TRY_S:g} s to compile"), False
        return Verdict(None, "it takes too much memory"), False

    def _start(self) -> Connection:
        self.close()
        spawn = multiprocessing.get_context("spawn")
        pipe, far_end = spawn.Pipe()
        process = spawn.Process(target=run_checker, args=(self._model, far_end), daemon=True)
        process.start()
        self._process, self._pipe = process, pipe
        far_end.close()
        # Its first message says that it is ready.
        with contextlib.suppress(EOFError, OSError):
            if pipe.poll(START_S):
                pipe.recv_bytes()
        return pipe

    def close(self) -> None:
        """End the process; a later check starts it anew. Safe to call twice, from any thread."""
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if process is not None:
            process.kill()
            process.join()
            process.close()
        if pipe is not None:
            pipe.close()


@dataclass(eq=False)
class _Try:
    """A grammar that is being tried, or will be."""

    task: "asyncio.Task[Verdict] | None" = None
    num_waiting: int = 0


def run_checker(model: ModelConfig, pipe: Connection) -> None:
    """Target of the process: answers questions until its parent ends."""
    die_with_parent()
    # A terminal's Ctrl-C reaches every process; the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    error, vocabulary = "", None
    try:
        vocabulary = make_vocabulary(model)
    except GrammarError as reason:
        error = str(reason)
    allowed = psutil.Process().memory_info().vms + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            question = msgspec.msgpack.decode(pipe.recv_bytes(), type=Question)
            verdict = Verdict(None, error)
            if vocabulary is not None:
                verdict = try_grammar(vocabulary, question)
            pipe.send_bytes(msgspec.msgpack.encode(verdict))


def try_grammar(vocabulary: LLTokenizer, question: Question) -> Verdict:
    """Compile it, and look for its first tokens."""
    started = time.process_time()
    try:
        grammar = to_llguidance(question.kind, question.source, question.outer, question.calls)
        matcher = compile_grammar(vocabulary, grammar)
        matcher.compute_bitmask()
        check_state(matcher)
    except GrammarError as error:
        return Verdict(None, str(error))
    except (MemoryError, RecursionError):
        return Verdict(None, "it is too complex")
    spent = time.process_time() - started
    if spent > MAX_COMPILE_S:
        return Verdict(
            None, f"it takes {spent:.1f} s to compile; at most {MAX_COMPILE_S:g} s may go"
        )
    return Verdict(grammar, None)
