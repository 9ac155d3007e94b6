"""A plan as tables for a person, and as JSON for a program."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from moed.config.items import Item, total
from moed.config.plan import Plan
from moed.config.planning import Alternative, FullPlan
from moed.config.sizes import format_bytes
from moed.config.weight_bytes import tensor_parallel_size

WIDTH = 100
NAME_WIDTH = 22
SIZE_WIDTH = 11
ALTERNATIVE_COLUMNS = (
    "backends",
    "B",
    "largest B",
    "dispatch",
    "workspace",
    "KV tokens",
    "refusals",
)


def full_text(full: FullPlan) -> str:
    """What `moed plan` prints, refusals last."""
    parts = [_head(full.plan), *_tables(full.plan), _alternatives(full), _findings(full.plan)]
    return "\n".join(part for part in parts if part)


def launch_text(plan: Plan) -> str:
    """The same tables for the log of a launch, whose refusals have stopped it already."""
    return "\n".join([_head(plan), *_tables(plan)])


def _head(plan: Plan) -> str:
    config, machine = plan.config, plan.machine
    parallel = config.parallel
    ranks, tensor = parallel.expert_parallel_size, tensor_parallel_size(config)
    spread = f"{_plural(ranks, 'rank')} (DP {parallel.data_parallel_size} x TP {tensor})"
    where = f"{_plural(machine.num_nodes, 'node')}, {parallel.device}"
    if parallel.device == "cuda" and machine.gpu_memory_bytes is not None:
        where += f" with {format_bytes(machine.gpu_memory_bytes)} each"
    model = config.model
    return (
        f"{model.model}: {model.model_type}, {model.num_layers} layers, hidden "
        f"{model.hidden_size}, {model.num_experts} experts, top-{model.top_k}, {model.dtype}\n"
        f"{spread} on {where}; all2all_backend {parallel.backend.name}\n"
    )


def _tables(plan: Plan) -> list[str]:
    backend = plan.config.parallel.backend.name
    return [
        _section("weights", [(part, size, "") for part, size in plan.weights.items() if size]),
        _section(f"dispatch buffers of {backend}", _rows(plan.dispatch)),
        _section("workspace of one step, at most", _rows(plan.workspace)),
        _kv_cache(plan),
        _budget(plan),
    ]


def _rows(items: Sequence[Item]) -> list[tuple[str, int, str]]:
    return [(item.name, item.num_bytes, item.formula) for item in items]


def _section(title: str, rows: list[tuple[str, int, str]]) -> str:
    whole = format_bytes(sum(size for _, size, _ in rows))
    lines = [f"{title:<{NAME_WIDTH + 2}}{whole:>{SIZE_WIDTH}}"]
    if len(title) > NAME_WIDTH:
        lines = [f"{title}: {whole}"]
    lines += (_line(name, format_bytes(size), text) for name, size, text in rows)
    return "\n".join(lines) + "\n"


def _line(name: str, value: str, text: str) -> str:
    """One row; a long text goes on below its own column."""
    left = f"  {name:<{NAME_WIDTH}}{value:>{SIZE_WIDTH}}"
    if not text:
        return left
    wrapped = _wrap(text, WIDTH - len(left) - 3)
    return ("\n" + " " * (len(left) + 3)).join([f"{left}   {wrapped[0]}", *wrapped[1:]])


def _wrap(text: str, width: int) -> list[str]:
    """In lines that leave flags whole."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _kv_cache(plan: Plan) -> str:
    cache, memory = plan.kv_cache, plan.memory
    lines = [_line("a token", format_bytes(cache.bytes_per_token), cache.formula)]
    if memory.usable is not None:
        share = f"{plan.config.cache.gpu_memory_utilization:g} of the GPU's memory"
        left = max(0, memory.left or 0)
        lines.append(_line("usable", format_bytes(memory.usable), share))
        lines.append(_line("left for it", format_bytes(left), "after all of the above"))
    if cache.num_bytes is None or cache.num_tokens is None:
        lines.append(_line("cache", "at start", "from the memory that is free then"))
    else:
        lines.append(_line("cache", format_bytes(cache.num_bytes), cache.why))
        requests = cache.num_tokens / cache.longest
        text = f"{requests:.1f} requests of {cache.longest} tokens on each data-parallel rank"
        lines.append(_line("tokens it holds", f"{cache.num_tokens}", text))
    return "\n".join(["KV cache", *lines]) + "\n"


