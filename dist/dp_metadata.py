"""How many tokens each DP rank runs in this step: what the ranks have agreed on."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from moed.config.engine_config import ParallelConfig


@dataclass
class _SizeScope:
    """The sizes of the open `sp_local_sizes`; the one thing that changes."""

    sizes: list[int] | None = None


@dataclass(frozen=True)
class DPMetadata:
    """Passed as an argument to every MoE layer of the step, never through a global."""

    num_tokens_across_dp_cpu: torch.Tensor
    """[dp] int32, on the CPU."""
    rank: int
    """DP rank."""
    step_id: int
    padding: torch.Tensor | None = field(default=None, repr=False, compare=False)
    """[own rows] bool, on the device: true for rows that only fill up a graph's bucket, of which
    each rank then has as many rows as it holds. None: the sizes are those of the tokens.
    """
    _scope: _SizeScope = field(default_factory=_SizeScope, repr=False, compare=False)

    @classmethod
    def make(
        cls,
        parallel_config: ParallelConfig,
        num_tokens: int,
        num_tokens_across_dp_cpu: torch.Tensor,
        *,
        rank: int,
        step_id: int,
    ) -> "DPMetadata":
        """Raises `ValueError` when the gathered sizes are not one per rank, or the own entry is not
        `num_tokens`, the rows that this rank is about to run.
        """
        expected = parallel_config.data_parallel_size
        if num_tokens_across_dp_cpu.shape != (expected,):
            raise ValueError(
                f"sizes of {tuple(num_tokens_across_dp_cpu.shape)} ranks were gathered, not of "
                f"{expected}"
            )
        own = int(num_tokens_across_dp_cpu[rank])
        if own != num_tokens:
            raise ValueError(
                f"rank {rank} runs {num_tokens} tokens in step {step_id} but announced {own}"
            )
        return cls(num_tokens_across_dp_cpu, rank, step_id)

    @classmethod
    def of_graph(
        cls, parallel_config: ParallelConfig, num_rows: int, padding: torch.Tensor, *, rank: int
    ) -> "DPMetadata":
        """For a graph of `num_rows` on each rank, of which `padding` [num_rows] tells at each
        replay how many are real.
        """
        sizes = torch.full((parallel_config.data_parallel_size,), num_rows, dtype=torch.int32)
        return cls(sizes, rank, -1, padding)

    @property
    def local_sizes(self) -> list[int]:
        """Tokens of each DP rank."""
        sizes: list[int] = self.num_tokens_across_dp_cpu.tolist()
        return sizes

    @contextlib.contextmanager
    def sp_local_sizes(self, sequence_parallel_size: int) -> Iterator[list[int]]:
        """Open a scope in which the rows of each DP rank are split over its members.

        Yields one size per member, dp-major: each rank's ceil(tokens / members), repeated.
        """
        before = self._scope.sizes
        self._scope.sizes = [
            -(-size // sequence_parallel_size)
            for size in self.local_sizes
            for _ in range(sequence_parallel_size)
        ]
        try:
            yield self._scope.sizes
        finally:
            self._scope.sizes = before

    @property
    def row_sizes(self) -> list[int]:
        """Rows that each process sends from one MoE layer: the sizes of the open scope, or without
        one the tokens of each rank.
        """
        return self.local_sizes if self._scope.sizes is None else self._scope.sizes

    def get_chunk_sizes_across_dp_rank(self) -> list[int] | None:
        """The sizes of the open `sp_local_sizes` scope, None outside one."""
        return self._scope.sizes
