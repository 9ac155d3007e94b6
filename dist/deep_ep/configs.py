"""`Config` of the high-throughput calls, and the ones that DeepEP recommends."""

from moed.config import deep_ep_limits as limits
from moed.dist.deep_ep.rules import require


class Config:
    """Queue lengths in rows. The defaults are DeepEP's own."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        nvl = (num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens)
        rdma_send = num_max_rdma_chunked_send_tokens
        require(num_sms >= 0 and num_sms % 2 == 0, f"num_sms {num_sms} must be even")
        require(0 < nvl[0] < nvl[1], f"NVLink: must send fewer rows than are received, got {nvl}")
        require(rdma_send > 0, f"RDMA: num_max_rdma_chunked_send_tokens is {rdma_send}")
        rdma_recv = limits.round_up(num_max_rdma_chunked_recv_tokens, rdma_send)
        require(
            0 < rdma_send <= rdma_recv // 2,
            f"RDMA: must send at most half of what is received, got {rdma_send} and {rdma_recv}",
        )
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens = nvl
        self.num_max_rdma_chunked_send_tokens = rdma_send
        self.num_max_rdma_chunked_recv_tokens = rdma_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        """Bytes of the NVLink buffer for rows of `hidden_bytes`."""
        return limits.nvl_queue_bytes(
            num_ranks, hidden_bytes, self.num_sms, self.num_max_nvl_chunked_recv_tokens
        )

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        """Bytes of the RDMA buffer for rows of `hidden_bytes`; 0 on one node."""
        return limits.rdma_queue_bytes(
            num_ranks, hidden_bytes, self.num_sms, self.num_max_rdma_chunked_recv_tokens
        )


# By rank count: rows sent and received at once over NVLink, then over RDMA.
DISPATCH = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    32: (32, 288, 8, 128),
    48: (32, 288, 8, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
COMBINE = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    32: (1, 288, 8, 128),
    48: (1, 288, 8, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}


def recommended(
    table: dict[int, tuple[int, int, int, int]], num_ranks: int, num_sms: int, *, is_strict: bool
) -> Config:
    """The entry for `num_ranks`. Where it is missing: refused when strict, else the next larger."""
    known = [size for size in table if size >= num_ranks]
    require(
        num_ranks in table or (not is_strict and bool(known)),
        f"{num_ranks} ranks: high-throughput mode serves {sorted(table)}",
    )
    return Config(num_sms, *table[min(known)])
