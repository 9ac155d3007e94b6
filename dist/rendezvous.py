"""How ranks find each other and compare what they are, through the store, before any collective.

Each rank writes who it is; then each reads the others. What differs, what fails and who does not
come is said on every rank, in one sentence.
"""

import contextlib
import datetime
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from moed.config.errors import MoedError, PeerLost, RankMismatch
from moed.dist.launch import LaunchEnvironment

logger = logging.getLogger(__name__)

POLL_S = 0.1
# Once all have come, until rank 0 has seen it too.
CONFIRM_S = 0.01
REMIND_S = 10.0
CONNECT_S = 2.0
# What differs is told to ranks that come a little later too, before the store may go.
TELL_S = 15.0
MAX_NAMED_KEYS = 3
# Of torchrun's own store, which may outlive its workers and keeps what they have said there.
NUM_LAUNCHES_KEY = "moed/launches"
MET_KEY = "moed/met"
FAILURE_KEY = "moed/failure"
TOLD_KEY = "moed/told"


class Introduction(msgspec.Struct, frozen=True):
    """What a rank says of itself."""

    host: str
    """`host_identity()`"""
    name: str
    """The host's, for people."""
    items: dict[str, str]
    """What must be equal on all ranks."""
    told: dict[str, str]
    """From rank 0: what all others need to know."""


class Failure(msgspec.Struct, frozen=True):
    """Why the ranks will not meet: the first one that is written counts."""

    error: str
    is_mismatch: bool
    num_told: int | None = None
    """How many ranks are there to be told; None: all of them are, or will be."""


@dataclass(frozen=True)
class Node:
    """One host, and the ranks on it."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Meeting:
    """What the ranks know once all have come."""

    environment: LaunchEnvironment
    """With the local ranks as found by host."""
    nodes: tuple[Node, ...]
    told: Mapping[str, str]
    """By rank 0."""

    @property
    def node(self) -> int:
        """Index of the own node."""
        rank = self.environment.rank
        return next(index for index, node in enumerate(self.nodes) if rank in node.ranks)


_introduction = msgspec.json.Decoder(Introduction)
_failure = msgspec.json.Decoder(Failure)


class _LaunchOver(Exception):
    """The ranks of a newer launch meet elsewhere."""


def open_store(environment: LaunchEnvironment, listen_fd: int | None, timeout_s: float) -> Store:
    """The store of this launch. `listen_fd`: on rank 0 of our own launcher, its bound socket; else
    None. Raises `PeerLost` when nobody answers in time.
    """
    return _open_store(environment, listen_fd, timeout_s)[0]


def _open_store(
    environment: LaunchEnvironment, listen_fd: int | None, timeout_s: float
) -> tuple[Store, Callable[[], None]]:
    """As `open_store`, and what raises `_LaunchOver` once this store is not the one any more."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if environment.rank != 0:
        _await_port(environment, timeout_s)
    with _store_errors(environment):
        if environment.launcher == "torchrun":
            # The agent's, or else that of rank 0.
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
            return _newest_launch(store, environment, timeout_s)
        store = _within(
            timeout_s,
            lambda: TCPStore(
                environment.store_host,
                environment.store_port,
                environment.world_size,
                environment.rank == 0,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listen_fd,
            ),
        )
        return store, lambda: None


def _newest_launch(
    store: Store, environment: LaunchEnvironment, timeout_s: float
) -> tuple[Store, Callable[[], None]]:
    """The part of torchrun's store that rank 0 has begun and this rank has not been in: what tells
    one start of the workers from another there is not the same on all nodes.
    """
    started, rank, seen = time.monotonic(), environment.rank, 0
    if rank == 0:
        seen = store.add(NUM_LAUNCHES_KEY, 1)
        return PrefixStore(f"launch-{seen}", store), lambda: None
    reminder = Reminder(environment)
    while True:
        newest = store.add(NUM_LAUNCHES_KEY, 0)
        if newest > seen and store.add(f"moed/launch-{newest}/rank-{rank}", 1) == 1:
            break
        seen = newest
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise PeerLost(
                f"rank 0 did not come within {timeout_s:g} s: see the log of the first node, or "
                "start it; --rendezvous-timeout waits longer"
            )
        reminder.say("waiting for rank 0", waited)
        time.sleep(POLL_S)

    def check() -> None:
        if store.add(NUM_LAUNCHES_KEY, 0) > newest:
            raise _LaunchOver

    return PrefixStore(f"launch-{newest}", store), check


