"""The loop of one rank: the same steps and collectives on every rank, whatever its load.

A step is made in one of two orders, which give the same tokens. Plain: run, choose, take in what
was chosen. One ahead: run, take in what the step *before* has chosen while the device computes this
one, choose. Then the next step is scheduled as if no request ended with a token that only the
device knows; what one computes beyond its end is dropped. Either way each step agrees and runs
once, in this order, so ranks may even differ.
"""

import logging
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import torch

from moed.dist.agreement import Agreed, Agreement, DecisionKind, RankState
from moed.moe.batch import ForwardBatch
from moed.server.block_manager import BlockManager
from moed.server.expert_reports import ExpertReports
from moed.server.faults import Faults
from moed.server.grammar_masks import NO_MASKS, GrammarMasks, TokenMasks
from moed.server.messages import (
    AbortRequests,
    AddRequest,
    ForgetPrefixes,
    FromEngine,
    FrontendReplaced,
    PauseRequests,
    RankStats,
    ResumeRequests,
    Shutdown,
    StepOutputs,
    ToEngine,
    TokenOutput,
    Wake,
)
from moed.server.model_runner import Runner
from moed.server.part_times import PartSamples
from moed.server.phases import PREFILL, group_phase, phase_of
from moed.server.routed_experts import keep_routed_experts
from moed.server.sampler import Sampling
from moed.server.scheduler import Schedule, Scheduler, refuse
from moed.server.step_plan import StepPlan, StepPlans
from moed.server.step_times import StepTimes

logger = logging.getLogger(__name__)

# A sleeping rank waits for a message, not for time to pass; this only bounds one system call.
SLEEP_WAIT_S = 60.0


class Channel(Protocol):
    """What the loop needs of `moed.server.channel.EngineChannel`."""

    def receive(self) -> list[ToEngine]: ...

    def wait(self, timeout_s: float) -> bool: ...

    def send(self, message: FromEngine) -> None: ...


