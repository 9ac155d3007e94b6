"""Requests spread over the ranks by load, from the first burst on."""

import concurrent.futures

import httpx
import pytest

from tests.daemon import Daemon


@pytest.mark.parametrize("burst", ["cold", "warm"])
def test_a_burst_of_equal_requests_is_spread_evenly(daemon: Daemon, burst: str) -> None:
    before = daemon.metrics()
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        list(pool.map(lambda index: daemon.tokens([65 + index], 12), range(40)))
    daemon.assert_at_rest()
    after = daemon.metrics()
    name = "moed:prompt_tokens_total"
    counts = [after[name, rank] - before[name, rank] for rank in range(2)]
    assert sum(counts) == 40
    assert all(18 <= count <= 22 for count in counts), counts


def test_a_rank_asked_for_by_header_is_used(daemon: Daemon) -> None:
    name = "moed:generation_tokens_total"
    for rank in (0, 1):
        before = daemon.metrics()
        daemon.tokens([65, 66], 10, rank)
        daemon.assert_at_rest()
        after = daemon.metrics()
        assert after[name, rank] - before[name, rank] == 10
        assert after[name, 1 - rank] == before[name, 1 - rank]


@pytest.mark.parametrize("rank", ["2", "-1", "x"])
def test_a_rank_that_does_not_exist_is_refused(daemon: Daemon, rank: str) -> None:

    response = httpx.post(
        f"{daemon.url}/v1/completions",
        json={"prompt": [65], "max_tokens": 1},
        headers={"X-data-parallel-rank": rank},
    )
    assert response.status_code == 400
    assert rank in response.json()["error"]["message"]
