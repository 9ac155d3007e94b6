"""One readable decoder for all families: attention replicated, experts spread over the ranks.

Legend: T tokens, D hidden, H query heads, G KV heads, d head dim, J rows whose logits are wanted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from moed.config.engine_config import ModelConfig
from moed.config.windows import Window
from moed.dist.all2all.base import All2AllBackend
from moed.dist.dp_metadata import DPMetadata
from moed.dist.groups import Groups
from moed.dist.tensor_parallel import TensorParallel
from moed.moe import native
from moed.moe.attention import (
    AttentionBackend,
    AttentionPlan,
    GraphAttention,
    StepAttention,
    TorchAttention,
)
from moed.moe.batch import ForwardBatch
from moed.moe.experts import Experts, swiglu
from moed.moe.families import DecoderFeatures, QueryKeyNorm, Temperature
from moed.moe.fused_moe import FusedMoE
from moed.moe.kv_cache import KVCache, LatentCache, local_kv_heads
from moed.moe.linear import Linear
from moed.moe.mla import LatentAttention
from moed.moe.native.attention import HeadSizes, NativeAttention, NativeStep, can_attend
from moed.moe.norm import Norm, rms_norm
from moed.moe.part_times import Part
from moed.moe.rotary import Tables


def _query_scale(
    positions: torch.Tensor, temperature: Temperature | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """[T, 1, 1] for `positions` [T]."""
    if temperature is None:
        return None
    steps = torch.floor((positions.float() + 1) / temperature.step)
    return (torch.log1p(steps) * temperature.strength + 1).to(dtype)[:, None, None]


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1.0 else tensor * factor


@dataclass
class Attention:
    """Weights of one layer's attention, of the H and G heads that this process computes."""

    qkv: Linear
    """To (H + 2 G) d."""
    output: Linear
    """From H d."""
    sinks: torch.Tensor | None
    """[H]."""
    query_key_norm: torch.Tensor | None
    """[H + G, d]: the query's weights for H heads, then the key's for G."""


