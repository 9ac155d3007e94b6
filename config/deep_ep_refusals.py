"""Why DeepEP cannot carry a configuration: each refusal says what was asked, what is allowed, and
the nearest choice that is.
"""

from collections.abc import Iterable, Iterator

from moed.config import deep_ep_limits as limits
from moed.config.capabilities import DeepEPMode
from moed.config.deep_ep_question import Question
from moed.config.machine import QP_DEPTH_VARIABLE
from moed.config.sizes import format_bytes

ANOTHER_BACKEND = "take --all2all-backend all2allv, which carries any"
NUM_DTYPE_BYTES = 2
"""DeepEP's rows are bfloat16."""


def deep_ep_refusals(asked: Question, emulated: bool) -> list[str]:
    """Every reason against, in one sentence each. `emulated`: the stand-in on a CPU, for which
    sizes that only a kernel cares about do not count.
    """
    found = _of_any_mode(asked)
    match asked.mode:
        case DeepEPMode.LOW_LATENCY:
            found += _low_latency(asked)
        case DeepEPMode.HIGH_THROUGHPUT:
            found += _high_throughput(asked)
        case DeepEPMode.ELASTIC:
            found += _elastic(asked)
    if emulated:
        return found
    found += _of_kernels(asked)
    match asked.mode:
        case DeepEPMode.LOW_LATENCY:
            found += _low_latency_kernels(asked)
        case DeepEPMode.HIGH_THROUGHPUT:
            found += _high_throughput_kernels(asked)
        case DeepEPMode.ELASTIC:
            found += _elastic_kernels(asked)
    return found


def _of_any_mode(asked: Question) -> list[str]:
    experts, ranks = asked.num_experts, asked.num_ranks
    if experts % ranks == 0:
        return []
    fitting = [count for count in range(1, experts + 1) if experts % count == 0]
    return [
        f"{asked.name} gives each rank equally many experts: {experts} do not divide over {ranks} "
        f"ranks; take {_nearest(ranks, fitting)} ranks (--data-parallel-size x "
        "--tensor-parallel-size), or another --all2all-backend"
    ]


def _of_kernels(asked: Question) -> list[str]:
    if asked.dtype == "bfloat16":
        return []
    return [
        f"{asked.name} carries bfloat16 rows, and dtype is {asked.dtype}: take --dtype bfloat16, "
        "or another --all2all-backend"
    ]


def _top_k(asked: Question, most: int) -> Iterator[str]:
    if asked.top_k > most:
        yield (
            f"{asked.name} sends a token to at most {most} experts, and {asked.model} chooses "
            f"{asked.top_k}: {ANOTHER_BACKEND} number"
        )


def _low_latency(asked: Question) -> list[str]:
    found = list(_top_k(asked, limits.LOW_LATENCY_MAX_TOP_K))
    least, most = limits.LOW_LATENCY_MIN_EXPERTS, limits.LOW_LATENCY_MAX_EXPERTS
    if not least <= asked.num_experts <= most:
        found.append(
            f"{asked.name} serves {least} to {most} experts (fewer than 15 for each of a GPU's 132 "
            f"multiprocessors), and {asked.model} has {asked.num_experts}: {ANOTHER_BACKEND} number"
        )
    return [*found, *_low_latency_buffer(asked), *_qp_depth(asked)]


def _low_latency_buffer(asked: Question) -> Iterator[str]:
    sizes = asked.hidden_size, asked.num_experts
    needed = limits.low_latency_rdma_bytes(asked.num_tokens, *sizes)
    if needed < limits.MAX_BUFFER_BYTES:
        return
    most = limits.most_low_latency_tokens(*sizes, asked.num_ranks)
    yield (
        f"{asked.name} would need a buffer of {needed} bytes ({format_bytes(needed)}) for "
        f"{asked.num_tokens} tokens per rank, {asked.num_experts} experts and hidden size "
        f"{asked.hidden_size}, and it must stay under {limits.MAX_BUFFER_BYTES} (32 GiB): lower "
        f"--max-num-batched-tokens to at most {most * asked.tensor_parallel_size}"
    )


