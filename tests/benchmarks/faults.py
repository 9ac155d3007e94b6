"""Faults, and what each costs the requests that are open while it happens."""

import difflib
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.daemon import Daemon
from tests.e2e.stalled import StalledReader, await_paused
from tests.e2e.streams import LONG, PROMPT, Stream, await_growth, kill
from tests.small_disk import SmallDiskDaemon

RECOVERY_S = 60.0
NUM_STREAMS = 6
NUM_TOKENS = 200
# Long enough that its choices pause before it is cut off, also on a busy machine.
SLOW_READER_TIMEOUT_S = 10
LOST, AGAIN = "Forming the group anew", "ready again"
# Processes that use less of a core, for so long, do no work.
STILL_SHARE, STILL_S = 0.15, 0.3


@dataclass
class Row:
    """One line of the table."""

    ranks: int
    fault: str
    open: int = 0
    lost: int = 0
    repeated: int = 0
    wrong: int = 0
    seconds: list[float] = field(default_factory=list)
    freed_s: list[float] = field(default_factory=list)
    """Until the ranks did nothing any more for clients that were cut off."""
    failures: list[str] = field(default_factory=list)
    """Why repeats were given up."""
    breaks_connections: bool = False
    """As it must."""

    def compare(self, streams: Sequence[Stream], expected: Sequence[list[int]]) -> None:
        """Take in what the `streams` have given, which all have ended or failed."""
        for stream, tokens in zip(streams, expected, strict=True):
            self.open += 1
            self.lost += stream.error is not None or not stream.is_done
            self._count(tokens_of(stream), tokens)

    def _count(self, found: list[int], expected: list[int]) -> None:
        if found == expected[: len(found)]:
            return
        matcher = difflib.SequenceMatcher(None, expected, found, autojunk=False)
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind == "insert":
                self.repeated += d - c
            elif kind == "replace" or (kind == "delete" and b < len(expected)):
                self.wrong += max(b - a, d - c)

    @property
    def is_good(self) -> bool:
        lost = 0 if self.breaks_connections else self.lost
        return not (lost or self.repeated or self.wrong or self.failures)

    def __str__(self) -> str:
        counts = (self.open, self.lost, self.repeated, self.wrong)
        text = f"{self.fault:<36}" + "".join(f"{count:>9}" for count in counts)
        if self.seconds:
            text += f" {statistics.median(self.seconds):8.2f} {max(self.seconds):8.2f}"
        if self.freed_s:
            text += f"   orphans freed within {max(self.freed_s):.2f} s"
        if self.failures:
            text += f"   {len(self.failures)} FAILED"
        return text


HEADER = f"{'fault':<36}{'open':>9}{'lost':>9}{'repeated':>9}{'wrong':>9}   median      max s"


def tokens_of(stream: Stream) -> list[int]:
    return stream.choices[0].token_ids if stream.choices else []


class Bed:
    """A daemon that is ready, and what its requests give undisturbed: half of them greedy, half
    sampled with a seed.
    """

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.expected: list[list[int]] = []
        for stream in self.start():
            stream.join()
            self.expected.append(tokens_of(stream))

    def start(self) -> list[Stream]:
        more = [
            {"prompt": PROMPT[n:], "temperature": n % 2, "seed": n, "max_tokens": NUM_TOKENS}
            for n in range(NUM_STREAMS)
        ]
        return [Stream(self.daemon, {**LONG, **body}) for body in more]

    def open(self) -> list[Stream]:
        """Requests that all stream."""
        streams = self.start()
        await_growth(streams, 5)
        return streams

    def finish(self, streams: list[Stream], row: Row) -> None:
        for stream in streams:
            stream.wait(RECOVERY_S)
        row.compare(streams, self.expected)
        self.daemon.assert_at_rest()

    def await_count(self, text: str, count: int) -> None:
        """In the log."""
        deadline = time.monotonic() + RECOVERY_S
        while self.daemon.log.count(text) < count:
            assert time.monotonic() < deadline, f"{text!r} is not there {count} times"
            time.sleep(0.005)

    def await_ready(self) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while not self._is_ready():
            assert time.monotonic() < deadline, "not ready"
            time.sleep(0.01)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.daemon.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def rank_pids(self) -> list[int]:
        return [self.daemon.pid(f"rank-{rank}") for rank in range(self.daemon.ranks)]

    def num_losses(self) -> float:
        samples = self.daemon.metrics()
        return sum(n for (name, _), n in samples.items() if name == "moed:rank_losses_total")


