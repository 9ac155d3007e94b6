"""What the next step computes: at most B tokens of at most S requests. Plain Python, no tensors.

Order of service is `Request.key`: lower priority numbers first, then who came first. In a step:

1. Running requests that decode get one token each. When no KV block is left for one, the running
   request that is last in the order gives its blocks back and waits (it may be this one); its
   output is kept and computed again later as if it were prompt. A request that has been given
   tokens in this step is never that one, since decodes are served in the same order.
2. Running requests whose prompt is not yet computed get pieces of it. Their blocks are theirs since
   admission, so they never lack any.
3. Waiting requests are admitted in order while seats, tokens and blocks last. The first one that
   does not fit holds back those behind it, so a long prompt is never passed over for ever. What
   others have computed of a prompt, also earlier in this step, is shared and not computed again.

The first request in the order is never preempted and every admitted request fits alone, so each
step makes progress and each request ends. A waiting request takes no running one's seat.
"""

import bisect
import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moed.config.engine_config import SchedulerConfig
from moed.server.block_manager import BlockManager, Prefix
from moed.server.messages import AddRequest, TokenLogprobs, TokenOutput
from moed.server.request import Request, Status

# Aborted requests in the waiting heap are swept out when they are more than half of it and than
# this.
MIN_STALE_ENTRIES = 64


@dataclass(frozen=True)
class ScheduledRequest:
    """The next `num_tokens` tokens of a request, from `request.num_computed_tokens` on."""

    request: Request
    num_tokens: int
    prompt_logprob_positions: range
    """Positions in the request whose logits score the prompt token after them."""
    samples: bool
    """True when its last token is reached, so that the next one is chosen."""

    @property
    def chooses(self) -> bool:
        """False also when its request has ended since: what it was scheduled for is dropped."""
        request = self.request
        return self.samples and request.wants_token and request.status is not Status.FINISHED

    @property
    def logits_positions(self) -> list[int]:
        """Positions in the request whose logits are wanted: those of the prompt, then its last."""
        last = self.request.num_computed_tokens + self.num_tokens - 1
        return [*self.prompt_logprob_positions, *([last] if self.samples else [])]


@dataclass(frozen=True)
class Schedule:
    """One step's work; `requests` is empty when there is none."""

    requests: tuple[ScheduledRequest, ...]
    num_tokens: int


@dataclass(frozen=True)
class Sampled:
    """What the logits of one scheduled request gave."""

    token_id: int | None
    """None when the request does not sample in this step, wants no tokens, or failed."""
    logprobs: TokenLogprobs | None
    """Of that token, when asked for."""
    prompt_logprobs: Sequence[TokenLogprobs]
    """One for each of `prompt_logprob_positions`."""
    error: str | None


