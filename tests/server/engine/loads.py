"""What a process tells of its experts, made up."""

from moed.server.messages import ExpertLoad, WireBytes


def expert_load(
    rank: int,
    layers: list[int],
    decode: list[list[int]],
    prefill: list[list[int]] | None = None,
    num_bytes: int = 0,
    num_steps: int = 0,
    num_tokens: int = 0,
) -> ExpertLoad:
    """Rows by layer and slot. `num_bytes` went out to others of the node in decode steps; half as
    many came back.
    """
    nothing = WireBytes(0, 0)
    some = WireBytes(num_bytes, num_bytes // 2)
    rows = {"prefill": prefill or [[0] * len(own) for own in decode], "decode": decode}
    wire_bytes = {
        "prefill": {"intra": nothing, "inter": nothing},
        "decode": {"intra": some, "inter": nothing},
    }
    return ExpertLoad(rank, num_steps, num_tokens, layers, rows, wire_bytes)