# A fault, for one repeat: `measure(bed, row, victim)`.
Measure = Callable[[Bed, Row, int], None]
Strike = Callable[[Bed, int], Any]


def losing(num_losses: int, strike: Strike) -> Measure:
    """`strike` costs the group so many ranks."""

    def measure(bed: Bed, row: Row, victim: int) -> None:
        streams = bed.open()
        before = bed.daemon.log.count(LOST)
        strike(bed, victim)
        started = time.monotonic()
        bed.await_count(LOST, before + num_losses)
        epoch = bed.daemon.log.count(LOST)
        bed.await_count(f"{AGAIN}: all ranks serve in epoch {epoch}", 1)
        await_growth(streams, 1)
        row.seconds.append(time.monotonic() - started)
        bed.finish(streams, row)

    return measure


def kill_rank(bed: Bed, victim: int) -> None:
    kill(bed.daemon, f"rank-{victim}")


def stop(bed: Bed, victim: int) -> None:
    os.kill(bed.daemon.pid(f"rank-{victim}"), signal.SIGSTOP)


def kill_twice(bed: Bed, victim: int) -> None:
    """The same rank again, right after the streams go on."""
    num_ready = bed.daemon.log.count(AGAIN)
    kill_rank(bed, victim)
    bed.await_count(AGAIN, num_ready + 1)
    kill_rank(bed, victim)


def kill_another(bed: Bed, victim: int) -> None:
    """Another rank while the first recovers."""
    num_lost = bed.daemon.log.count(LOST)
    kill_rank(bed, victim)
    bed.await_count(LOST, num_lost + 1)
    time.sleep(0.4)
    kill_rank(bed, (victim + 1) % bed.daemon.ranks)


def full_disk(bed: Bed, row: Row, victim: int) -> None:
    """The log cannot be written, nor any other file; then a rank is killed."""
    daemon = bed.daemon
    assert isinstance(daemon, SmallDiskDaemon)
    streams = bed.open()
    daemon.fill()
    await_growth(streams, 5)
    before, num_losses = daemon.children(), bed.num_losses()
    kill_rank(bed, victim)
    started = time.monotonic()
    daemon.await_another(f"rank-{victim}", before, RECOVERY_S)
    while bed.num_losses() == num_losses:
        assert time.monotonic() < started + RECOVERY_S, "the front end was not told"
    bed.await_ready()
    await_growth(streams, 1)
    row.seconds.append(time.monotonic() - started)
    bed.finish(streams, row)
    daemon.free()


def stalled_reader(bed: Bed, row: Row, victim: int) -> None:
    """One more client stops reading: paused, then dropped. Seconds are the longest that another
    one waited for a token meanwhile.
    """
    with StalledReader(bed.daemon, victim) as reader:
        streams = bed.open()
        await_paused(bed.daemon, 4, RECOVERY_S)
        reader.wait_cut_off(RECOVERY_S)
        bed.finish(streams, row)
    await_paused(bed.daemon, 0, RECOVERY_S)
    row.seconds.append(max(longest_silence_s(stream) for stream in streams))


def longest_silence_s(stream: Stream) -> float:
    return max(b - a for a, b in zip(stream.times[:-1], stream.times[1:], strict=True))


def front_end(bed: Bed, row: Row, victim: int) -> None:
    """Its clients lose their connections; no rank is started again. Seconds are until another one
    is ready on the port.
    """
    streams, pids = bed.open(), bed.rank_pids
    kill(bed.daemon, "http")
    started = time.monotonic()
    row.freed_s.append(seconds_until_still(pids))
    bed.await_ready()
    row.seconds.append(time.monotonic() - started)
    for stream in streams:
        stream.wait(RECOVERY_S)
        assert stream.error is not None, "a cut off answer looks complete"
    row.breaks_connections = True
    row.open, row.lost = row.open + len(streams), row.lost + len(streams)
    bed.daemon.assert_at_rest(2)
    assert pids == bed.rank_pids, "a rank was started again"


def seconds_until_still(pids: Sequence[int]) -> float:
    """From now, until these processes do nothing for `STILL_S`."""
    processes = [psutil.Process(pid) for pid in pids]

    def used_s() -> float:
        return sum(p.cpu_times().user + p.cpu_times().system for p in processes)

    started = time.monotonic()
    since, used = started, used_s()
    while time.monotonic() - since < STILL_S:
        assert time.monotonic() - started < RECOVERY_S, "the ranks go on for nobody"
        time.sleep(0.02)
        if used_s() - used > STILL_SHARE * STILL_S:
            since, used = time.monotonic(), used_s()
    return since - started
