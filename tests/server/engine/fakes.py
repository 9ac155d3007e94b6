"""A scheduler's whole life with a model whose next token is a pure function of all tokens before
it, so that a wrong recompute, a lost token or a mixed-up request changes the output.
"""

from collections.abc import Mapping

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


class FakeCache:
    """Which token each KV slot holds, and after which others: reading back what was written catches
    a wrong block, and one that was shared with another beginning.
    """

    def __init__(self, block_size: int, window: Window | None = None) -> None:
        """`window`: the cache of the layers that slide."""
        self.block_size = block_size
        self._window = window
        self._slots: dict[int, tuple[int, int, int]] = {}

    def write(self, scheduled: ScheduledRequest) -> None:
        request = scheduled.request
        first = request.num_computed_tokens
        for position in range(first, first + scheduled.num_tokens):
            token, before = request.token_ids[position], hash(tuple(request.token_ids[:position]))
            self._slots[self._slot(scheduled, position)] = (position, token, before)

    def read(self, scheduled: ScheduledRequest, num_tokens: int) -> list[int]:
        """The first `num_tokens` of the request, as the cache holds them; with a window, those that
        this step's tokens see.
        """
        tokens = scheduled.request.token_ids[:num_tokens]
        first = 0
        if self._window is not None:
            first = max(0, self._window.first_seen(scheduled.request.num_computed_tokens))
        for index in range(first, num_tokens):
            found = self._slots[self._slot(scheduled, index)]
            assert found == (index, tokens[index], hash(tuple(tokens[:index])))
        return tokens

    def _slot(self, scheduled: ScheduledRequest, position: int) -> int:
        request = scheduled.request
        blocks = request.block_ids if self._window is None else request.window_block_ids
        block_id = blocks[position // self.block_size]
        return block_id * self.block_size + position % self.block_size


def fake_results(schedule: Schedule, cache: FakeCache) -> list[Sampled]:
    """What the model and the sampler would give."""
    for scheduled in schedule.requests:
        cache.write(scheduled)
    results = []
    for scheduled in schedule.requests:
        request = scheduled.request
        end = request.num_computed_tokens + scheduled.num_tokens
        context = cache.read(scheduled, end)
        token_id = next_token(context) if scheduled.samples and request.wants_token else None
        prompt_logprobs = [
            TokenLogprobs(-float(position), request.token_ids[position + 1], [], [])
            for position in scheduled.prompt_logprob_positions
        ]
        results.append(Sampled(token_id, None, prompt_logprobs, None))
    return results


class Harness:
    """A scheduler with the fake model, checked after each step."""

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
        self.steps.append(schedule)
        self._check(schedule)
        if self.blocks.window_blocks is not None:
            self._use_window_cache(schedule)
        outputs = self.scheduler.update(schedule, fake_results(schedule, self.cache))
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

    def _use_window_cache(self, schedule: Schedule) -> None:
        for scheduled in schedule.requests:
            self.window_cache.write(scheduled)
        for scheduled in schedule.requests:
            end = scheduled.request.num_computed_tokens + scheduled.num_tokens
            self.window_cache.read(scheduled, end)

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
