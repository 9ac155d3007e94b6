"""The front end's side of the engines: submits requests, routes their tokens, aborts, and wakes.

This is the one waker of the group: a rank is given its message first, and only then is the wake
number raised and sent to every rank.
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moed.config.engine_config import EngineConfig
from moed.server.balancer import Balancer, Placed, Work
from moed.server.channel import first_wake_number
from moed.server.drain_rate import DrainRate
from moed.server.ended_requests import EndedChoice, EndedRequest, Origin
from moed.server.health import Health
from moed.server.lifecycle import FrontendPlace
from moed.server.messages import (
    NOTHING_LEFT,
    AbortRequests,
    AddRequest,
    ExpertLoad,
    ForgetPrefixes,
    FromEngine,
    PauseRequests,
    RankProgress,
    RankReady,
    ResumeRequests,
    SamplingParams,
    Shutdown,
    StepDurations,
    StepOutputs,
    ToEngine,
    TokenOutput,
    Wake,
)
from moed.server.metrics import Metrics
from moed.server.prefix import extend_keys

logger = logging.getLogger(__name__)

# Of one HTTP request whose client reads more slowly than its choices grow: they pause at the first
# number, a little after it, and go on at the second.
MAX_UNREAD_OUTPUTS = 1024
RESUME_UNREAD_OUTPUTS = 256

# A request that was part of so many losses in a row, with no token between, may be their cause.
LOSSES_OF_SUSPECT = 2


class Channel(Protocol):
    """What is needed of `moed.server.channel.FrontendChannel`."""

    def start_epoch(self, epoch: int) -> None: ...

    async def receive(self) -> FromEngine: ...

    def send(self, rank: int, message: ToEngine) -> None: ...


class GenerationFailed(Exception):
    """A request ends with an error of the engine or of the group; the message is for the client."""


class RequestImpossible(GenerationFailed):
    """What the request asks for contradicts itself, as its tokens have shown."""


class RequestTimedOut(GenerationFailed):
    """It took longer than a request may."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"the request took longer than the {timeout_s:g} s that one may take (request_timeout)"
        )


class QueueFull(Exception):
    """More requests wait than are allowed."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class ChoiceSpec:
    """One sequence to generate: what becomes one engine request."""

    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(eq=False)
class OpenChoice:
    """One engine request that has not ended."""

    request_id: str
    index: int
    epoch: int
    submission: "Submission"
    spec: "ChoiceSpec"
    keys: Sequence[bytes]
    """Of the prompt's blocks that a rank may know already."""
    follows: bool
    """It has the prompt of the choice before it, and goes to the same rank."""
    wanted_rank: int | None
    priority: int
    cache_salt: str | None
    submitted_at: float
    num_prompt_tokens: int
    max_tokens: int
    rank: int = 0
    load: int = 0
    """Tokens counted for it at the balancer."""
    num_prefill_tokens: int = 0
    """Those of them that the next output takes off, unless `is_prefilled`."""
    is_prefilled: bool = False
    next_output_index: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None
    output_token_ids: list[int] = field(default_factory=list)
    """What has come so far: with the spec, all that another engine needs to go on."""
    is_given: bool = False
    """A rank of the group that is there has it."""
    num_losses: int = 0
    """How often in a row a group that had it was lost before it got another token."""

    def work(self, keys: Sequence[bytes], block_size: int) -> Work:
        """What is left to do."""
        num_prompt = len(self.spec.prompt_token_ids) + len(self.output_token_ids)
        num_left = self.spec.params.max_tokens - len(self.output_token_ids)
        return Work(num_prompt, num_left, keys, block_size)

    def place(self, placed: Placed) -> None:
        self.rank, self.load = placed.rank, placed.load
        self.num_prefill_tokens, self.is_prefilled = placed.num_prefill_tokens, False

    def message(self) -> AddRequest:
        return AddRequest(
            request_id=self.request_id,
            epoch=self.epoch,
            prompt_token_ids=self.spec.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            params=self.spec.params,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )

    def ended(self, reason: str, now: float) -> EndedChoice:
        return EndedChoice(
            rank=self.rank,
            reason=reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.next_output_index,
            num_preemptions=self.num_preemptions,
            max_tokens=self.max_tokens,
            submitted_at=self.submitted_at,
            queue_s=self.queue_s,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            ended_at=now,
        )