def _budget(plan: Plan) -> str:
    budget = plan.budget
    largest = _largest(plan)
    lines = [
        _line("B", str(budget.tokens), f"max_num_batched_tokens, {budget.why}"),
        _line("largest B", largest, budget.largest_why),
        _line("N", str(budget.dispatched), "tokens that a rank sends to experts at most"),
    ]
    if budget.needed_qp_depth is not None:
        given = plan.machine.qp_depth
        text = f"needed: at least 2 x ({budget.dispatched} + 1); "
        text += "not set, so moed sets it" if given is None else f"set to {given}"
        lines.append(_line("NVSHMEM_QP_DEPTH", str(budget.needed_qp_depth), text))
    return "\n".join(["token budget of a rank and step", *lines]) + "\n"


def _alternatives(full: FullPlan) -> str:
    """Every backend in one line, the chosen one first."""
    chosen = Alternative(full.plan.config.parallel.backend.name + " (chosen)", full.plan)
    rows: list[tuple[str, ...]] = [ALTERNATIVE_COLUMNS]
    rows += (_alternative(entry) for entry in (chosen, *full.alternatives))
    name_width = max(len(row[0]) for row in rows) + 2
    lines = (f"{row[0]:<{name_width}}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)
    return "\n".join(lines) + "\n"


def _alternative(entry: Alternative) -> tuple[str, ...]:
    plan = entry.plan
    if plan is None:
        return (f"  {entry.name}", *["-"] * 5, "not here")
    tokens = plan.kv_cache.num_tokens
    return (
        f"  {entry.name}",
        str(plan.budget.tokens),
        _largest(plan),
        format_bytes(plan.memory.dispatch),
        format_bytes(plan.memory.workspace),
        "-" if tokens is None else str(tokens),
        str(len(plan.refusals)) if plan.refusals else "none",
    )


def _largest(plan: Plan) -> str:
    largest = plan.budget.largest
    return "-" if largest is None else str(largest or "none")


def _findings(plan: Plan) -> str:
    parts = []
    if plan.notes:
        parts.append("notes\n" + _bullets(plan.notes))
    if plan.refusals:
        parts.append(f"refused, for {_plural(len(plan.refusals), 'reason')}\n")
        parts[-1] += _bullets(plan.refusals)
    else:
        parts.append("nothing speaks against it\n")
    return "\n".join(parts)


def _bullets(sentences: Iterable[str]) -> str:
    wrapped = (_wrap(sentence, WIDTH - 4) for sentence in sentences)
    return "".join("  - " + "\n    ".join(lines) + "\n" for lines in wrapped)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def full_json(full: FullPlan) -> str:
    """One object; sizes in bytes, None where a number is not known."""
    content = _object(full.plan)
    content["other_backends"] = {
        entry.name: None if entry.plan is None else _object(entry.plan)
        for entry in full.alternatives
    }
    return json.dumps(content, indent=2)


def _object(plan: Plan) -> dict[str, Any]:
    config, machine, memory = plan.config, plan.machine, plan.memory
    return {
        "model": config.model.model,
        "model_type": config.model.model_type,
        "dtype": config.model.dtype,
        "all2all_backend": config.parallel.backend.name,
        "device": config.parallel.device,
        "data_parallel_size": config.parallel.data_parallel_size,
        "tensor_parallel_size": tensor_parallel_size(config),
        "num_nodes": machine.num_nodes,
        "gpu_memory_bytes": machine.gpu_memory_bytes,
        "weights_bytes": {**plan.weights, "total": memory.weights},
        "dispatch_bytes": _items(plan.dispatch),
        "workspace_bytes": _items(plan.workspace),
        "usable_bytes": memory.usable,
        "left_bytes": memory.left,
        "kv_cache": {
            "bytes_per_token": plan.kv_cache.bytes_per_token,
            "bytes": plan.kv_cache.num_bytes,
            "tokens": plan.kv_cache.num_tokens,
        },
        "max_num_batched_tokens": plan.budget.tokens,
        "max_num_batched_tokens_from": plan.budget.why,
        "largest_max_num_batched_tokens": plan.budget.largest,
        "largest_max_num_batched_tokens_from": plan.budget.largest_why,
        "dispatch_capacity": plan.budget.dispatched,
        "needed_nvshmem_qp_depth": plan.budget.needed_qp_depth,
        "notes": list(plan.notes),
        "refusals": list(plan.refusals),
    }


def _items(items: Sequence[Item]) -> dict[str, Any]:
    found: dict[str, Any] = {item.name: item.num_bytes for item in items}
    return {**found, "total": total(items)}
