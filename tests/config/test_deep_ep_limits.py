"""The size formulas against numbers that DeepEP's compiled functions returned, and the limits."""

import pytest

from moed.config import deep_ep_limits as limits

MIB = 2**20
HIDDEN, EXPERTS, TOP_K = 7168, 256, 8


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(128, 1908410496), (256, 3816818816), (512, 7633635456), (1024, 15267268736)],
)
def test_low_latency_bytes(num_tokens: int, expected: int) -> None:
    assert limits.low_latency_rdma_bytes(num_tokens, HIDDEN, EXPERTS) == expected


def test_low_latency_bytes_of_another_model() -> None:
    assert limits.low_latency_rdma_bytes(128, 3072, 288) == 920127872


@pytest.mark.parametrize("size", [1908410496, 15267268736])
def test_low_latency_bytes_are_whole_multiples(size: int) -> None:
    assert size % limits.BYTES_MULTIPLE == 0


@pytest.mark.parametrize(("num_tokens", "gib"), [(128, 2.0), (256, 4.0), (512, 7.5), (1024, 14.5)])
def test_the_heap_grows_in_steps(num_tokens: int, gib: float) -> None:
    assert limits.low_latency_heap_bytes(num_tokens, HIDDEN, EXPERTS) == gib * 2**30


@pytest.mark.parametrize(
    ("num_tokens", "depth"),
    [(1, 1024), (256, 1024), (511, 1024), (512, 2048), (1023, 2048), (1024, 4096)],
)
def test_qp_depth(num_tokens: int, depth: int) -> None:
    assert limits.needed_qp_depth(num_tokens) == depth
    assert limits.most_tokens_at_qp_depth(depth) >= num_tokens


@pytest.mark.parametrize(("num_ranks", "most"), [(1, 508), (2, 510), (3, 508), (4, 511), (8, 511)])
def test_most_tokens_at_the_default_depth(num_ranks: int, most: int) -> None:
    assert limits.most_tokens_at_qp_depth(limits.DEFAULT_QP_DEPTH, num_ranks) == most


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("hidden", "experts"), [(7168, 256), (2048, 128), (8192, 1848)])
def test_most_low_latency_tokens(num_ranks: int, hidden: int, experts: int) -> None:
    most = limits.most_low_latency_tokens(hidden, experts, num_ranks)
    step = {1: 4, 2: 2, 3: 4, 8: 1}[num_ranks]
    assert most % step == 0
    assert limits.low_latency_rdma_bytes(most, hidden, experts) < limits.MAX_BUFFER_BYTES
    assert limits.low_latency_rdma_bytes(most + step, hidden, experts) >= limits.MAX_BUFFER_BYTES


@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "expected"), [(2, 255, 256), (1, 9, 12), (3, 4, 4), (8, 7, 7)]
)
def test_round_up_tokens(num_ranks: int, num_tokens: int, expected: int) -> None:
    assert limits.round_up_tokens(num_tokens, num_ranks) == expected


@pytest.mark.parametrize(
    ("num_ranks", "nvl_mib", "rdma_mib"),
    [
        (2, 80.0, 0),
        (4, 160.1, 0),
        (8, 320.2, 0),
        (16, 360.2, 87.6),
        (32, 360.2, 160.2),
        (64, 360.2, 320.5),
    ],
)
def test_high_throughput_bytes(num_ranks: int, nvl_mib: float, rdma_mib: float) -> None:
    nvl = limits.high_throughput_nvl_bytes(num_ranks, HIDDEN)
    rdma = limits.high_throughput_rdma_bytes(num_ranks, HIDDEN)
    assert round(nvl / MIB, 1) == nvl_mib
    assert round(rdma / MIB, 1) == rdma_mib
    assert nvl % limits.BYTES_MULTIPLE == rdma % limits.BYTES_MULTIPLE == 0


def test_high_throughput_bytes_to_two_places() -> None:
    assert round(limits.high_throughput_nvl_bytes(8, HIDDEN) / MIB, 2) == 320.16
    assert round(limits.high_throughput_rdma_bytes(16, HIDDEN) / MIB, 2) == 87.63


@pytest.mark.parametrize("num_ranks", limits.HIGH_THROUGHPUT_RANKS)
def test_every_rank_count_has_a_size(num_ranks: int) -> None:
    assert 0 < limits.high_throughput_nvl_bytes(num_ranks, HIDDEN) <= limits.MAX_INDEXED_BYTES
    assert (limits.high_throughput_rdma_bytes(num_ranks, HIDDEN) > 0) == (num_ranks > 8)


@pytest.mark.parametrize("num_ranks", [1, 3, 12, 40])
def test_other_rank_counts_have_none(num_ranks: int) -> None:
    with pytest.raises(KeyError):
        limits.high_throughput_nvl_bytes(num_ranks, HIDDEN)


@pytest.mark.parametrize(
    ("num_tokens", "mib"),
    [(128, (16, 72, 282)), (256, (30, 106, 422)), (512, (58, 176, 704)), (1024, (114, 318, 1266))],
)
def test_elastic_bytes(num_tokens: int, mib: tuple[int, int, int]) -> None:
    found = (limits.elastic_bytes(ranks, num_tokens, HIDDEN, TOP_K) for ranks in (8, 16, 64))
    assert tuple(size // MIB for size in found) == mib


def test_elastic_bytes_of_a_report() -> None:
    assert limits.elastic_bytes(16, 4096, HIDDEN, TOP_K) == 1218445312


@pytest.mark.parametrize(("num_ranks", "gib"), [(8, 0.11), (16, 0.22), (64, 0.44)])
def test_elastic_expanded_rows(num_ranks: int, gib: float) -> None:
    rows = limits.elastic_expanded_rows(num_ranks, 128, TOP_K, EXPERTS // num_ranks)
    assert round(rows * HIDDEN * 2 / 2**30, 2) == gib