class Submission:
    """The choices of one HTTP request. Always `close` it: what has not ended is aborted."""

    def __init__(self, client: "EngineClient", num_choices: int, origin: Origin) -> None:
        self._client = client
        self._outputs: deque[tuple[int, TokenOutput]] = deque()
        self._failure: GenerationFailed | None = None
        self._has_news = asyncio.Event()
        self.is_paused = False
        self.open: dict[int, OpenChoice] = {}
        self.ended: list[EndedChoice] = []
        self.origin = origin
        self.num_choices = num_choices

    def put(self, index: int, output: TokenOutput) -> None:
        self._outputs.append((index, output))
        self._has_news.set()
        if len(self._outputs) >= MAX_UNREAD_OUTPUTS and not self.is_paused and self.open:
            self.is_paused = True
            self._client.pause(self)

    def fail(self, error: GenerationFailed) -> None:
        """Raise `error` once all outputs before it are taken."""
        self._failure = self._failure or error
        self._has_news.set()

    async def take(self, most: int) -> list[tuple[int, TokenOutput]]:
        """The next outputs of any choices, each with its choice's index: all that are there, up to
        `most`; waits for one where there is none. Raises `GenerationFailed`.
        """
        outputs = self._outputs
        while not outputs:
            if self._failure is not None:
                raise self._failure
            self._has_news.clear()
            await self._has_news.wait()
        taken = [outputs.popleft() for _ in range(min(most, len(outputs)))]
        if self.is_paused and len(outputs) <= RESUME_UNREAD_OUTPUTS:
            self.is_paused = False
            self._client.resume(self)
        return taken

    def stop(self, index: int) -> None:
        """End one choice early: its text is complete."""
        if (choice := self.open.get(index)) is not None:
            self._client.abort([choice], "stop")

    def abort(self) -> None:
        """End what is still open here and on the engines; each ends with the reason "abort"."""
        choices = list(self.open.values())
        self.close()
        for choice in choices:
            ending = TokenOutput(
                request_id=choice.request_id,
                epoch=choice.epoch,
                output_index=choice.next_output_index,
                token_ids=[],
                finish_reason="abort",
            )
            self.put(choice.index, ending)

    def close(self) -> None:
        """Abort what is still open. Safe to call twice."""
        if self.open:
            self._client.abort(list(self.open.values()), "abort")


