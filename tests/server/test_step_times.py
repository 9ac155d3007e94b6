"""Steps are counted by phase and told at most once a second; the front end shows them cumulated."""

import time

import pytest
import torch

from moed.moe.part_times import Part, PartTimes
from moed.server.messages import AddRequest, RankStats, SamplingParams, StepDurations
from moed.server.metric_buckets import STEP_S
from moed.server.part_times import SAMPLE_EVERY, PartSamples
from moed.server.phases import phase_of
from moed.server.request import Request
from moed.server.scheduler import Schedule, ScheduledRequest
from moed.server.step_metrics import StepMetrics
from moed.server.step_times import StepTimes

CPU = torch.device("cpu")


def schedule(num_tokens: int, num_computed: int, output: list[int]) -> Schedule:
    """Of one request with a prompt of one token."""
    params = SamplingParams(max_tokens=5, seed=0, temperature=0.0)
    message = AddRequest(
        request_id="a", epoch=0, prompt_token_ids=[1], params=params, output_token_ids=output
    )
    request = Request.from_message(message, 0, 100)
    request.num_computed_tokens = num_computed
    return Schedule((ScheduledRequest(request, num_tokens, range(0), True),), num_tokens)


@pytest.mark.parametrize(
    ("step", "phase"),
    [
        (schedule(7, 0, []), "prefill"),
        (schedule(1, 0, []), "prefill"),  # a prompt of one token is no decode
        (schedule(1, 1, []), "decode"),  # the one before is known to the device alone
        (schedule(1, 1, [5]), "decode"),
        (schedule(2, 0, [5]), "prefill"),  # what preemption has dropped
        (Schedule((), 0), "idle"),
        (Schedule((*schedule(1, 1, [5]).requests, *schedule(1, 0, []).requests), 2), "prefill"),
    ],
)
def test_the_phase_of_a_step(step: Schedule, phase: str) -> None:
    assert phase_of(step) == phase


def test_phases_and_the_last_steps_before_sleep_are_told() -> None:
    sent: list[StepDurations] = []
    times = StepTimes(1, PartSamples(CPU), sent.append)
    times.on_step("prefill", 0.001, 0.003)
    assert len(sent) == 1
    times.on_step("prefill", 0.001, 0.003)
    times.on_step("decode", 0.001, 0.04)
    times.on_step("idle", 100.0, 1000.0)
    assert len(sent) == 1
    times.before_sleep()
    times.before_sleep()
    assert len(sent) == 2
    told = sent[-1]
    assert {phase: sum(d.counts) for phase, d in told.steps.items()} == {
        "prefill": 2,
        "decode": 1,
        "idle": 1,
    }
    assert told.steps["decode"].counts[STEP_S.index(0.05)] == 1
    assert told.steps["idle"].counts[-1] == 1 and told.waits.sum_s == pytest.approx(100.003)


def test_buckets_are_cumulated_and_lag_is_only_of_busy_ranks() -> None:
    sent: list[StepDurations] = []
    StepTimes(0, PartSamples(CPU), sent.append).on_step("decode", 0.0, 0.04)
    now = time.monotonic()
    clock = iter((now, now, now + 3, now + 3)).__next__
    metrics = StepMetrics("m", clock)
    metrics.on_durations(sent[0])
    for rank, num_running in ((0, 1), (1, 0)):
        metrics.on_stats(stats(rank, num_running))
    steps, waits, lag, *_ = metrics.families()
    found = {(s.labels.get("phase"), s.labels.get("le")): s.value for s in steps.samples}
    assert found["decode", "0.025"] == 0 and found["decode", "0.05"] == 1
    assert found["decode", "+Inf"] == 1 and found["prefill", "+Inf"] == 0
    assert waits.samples[0].labels["ep_rank"] == "0"
    assert [sample.value for sample in lag.samples] == [3, 0]


