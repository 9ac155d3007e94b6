"""moed's own Python in a step: what schedules, builds the batch, samples and reports, without model
and without collectives.

    python -m tests.benchmarks.engine_step [--running 32] [--vocab 32000] [--steps 200]

Prints the median of each part in microseconds, for greedy and for drawn tokens; then what a step's
scheduling costs with 256 running requests and 10,000 queued ones.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from moed.config.engine_config import SchedulerConfig
from moed.server.block_manager import BlockManager
from moed.server.grammar_masks import NO_MASKS
from moed.server.messages import AddRequest, RankStats, SamplingParams, StepOutputs, TokenOutput
from moed.server.model_runner import make_batch
from moed.server.sampler import sample
from moed.server.scheduler import Sampled, Schedule, Scheduler

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
NUM_PROMPT_TOKENS = 128
NUM_QUEUED, NUM_RUNNING = 10_000, 256
CPU = torch.device("cpu")


def make_scheduler(num_running: int, num_queued: int, vocab_size: int, temperature: float) -> Any:
    """A scheduler and its blocks, with `num_running` requests that decode."""
    config = SchedulerConfig(
        max_num_batched_tokens=8192,
        max_num_seqs=num_running,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=True,
        max_num_queued_requests=100_000,
    )
    blocks = BlockManager(MAX_MODEL_LEN // BLOCK_SIZE * 300, BLOCK_SIZE, shares_prefixes=True)
    scheduler = Scheduler(config, blocks, MAX_MODEL_LEN, vocab_size)
    for number in range(num_running + num_queued):
        params = SamplingParams(max_tokens=3000, seed=number, temperature=temperature)
        prompt = [(number + place) % vocab_size for place in range(NUM_PROMPT_TOKENS)]
        message = AddRequest(
            request_id=f"{number:032x}", epoch=0, prompt_token_ids=prompt, params=params
        )
        assert scheduler.add(message) is None
    while True:
        schedule = scheduler.schedule()
        update(scheduler, schedule, tokens_of(schedule))
        if schedule.num_tokens == num_running:
            return scheduler


def update(
    scheduler: Scheduler, schedule: Schedule, results: Sequence[Sampled]
) -> list[TokenOutput]:
    scheduler.advance(schedule)
    return scheduler.update(schedule, results)


def tokens_of(schedule: Schedule) -> list[Sampled]:
    return [Sampled(7 if s.samples else None, None, (), None) for s in schedule.requests]


class Clock:
    """Times of named parts, call by call."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        self.parts.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def medians(self) -> dict[str, float]:
        """Microseconds."""
        return {name: 1e6 * statistics.median(times) for name, times in self.parts.items()}


def measure(num_running: int, vocab_size: int, num_steps: int, temperature: float) -> Clock:
    scheduler = make_scheduler(num_running, 0, vocab_size, temperature)
    clock, encoder = Clock(), msgspec.msgpack.Encoder()
    logits = torch.randn(num_running, vocab_size, generator=torch.Generator().manual_seed(0))
    stats = RankStats(**dict.fromkeys(RankStats.__struct_fields__, 0))
    for _ in range(num_steps):
        schedule = clock.time("schedule", scheduler.schedule)
        clock.time("batch", lambda: make_batch(schedule, BLOCK_SIZE, False, CPU))  # noqa: B023
        results = clock.time("sample", lambda: sample(schedule, logits, NO_MASKS))  # noqa: B023
        outputs = clock.time("update", lambda: update(scheduler, schedule, results))  # noqa: B023
        clock.time("encode", lambda: encoder.encode(StepOutputs(0, outputs, stats)))  # noqa: B023
    return clock


def measure_queue(vocab_size: int, num_steps: int) -> Clock:
    """A step's scheduling with many requests running, and very many queued."""
    scheduler, clock = make_scheduler(NUM_RUNNING, NUM_QUEUED, vocab_size, 0.0), Clock()
    for _ in range(num_steps):
        schedule = clock.time("schedule", scheduler.schedule)
        clock.time("update", lambda: update(scheduler, schedule, tokens_of(schedule)))  # noqa: B023
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    print(f"{arguments.running} requests decode, vocabulary {arguments.vocab}; median us of a step")
    for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
        found = measure(arguments.running, arguments.vocab, arguments.steps, temperature).medians()
        parts = "  ".join(f"{part} {us:.0f}" for part, us in found.items())
        print(f"{name:>7}: {sum(found.values()):6.0f}   {parts}")
    clock = measure_queue(arguments.vocab, arguments.steps)
    parts = "  ".join(f"{part} {us:.0f}" for part, us in clock.medians().items())
    print(f"{NUM_RUNNING} running, {NUM_QUEUED} queued: {parts}")


if __name__ == "__main__":
    main()