class EngineClient:
    """All open requests of this front end. Use from one event loop; `run` must be running."""

    def __init__(
        self,
        config: EngineConfig,
        channel: Channel,
        health: Health,
        metrics: Metrics,
        *,
        place: FrontendPlace,
    ) -> None:
        self._config = config
        self._channel = channel
        self._health = health
        self._metrics = metrics
        self._num_ranks = config.parallel.data_parallel_size
        self._num_processes = config.parallel.world_size
        self._num_members = config.parallel.tensor_parallel_size
        self._balancer = Balancer(self._num_ranks)
        self._choices: dict[str, OpenChoice] = {}
        self.wake_number = first_wake_number(place.number)
        self._is_stopped = False
        self.epoch = place.epoch
        """Of the group that is there, or being formed."""
        # Between groups. A front end that takes over has ranks to wake when it has heard of all.
        self._is_holding = place.number > 0 or place.epoch > 0
        self._hold_timer: asyncio.TimerHandle | None = None
        # What may be what ends the ranks goes on alone: the one that does, and those that wait.
        self._on_trial: OpenChoice | None = None
        self._suspects: list[OpenChoice] = []
        self._ready: dict[int, RankReady] = {}
        self.context_length = 0
        """Most prompt plus output tokens of one request; 0 until the ranks are ready."""
        self.num_kv_blocks = 0
        """Per rank; 0 until the ranks are ready."""
        self._drain_rate = DrainRate()
        self.on_wake: Callable[[int], None] = lambda wake_number: None
        """Called with each wake number that the ranks are told."""
        self.on_request_end: list[Callable[[EndedRequest], None]] = []
        """All called with each HTTP request whose choices have all ended."""

    # From the engines ----------------------------------------------------------------------------

    async def run(self, on_rank_ready: Callable[[RankReady], None]) -> None:
        """Route messages until cancelled."""
        while True:
            self.handle(await self._channel.receive(), on_rank_ready)

    def handle(self, message: FromEngine, on_rank_ready: Callable[[RankReady], None]) -> None:
        match message:
            case StepOutputs():
                self._on_step(message)
            case StepDurations():
                self._metrics.steps.on_durations(message)
            case ExpertLoad():
                self._metrics.on_expert_load(message)
            case RankProgress(rank, phase):
                self._health.on_progress(rank, phase)
            case RankReady():
                self._ready[message.rank] = message
                lengths = [
                    min(ready.max_model_len, ready.num_kv_blocks * ready.block_size)
                    for ready in self._ready.values()
                ]
                self.context_length = min(lengths)
                self.num_kv_blocks = min(r.num_kv_blocks for r in self._ready.values())
                self._balancer.remember_blocks(self.num_kv_blocks)
                self._metrics.on_rank_ready(message)
                self._health.on_rank_ready(message.rank)
                if self._is_holding and len(self._ready) == self._num_processes:
                    self._resume()
                on_rank_ready(message)

    def _on_step(self, step: StepOutputs) -> None:
        self._metrics.on_stats(step.stats)
        now = time.monotonic()
        for output in step.outputs:
            choice = self._choices.get(output.request_id)
            # Unknown: it was aborted, and this was on its way. Another epoch, or another rank: it
            # has been taken over since.
            if choice is None or output.epoch != choice.epoch or step.rank != choice.rank:
                continue
            self._on_output(choice, output, now)

    def _on_output(self, choice: OpenChoice, output: TokenOutput, now: float) -> None:
        if output.finish_reason == "error" or output.error is not None:
            self._end(choice, "error")
            error = output.error or "the engine gave no reason"
            kind = RequestImpossible if error == NOTHING_LEFT else GenerationFailed
            choice.submission.fail(kind(error))
            return
        fresh = drop_duplicates(output, choice.next_output_index)
        if fresh is None:
            return
        if fresh.output_index > choice.next_output_index:
            logger.error(
                "rank %d sent output %d of %s, expected %d",
                choice.rank,
                fresh.output_index,
                choice.request_id,
                choice.next_output_index,
            )
            self.abort([choice], "error")
            lost = GenerationFailed("tokens were lost between engine and server")
            choice.submission.fail(lost)
            return
        if fresh.output_index == 0:
            choice.num_cached_tokens, choice.queue_s = fresh.num_cached_tokens, fresh.queue_s
        if fresh.token_ids:
            choice.output_token_ids += fresh.token_ids
            self._on_tokens(choice, len(fresh.token_ids), now)
        if fresh.finish_reason is not None:
            choice.num_preemptions = fresh.num_preemptions
            self._end(choice, fresh.finish_reason)
        choice.submission.put(choice.index, fresh)

    def _on_tokens(self, choice: OpenChoice, num_tokens: int, now: float) -> None:
        choice.next_output_index += num_tokens
        self._metrics.requests.on_tokens(
            choice.rank, choice.submitted_at, choice.last_token_at, num_tokens, now
        )
        done = num_tokens + (0 if choice.is_prefilled else choice.num_prefill_tokens)
        done, choice.is_prefilled = min(done, choice.load), True
        choice.load -= done
        self._balancer.done(choice.rank, done)
        if choice.first_token_at is None:
            choice.first_token_at = now
        choice.last_token_at = now
        choice.num_losses = 0
        if choice is self._on_trial:
            self._go_on()

    def _end(self, choice: OpenChoice, reason: str) -> None:
        del self._choices[choice.request_id]
        del choice.submission.open[choice.index]
        self._balancer.done(choice.rank, choice.load)
        choice.load = 0
        now = time.monotonic()
        submission, ended = choice.submission, choice.ended(reason, now)
        self._metrics.requests.on_choice_end(ended)
        submission.ended.append(ended)
        if not submission.open:
            request = EndedRequest(submission.origin, tuple(submission.ended))
            self._metrics.requests.on_request_end(request)
            for listener in self.on_request_end:
                listener(request)
        self._drain_rate.on_end(now)
        if choice is self._on_trial:
            self._go_on()

    # To the engines ------------------------------------------------------------------------------

    def submit(
        self,
        specs: Sequence[ChoiceSpec],
        origin: Origin,
        priority: int,
        wanted_rank: int | None,
        cache_salt: str | None = None,
    ) -> Submission:
        """Give every choice to a rank, then wake all ranks. Choices of one prompt follow each other
        and go to one rank, where they share it. Raises `GenerationFailed` when the group is gone,
        `QueueFull` when too many wait.
        """
        if self._is_stopped:
            raise GenerationFailed(self._health.reason)
        self._check_queue(len(specs))
        submission = Submission(self, len(specs), origin)
        now = time.monotonic()
        keys: list[bytes] = []
        for index, spec in enumerate(specs):
            follows = index > 0 and spec.prompt_token_ids is specs[index - 1].prompt_token_ids
            if not follows:
                keys = self._block_keys(spec, cache_salt)
            choice = OpenChoice(
                request_id=uuid.uuid4().hex,
                index=index,
                epoch=self.epoch,
                submission=submission,
                spec=spec,
                keys=keys,
                follows=follows and bool(keys),
                wanted_rank=wanted_rank,
                priority=priority,
                cache_salt=cache_salt,
                submitted_at=now,
                num_prompt_tokens=len(spec.prompt_token_ids),
                max_tokens=spec.params.max_tokens,
            )
            self._choices[choice.request_id] = choice
            submission.open[index] = choice
        if not self._is_holding and self._on_trial is None:
            self._give(list(submission.open.values()))
        return submission

    def _give(self, choices: Sequence[OpenChoice]) -> None:
        """To ranks, from where they are; then all ranks are woken."""
        before: OpenChoice | None = None
        for choice in choices:
            rank = choice.wanted_rank
            if choice.follows and before is not None and before.submission is choice.submission:
                rank = before.rank
            work = choice.work(choice.keys, self._config.cache.block_size)
            choice.place(self._balancer.choose(work, rank))
            self._send(choice.rank, choice.message())
            choice.is_given = True
            before = choice
        self._wake()

    def _block_keys(self, spec: ChoiceSpec, cache_salt: str | None) -> list[bytes]:
        """Of the prompt's blocks that a rank may know already; of none where it does not look."""
        keys: list[bytes] = []
        params = spec.params
        if params.prompt_logprobs is not None or params.return_routed_experts:
            return keys
        if self._config.cache.enable_prefix_caching:
            size = self._config.cache.block_size
            extend_keys(keys, cache_salt, spec.prompt_token_ids, size)
        return keys

    def forget_prefixes(self) -> None:
        """Have every rank compute the prompts of new requests in full."""
        self._balancer.forget_prefixes()
        if self._is_holding:
            return  # a new group knows none
        for rank in range(self._num_ranks):
            self._send(rank, ForgetPrefixes())
        self._wake()

    def _check_queue(self, num_new: int) -> None:
        scheduler = self._config.scheduler
        num_slots = scheduler.max_num_seqs * self._num_ranks
        num_waiting = max(0, len(self._choices) - num_slots)
        if num_waiting and num_waiting + num_new > scheduler.max_num_queued_requests:
            most = scheduler.max_num_queued_requests
            self._metrics.requests.on_rejection("queue_full")
            raise QueueFull(
                f"{num_waiting} requests wait already, and at most {most} may "
                "(max_num_queued_requests). Try again later.",
                self._drain_rate.retry_after_s(num_waiting + num_new - most, time.monotonic()),
            )

    def abort(self, choices: Sequence[OpenChoice], reason: str) -> None:
        """Free these on their ranks; nothing more of them will be routed."""
        for choice in choices:
            self._end(choice, reason)
        self._tell_ranks(choices, AbortRequests)

    def pause(self, submission: Submission) -> None:
        """Compute no more of its choices: their places are for others until `resume`."""
        self._tell_ranks(submission.open.values(), PauseRequests)

    def resume(self, submission: Submission) -> None:
        self._tell_ranks(submission.open.values(), ResumeRequests)

    def _tell_ranks(
        self,
        choices: Collection[OpenChoice],
        kind: type[AbortRequests] | type[PauseRequests] | type[ResumeRequests],
    ) -> None:
        """To each rank those of `choices` that it has."""
        choices = [choice for choice in choices if choice.is_given]
        if self._is_stopped or not choices:
            return
        by_rank: dict[int, list[str]] = {}
        for choice in choices:
            by_rank.setdefault(choice.rank, []).append(choice.request_id)
        for rank, request_ids in by_rank.items():
            self._send(rank, kind(request_ids))
        self._wake()

    def _send(self, rank: int, message: ToEngine) -> None:
        """To the process that schedules for DP rank `rank`: the first of its members."""
        self._channel.send(rank * self._num_members, message)

    def _wake(self) -> None:
        self.wake_number += 1
        for process in range(self._num_processes):
            self._channel.send(process, Wake(self.wake_number))
        self.on_wake(self.wake_number)

    # Another group -------------------------------------------------------------------------------

    def hold(self, epoch: int) -> None:
        """The group is lost: keep what is open until all ranks of `epoch` are ready."""
        self._is_holding = True
        self.epoch = epoch
        self._channel.start_epoch(epoch)
        self._ready = {}
        self._balancer.start_anew()
        culprit, self._on_trial, self._suspects = self._on_trial, None, []
        for choice in self._choices.values():
            choice.num_losses += choice.is_given and not choice.submission.is_paused
            choice.load, choice.epoch, choice.is_given = 0, epoch, False
        if culprit is not None:
            self._drop(culprit)
        if self._hold_timer is None:
            timeout_s = self._config.server.recovery.recovery_timeout_s
            loop = asyncio.get_running_loop()
            self._hold_timer = loop.call_later(timeout_s, self._give_up_holding, timeout_s)

    def _drop(self, culprit: OpenChoice) -> None:
        """It went on alone, and the group was lost again: the others are in the clear."""
        self._end(culprit, "error")
        culprit.submission.fail(
            GenerationFailed(
                f"a rank has failed {culprit.num_losses} times in a row while this request ran, "
                "without giving it a token: it is not tried again"
            )
        )
        for choice in self._choices.values():
            choice.num_losses = 0

    def _give_up_holding(self, timeout_s: float) -> None:
        # Another loss, before the ranks are there, holds requests again, and as long.
        self._hold_timer = None
        reason = (
            f"the ranks have not recovered within {timeout_s:g} s (recovery_timeout): "
            f"{self._health.reason}"
        )
        self._health.give_up_holding(reason)
        self.fail_all(reason)

    def _resume(self) -> None:
        """All ranks of the new group are ready: they go on where the old one was."""
        self._is_holding = False
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        if self._choices:
            logger.info("going on with %d open request(s)", len(self._choices))
        self._suspects = [
            choice
            for choice in self._choices.values()
            if choice.num_losses >= LOSSES_OF_SUSPECT and not choice.submission.is_paused
        ]
        if self._suspects:
            logger.warning(
                "%d groups were lost in a row before %d request(s) got another token: these go on "
                "one at a time, the newest first, and all others after them",
                LOSSES_OF_SUSPECT,
                len(self._suspects),
            )
        self._go_on()

    def _go_on(self) -> None:
        """Give the next suspect to a rank; after the last one, all that no rank has."""
        if self._is_stopped:
            return
        self._on_trial = None
        while self._suspects and self._on_trial is None:
            newest = self._suspects.pop()
            if newest.request_id in self._choices:
                self._on_trial = newest
        if self._on_trial is not None:
            self._give([self._on_trial])
            return
        # Wakes them also with nothing to do: wake numbers of before may differ.
        choices = [choice for choice in self._choices.values() if not choice.is_given]
        self._give(choices)
        paused = [c for c in choices if c.submission.is_paused]
        self._tell_ranks(paused, PauseRequests)

    # The end -------------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """The ranks were told to leave, or are gone for good."""
        return self._is_stopped

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return len(self._choices)

    def fail_all(self, message: str) -> int:
        """Every open request gets an error; returns how many there were."""
        submissions = {id(c.submission): c.submission for c in self._choices.values()}
        self.abort(list(self._choices.values()), "error")
        for submission in submissions.values():
            submission.fail(GenerationFailed(message))
        return len(submissions)

    def lose_group(self, message: str) -> int:
        """As `fail_all`, when the ranks are gone: nothing is sent to them any more."""
        self._is_stopped = True
        return self.fail_all(message)

    def shut_down(self) -> None:
        """Tell all ranks to leave together. Safe to call twice; ranks that have never been ready
        are not told.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        for rank in self._ready:
            self._channel.send(rank, Shutdown())
        if len(self._ready) == self._num_processes:
            self._wake()


def drop_duplicates(output: TokenOutput, next_index: int) -> TokenOutput | None:
    """What of `output` has not been seen yet; None when nothing. Outputs can repeat after a request
    has been taken over by another engine.
    """
    num_seen = next_index - output.output_index
    if num_seen <= 0:
        return output
    if num_seen >= len(output.token_ids):
        # An end that repeats old tokens, or has none, is still news.
        if output.finish_reason is None:
            return None
        num_seen = len(output.token_ids)
    return TokenOutput(
        request_id=output.request_id,
        epoch=output.epoch,
        output_index=next_index,
        token_ids=output.token_ids[num_seen:],
        finish_reason=output.finish_reason,
        stop_token_id=output.stop_token_id,
        logprobs=None if output.logprobs is None else output.logprobs[num_seen:],
        prompt_logprobs=output.prompt_logprobs,
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=output.num_preemptions,
    )
