"""A scheduler's whole life with a model whose next token is a pure function of all tokens before
it, so that a wrong recompute, a lost token or a mixed-up request changes the output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moed.config.engine_config import SchedulerConfig
from moed.config.windows import Window
from moed.server.block_manager import BlockManager
from moed.server.messages import AddRequest, SamplingParams, TokenLogprobs, TokenOutput
from moed.server.scheduler import Sampled, Schedule, ScheduledRequest, Scheduler
from moed.server.window_blocks import WindowBlocks

VOCAB_SIZE = 97


def next_token(prefix: list[int]) -> int:
    """Any function of the whole prefix will do."""
    value = 7
    for token in prefix:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB_SIZE


def expected_output(prompt: list[int], max_tokens: int, stop_token_ids: list[int]) -> list[int]:
    """What a request must give, computed token by token without any scheduler."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Work:
    """One scheduled request as the device is given it, whatever the host learns later."""

    scheduled: ScheduledRequest
    first: int
    tokens: list[int]
    """All of the request's, the one too that only the device knows."""
    block_ids: list[int]
    window_block_ids: list[int]

    @classmethod
    def of(cls, scheduled: ScheduledRequest, chosen: Sequence[int | None]) -> "Work":
        """`chosen`: by the step before."""
        request = scheduled.request
        tokens = list(request.token_ids)
        if request.awaited_place is not None:
            awaited = chosen[request.awaited_place]
            assert awaited is not None
            tokens.append(awaited)
        blocks, window_blocks = list(request.block_ids), list(request.window_block_ids)
        return cls(scheduled, request.num_computed_tokens, tokens, blocks, window_blocks)

    @property
    def end(self) -> int:
        return self.first + self.scheduled.num_tokens


