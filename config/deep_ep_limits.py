"""What DeepEP accepts and how large its buffers are: the one table that `moed plan`, the launch and
the CPU stand-in read. Numbers and arithmetic only; no torch, and nothing of this machine.

Legend: R ranks of the expert-parallel group, E experts of the model, L = E / R experts of a rank,
K experts of a token, H hidden size, N the most tokens that one rank sends in one call.
Source: DeepEP 2.1.0, its size functions and its host-side checks; the tests hold numbers that its
compiled functions returned.
"""

from dataclasses import dataclass

GPUS_PER_NODE = 8
"""What both `Buffer` modes assume across nodes: the node of a rank is rank // 8."""
BYTES_MULTIPLE = 128
"""Every buffer size is a multiple of it."""
MAX_BUFFER_BYTES = 2**35
"""A buffer is smaller than this (32 GiB)."""
MAX_INDEXED_BYTES = 2**31 - 1
"""High-throughput buffers across nodes are at most this large."""
NVSHMEM_HEAP_STEP_BYTES = 2**29
"""NVSHMEM's heap grows in steps of this size."""
WORKSPACE_BYTES = 32 * 2**20
"""Device memory that a `Buffer` takes besides its buffers."""
ALIGNMENT_CHANNELS = 128
"""Channels that share one scale after quantisation to 8 bits."""

# Low-latency mode.
LOW_LATENCY_HIDDEN_SIZES = frozenset({2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192})
LOW_LATENCY_MAX_TOP_K = 11
LOW_LATENCY_MIN_EXPERTS = 2
LOW_LATENCY_MAX_EXPERTS = 1848
"""Fewer than 15 experts for each multiprocessor of a GPU with 132 of them."""
LOW_LATENCY_ROWS_MULTIPLE = 4
"""R x N is a multiple of it."""
LOW_LATENCY_ADVISED_TOKENS = 256
"""Larger N is outside what DeepEP recommends."""
LOW_LATENCY_MESSAGE_HEADER_BYTES = 16
DEFAULT_QP_DEPTH = 1024
"""`NVSHMEM_QP_DEPTH` where it is not set."""

# High-throughput mode.
HIGH_THROUGHPUT_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
HIGH_THROUGHPUT_MAX_TOP_K = 32
HIGH_THROUGHPUT_MAX_LOCAL_EXPERTS = 128
"""Experts of a rank, on one node."""
HIGH_THROUGHPUT_MAX_NODE_EXPERTS = 512
"""Experts of a node, across nodes."""
HIGH_THROUGHPUT_ROW_MULTIPLE_BYTES = 16
HIGH_THROUGHPUT_NUM_SMS = 20
# Bytes beside a row: its source, 128 expert ids, 128 weights and 128 scales.
_HIGH_THROUGHPUT_ROW_OVERHEAD = 8 + 128 * 8 + 128 * 4 + 128 * 4
_RDMA_METADATA_BYTES = 16

# `ElasticBuffer`.
ELASTIC_MAX_RANKS = 1024
ELASTIC_MAX_EXPERTS = 2048
ELASTIC_MAX_LOCAL_EXPERTS = 256
ELASTIC_MAX_TOP_K = 32
ELASTIC_MAX_NODES = 32
ELASTIC_MAX_GPUS_PER_NODE = 64
ELASTIC_ROW_MULTIPLE_BYTES = 32
ELASTIC_HIDDEN_MULTIPLE = 256
ELASTIC_ALIGNMENT_BYTES = 2 * 2**20
ELASTIC_WORKSPACE_BYTES = 14 * 2**20
_ELASTIC_RELAY_TOKENS = 1280


@dataclass(frozen=True)
class _QueueDepths:
    """Rows that a receive queue holds in the recommended settings, the larger of dispatch's and
    combine's.
    """

    nvl_tokens: int
    rdma_tokens: int
    """Rounded up to a multiple of the rows sent together."""


_QUEUES = {
    **{ranks: _QueueDepths(256, 128) for ranks in (2, 4, 8)},
    16: _QueueDepths(288, 140),
    **{ranks: _QueueDepths(288, 128) for ranks in (24, 32, 48, 64)},
    96: _QueueDepths(480, 132),
    128: _QueueDepths(560, 132),
    **{ranks: _QueueDepths(720, 132) for ranks in (144, 160)},
}


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def round_up_tokens(num_tokens: int, num_ranks: int) -> int:
    """The smallest N of at least `num_tokens` with which R x N is a multiple of 4."""
    while num_tokens * num_ranks % LOW_LATENCY_ROWS_MULTIPLE:
        num_tokens += 1
    return num_tokens


def needed_qp_depth(num_tokens: int) -> int:
    """The `NVSHMEM_QP_DEPTH` to set for N: a power of two, at least the default and 2 x (N + 1)."""
    depth = DEFAULT_QP_DEPTH
    while depth < 2 * (num_tokens + 1):
        depth *= 2
    return depth


