"""The sizes of a step, worked out by hand."""

import dataclasses

import pytest
import torch

from moed.dist.dp_metadata import DPMetadata
from tests.server.engine.configs import engine_config


def make(sizes: list[int], num_tokens: int, rank: int, num_ranks: int) -> DPMetadata:
    return DPMetadata.make(
        engine_config(ranks=num_ranks).parallel,
        num_tokens,
        torch.tensor(sizes, dtype=torch.int32),
        rank=rank,
        step_id=12,
    )


@pytest.mark.parametrize(
    ("sizes", "rank"), [([5], 0), ([3, 0, 16], 0), ([3, 0, 16], 1), ([0, 0], 1)]
)
def test_carries_the_sizes_of_all_ranks(sizes: list[int], rank: int) -> None:
    metadata = make(sizes, sizes[rank], rank, len(sizes))
    assert metadata.local_sizes == sizes
    assert metadata.num_tokens_across_dp_cpu.dtype == torch.int32
    assert metadata.num_tokens_across_dp_cpu.device.type == "cpu"
    assert (metadata.rank, metadata.step_id) == (rank, 12)


def test_own_size_must_be_the_own_rows() -> None:
    with pytest.raises(ValueError, match="rank 1 runs 5 tokens in step 12 but announced 4"):
        make([3, 4], 5, 1, 2)
    # The other rank's size is not the own one.
    with pytest.raises(ValueError, match="rank 0 runs 4 tokens in step 12 but announced 3"):
        make([3, 4], 4, 0, 2)


@pytest.mark.parametrize("sizes", [[3], [3, 4, 5], []])
def test_one_size_for_each_rank(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="not of 2"):
        make(sizes, 3, 0, 2)


@pytest.mark.parametrize(
    ("sizes", "members", "split"),
    [
        # ceil(7 / 2) = 4, ceil(0 / 2) = 0, ceil(1 / 2) = 1; each rank's for each of its members.
        ([7, 0, 1], 2, [4, 4, 0, 0, 1, 1]),
        # ceil(7 / 4) = 2, ceil(8 / 4) = 2, ceil(9 / 4) = 3.
        ([7, 8, 9], 4, [2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3]),
        ([7, 0], 1, [7, 0]),
        ([2048], 3, [683, 683, 683]),
    ],
)
def test_sequence_parallel_sizes(sizes: list[int], members: int, split: list[int]) -> None:
    metadata = make(sizes, sizes[0], 0, len(sizes))
    assert metadata.get_chunk_sizes_across_dp_rank() is None
    with metadata.sp_local_sizes(members) as yielded:
        assert yielded == split
        assert metadata.get_chunk_sizes_across_dp_rank() == split
    assert metadata.get_chunk_sizes_across_dp_rank() is None
    # The sizes of the ranks themselves are never touched.
    assert metadata.local_sizes == sizes


def test_scopes_nest_and_close_on_errors() -> None:
    metadata = make([4, 6], 4, 0, 2)
    with metadata.sp_local_sizes(1):
        with pytest.raises(KeyError), metadata.sp_local_sizes(2):
            assert metadata.get_chunk_sizes_across_dp_rank() == [2, 2, 3, 3]
            raise KeyError
        assert metadata.get_chunk_sizes_across_dp_rank() == [4, 6]
    assert metadata.get_chunk_sizes_across_dp_rank() is None


def test_two_steps_do_not_share_a_scope() -> None:
    first, second = make([4, 6], 4, 0, 2), make([4, 6], 4, 0, 2)
    with first.sp_local_sizes(2):
        assert second.get_chunk_sizes_across_dp_rank() is None


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make([4], 4, 0, 1).step_id = 3  # type: ignore[misc]