def _qp_depth(asked: Question) -> Iterator[str]:
    if asked.qp_depth is None:
        return
    needed = limits.needed_qp_depth(asked.num_tokens)
    try:
        depth = int(asked.qp_depth)
    except ValueError:
        yield (
            f"{QP_DEPTH_VARIABLE} is {asked.qp_depth!r}, which is no number: set {needed}, or "
            f"unset it, and moed sets {needed}"
        )
        return
    if depth >= 2 * (asked.num_tokens + 1):
        return
    most = limits.most_tokens_at_qp_depth(depth, asked.num_ranks) * asked.tensor_parallel_size
    lower = f", or lower --max-num-batched-tokens to at most {most}" if most > 0 else ""
    yield (
        f"{QP_DEPTH_VARIABLE} is {depth}, and {asked.num_tokens} tokens per rank need at least "
        f"2 x ({asked.num_tokens} + 1) = {2 * (asked.num_tokens + 1)}: set {needed}, or unset it, "
        f"and moed sets {needed}{lower}"
    )


def _low_latency_kernels(asked: Question) -> list[str]:
    found = []
    hidden, sizes = asked.hidden_size, limits.LOW_LATENCY_HIDDEN_SIZES
    if hidden not in sizes:
        found.append(
            f"{asked.name} carries hidden sizes {_list(sizes)}; that of {asked.model} is {hidden} "
            f"(nearest: {_nearest(hidden, sizes)}): {ANOTHER_BACKEND} size"
        )
    rows = asked.num_ranks * asked.num_tokens
    if rows % limits.LOW_LATENCY_ROWS_MULTIPLE:
        tokens = limits.round_up_tokens(asked.num_tokens, asked.num_ranks)
        found.append(
            f"{asked.name} needs ranks x tokens per rank to be a multiple of "
            f"{limits.LOW_LATENCY_ROWS_MULTIPLE}, and {asked.num_ranks} x {asked.num_tokens} is "
            f"{rows}: set --max-num-batched-tokens to {tokens * asked.tensor_parallel_size}"
        )
    return [*found, *_whole_nodes(asked)]


