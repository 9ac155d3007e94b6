"""Steps are counted by phase and told at most once a second; the front end shows them cumulated."""

import time

import pytest

from moed.server.messages import AddRequest, RankStats, SamplingParams, StepDurations
from moed.server.metric_buckets import STEP_S
from moed.server.request import Request
from moed.server.scheduler import Schedule, ScheduledRequest
from moed.server.step_metrics import StepMetrics
from moed.server.step_times import StepTimes


def schedule(num_tokens: int, output: list[int]) -> Schedule:
    params = SamplingParams(max_tokens=5, seed=0, temperature=0.0)
    message = AddRequest(
        request_id="a", epoch=0, prompt_token_ids=[1], params=params, output_token_ids=output
    )
    request = Request.from_message(message, 0, 100)
    return Schedule((ScheduledRequest(request, num_tokens, range(0), True),), num_tokens)


def test_phases_and_the_last_steps_before_sleep_are_told() -> None:
    sent: list[StepDurations] = []
    times = StepTimes(1, sent.append)
    times.on_step(schedule(7, []), 0.001, 0.003)
    assert len(sent) == 1
    times.on_step(schedule(1, []), 0.001, 0.003)  # a prompt of one token is no decode
    times.on_step(schedule(1, [5]), 0.001, 0.04)
    times.on_step(Schedule((), 0), 100.0, 1000.0)
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
    StepTimes(0, sent.append).on_step(schedule(1, [5]), 0.0, 0.04)
    now = time.monotonic()
    clock = iter((now, now, now + 3, now + 3)).__next__
    metrics = StepMetrics("m", clock)
    metrics.on_durations(sent[0])
    for rank, num_running in ((0, 1), (1, 0)):
        metrics.on_stats(stats(rank, num_running))
    steps, waits, lag = metrics.families()
    found = {(s.labels.get("phase"), s.labels.get("le")): s.value for s in steps.samples}
    assert found["decode", "0.025"] == 0 and found["decode", "0.05"] == 1
    assert found["decode", "+Inf"] == 1 and found["prefill", "+Inf"] == 0
    assert waits.samples[0].labels["ep_rank"] == "0"
    assert [sample.value for sample in lag.samples] == [3, 0]


def stats(rank: int, num_running: int) -> RankStats:
    counts = {name: 0 for name in RankStats.__struct_fields__}
    return RankStats(**{**counts, "rank": rank, "num_running": num_running})