def most_tokens_at_qp_depth(depth: int, num_ranks: int = 4) -> int:
    """The largest N that a queue of `depth` entries carries, 511 at the default of 1024, with R x N
    a multiple of 4.
    """
    return _round_down_tokens(depth // 2 - 1, num_ranks)


def _round_down_tokens(num_tokens: int, num_ranks: int) -> int:
    while num_tokens > 0 and num_tokens * num_ranks % LOW_LATENCY_ROWS_MULTIPLE:
        num_tokens -= 1
    return num_tokens


def low_latency_rdma_bytes(num_tokens: int, hidden_size: int, num_experts: int) -> int:
    """The low-latency buffer of one rank; R plays no part."""
    scales = 4 * (hidden_size // ALIGNMENT_CHANNELS)
    dispatched = LOW_LATENCY_MESSAGE_HEADER_BYTES + max(2 * hidden_size, hidden_size + scales)
    combined = 2 * hidden_size + scales
    send = max(num_tokens * dispatched, num_experts * num_tokens * combined)
    received = num_experts * num_tokens * max(dispatched, combined)
    signals = round_up(4 * num_experts, BYTES_MULTIPLE)
    # Two of everything, as two calls alternate.
    total = 2 * (send + received + signals) + BYTES_MULTIPLE
    return total // BYTES_MULTIPLE * BYTES_MULTIPLE


def low_latency_heap_bytes(num_tokens: int, hidden_size: int, num_experts: int) -> int:
    """Device memory that the low-latency buffer takes of a rank, in whole steps of the heap."""
    size = low_latency_rdma_bytes(num_tokens, hidden_size, num_experts)
    return round_up(size, NVSHMEM_HEAP_STEP_BYTES)


def most_low_latency_tokens(hidden_size: int, num_experts: int, num_ranks: int = 4) -> int:
    """The largest N whose buffer stays under 32 GiB, with R x N a multiple of 4; 0 if there is
    none.
    """
    low, high = 0, 1
    while low_latency_rdma_bytes(high, hidden_size, num_experts) < MAX_BUFFER_BYTES:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = low_latency_rdma_bytes(middle, hidden_size, num_experts) < MAX_BUFFER_BYTES
        low, high = (middle, high) if fits else (low, middle)
    return _round_down_tokens(low, num_ranks)


def high_throughput_nvl_bytes(num_ranks: int, hidden_size: int, itemsize: int = 2) -> int:
    """The NVLink buffer of one rank; R is one of `HIGH_THROUGHPUT_RANKS`. N plays no part."""
    row = hidden_size * max(itemsize, 2)
    return nvl_queue_bytes(num_ranks, row, HIGH_THROUGHPUT_NUM_SMS, _QUEUES[num_ranks].nvl_tokens)


def high_throughput_rdma_bytes(num_ranks: int, hidden_size: int, itemsize: int = 2) -> int:
    """The RDMA buffer of one rank: 0 on one node, else as `high_throughput_nvl_bytes`."""
    row = hidden_size * max(itemsize, 2)
    return rdma_queue_bytes(num_ranks, row, HIGH_THROUGHPUT_NUM_SMS, _QUEUES[num_ranks].rdma_tokens)


def nvl_queue_bytes(num_ranks: int, row_bytes: int, num_sms: int, num_tokens: int) -> int:
    """The NVLink buffer for receive queues of `num_tokens` rows, on `num_sms` multiprocessors."""
    channels, nodes = num_sms // 2, _nodes(num_ranks)
    queue = 4 * (2 * nodes + 3) + num_tokens * (row_bytes + _HIGH_THROUGHPUT_ROW_OVERHEAD)
    return round_up(channels * min(num_ranks, GPUS_PER_NODE) * queue, BYTES_MULTIPLE)


def rdma_queue_bytes(num_ranks: int, row_bytes: int, num_sms: int, num_tokens: int) -> int:
    """The RDMA buffer for the same; 0 on one node."""
    if num_ranks <= GPUS_PER_NODE:
        return 0
    row = row_bytes + _HIGH_THROUGHPUT_ROW_OVERHEAD + _RDMA_METADATA_BYTES
    queue = 18 * 2 * 4 + 2 * num_tokens * row
    return round_up(num_sms // 2 * _nodes(num_ranks) * queue, BYTES_MULTIPLE)


def _nodes(num_ranks: int) -> int:
    return max(num_ranks // GPUS_PER_NODE, 1)


def elastic_bytes(
    num_ranks: int,
    num_tokens: int,
    hidden_size: int,
    top_k: int,
    *,
    gpus_per_node: int = GPUS_PER_NODE,
    itemsize: int = 2,
    with_scales: bool = False,
) -> int:
    """The `ElasticBuffer` of one rank, without its workspace: NVLink within a node of
    `gpus_per_node`, RDMA between nodes. `with_scales`: rows of 8-bit numbers, one scale for 32.
    """
    scales = round_up(4 * -(-hidden_size // 32), 32) if with_scales else 0
    routing = round_up(8 * top_k + 4 * (1 + top_k), 32)
    dispatched = round_up(hidden_size * itemsize, 32) + scales + routing
    combined = round_up(2 * hidden_size, 32) + round_up(8 * top_k, 32)
    if num_ranks <= gpus_per_node:
        dispatch = num_ranks * num_tokens * dispatched
        combine = min(num_ranks, top_k) * num_tokens * combined
    else:
        nodes = -(-num_ranks // gpus_per_node)
        relayed = nodes * (num_tokens + _ELASTIC_RELAY_TOKENS)
        dispatch = dispatched * (gpus_per_node * nodes * num_tokens + num_tokens + relayed)
        received = min(gpus_per_node, top_k) * nodes * num_tokens
        combine = combined * (received + min(nodes, top_k) * num_tokens + relayed)
    return round_up(max(dispatch, combine), ELASTIC_ALIGNMENT_BYTES)


def elastic_expanded_rows(
    num_ranks: int, num_tokens: int, top_k: int, num_local_experts: int, alignment: int = 1
) -> int:
    """The most rows, sorted by expert, that one rank receives of an `ElasticBuffer`; each expert's
    begin at a multiple of `alignment`.
    """
    rows = num_ranks * num_tokens * min(top_k, num_local_experts)
    return round_up(rows + (alignment - 1) * num_local_experts, alignment)
