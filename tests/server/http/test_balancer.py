"""Requests go where the least work is, from the first burst on."""

import concurrent.futures

import pytest

from moed.server.balancer import EXPECTED_OUTPUT_TOKENS, Balancer, Work
from tests.server.http.served import Served


def place(balancer: Balancer, num_tokens: int, rank: int | None = None) -> int:
    return balancer.choose(Work(num_tokens, 0), rank).rank


def test_ties_go_round() -> None:
    balancer = Balancer(3)
    assert [place(balancer, 10) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_ties_go_round_when_each_request_ends_before_the_next() -> None:
    balancer = Balancer(2)
    ranks = []
    for _ in range(6):
        ranks.append(place(balancer, 10))
        balancer.done(ranks[-1], 10)
    assert ranks == [0, 1, 0, 1, 0, 1]


def test_long_prompt_weighs_as_much_as_many_short_ones() -> None:
    balancer = Balancer(2)
    assert balancer.choose(Work(100, 20), None).rank == 0  # 120
    # 30 each: four of them weigh as much.
    assert [balancer.choose(Work(10, 20), None).rank for _ in range(4)] == [1, 1, 1, 1]
    assert balancer.loads == [120, 120]


def test_wanted_rank_is_obeyed_and_counted() -> None:
    balancer = Balancer(2)
    assert [place(balancer, 10, 1) for _ in range(3)] == [1, 1, 1]
    assert [place(balancer, 10) for _ in range(3)] == [0, 0, 0]


def test_output_limit_counts_up_to_what_outputs_are_expected_to_have() -> None:
    assert Balancer(1).choose(Work(5, 7), None).load == 12
    assert Balancer(1).choose(Work(5, 100_000), None).load == 5 + EXPECTED_OUTPUT_TOKENS


def with_prefix(own: int, num_tokens: int = 100) -> Work:
    """Ten blocks of ten tokens, of which the first nine are everybody's."""
    keys = [b"common%d" % index for index in range(9)] + [b"own%d" % own]
    return Work(num_tokens, 10, keys, 10)


def test_common_beginning_is_no_work_where_it_was_computed() -> None:
    balancer = Balancer(2)
    balancer.remember_blocks(1000)
    assert balancer.choose(with_prefix(0), 1).load == 110
    placed = balancer.choose(with_prefix(1), 1)
    assert (placed.num_prefill_tokens, placed.load) == (10, 20)
    # The whole prompt again: its last token is computed at least.
    assert balancer.choose(with_prefix(1), 1).num_prefill_tokens == 1
    balancer.forget_prefixes()
    assert balancer.choose(with_prefix(1), 1).load == 110


def test_requests_with_a_common_beginning_meet_without_herding() -> None:
    balancer = Balancer(2)
    balancer.remember_blocks(1000)
    ranks = [balancer.choose(with_prefix(own), None).rank for own in range(40)]
    # The second goes elsewhere only once the first rank's lead outweighs computing it anew there.
    assert ranks[0] == 0 and ranks[1] == 1 and abs(sum(ranks) - 20) <= 5
    assert abs(balancer.loads[0] - balancer.loads[1]) <= 110


def test_one_at_a_time_they_all_meet_on_one_rank() -> None:
    balancer = Balancer(3)
    balancer.remember_blocks(1000)
    ranks = []
    for own in range(6):
        placed = balancer.choose(with_prefix(own), None)
        balancer.done(placed.rank, placed.load)
        ranks.append(placed.rank)
    assert ranks == [0] * 6


def test_no_more_beginnings_are_remembered_than_a_rank_can_hold() -> None:
    balancer = Balancer(1)
    balancer.remember_blocks(15)
    balancer.choose(with_prefix(0), None)
    balancer.choose(Work(100, 10, [b"other%d" % index for index in range(10)], 10), None)
    assert balancer.choose(with_prefix(0), None).load == 110


def counts(served: Served) -> list[int]:
    return [len(engine.added) for engine in served.engines]


@pytest.mark.parametrize("burst", ["cold", "warm"])
def test_burst_of_equal_requests_is_spread_evenly(served: Served, burst: str) -> None:
    for engine in served.engines:
        engine.step_s = 0.02
    before = counts(served)
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        list(pool.map(lambda n: served.complete(prompt=[n + 1], max_tokens=8), range(40)))
    spread = [after - start for after, start in zip(counts(served), before, strict=True)]
    assert sum(spread) == 40
    assert all(18 <= count <= 22 for count in spread), spread


def test_load_is_forgotten_when_requests_end(served: Served) -> None:
    """However they ended, the next requests alternate again."""
    served.complete(prompt=[1] * 300, max_tokens=5)
    served.complete(prompt=[1, 2, 3], max_tokens=200, stop=["\x02"])
    for engine in served.engines:
        engine.is_paused = True
    for _ in range(2):
        with pytest.raises(Exception, match="timed out"):
            served.post("/v1/completions", {"prompt": [1] * 200}, headers={"X": "y"}, timeout=0.3)
    for engine in served.engines:
        engine.is_paused = False
    served.wait(lambda: served.num_running == 0)
    before = counts(served)
    for _ in range(10):
        served.complete(prompt=[1], max_tokens=1)
    spread = [after - start for after, start in zip(counts(served), before, strict=True)]
    assert spread == [5, 5]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_of_the_header_is_used_for_all_choices(served: Served, rank: int) -> None:
    before = counts(served)
    headers = {"X-data-parallel-rank": str(rank)}
    body = {"prompt": [[1], [2]], "n": 2, "max_tokens": 1}
    assert served.post("/v1/completions", body, headers=headers).status_code == 200
    after = counts(served)
    assert after[rank] - before[rank] == 4
    assert after[1 - rank] == before[1 - rank]


@pytest.mark.parametrize("rank", ["2", "-1", "x", "", "1.0", "٣", "9" * 40])
def test_rank_that_does_not_exist_is_refused(served: Served, rank: str) -> None:
    headers = {"X-data-parallel-rank": rank.encode()}
    response = served.post("/v1/completions", {"prompt": [1]}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-data-parallel-rank"
