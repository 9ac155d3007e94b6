"""Engines without a model: threads that speak the real channel and answer from a script."""

import threading
import time
from collections.abc import Callable

from moed.server.channel import EngineChannel
from moed.server.messages import (
    AbortRequests,
    AddRequest,
    PauseRequests,
    RankProgress,
    RankReady,
    RankStats,
    ResumeRequests,
    Shutdown,
    StepOutputs,
    TokenLogprobs,
    TokenOutput,
    Wake,
)
from moed.server.wire import Wire
from tests.server.engine.loads import expert_load

MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
NUM_BLOCKS = 64
NUM_CACHED = 3
NUM_PREEMPTIONS = 2
QUEUE_S = 0.001

Script = Callable[[AddRequest], list[int]]
# By request id: the request, its tokens, and how many have been sent.
States = dict[str, tuple[AddRequest, list[int], int]]


def logprobs_of(token: int, k: int, vocab_size: int) -> TokenLogprobs:
    """Made up, and easy to check: token t has -t/100, the likeliest are t, t+1, …"""
    ids = [(token + step) % vocab_size for step in range(k)]
    return TokenLogprobs(-token / 100, 1, ids, [-token / 100 - step for step in range(k)])


def repeat_prompt(request: AddRequest) -> list[int]:
    """The prompt again and again, up to `max_tokens`."""
    prompt = request.prompt_token_ids
    times = request.params.max_tokens // len(prompt) + 1
    return (prompt * times)[: request.params.max_tokens]


class FakeEngine:
    """One rank. Sends one token of each request per step, once it has been woken."""

    def __init__(
        self, address: str, rank: int, vocab_size: int, arrivals: list[AddRequest]
    ) -> None:
        """`arrivals`: where this and other engines note every request, in order."""
        self.rank = rank
        self._arrivals = arrivals
        self.script: Script = repeat_prompt
        self.step_s = 0.0
        self.load_interval_s = 0.0
        self._told_load_at = 0.0
        self.is_paused = False
        self.tokens_per_step = 1
        """Each in an output of its own."""
        self.expert_rows = [10, 1, 0, 0]
        """By slot, of the only MoE layer."""
        self.added: list[AddRequest] = []
        self.aborted: list[str] = []
        self.wake_numbers: list[int] = []
        self.log: list[str] = []
        self.was_shut_down = threading.Event()
        self._vocab_size = vocab_size
        self._address = address
        self._running: States = {}
        self._held: States = {}
        self._stop = threading.Event()
        self._may_be_ready = threading.Event()
        self._extra: list[TokenOutput] = []
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def become_ready(self) -> None:
        self._may_be_ready.set()

    def stop(self) -> None:
        self._may_be_ready.set()
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def inject(self, output: TokenOutput) -> None:
        """Send this as part of the next step, whatever it is."""
        self._extra.append(output)

    def _run(self) -> None:
        channel = EngineChannel(Wire(self._address), self.rank, 0, None)
        try:
            channel.send(RankProgress(self.rank, "loading the model"))
            self._may_be_ready.wait()
            channel.send(
                RankReady(
                    rank=self.rank,
                    num_kv_blocks=NUM_BLOCKS,
                    block_size=BLOCK_SIZE,
                    max_model_len=MAX_MODEL_LEN,
                    startup_s={"load": 0.5},
                )
            )
            while not self._stop.is_set():
                if not self._running and not self._extra:
                    channel.wait(0.02)
                self._take_in(channel)
                self._step(channel)
        finally:
            channel.close()

    def _take_in(self, channel: EngineChannel) -> None:
        for message in channel.receive():
            self.log.append(type(message).__name__)
            match message:
                case AddRequest():
                    self.added.append(message)
                    self._arrivals.append(message)
                    self._num_prompt_tokens += len(message.prompt_token_ids)
                    tokens = self.script(message)
                    self._running[message.request_id] = (message, tokens, 0)
                case AbortRequests(request_ids):
                    self.aborted += request_ids
                    for request_id in request_ids:
                        self._running.pop(request_id, None)
                        self._held.pop(request_id, None)
                    channel.send(StepOutputs(self.rank, [], self._stats()))
                case PauseRequests(request_ids):
                    self._move(self._running, self._held, request_ids)
                    channel.send(StepOutputs(self.rank, [], self._stats()))
                case ResumeRequests(request_ids):
                    self._move(self._held, self._running, request_ids)
                case Wake(number):
                    self.wake_numbers.append(number)
                case Shutdown():
                    self.was_shut_down.set()

    @staticmethod
    def _move(source: States, target: States, request_ids: list[str]) -> None:
        target |= {i: source.pop(i) for i in request_ids if i in source}

    def _step(self, channel: EngineChannel) -> None:
        outputs, self._extra = self._extra, []
        if not self.is_paused:
            for _ in range(self.tokens_per_step):
                outputs += [self._advance(request_id) for request_id in list(self._running)]
        if outputs:
            self._num_steps += 1
            if time.monotonic() - self._told_load_at >= self.load_interval_s:
                self._told_load_at = time.monotonic()
                channel.send(expert_load(self.rank, [0], [self.expert_rows]))
            channel.send(StepOutputs(self.rank, outputs, self._stats()))
            time.sleep(self.step_s)
        elif self._running:
            time.sleep(0.005)

    def _advance(self, request_id: str) -> TokenOutput:
        request, tokens, done = self._running[request_id]
        params = request.params
        token_ids = tokens[done : done + 1]
        is_stop = bool(token_ids) and token_ids[0] in params.stop_token_ids
        is_last = is_stop or done + len(token_ids) >= min(len(tokens), params.max_tokens)
        self._num_generation_tokens += len(token_ids)
        if is_last:
            del self._running[request_id]
        else:
            self._running[request_id] = (request, tokens, done + 1)
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if done == 0 and params.prompt_logprobs is not None:
            k = params.prompt_logprobs
            rest = request.prompt_token_ids[1:]
            prompt_logprobs = [None, *(logprobs_of(t, k, self._vocab_size) for t in rest)]
        logprobs = None
        if params.logprobs is not None:
            logprobs = [logprobs_of(t, params.logprobs, self._vocab_size) for t in token_ids]
        reason = ("stop" if is_stop else "length") if is_last else None
        return TokenOutput(
            request_id=request_id,
            epoch=request.epoch,
            output_index=done,
            token_ids=token_ids,
            finish_reason=reason,
            stop_token_id=token_ids[0] if is_stop else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=NUM_CACHED if done == 0 else 0,
            queue_s=QUEUE_S if done == 0 else 0.0,
            num_preemptions=NUM_PREEMPTIONS if is_last else 0,
        )

    def _stats(self) -> RankStats:
        return RankStats(
            rank=self.rank,
            num_running=len(self._running),
            num_waiting=0,
            num_kv_blocks_used=len(self._running),
            num_kv_blocks=NUM_BLOCKS,
            num_queued_tokens=0,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_preemptions=0,
            max_step_tokens=7,
            num_finished=0,
            num_aborted=len(self.aborted),
            num_prefix_queries=0,
            num_prefix_hits=0,
            num_paused=len(self._held),
        )