def _within(timeout_s: float, connect: Callable[[], Store]) -> Store:
    """`connect()`, which has no bound of its own where something listens and says nothing. Raises
    `RuntimeError` for that.
    """
    results: list[Store | Exception] = []

    def work() -> None:
        try:
            results.append(connect())
        except Exception as error:
            results.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(timeout_s)
    if not results:
        raise RuntimeError(f"no answer within {timeout_s:g} s")
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _await_port(environment: LaunchEnvironment, timeout_s: float) -> None:
    """Until the first node answers: the store's own attempts would say nothing to a person."""
    host, port = environment.store_host, environment.store_port
    started = time.monotonic()
    reminder = Reminder(environment)
    while True:
        try:
            socket.create_connection((host, port), CONNECT_S).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise PeerLost(
                f"the first node did not answer at {host} port {port} for {timeout_s:g} s "
                f"({reason}): check that it runs, what its log says, and that this is its address"
            )
        reminder.say(f"waiting for the first node at {host} port {port}: {reason}", waited)
        time.sleep(POLL_S)


class Reminder:
    """Says every `REMIND_S`, on one rank of each node, what is waited for."""

    def __init__(self, environment: LaunchEnvironment) -> None:
        self._is_speaker = environment.local_rank == 0
        self._num_said = 0

    def say(self, text: str, waited_s: float) -> None:
        if self._is_speaker and waited_s >= (self._num_said + 1) * REMIND_S:
            self._num_said += 1
            logger.warning("%s (%d s so far)", text, int(waited_s))


@contextlib.contextmanager
def _store_errors(environment: LaunchEnvironment) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        reason = str(error).split("\n")[0][:200]
        raise PeerLost(
            f"the store of the first node, {environment.store_host} port {environment.store_port}, "
            f"does not answer as expected: most likely that node has ended, and its log says why, "
            f"or something else listens there. Reason: {reason}"
        ) from error


def find_others(
    environment: LaunchEnvironment,
    listen_fd: int | None,
    own: Introduction,
    timeout_s: float,
    check: Callable[[], None] | None,
) -> tuple[Store, Meeting]:
    """`open_store`, and `meet` there."""
    while True:
        store, check_launch = _open_store(environment, listen_fd, timeout_s)

        def check_both(check_launch: Callable[[], None] = check_launch) -> None:
            check_launch()
            if check is not None:
                check()

        with contextlib.suppress(_LaunchOver):
            return store, meet(store, environment, own, timeout_s, check_both)


def meet(
    store: Store,
    environment: LaunchEnvironment,
    own: Introduction,
    timeout_s: float,
    check: Callable[[], None] | None,
) -> Meeting:
    """Wait for all ranks, and compare their items while they come. `check` is called meanwhile, and
    raises to give up.

    Raises `RankMismatch`, on every rank alike, for what differs, `PeerLost` for a rank that failed
    before or does not come in time.
    """
    with _store_errors(environment):
        everyone = _Waiting(store, environment, own, check).run(timeout_s)
    nodes = nodes_of([everyone[rank] for rank in range(environment.world_size)])
    here = next(node.ranks for node in nodes if environment.rank in node.ranks)
    found = replace(
        environment, local_rank=here.index(environment.rank), local_world_size=len(here)
    )
    return Meeting(found, nodes, everyone[0].told)


def nodes_of(introductions: Sequence[Introduction]) -> tuple[Node, ...]:
    """The hosts of ranks 0, 1, …, in the order of their first ranks."""
    by_host: dict[str, list[int]] = {}
    for rank, introduction in enumerate(introductions):
        by_host.setdefault(introduction.host, []).append(rank)
    return tuple(Node(introductions[ranks[0]].name, tuple(ranks)) for ranks in by_host.values())


def tell_failure(store: Store, who: str, num_ranks: int, error: MoedError) -> None:
    """Let all ranks that wait know why `who`, `num_ranks` of them, does not come."""
    with contextlib.suppress(RuntimeError, dist.DistError):
        _write_failure(store, Failure(f"{who} failed: {error}", is_mismatch=False))
        store.add(TOLD_KEY, num_ranks)


def _write_failure(store: Store, failure: Failure) -> Failure:
    """Returns the one that counts."""
    text = msgspec.json.encode(failure).decode()
    return _failure.decode(store.compare_set(FAILURE_KEY, "", text))


