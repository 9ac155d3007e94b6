"""What kind of work a step is: of one rank, and of all ranks together."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moed.server.scheduler import Schedule

PREFILL, DECODE, IDLE = "prefill", "decode", "idle"
GROUP_PHASES = (PREFILL, DECODE)


def phase_of(schedule: "Schedule") -> str:
    """Of a rank's step that is about to run: one that computes any piece of a prompt, or what a
    preempted request has lost, is one of prefill; "idle" is one without tokens.
    """
    if not schedule.requests:
        return IDLE
    is_decode = all(
        scheduled.num_tokens == 1
        and scheduled.request.num_computed_tokens >= scheduled.request.num_prompt_tokens
        for scheduled in schedule.requests
    )
    return DECODE if is_decode else PREFILL


def group_phase(has_prompts: bool) -> str:
    """Of a step of all ranks, whose rows meet at the experts: prefill where any rank's is."""
    return PREFILL if has_prompts else DECODE