class FakeCache:
    """Which token each KV slot holds, and after which others: reading back what was written catches
    a wrong block, and one that was shared with another beginning.
    """

    def __init__(self, block_size: int, window: Window | None = None) -> None:
        """`window`: the cache of the layers that slide."""
        self.block_size = block_size
        self._window = window
        self._slots: dict[int, tuple[int, int, int]] = {}

    def write(self, work: Work) -> None:
        for position in range(work.first, work.end):
            token, before = work.tokens[position], hash(tuple(work.tokens[:position]))
            self._slots[self._slot(work, position)] = (position, token, before)

    def read(self, work: Work) -> list[int]:
        """The request up to this step's end, as the cache holds it; with a window, what this step's
        tokens see is looked at.
        """
        tokens = work.tokens[: work.end]
        first = 0
        if self._window is not None:
            first = max(0, self._window.first_seen(work.first))
        for index in range(first, work.end):
            found = self._slots[self._slot(work, index)]
            assert found == (index, tokens[index], hash(tuple(tokens[:index])))
        return tokens

    def _slot(self, work: Work, position: int) -> int:
        blocks = work.block_ids if self._window is None else work.window_block_ids
        block_id = blocks[position // self.block_size]
        return block_id * self.block_size + position % self.block_size


def fake_result(work: Work, context: list[int]) -> Sampled:
    """What the sampler would give."""
    token_id = next_token(context) if work.scheduled.chooses else None
    prompt_logprobs = [
        TokenLogprobs(-float(position), work.tokens[position + 1], [], [])
        for position in work.scheduled.prompt_logprob_positions
    ]
    return Sampled(token_id, None, prompt_logprobs, None)


class Harness:
    """A scheduler with the fake model, checked after each step. One step ahead, the next schedule
    is made before the last step's tokens are known, as the engine's loop does.
    """

    step_ahead = False

    def __init__(
        self,
        *,
        budget: int = 8,
        max_num_seqs: int = 4,
        num_blocks: int = 16,
        block_size: int = 4,
        max_model_len: int = 64,
        chunked: bool = True,
        shares_prefixes: bool = True,
        window: Window | None = None,
    ) -> None:
        """`window`: of layers that have one, beside others that do not."""
        self._last: tuple[Schedule, list[Sampled]] | None = None
        self.config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            enable_chunked_prefill=chunked,
            max_num_queued_requests=10_000,
        )
        window_blocks = None
        if window is not None:
            # What `config.kv_layout` grants.
            number = max_num_seqs * (window.size // block_size + 3) + budget // block_size
            number = min(num_blocks, number)
            window_blocks = WindowBlocks(number, window, block_size)
        self.blocks = BlockManager(
            num_blocks, block_size, shares_prefixes=shares_prefixes, window_blocks=window_blocks
        )
        self.cache = FakeCache(block_size)
        self.window_cache = FakeCache(block_size, window)
        self.scheduler = Scheduler(self.config, self.blocks, max_model_len, VOCAB_SIZE)
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.steps: list[Schedule] = []

    def add(self, request_id: str, prompt: list[int], max_tokens: int, **more: object) -> None:
        output = self.scheduler.add(make_request(request_id, prompt, max_tokens, **more))
        self.outputs[request_id] = [] if output is None else [output]

    def step(self) -> list[TokenOutput]:
        schedule = self.scheduler.schedule()
        outputs = []
        if not schedule.requests and self._last is not None:
            outputs = self._take_in_last()
            schedule = self.scheduler.schedule()
        self._check(schedule)
        if not schedule.requests:
            return outputs
        self.steps.append(schedule)
        chosen = [] if self._last is None else [sampled.token_id for sampled in self._last[1]]
        step = [Work.of(scheduled, chosen) for scheduled in schedule.requests]
        contexts = self._compute(step)
        outputs += self._take_in_last()
        results = list(map(fake_result, step, contexts))
        self.scheduler.advance(schedule)
        self._last = schedule, results
        return outputs if self.step_ahead else self._take_in_last()

    def _take_in_last(self) -> list[TokenOutput]:
        last, self._last = self._last, None
        outputs = [] if last is None else self.scheduler.update(*last)
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return outputs

    def run(self, max_steps: int = 5000) -> None:
        """Until nothing is left; each step must compute something."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests:
                return
            self.step()
        raise AssertionError("requests do not end")

    def _compute(self, step: Sequence[Work]) -> list[list[int]]:
        """Each request up to its last token of this step, as the cache holds it."""
        caches = [self.cache]
        if self.blocks.window_blocks is not None:
            caches.append(self.window_cache)
        for cache in caches:
            for work in step:
                cache.write(work)
        for cache in caches[1:]:
            for work in step:
                cache.read(work)
        return [self.cache.read(work) for work in step]

    def _check(self, schedule: Schedule) -> None:
        assert schedule.num_tokens == sum(s.num_tokens for s in schedule.requests)
        assert schedule.num_tokens <= self.config.max_num_batched_tokens
        assert len(schedule.requests) <= self.config.max_num_seqs
        assert all(s.num_tokens > 0 for s in schedule.requests)
        assert bool(schedule.requests) == self.scheduler.has_requests
        held = [block for s in schedule.requests for block in s.request.block_ids]
        assert len(set(held)) <= self.blocks.num_used_blocks
        written: list[int] = []
        for scheduled in schedule.requests:
            request, size = scheduled.request, self.blocks.block_size
            end = request.num_computed_tokens + scheduled.num_tokens
            assert len(request.block_ids) * size >= end
            written.extend(request.block_ids[request.num_computed_tokens // size : -(-end // size)])
        # A block is filled by one request alone, also where others read it in the same step.
        assert len(written) == len(set(written))

    def tokens(self, request_id: str) -> list[int]:
        """All tokens sent, after checking that indexes follow each other."""
        tokens: list[int] = []
        for output in self.outputs[request_id]:
            assert output.output_index == len(tokens)
            tokens.extend(output.token_ids)
        return tokens

    def finish_reason(self, request_id: str) -> str | None:
        outputs = self.outputs[request_id]
        assert all(output.finish_reason is None for output in outputs[:-1])
        return outputs[-1].finish_reason if outputs else None


def make_request(request_id: str, prompt: list[int], max_tokens: int, **more: object) -> AddRequest:
    """Fields of `AddRequest` by their names, all others are sampling parameters."""
    fields = {"epoch", "priority", "output_token_ids", "cache_salt"}
    own: Mapping[str, object] = {key: value for key, value in more.items() if key in fields}
    rest: Mapping[str, object] = {key: value for key, value in more.items() if key not in fields}
    params = SamplingParams(
        **{"max_tokens": max_tokens, "seed": 0, "temperature": 0.0, **rest}  # type: ignore[arg-type]
    )
    return AddRequest(
        **{  # type: ignore[arg-type]
            "request_id": request_id,
            "epoch": 0,
            "prompt_token_ids": prompt,
            "params": params,
            **own,
        }
    )