class EngineLoop:
    """Runs steps until all ranks agree to stop."""

    def __init__(
        self,
        *,
        rank: int,
        scheduler: Scheduler,
        blocks: BlockManager,
        runner: Runner,
        plans: StepPlans,
        agreement: Agreement,
        channel: Channel,
        faults: Faults,
        grammars: GrammarMasks,
        expert_reports: ExpertReports,
        part_samples: PartSamples,
        first_step_id: int,
        step_ahead: bool,
    ) -> None:
        self._rank = rank
        self._scheduler = scheduler
        self._blocks = blocks
        self._runner = runner
        self._plans = plans
        self._agreement = agreement
        self._channel = channel
        self._faults = faults
        self._grammars = grammars
        self._expert_reports = expert_reports
        self._part_samples = part_samples
        self._step_times = StepTimes(rank, part_samples, channel.send)
        self._step_id = first_step_id
        self._step_ahead = step_ahead
        # What the last step has chosen, until it is taken in.
        self._last: Sampling | None = None
        self._num_steps = 0
        self._wake_number = 0
        self._is_stopping = False
        # Requests that ended while messages were read, sent with the next report.
        self._early_outputs: list[TokenOutput] = []
        self._last_stats = self._stats()

    def run(self) -> None:
        """Returns when all ranks stop together; raises what goes wrong in a step."""
        while self.step():
            pass

    def step(self) -> bool:
        """One step; False once all ranks have agreed to stop."""
        self._receive()
        self._faults.on_step(self._step_id)
        schedule = self._schedule()
        self._faults.on_requests(r.request.num_prompt_tokens for r in schedule.requests)
        state, last = self._state, self._last
        batch = self._runner.batch(schedule, None if last is None else last.token_ids)
        self._plans.send(StepPlan(self._step_id, state, batch))
        graph, phase = self._runner.graph_for(batch), phase_of(schedule)
        waiting_since = time.monotonic()
        agreed = self._agreement.agree(
            self._step_id, schedule.num_tokens, state, self._wake_number, graph, phase == PREFILL
        )
        agreed_at = time.monotonic()
        self._step_id += 1
        match agreed.decision.kind:
            case DecisionKind.STOP:
                self._report([])
                return False
            case DecisionKind.SLEEP:
                self._sleep()
                return True
        self._num_steps += 1
        batch = self._measured(batch, phase, group_phase(agreed.has_prompts))
        if self._step_ahead:
            self._run_ahead(schedule, batch, agreed)
        else:
            self._run_plainly(schedule, batch, agreed)
        self._expert_reports.after_step()
        self._step_times.on_step(phase, agreed_at - waiting_since, time.monotonic() - agreed_at)
        return True

    def _measured(self, batch: ForwardBatch, phase: str, group_phase: str) -> ForwardBatch:
        """`batch`, which may be asked to tell its times."""
        self._expert_reports.before_step(group_phase, batch.num_tokens)
        times = self._part_samples.begin(phase, group_phase)
        return batch if times is None else replace(batch, times=times)

    def _run_plainly(self, schedule: Schedule, batch: ForwardBatch, agreed: Agreed) -> None:
        masks = self._grammars.start(schedule)
        logits = self._runner.run(batch, agreed.dp_metadata, agreed.decision.graph)
        self._choose(schedule, batch, logits, masks)
        self._take_in_last()

    def _run_ahead(self, schedule: Schedule, batch: ForwardBatch, agreed: Agreed) -> None:
        logits = self._runner.run(batch, agreed.dp_metadata, agreed.decision.graph)
        # All that follows happens while the device computes. Choosing needs what came before.
        self._take_in_last()
        masks = self._grammars.start(schedule)
        self._choose(schedule, batch, logits, masks)

    def _schedule(self) -> Schedule:
        schedule = self._scheduler.schedule()
        if not schedule.requests and self._last is not None:
            # Nothing is left to be done meanwhile.
            self._take_in_last()
            schedule = self._scheduler.schedule()
        return schedule

    def _choose(
        self,
        schedule: Schedule,
        batch: ForwardBatch,
        logits: torch.Tensor,
        pending: "Future[TokenMasks] | None",
    ) -> None:
        if batch.routed_experts is not None:
            keep_routed_experts(schedule, batch.routed_experts)
        masks = NO_MASKS if pending is None else pending.result()
        self._last = Sampling(schedule, logits, masks)
        self._scheduler.advance(schedule)

    def _take_in_last(self) -> None:
        """Append what was chosen, end what has ended, and tell the front end."""
        last, self._last = self._last, None
        outputs = [] if last is None else self._scheduler.update(last.schedule, last.results())
        self._report(outputs)

    @property
    def _state(self) -> RankState:
        if self._is_stopping:
            return RankState.STOPPING
        return RankState.WORKING if self._scheduler.has_requests else RankState.IDLE

    def _sleep(self) -> None:
        """Wait for a wake number above the last one. Messages that come before it are taken in, but
        no step is made: the other ranks may not have heard of them yet.
        """
        self._report([], if_anything_changed=True)
        self._expert_reports.before_sleep()
        self._step_times.before_sleep()
        last = self._wake_number
        while self._wake_number <= last:
            self._channel.wait(SLEEP_WAIT_S)
            self._receive()

    def _receive(self) -> None:
        for message in self._channel.receive():
            match message:
                case AddRequest():
                    self._add(message)
                case AbortRequests():
                    self._scheduler.abort(message.request_ids)
                case PauseRequests():
                    self._scheduler.pause(message.request_ids)
                case ResumeRequests():
                    self._scheduler.resume(message.request_ids)
                case Wake():
                    self._wake_number = max(self._wake_number, message.number)
                case FrontendReplaced():
                    self._forget_requests()
                case ForgetPrefixes():
                    self._blocks.forget_prefixes()
                case Shutdown():
                    self._is_stopping = True
                    self._scheduler.abort_all()

    def _forget_requests(self) -> None:
        """Nobody waits for them any more; who takes over is told where this rank stands."""
        self._scheduler.abort_all()
        self._early_outputs = []
        self._channel.send(StepOutputs(self._rank, [], self._stats()))

    def _add(self, message: AddRequest) -> None:
        if self._is_stopping:
            output: TokenOutput | None = refuse(message, "the server is shutting down")
        else:
            output = self._scheduler.add(message)
        if output is not None:
            self._early_outputs.append(output)

    def _report(self, outputs: list[TokenOutput], if_anything_changed: bool = False) -> None:
        """Send outputs with the statistics; without outputs only when a gauge has changed, or, if
        so asked, any counter.
        """
        outputs = [*self._early_outputs, *outputs]
        stats = self._stats()
        changed = (
            stats != self._last_stats
            if if_anything_changed
            else _gauges(stats) != _gauges(self._last_stats)
        )
        if outputs or changed:
            self._channel.send(StepOutputs(self._rank, outputs, stats))
            self._early_outputs = []
            self._last_stats = stats

    def _stats(self) -> RankStats:
        counters = self._scheduler.counters
        return RankStats(
            rank=self._rank,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_kv_blocks_used=self._blocks.num_used_blocks,
            num_kv_blocks=self._blocks.num_blocks,
            num_queued_tokens=self._scheduler.num_queued_tokens,
            num_steps=self._num_steps,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generation_tokens=counters.num_generation_tokens,
            num_preemptions=counters.num_preemptions,
            max_step_tokens=counters.max_step_tokens,
            num_finished=counters.num_finished,
            num_aborted=counters.num_aborted,
            num_prefix_queries=counters.num_prefix_queries,
            num_prefix_hits=counters.num_prefix_hits,
            num_paused=self._scheduler.num_paused,
        )


def _gauges(stats: RankStats) -> tuple[int, int, int]:
    return (stats.num_running, stats.num_waiting, stats.num_paused)