def differences(own_rank: int, own: Introduction, rank: int, other: Introduction) -> str:
    """One sentence with each key that differs and both values; empty when nothing does."""
    found = []
    for key in sorted({*own.items, *other.items}):
        values = [(own_rank, own), (rank, other)]
        texts = [
            f"rank {number} on {one.name}: {one.items.get(key, '(missing)')}"
            for number, one in sorted(values, key=lambda value: value[0])
        ]
        if own.items.get(key) != other.items.get(key):
            found.append(f"{key} ({', '.join(texts)})")
    if not found:
        return ""
    more = "" if len(found) <= MAX_NAMED_KEYS else f" and {len(found) - MAX_NAMED_KEYS} more"
    return (
        f"the ranks differ in {', '.join(found[:MAX_NAMED_KEYS])}{more}; give all of them the same "
        "settings, model and packages"
    )


class _Waiting:
    """One rank's wait for all others."""

    def __init__(
        self,
        store: Store,
        environment: LaunchEnvironment,
        own: Introduction,
        check: Callable[[], None] | None,
    ) -> None:
        self._store = store
        self._environment = environment
        self._own = own
        self._arrived = {environment.rank: own}
        self._reminder = Reminder(environment)
        self._check = check

    def run(self, timeout_s: float) -> dict[int, Introduction]:
        started = time.monotonic()
        self._introduce()
        while True:
            if self._check is not None:
                self._check()
            for rank in self._missing:
                if self._store.check([_key(rank)]):
                    self._on_arrival(rank)
            self._check_failure()
            if not self._missing and self._is_over():
                return self._arrived
            waited = time.monotonic() - started
            if waited > timeout_s:
                text = (
                    f"{self._describe_missing()} did not come within {timeout_s:g} s: see the log "
                    "of that node, or start it; --rendezvous-timeout waits longer"
                )
                self._fail(Failure(text, is_mismatch=False, num_told=len(self._arrived)))
            self._reminder.say(f"waiting for {self._describe_missing()}", waited)
            time.sleep(POLL_S if self._missing else CONFIRM_S)

    def _is_over(self) -> bool:
        """Rank 0 says so: it is there now, and not only what it said before it ended."""
        if self._environment.rank == 0:
            self._store.set(MET_KEY, "")
            return True
        return self._store.check([MET_KEY])

    def _introduce(self) -> None:
        rank = self._environment.rank
        if self._store.add(f"{_key(rank)}/claims", 1) > 1:
            # What differs says more than that it has come twice.
            for other in self._missing:
                if self._store.check([_key(other)]):
                    self._on_arrival(other)
            self._fail(
                Failure(
                    f"rank {rank} has come twice, the second time from {self._own.name}: each node "
                    "needs its own --node-rank, and one launch its own port",
                    is_mismatch=True,
                )
            )
        self._store.set(_key(rank), msgspec.json.encode(self._own).decode())

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(self._environment.world_size) if rank not in self._arrived]

    def _describe_missing(self) -> str:
        """`ranks 2, 3 (node 1)`"""
        # Rank 0 has come once and not said that all have: it is another one that is waited for.
        missing, size = self._missing or [0], self._environment.local_world_size
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        if size >= self._environment.world_size:
            return ranks
        nodes = sorted({rank // size for rank in missing})
        return f"{ranks} (node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))})"

    def _on_arrival(self, rank: int) -> None:
        other = _introduction.decode(self._store.get(_key(rank)))
        self._arrived[rank] = other
        if text := differences(self._environment.rank, self._own, rank, other):
            self._fail(Failure(text, is_mismatch=True))

    def _check_failure(self) -> None:
        if self._store.check([FAILURE_KEY]):
            self._fail(_failure.decode(self._store.get(FAILURE_KEY)))

    def _fail(self, failure: Failure) -> NoReturn:
        counted = _write_failure(self._store, failure)
        self._wait_until_told(counted.num_told or self._environment.world_size)
        raise (RankMismatch if counted.is_mismatch else PeerLost)(counted.error)

    def _wait_until_told(self, num_ranks: int) -> None:
        """The store may end with rank 0: first the others get to know, within a bound."""
        deadline = time.monotonic() + TELL_S
        is_last = self._environment.rank == 0
        with contextlib.suppress(RuntimeError, dist.DistError):
            num_told = self._store.add(TOLD_KEY, 1)
            while is_last and num_told < num_ranks and time.monotonic() < deadline:
                time.sleep(POLL_S)
                num_told = self._store.add(TOLD_KEY, 0)


def _key(rank: int) -> str:
    return f"moed/rank-{rank}"