def stats(rank: int, num_running: int) -> RankStats:
    counts = {name: 0 for name in RankStats.__struct_fields__}
    return RankStats(**{**counts, "rank": rank, "num_running": num_running})


def call(times: PartTimes | None, part: Part) -> None:
    """`part` of one layer, which adds two numbers."""
    if times is not None:
        assert times.timing(part, lambda a, b: a + b)(2, b=3) == 5


def test_parts_of_a_step_now_and_then_are_told_by_phase() -> None:
    """Of each phase of the group, the first step and then each 64th."""
    sent: list[StepDurations] = []
    samples = PartSamples(CPU)
    times = StepTimes(0, samples, sent.append)
    sampled = []
    for number in range(2 * SAMPLE_EVERY + 1):
        # This rank decodes; another has a prompt in its first step.
        asked = samples.begin("decode", "prefill" if number == 0 else "decode")
        sampled += [number] if asked is not None else []
        for _ in range(3):  # layers
            call(asked, Part.ATTENTION)
            call(asked, Part.DISPATCH)
        times.on_step("decode", 0.0, 0.0)
    assert sampled == [0, 1, 1 + SAMPLE_EVERY]
    times.before_sleep()
    metrics = StepMetrics("m")
    for _ in range(2):
        metrics.on_durations(sent[-1])
    metrics.start_anew()
    metrics.on_durations(sent[-1])
    *_, exchange, gemm, attention = metrics.families()
    counts = {
        (family.name.removeprefix("moed:"), s.labels.get("op"), s.labels["phase"]): s.value
        for family in (exchange, gemm, attention)
        for s in family.samples
        if s.name.endswith("_count")
    }
    # Two groups, one after the other, of three layers and three steps each.
    assert counts == {
        ("all2all_seconds", "dispatch", "prefill"): 2 * 3,
        ("all2all_seconds", "dispatch", "decode"): 2 * 3 * 2,
        ("all2all_seconds", "combine", "prefill"): 0,
        ("all2all_seconds", "combine", "decode"): 0,
        ("moe_gemm_seconds", None, "prefill"): 0,
        ("moe_gemm_seconds", None, "decode"): 0,
        ("attention_seconds", None, "prefill"): 0,
        ("attention_seconds", None, "decode"): 2 * 3 * 3,
    }


def test_a_rank_without_tokens_attends_to_nothing() -> None:
    samples = PartSamples(CPU)
    asked = samples.begin("idle", "decode")
    for part in Part:
        call(asked, part)
    samples.collect()
    counts = {part: sum(samples.histograms[part]["decode"].counts) for part in Part}
    assert counts == {part: int(part is not Part.ATTENTION) for part in Part}


class FakeEvent:
    """Of a device that does nothing before `is_done`; each event comes 2 ms after the last."""

    is_done = False
    num_recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.num_recorded += 1
        self.number = FakeEvent.num_recorded

    def query(self) -> bool:
        return FakeEvent.is_done

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert FakeEvent.is_done, "the device would be waited for"
        return 2.0 * (end.number - self.number)


def test_a_device_is_asked_later_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    samples = PartSamples(torch.device("cuda"))
    experts = samples.histograms[Part.EXPERTS]["prefill"]
    call(samples.begin("prefill", "prefill"), Part.EXPERTS)
    samples.collect()
    # While one is on its way, no other begins.
    assert sum(experts.counts) == 0 and samples.begin("decode", "decode") is None
    FakeEvent.is_done = True
    samples.collect()
    assert sum(experts.counts) == 1 and experts.sum == pytest.approx(0.002)
    # A replayed graph tells nothing, and holds nothing up.
    for number in range(2 * SAMPLE_EVERY):
        asked = samples.begin("decode", "decode")
        samples.collect()
        assert (asked is None) == (number % SAMPLE_EVERY != SAMPLE_EVERY - 1), number
    assert sum(map(sum, (h.counts for h in samples.histograms[Part.EXPERTS].values()))) == 1