def _whole_nodes(asked: Question) -> Iterator[str]:
    """The node of a rank is rank // 8."""
    whole, ranks = limits.GPUS_PER_NODE, asked.num_ranks
    if asked.num_nodes > 1 and asked.ranks_per_node < whole:
        used = -(-ranks // whole)
        yield (
            f"{asked.name} across nodes takes {whole} GPUs of each node, and {ranks} ranks on "
            f"{asked.num_nodes} nodes are {asked.ranks_per_node} on each: take {used} node(s) with "
            f"{whole} GPUs each, or {whole * asked.num_nodes} ranks, or another --all2all-backend"
        )
    elif ranks > whole and ranks % whole:
        yield (
            f"{asked.name} takes whole nodes of {whole} ranks beyond one, and there are {ranks} "
            f"ranks: take {ranks // whole * whole} or {(ranks // whole + 1) * whole}"
        )


def _high_throughput(asked: Question) -> list[str]:
    found = list(_top_k(asked, limits.HIGH_THROUGHPUT_MAX_TOP_K))
    on_one_node = asked.num_ranks <= limits.GPUS_PER_NODE
    if on_one_node and asked.num_local_experts > limits.HIGH_THROUGHPUT_MAX_LOCAL_EXPERTS:
        most = limits.HIGH_THROUGHPUT_MAX_LOCAL_EXPERTS
        fitting = -(-asked.num_experts // most)
        found.append(
            f"{asked.name} holds at most {most} experts on a rank, and {asked.num_experts} over "
            f"{asked.num_ranks} ranks are {asked.num_local_experts}: take at least {fitting} ranks"
        )
    experts_of_node = asked.num_local_experts * limits.GPUS_PER_NODE
    if not on_one_node and experts_of_node > limits.HIGH_THROUGHPUT_MAX_NODE_EXPERTS:
        most = limits.HIGH_THROUGHPUT_MAX_NODE_EXPERTS
        nodes = -(-asked.num_experts // most)
        found.append(
            f"{asked.name} holds at most {most} experts on a node, and {asked.num_experts} over "
            f"{asked.num_ranks} ranks are {experts_of_node}: take at least "
            f"{nodes * limits.GPUS_PER_NODE} ranks"
        )
    return found


def _high_throughput_kernels(asked: Question) -> list[str]:
    ranks, known = asked.num_ranks, limits.HIGH_THROUGHPUT_RANKS
    found = list(_row_bytes(asked, limits.HIGH_THROUGHPUT_ROW_MULTIPLE_BYTES))
    if ranks in known:
        found += [*_whole_nodes(asked), *_high_throughput_buffers(asked)]
    else:
        found.append(
            f"{asked.name} knows {_list(known)} ranks, and there are {ranks}: take "
            f"{_nearest(ranks, known)} (--data-parallel-size x --tensor-parallel-size), or another "
            "--all2all-backend"
        )
    return found


def _high_throughput_buffers(asked: Question) -> Iterator[str]:
    if asked.num_ranks <= limits.GPUS_PER_NODE:
        return
    sizes = asked.num_ranks, asked.hidden_size
    for kind, needed in (
        ("NVLink", limits.high_throughput_nvl_bytes(*sizes)),
        ("RDMA", limits.high_throughput_rdma_bytes(*sizes)),
    ):
        if needed > limits.MAX_INDEXED_BYTES:
            yield (
                f"{asked.name} would need an {kind} buffer of {needed} bytes for hidden size "
                f"{asked.hidden_size} on {asked.num_ranks} ranks, and at most "
                f"{limits.MAX_INDEXED_BYTES} are served: take at most {limits.GPUS_PER_NODE} ranks"
            )


def _elastic(asked: Question) -> list[str]:
    found = list(_top_k(asked, limits.ELASTIC_MAX_TOP_K))
    if asked.num_experts > limits.ELASTIC_MAX_EXPERTS:
        found.append(
            f"{asked.name} serves at most {limits.ELASTIC_MAX_EXPERTS} experts, and {asked.model} "
            f"has {asked.num_experts}: {ANOTHER_BACKEND} number"
        )
    if asked.num_local_experts > limits.ELASTIC_MAX_LOCAL_EXPERTS:
        most = limits.ELASTIC_MAX_LOCAL_EXPERTS
        found.append(
            f"{asked.name} holds at most {most} experts on a rank, and {asked.num_experts} over "
            f"{asked.num_ranks} ranks are {asked.num_local_experts}: take at least "
            f"{-(-asked.num_experts // most)} ranks"
        )
    return found


def _elastic_kernels(asked: Question) -> list[str]:
    found = list(_row_bytes(asked, limits.ELASTIC_ROW_MULTIPLE_BYTES))
    hidden, multiple = asked.hidden_size, limits.ELASTIC_HIDDEN_MULTIPLE
    if hidden % multiple:
        below = hidden // multiple * multiple
        found.append(
            f"{asked.name} needs a hidden size that is a multiple of {multiple}, and that of "
            f"{asked.model} is {hidden} (nearest: {below} and {below + multiple}): "
            f"{ANOTHER_BACKEND} size"
        )
    for what, given, most in (
        ("ranks", asked.num_ranks, limits.ELASTIC_MAX_RANKS),
        ("nodes", asked.num_nodes, limits.ELASTIC_MAX_NODES),
        ("ranks on a node", asked.ranks_per_node, limits.ELASTIC_MAX_GPUS_PER_NODE),
    ):
        if given > most:
            found.append(f"{asked.name} serves at most {most} {what}, not {given}: take {most}")
    return found


def _row_bytes(asked: Question, multiple: int) -> Iterator[str]:
    row = asked.hidden_size * NUM_DTYPE_BYTES
    if row % multiple:
        size = multiple // NUM_DTYPE_BYTES
        below = asked.hidden_size // size * size
        yield (
            f"{asked.name} needs rows whose bytes are a multiple of {multiple}, and hidden size "
            f"{asked.hidden_size} makes {row} (nearest: {below} and {below + size}): "
            f"{ANOTHER_BACKEND} size"
        )


def _list(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(values)))


def _nearest(value: int, allowed: Iterable[int]) -> str:
    """The allowed values around `value`."""
    ordered = sorted(allowed)
    below = [entry for entry in ordered if entry < value][-1:]
    above = [entry for entry in ordered if entry > value][:1]
    return " or ".join(map(str, below + above))