@dataclass
class Counters:
    """Since the start; the scheduler alone adds to them."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    max_step_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0


class Scheduler:
    """Requests of one rank from `add` to their end."""

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, max_model_len: int, vocab_size: int
    ) -> None:
        self.counters = Counters()
        self._config = config
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._requests: dict[str, Request] = {}
        # Aborted requests stay in the heap until they reach its top.
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        self._num_paused = 0
        # Sorted by key.
        self._running: list[Request] = []
        self._num_arrived = 0

    # In and out --------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> TokenOutput | None:
        """Queue a request. Returns its only output when it ends at once: refused, or nothing left
        to do.
        """
        if (error := self._refusal(message)) is not None:
            return refuse(message, error)
        request = Request.from_message(message, self._num_arrived, self._max_model_len)
        self._num_arrived += 1
        reason = request.finish_reason()
        if reason is not None and not request.has_unsent_prompt_logprobs:
            self.counters.num_finished += 1
            return _output(request, [], reason, None)
        self._requests[request.request_id] = request
        self._push_waiting(request)
        return None

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests in any state and free their blocks at once; unknown ids are ignored."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._remove(request)
                self.counters.num_aborted += 1

    def pause(self, request_ids: Iterable[str]) -> None:
        """Give back the places and blocks of these, and schedule them no more until `resume`."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None or request.status is Status.PAUSED:
                continue
            if request.status is Status.RUNNING:
                self._running.remove(request)
                self._blocks.free(request)
            else:
                self._leave_waiting(request)
                self._sweep_waiting(request)
            request.status = Status.PAUSED
            self._num_paused += 1

    def resume(self, request_ids: Iterable[str]) -> None:
        """Have paused requests wait for their turn, in their old place in the order."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.status is Status.PAUSED:
                self._num_paused -= 1
                self._push_waiting(request)

    def abort_all(self) -> None:
        self.abort(list(self._requests))

    @property
    def has_requests(self) -> bool:
        """True while there is something to compute, now or when others have ended."""
        return len(self._requests) > self._num_paused

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_paused(self) -> int:
        return self._num_paused

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed before all requests decode."""
        running = sum(r.num_uncomputed_tokens for r in self._running if not r.is_decoding)
        return self._num_waiting_tokens + running

    # One step ----------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Choose this step's tokens. Every call must be followed by `advance` and later `update`,
        or by nothing when no tokens were chosen. One other step's `update` may come between: what
        it ends is then dropped from this one.
        """
        budget = self._config.max_num_batched_tokens
        chosen: list[ScheduledRequest] = []
        for request in [r for r in self._running if r.is_decoding and not r.is_ending]:
            if budget == 0:
                break
            if request.status is Status.RUNNING and self._make_room(request):
                chosen.append(self._piece(request, 1))
                budget -= 1
        for request in self._running:
            if budget == 0:
                break
            if not request.is_decoding and not request.is_ending:
                count = min(request.num_uncomputed_tokens, budget)
                chosen.append(self._piece(request, count))
                budget -= count
        budget = self._admit(chosen, budget)
        num_tokens = self._config.max_num_batched_tokens - budget
        assert len(chosen) <= self._config.max_num_seqs and budget >= 0
        self.counters.max_step_tokens = max(self.counters.max_step_tokens, num_tokens)
        return Schedule(tuple(chosen), num_tokens)

    def advance(self, schedule: Schedule) -> None:
        """The step is under way and its tokens are being chosen: what follows from it for the next
        schedule, whatever they are.
        """
        for place, scheduled in enumerate(schedule.requests):
            request = scheduled.request
            if request.status is Status.FINISHED:
                continue
            chooses = scheduled.chooses
            request.num_computed_tokens += scheduled.num_tokens
            self._blocks.end_step(request)
            self._count_prompt_tokens(request)
            if chooses:
                request.awaited_place = place

    def update(self, schedule: Schedule, results: Sequence[Sampled]) -> list[TokenOutput]:
        """Append what was sampled, end what has ended, and say what the front end must know."""
        outputs: list[TokenOutput] = []
        for scheduled, sampled in zip(schedule.requests, results, strict=True):
            if scheduled.request.status is Status.FINISHED:
                continue
            output = self._update_one(scheduled, sampled)
            if output is not None:
                outputs.append(output)
        return outputs

    def _update_one(self, scheduled: ScheduledRequest, sampled: Sampled) -> TokenOutput | None:
        request = scheduled.request
        if sampled.error is not None:
            # Whatever went wrong may be in its blocks.
            self._blocks.forget(request)
            self._remove(request)
            return _output(request, [], "error", None, sampled.error)
        if request.prompt_logprobs is not None:
            # In their places: after a preemption meanwhile, some were made twice.
            place = scheduled.prompt_logprob_positions.start + 1
            request.prompt_logprobs[place : place + len(sampled.prompt_logprobs)] = (
                sampled.prompt_logprobs
            )
        if not scheduled.samples:
            return None
        new_tokens: list[int] = []
        if sampled.token_id is not None:
            new_tokens = [sampled.token_id]
            request.token_ids.append(sampled.token_id)
            request.awaited_place = None
            self.counters.num_generation_tokens += 1
        reason = request.finish_reason()
        if reason is not None:
            self._blocks.name_full(request, request.num_computed_tokens)
            self._remove(request)
            self.counters.num_finished += 1
        return _output(request, new_tokens, reason, sampled.logprobs)

    # Parts of a step ---------------------------------------------------------------------------

    def _make_room(self, request: Request) -> bool:
        """Get the blocks for a decode, from requests later in the order if need be; False when it
        was itself the last and now waits.
        """
        while self._blocks.num_missing_blocks(request) > self._blocks.num_free_blocks:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        self._blocks.allocate(request)
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._blocks.free(request)
        self._push_waiting(request)
        request.num_preemptions += 1
        self.counters.num_preemptions += 1

    def _admit(self, chosen: list[ScheduledRequest], budget: int) -> int:
        """Move waiting requests to running while all of it fits; returns the tokens left."""
        while budget > 0 and len(self._running) < self._config.max_num_seqs:
            request = self._first_waiting()
            if request is None or request.is_ending:
                break
            prefix = self._blocks.find_prefix(request)
            count = self._first_piece_size(request, len(prefix.block_ids), budget)
            if count == 0 or not self._has_blocks_for(request, prefix):
                break
            heapq.heappop(self._waiting)
            self._leave_waiting(request)
            request.status = Status.RUNNING
            if request.queue_s is None:
                request.queue_s = time.monotonic() - request.arrived_at
            self._blocks.start(request, prefix)
            self._count_prefix(request)
            bisect.insort(self._running, request, key=lambda running: running.key)
            chosen.append(self._piece(request, count))
            budget -= count
        return budget

    def _piece(self, request: Request, num_tokens: int) -> ScheduledRequest:
        self._blocks.take_step(request, request.num_computed_tokens + num_tokens)
        return _piece(request, num_tokens)

    def _has_blocks_for(self, request: Request, prefix: Prefix) -> bool:
        """True when its tokens fit, with one block over for each running request: otherwise the
        next decode that needs a block would throw it out again.
        """
        needed = self._blocks.num_needed_blocks(request, prefix) + len(self._running)
        return needed <= self._blocks.num_free_blocks

    def _first_piece_size(self, request: Request, num_prefix_blocks: int, budget: int) -> int:
        """Tokens of a waiting request that fit in this step; 0 when it must wait to go whole."""
        uncomputed = request.num_tokens - num_prefix_blocks * self._blocks.block_size
        whole = not self._config.enable_chunked_prefill
        # What preemption dropped may be more than B; it goes in pieces, or could never go again.
        if whole and budget < uncomputed <= self._config.max_num_batched_tokens:
            return 0
        return min(uncomputed, budget)

    # Waiting requests --------------------------------------------------------------------------

    def _push_waiting(self, request: Request) -> None:
        request.status = Status.WAITING
        heapq.heappush(self._waiting, (request.key, request))
        self._num_waiting += 1
        self._num_waiting_tokens += request.num_tokens

    def _leave_waiting(self, request: Request) -> None:
        self._num_waiting -= 1
        self._num_waiting_tokens -= request.num_tokens

    def _first_waiting(self) -> Request | None:
        while self._waiting and not _is_waiting(self._waiting[0][1]):
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _remove(self, request: Request) -> None:
        """End of a request in any state."""
        if request.status is Status.RUNNING:
            self._running.remove(request)
        elif request.status is Status.PAUSED:
            self._num_paused -= 1
        else:
            self._leave_waiting(request)
        request.status = Status.FINISHED
        self._blocks.free(request)
        del self._requests[request.request_id]
        if len(self._waiting) > 2 * self._num_waiting + MIN_STALE_ENTRIES:
            self._sweep_waiting(None)

    def _sweep_waiting(self, leaving: Request | None) -> None:
        """Drop what is stale, and `leaving`, which may come back: no request is there twice."""
        self._waiting = [
            (key, request)
            for key, request in self._waiting
            if _is_waiting(request) and request is not leaving
        ]
        heapq.heapify(self._waiting)

    def _count_prompt_tokens(self, request: Request) -> None:
        """Each prompt token once, however often preemption has it computed again."""
        computed = min(request.num_computed_tokens, request.num_prompt_tokens)
        if (more := computed - request.num_counted_prompt_tokens) > 0:
            self.counters.num_prompt_tokens += more
            request.num_counted_prompt_tokens = computed

    def _count_prefix(self, request: Request) -> None:
        """Once for each request: what it finds after a preemption is its own."""
        if request.num_cached_tokens is not None:
            return
        cached = min(request.num_computed_tokens, request.num_prompt_tokens)
        request.num_cached_tokens = cached
        # Found, not computed.
        request.num_counted_prompt_tokens = cached
        if request.may_use_prefixes:
            self.counters.num_prefix_queries += request.num_prompt_tokens
            self.counters.num_prefix_hits += cached

    # Checks and counts -------------------------------------------------------------------------

    def _refusal(self, message: AddRequest) -> str | None:
        """Why a request can never run here, or None. The front end checks the same, so this is for
        what slipped through it.
        """
        prompt, output = message.prompt_token_ids, message.output_token_ids
        if message.request_id in self._requests:
            return f"request {message.request_id} is already running on this rank"
        if not prompt:
            return "the prompt is empty: give at least one token"
        for token_id in (*prompt, *output, *message.params.logit_bias):
            if not 0 <= token_id < self._vocab_size:
                return (
                    f"token id {token_id} is outside the vocabulary: ids go from 0 to "
                    f"{self._vocab_size - 1}"
                )
        if len(prompt) >= self._max_model_len:
            return (
                f"the prompt has {len(prompt)} tokens, but at most {self._max_model_len - 1} fit "
                f"beside one output token (max_model_len is {self._max_model_len})"
            )
        whole = not self._config.enable_chunked_prefill
        if whole and len(prompt) > self._config.max_num_batched_tokens:
            return (
                f"the prompt has {len(prompt)} tokens, but chunked prefill is off and one step "
                f"takes at most {self._config.max_num_batched_tokens} (max_num_batched_tokens)"
            )
        longest = min(len(prompt) + message.params.max_tokens, self._max_model_len)
        needed = self._blocks.num_blocks_for(longest)
        if needed > self._blocks.num_blocks:
            return (
                f"prompt and output of up to {longest} tokens need {needed} KV blocks of "
                f"{self._blocks.block_size} tokens, but this rank has {self._blocks.num_blocks}; "
                "lower max_tokens"
            )
        return None


def _is_waiting(request: Request) -> bool:
    return request.status is Status.WAITING


def _piece(request: Request, num_tokens: int) -> ScheduledRequest:
    first = request.num_computed_tokens
    end = first + num_tokens
    positions = range(0)
    if request.prompt_logprobs is not None:
        # Logits at a position score the next token; those known from before preemption are done.
        known = len(request.prompt_logprobs)
        positions = range(max(first, known - 1), min(end, request.num_prompt_tokens - 1))
    return ScheduledRequest(request, num_tokens, positions, end == request.num_tokens)


def _output(
    request: Request,
    new_tokens: list[int],
    reason: str | None,
    logprobs: TokenLogprobs | None,
    error: str | None = None,
) -> TokenOutput:
    """Build the message and note what has been sent."""
    output = TokenOutput(
        request_id=request.request_id,
        epoch=request.epoch,
        output_index=request.num_sent_tokens,
        token_ids=new_tokens,
        finish_reason=reason,
        stop_token_id=request.token_ids[-1] if reason == "stop" else None,
        error=error,
        logprobs=None if logprobs is None else [logprobs],
        prompt_logprobs=None if error is not None else request.prompt_logprobs,
        num_cached_tokens=0 if request.num_sent_tokens else request.num_cached_tokens or 0,
        routed_experts=request.routed_experts,
        queue_s=request.queue_s or 0.0,
        num_preemptions=0 if reason is None else request.num_preemptions,
    )
    request.routed_experts = []
    request.num_sent_tokens += len(new_tokens)
    request.prompt_logprobs = None
    return output


def refuse(message: AddRequest, error: str) -> TokenOutput:
    """The only output of a request that is not taken."""
    return TokenOutput(
        request_id=message.request_id,
        epoch=message.epoch,
        output_index=len(message.output_token_ids),
        token_ids=[],
        finish_reason="error",
        error=error,
    )