@dataclass
class DenseMLP:
    """SwiGLU of every token."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass
class Layer:
    """One decoder layer: attention, then a MoE or a dense MLP."""

    input_norm: Norm
    attention: Attention | LatentAttention
    post_attention_norm: Norm
    mlp: FusedMoE | DenseMLP


@dataclass(frozen=True)
class _Step:
    """What attention of all layers shares in one step, made once."""

    rotary_tables: Tables
    plans: tuple[StepAttention, StepAttention]
    """Of layers that see the whole context, and of those with a window; the same where all are
    alike.
    """
    slots: tuple[torch.Tensor, torch.Tensor]
    """[T] of the same two kinds of layers."""
    kv_cache: KVCache | LatentCache
    query_scale: torch.Tensor | None
    """[T, 1, 1], of queries without rotary embedding."""


@dataclass(frozen=True)
class _NativeStep:
    """The same where the native kernels compute attention."""

    steps: tuple[NativeStep, NativeStep]
    """Of layers that see the whole context, and of those with a window."""
    kv_cache: KVCache


# Of queries and keys, as the kernels know them.
NATIVE_NORMS = (QueryKeyNorm.NONE, QueryKeyNorm.HEAD, QueryKeyNorm.HEAD_AFTER_ROTARY)


class Decoder:
    """Holds the layers; every rank calls `forward` in every step."""

    def __init__(
        self,
        model: ModelConfig,
        features: DecoderFeatures,
        embedding: torch.Tensor,
        layers: list[Layer],
        experts: Mapping[int, Experts],
        final_norm: Norm,
        head: Linear,
        tensor_parallel: TensorParallel,
        attention: AttentionBackend,
    ) -> None:
        """`embedding` [V, D], `head` to V; `experts` are those inside `layers`, by layer."""
        self._model = model
        self._features = features
        self._embedding = embedding
        self._layers = layers
        self._experts = experts
        self._final_norm = final_norm
        self._head = head
        self._tensor_parallel = tensor_parallel
        self._attention = attention
        self._num_heads = model.num_attention_heads // tensor_parallel.size
        scale = features.attention_scale
        self._attention_scale = model.head_dim**-0.5 if scale is None else scale
        self._num_kv_heads = local_kv_heads(model, tensor_parallel.size)
        self._native = self._native_attention(layers)

    def join(self, groups: Groups, backend: All2AllBackend) -> None:
        """Go on in a new group, with the weights and heads of before."""
        self._tensor_parallel.join(groups)
        for layer in self._layers:
            if isinstance(layer.mlp, FusedMoE):
                layer.mlp.join(backend)

    @property
    def attention(self) -> AttentionBackend:
        """What computes it, unless the native kernels do."""
        return self._attention

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The M layers that have experts."""
        return tuple(self._experts)

    @property
    def moe_rows(self) -> torch.Tensor:
        """[M, e] int64, on the device: (row, expert) pairs that this rank's experts have computed,
        for each MoE layer and slot.
        """
        rows = [experts.rows_per_slot for experts in self._experts.values()]
        if len({len(own) for own in rows}) == 1:
            return torch.stack(rows)
        # A placement may leave slots empty in some layers.
        return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0).long()

    @property
    def reads_on_host(self) -> bool:
        """Whether its experts wait for counts that the device made, which no CUDA graph holds."""
        return any(experts.reads_on_host for experts in self._experts.values())

    @property
    def copies_context(self) -> bool:
        """See `AttentionBackend`."""
        return self._attention.copies_context

    def graph_attention(
        self, num_rows: int, num_blocks: int, block_size: int
    ) -> GraphAttention | None:
        """See `AttentionBackend.graph`."""
        return self._attention.graph(num_rows, num_blocks, block_size, self._windows)

    def routing_record(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, M, K] int32, for `ForwardBatch.routed_experts`."""
        shape = (num_tokens, len(self._experts), self._model.top_k)
        return torch.empty(shape, dtype=torch.int32, device=self._embedding.device)

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache | LatentCache, dp_metadata: DPMetadata
    ) -> torch.Tensor:
        """Logits [J, V] float32. With T = 0 the rank still takes part in each MoE layer.

        Each process of a DP rank calls it with the same tokens.
        """
        with dp_metadata.sp_local_sizes(self._tensor_parallel.size):
            return self._forward(batch, kv_cache, dp_metadata)

    def _forward(
        self, batch: ForwardBatch, kv_cache: KVCache | LatentCache, dp_metadata: DPMetadata
    ) -> torch.Tensor:
        features = self._features
        hidden = F.embedding(batch.token_ids, self._embedding)
        hidden = _scaled(hidden, features.embedding_scale)
        scale = features.residual_scale
        step = self._step(batch, kv_cache, hidden.dtype)
        routed = iter(() if batch.routed_experts is None else batch.routed_experts.unbind(1))
        times, with_attention = batch.times, self._with_attention
        if times is not None:
            with_attention = times.timing(Part.ATTENTION, with_attention)
        for index, layer in enumerate(self._layers):
            hidden = with_attention(index, layer, hidden, step)
            normed = layer.post_attention_norm(hidden)
            if isinstance(layer.mlp, FusedMoE):
                added = layer.mlp(normed, dp_metadata, next(routed, None), times)
            else:
                part = swiglu(normed, layer.mlp.gate_up, layer.mlp.down)
                added = self._tensor_parallel.sum(part)
            hidden = hidden + _scaled(added, scale)
        wanted = self._final_norm(hidden[batch.logits_indices])
        return _scaled(self._head(wanted).float(), 1 / features.logits_divisor)

    def _step(
        self, batch: ForwardBatch, kv_cache: KVCache | LatentCache, dtype: torch.dtype
    ) -> "_Step | _NativeStep":
        features = self._features
        tables = features.rotary.tables(batch.positions, dtype)
        if self._native is not None and batch.num_tokens:
            assert isinstance(kv_cache, KVCache)
            return self._native_step(batch, tables, kv_cache)
        slots = batch.window_slot_mapping
        slots = batch.slot_mapping if slots is None else slots
        return _Step(
            tables,
            self._plans(batch, kv_cache.block_size, dtype),
            (batch.slot_mapping, slots),
            kv_cache,
            _query_scale(batch.positions, features.temperature, dtype),
        )

    def _native_step(self, batch: ForwardBatch, tables: Tables, kv_cache: KVCache) -> "_NativeStep":
        sizes = (kv_cache.block_size, self._num_heads * self._model.head_dim)
        whole = window = NativeStep(batch, tables, *sizes)
        if batch.window_block_tables is not None and batch.window_slot_mapping is not None:
            of_window = replace(
                batch,
                block_tables=batch.window_block_tables,
                slot_mapping=batch.window_slot_mapping,
            )
            window = NativeStep(of_window, tables, *sizes)
        return _NativeStep((whole, window), kv_cache)

    def _with_attention(
        self, index: int, layer: Layer, hidden: torch.Tensor, step: "_Step | _NativeStep"
    ) -> torch.Tensor:
        """[T, D]: `hidden` [T, D], which may be overwritten, plus attention of layer `index`."""
        if isinstance(step, _NativeStep):
            assert self._native is not None
            own = step.steps[self._has_window(index)]
            self._native[index].add_to(hidden, index, own, step.kv_cache)
            return hidden
        attended = self._attend(index, layer.attention, layer.input_norm(hidden), step)
        return hidden + _scaled(attended, self._features.residual_scale)

    def _has_window(self, index: int) -> bool:
        """Whether layer `index` is of those with a window, where some are."""
        own = self._features.window_layers
        return own is None or own[index]

    def _native_attention(self, layers: list[Layer]) -> list[NativeAttention] | None:
        """By layer; None where the native kernels do not know what this model does."""
        features, library, made = self._features, native.library(), []
        is_known = (
            self._tensor_parallel.size == 1
            and isinstance(self._attention, TorchAttention)
            and features.query_key_norm in NATIVE_NORMS
            and features.attention_limit is None
            and features.rotary_layers is None
            and features.temperature is None
            and not (features.window is not None and features.window.is_aligned)
        )
        if library is None or not is_known:
            return None
        for index, layer in enumerate(layers):
            weights = layer.attention
            if isinstance(weights, LatentAttention) or layer.input_norm.bias is not None:
                return None
            qkv, output = weights.qkv.native, weights.output.native
            if qkv is None or output is None or not can_attend(qkv, output, self._model.head_dim):
                return None
            window = features.window if self._has_window(index) else None
            sizes = HeadSizes(
                num_heads=self._num_heads,
                num_kv_heads=self._num_kv_heads,
                head_dim=self._model.head_dim,
                num_rotated=features.rotary.num_dims,
                is_interleaved=features.rotary.is_interleaved,
                norm_after_rotary=features.query_key_norm is QueryKeyNorm.HEAD_AFTER_ROTARY,
                window=None if window is None else window.size,
                eps=features.rms_norm_eps,
                scale=self._attention_scale,
                residual_scale=features.residual_scale,
            )
            norms = (layer.input_norm.weight, weights.query_key_norm, weights.sinks)
            made.append(NativeAttention(library, qkv, output, *norms, sizes))
        return made

    def _plans(
        self, batch: ForwardBatch, block_size: int, dtype: torch.dtype
    ) -> tuple[StepAttention, StepAttention]:
        if batch.attention is not None:
            return batch.attention
        whole, window = self._windows
        of_window = batch
        if batch.window_block_tables is not None:
            of_window = replace(batch, block_tables=batch.window_block_tables)
        plan = self._attention.plan(of_window, block_size, window, dtype)
        if whole == window:
            return plan, plan
        return self._attention.plan(batch, block_size, whole, dtype), plan

    @property
    def _windows(self) -> tuple[Window | None, Window | None]:
        """Of layers that see the whole context, and of the others: the same where all are alike."""
        window, own = self._features.window, self._features.window_layers
        return (window if own is None or all(own) else None), window

    def _attend(
        self,
        index: int,
        weights: Attention | LatentAttention,
        hidden: torch.Tensor,
        step: _Step,
    ) -> torch.Tensor:
        """[T, D]: attention of layer `index` for `hidden` [T, D]."""
        if not hidden.shape[0]:
            return self._tensor_parallel.sum(hidden.clone())
        if isinstance(weights, LatentAttention):
            assert isinstance(step.kv_cache, LatentCache)
            plan = step.plans[0]
            assert isinstance(plan, AttentionPlan), "latent attention is torch's"
            part = weights(hidden, index, step.rotary_tables, plan, step.slots[0], step.kv_cache)
            return self._tensor_parallel.sum(part)
        assert isinstance(step.kv_cache, KVCache)
        heads, kv_heads, head_dim = self._num_heads, self._num_kv_heads, self._model.head_dim
        states = weights.qkv(hidden)
        states = states.view(-1, heads + 2 * kv_heads, head_dim)
        rotated, value = states[:, : heads + kv_heads], states[:, heads + kv_heads :]
        limit, norm = self._features.attention_limit, self._features.query_key_norm
        if norm in (QueryKeyNorm.HEAD, QueryKeyNorm.WHOLE):
            rotated = self._query_key_norm(rotated, weights.query_key_norm)
        if limit is not None:
            rotated, value = rotated.clamp(-limit, limit), value.clamp(-limit, limit)
        rotates = self._features.rotary_layers
        if rotates is None or rotates[index]:
            rotated = self._features.rotary.rotate(rotated, step.rotary_tables)
            if norm in (QueryKeyNorm.HEAD_AFTER_ROTARY, QueryKeyNorm.PLAIN_AFTER_ROTARY):
                rotated = self._query_key_norm(rotated, weights.query_key_norm)
            query, key = rotated[:, :heads], rotated[:, heads:]
        else:
            query, key = rotated[:, :heads], rotated[:, heads:]
            if step.query_scale is not None:
                query = query * step.query_scale
        kind = self._has_window(index)
        step.kv_cache.write(index, key, value, step.slots[kind])
        attended = step.plans[kind].attend(
            query, index, step.kv_cache, self._attention_scale, weights.sinks
        )
        rows = attended.reshape(-1, heads * head_dim)
        return self._tensor_parallel.sum(weights.output(rows))

    def _query_key_norm(self, states: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """[T, H + G, d]: queries and keys normed, as the family does it."""
        eps = self._features.rms_norm_eps
        if weight is None or self._features.query_key_norm is not QueryKeyNorm.WHOLE:
            return rms_norm(states, weight, eps)
        # Over all heads of the model, also those of other members.
        squares = states.float().square().sum(dim=-1)
        query, key = squares.split_with_sizes([self._num_heads, self._num_kv_heads], dim=1)
        sums = torch.stack([query.sum(dim=1), key.sum(dim=1)], dim=1)
        sums = self._tensor_parallel.sum(sums)
        query_size = self._model.num_attention_heads * self._model.head_dim
        key_size = self._num_kv_heads * self._tensor_parallel.size * self._model.head_dim
        of_query = (sums[:, :1] / query_size + eps).rsqrt().expand(-1, self._num_heads)
        of_key = (sums[:, 1:] / key_size + eps).rsqrt().expand(-1, self._num_kv_heads)
        factors = torch.cat([of_query, of_key], dim=1).to(states.dtype)
        return states * factors[..., None] * weight
