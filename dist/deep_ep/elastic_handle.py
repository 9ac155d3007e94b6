"""`EPHandle`: what a dispatch of `ElasticBuffer` learned, for its combine.

K experts of a token, R ranks, L local experts, M rows received.
"""

import torch


class EPHandle:
    """Parameters and fields are DeepEP's own."""

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: torch.Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: torch.Tensor,
        psum_num_recv_tokens_per_expert: torch.Tensor,
        num_unaligned_recv_tokens_per_expert: torch.Tensor | None,
        recv_src_metadata: torch.Tensor,
        dst_buffer_slot_idx: torch.Tensor,
        token_metadata_at_forward: torch.Tensor | None,
        channel_linked_list: torch.Tensor | None,
    ) -> None:
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        """[T, K], the ids that were dispatched."""
        self.num_recv_tokens = num_recv_tokens
        """M; without host synchronisation the most there can be."""
        self.num_expanded_tokens = num_expanded_tokens
        """Rows sorted by expert, gaps included; likewise."""
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        """Rounded up to the alignment; empty without host synchronisation."""
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        """[R] int32, rows of this and all earlier source ranks: the last is the valid prefix."""
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        """[L] int32. Expanded: aligned start of an expert's rows plus their number; else the sum of
        aligned numbers up to this expert.
        """
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        """[L] int32, only where expanded."""
        self.recv_src_metadata = recv_src_metadata
        """[M, K + 2] int32: source rank x N + source token; opaque; and where expanded the row of
        each choice, -1 for none.
        """
        self.dst_buffer_slot_idx = dst_buffer_slot_idx
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list
