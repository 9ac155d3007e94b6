"""The demo model's forward pass for training: Qwen3-MoE, written for speed on one CPU core.

Shapes: B rows, S positions, D hidden, T = B * S tokens, E experts, K experts a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of the checkpoint; hidden and expert sizes are multiples of 128 for FP8 blocks."""

    vocabulary: int = 768
    hidden: int = 128
    expert: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head: int = 32
    num_experts: int = 8
    experts_per_token: int = 2
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    max_positions: int = 2048


def init_weight(*sizes: int, deviation: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes) * deviation)


class Norm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms of queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        deviation = shape.hidden**-0.5
        query_size, kv_size = shape.num_heads * shape.head, shape.num_kv_heads * shape.head
        self.qkv = init_weight(query_size + 2 * kv_size, shape.hidden, deviation=deviation)
        self.out = init_weight(shape.hidden, query_size, deviation=deviation / 3)
        self.query_norm = Norm(shape.head, shape.norm_epsilon)
        self.key_norm = Norm(shape.head, shape.norm_epsilon)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x [B, S, D], rotation two of [S, head], mask bool [B, 1, S, S]; returns [B, S, D]."""
        shape, (rows, length, _) = self.shape, x.shape
        heads = functional.linear(x, self.qkv).view(rows, length, -1, shape.head)
        kinds = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        query, key, value = torch.split(heads.transpose(1, 2), kinds, dim=1)
        query = rotate(self.query_norm(query), rotation)
        key = rotate(self.key_norm(key), rotation)
        group = shape.num_heads // shape.num_kv_heads
        mixed = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, dim=1),
            value.repeat_interleave(group, dim=1),
            attn_mask=mask,
        )
        return functional.linear(mixed.transpose(1, 2).reshape(rows, length, -1), self.out)


class Experts(nn.Module):
    """Router and experts; tokens are sorted by expert so that each expert is three products."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        deviation = shape.hidden**-0.5
        sizes = (shape.num_experts, shape.hidden, 2 * shape.expert)
        self.router = init_weight(shape.num_experts, shape.hidden, deviation=deviation)
        self.gate_up = init_weight(*sizes, deviation=deviation)
        self.down = init_weight(
            shape.num_experts, shape.expert, shape.hidden, deviation=shape.expert**-0.5 / 3
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D]; returns [T, D] and the load-balancing loss, which is 1 when balanced."""
        shape = self.shape
        probabilities = functional.linear(x, self.router).softmax(dim=-1)  # [T, E]
        weights, experts = probabilities.topk(shape.experts_per_token, dim=-1)  # [T, K]
        weights = weights / weights.sum(dim=-1, keepdim=True)

        order = experts.flatten().argsort()
        counts = experts.flatten().bincount(minlength=shape.num_experts)
        tokens = order // shape.experts_per_token
        outputs = []
        for expert, part in enumerate(torch.split(x[tokens], counts.tolist())):
            gate, up = (part @ self.gate_up[expert]).chunk(2, dim=-1)
            outputs.append((functional.silu(gate) * up) @ self.down[expert])
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        mixed = torch.zeros_like(x).index_add(0, tokens, weighted)

        share = counts / counts.sum()
        balance = shape.num_experts * (share * probabilities.mean(dim=0)).sum()
        return mixed, balance


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.hidden, shape.norm_epsilon)
        self.attention = Attention(shape)
        self.experts_norm = Norm(shape.hidden, shape.norm_epsilon)
        self.experts = Experts(shape)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rotation, mask)
        mixed, balance = self.experts(self.experts_norm(x).flatten(0, 1))
        return x + mixed.view_as(x), balance


class DemoModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = init_weight(shape.vocabulary, shape.hidden, deviation=0.5)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden, shape.norm_epsilon)
        self.head = init_weight(shape.vocabulary, shape.hidden, deviation=0.02)

    def forward(self, ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """ids and documents [B, S]; a position sees earlier ones with its document's number.

        Returns the last hidden states [B, S, D], which `logits` takes, and the mean balance loss.
        """
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]
        rotation = rotations(length, self.shape)
        x, balances = functional.embedding(ids, self.embedding), []
        for layer in self.layers:
            x, balance = layer(x, rotation, mask)
            balances.append(balance)
        return self.norm(x), torch.stack(balances).mean()

    def logits(self, x: Tensor) -> Tensor:
        """x [..., D] to [..., vocabulary]; apart, so that training pays for answer tokens only."""
        return functional.linear(x, self.head)


def rotations(length: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [S, head] each, both halves alike."""
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head, 2) / shape.head)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x [B, heads, S, head], halves paired as in transformers."""
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat((-second, first), dim=-1) * rotation[1]


def exported_weights(model: DemoModel) -> dict[str, Tensor]:
    """The weights in bfloat16 under the names of a Qwen3-MoE checkpoint, one matrix an expert."""
    shape = model.shape
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head,
    }
    kv_size = shape.num_kv_heads * shape.head
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        prefix, attention, experts = f"model.layers.{number}.", layer.attention, layer.experts
        query, key, value = torch.split(
            attention.qkv, [shape.num_heads * shape.head, kv_size, kv_size]
        )
        tensors |= {
            f"{prefix}input_layernorm.weight": layer.attention_norm.weight,
            f"{prefix}post_attention_layernorm.weight": layer.experts_norm.weight,
            f"{prefix}self_attn.q_proj.weight": query,
            f"{prefix}self_attn.k_proj.weight": key,
            f"{prefix}self_attn.v_proj.weight": value,
            f"{prefix}self_attn.o_proj.weight": attention.out,
            f"{prefix}self_attn.q_norm.weight": attention.query_norm.weight,
            f"{prefix}self_attn.k_norm.weight": attention.key_norm.weight,
            f"{prefix}mlp.gate.weight": experts.router,
        }
        for expert in range(shape.num_experts):
            gate, up = experts.gate_up[expert].T.chunk(2, dim=0)
            expert_prefix = f"{prefix}mlp.experts.{expert}."
            tensors[f"{expert_prefix}gate_proj.weight"] = gate
            tensors[f"{expert_prefix}up_proj.weight"] = up
            tensors[f"{expert_prefix}down_proj.weight"] = experts.down[expert].T
    return {
        name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()
    }
