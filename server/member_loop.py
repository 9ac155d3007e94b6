"""The loop of a process that computes with another: all members of a tensor-parallel group but the
first. It makes the first member's steps, and takes part in every agreement for itself.
"""

import torch

from moed.dist.agreement import Agreement, DecisionKind
from moed.server.engine_loop import SLEEP_WAIT_S, Channel
from moed.server.expert_reports import ExpertReports
from moed.server.faults import Faults
from moed.server.messages import Wake
from moed.server.model_runner import Runner
from moed.server.phases import group_phase
from moed.server.step_plan import StepPlan, StepPlans


class MemberLoop:
    """Runs steps until all ranks agree to stop."""

    def __init__(
        self,
        plans: StepPlans,
        runner: Runner,
        agreement: Agreement,
        channel: Channel,
        faults: Faults,
        expert_reports: ExpertReports,
    ) -> None:
        self._plans = plans
        self._runner = runner
        self._agreement = agreement
        self._channel = channel
        self._faults = faults
        self._expert_reports = expert_reports
        self._wake_number = 0

    def run(self) -> None:
        """Returns when all ranks stop together; raises what goes wrong in a step."""
        while self.step():
            pass

    def step(self) -> bool:
        """One step; False once all ranks have agreed to stop."""
        plan = self._plans.receive()
        # After the plan: what woke the first member has been sent to this one too by then.
        self._receive()
        self._faults.on_step(plan.step_id)
        graph = self._runner.graph_for(plan.batch)
        agreed = self._agreement.agree(
            plan.step_id, plan.batch.num_tokens, plan.state, self._wake_number, graph
        )
        match agreed.decision.kind:
            case DecisionKind.STOP:
                return False
            case DecisionKind.SLEEP:
                self._sleep()
            case DecisionKind.RUN:
                self._expert_reports.before_step(group_phase(agreed.has_prompts), 0)
                self._runner.run(plan.batch, agreed.dp_metadata, agreed.decision.graph)
                self._expert_reports.after_step()
        return True

    def _sleep(self) -> None:
        """As the other ranks do: until a wake number above the last one."""
        self._expert_reports.before_sleep()
        last = self._wake_number
        while self._wake_number <= last:
            self._channel.wait(SLEEP_WAIT_S)
            self._receive()

    def _receive(self) -> None:
        """Only wake numbers concern this process."""
        for message in self._channel.receive():
            if isinstance(message, Wake):
                self._wake_number = max(self._wake_number, message.number)


def run_warm_up(plans: StepPlans, runner: Runner, agreement: Agreement) -> torch.Tensor:
    """The member's part of the first step."""
    plan: StepPlan = plans.receive()
    agreed = agreement.agree(plan.step_id, plan.batch.num_tokens, plan.state, 0)
    return runner.run(plan.batch, agreed.dp_metadata, agreed.decision.graph)
