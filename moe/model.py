"""From a checkpoint to a `Decoder` that holds this rank's experts."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from moed.config.capabilities import ActivationFormat
from moed.config.engine_config import EngineConfig
from moed.config.quantization import quantization_of
from moed.dist.all2all.base import All2AllBackend
from moed.dist.groups import Groups
from moed.dist.placement import SlotMap
from moed.dist.tensor_parallel import TensorParallel
from moed.moe import native
from moed.moe.attention import AttentionBackend
from moed.moe.attention_choice import make_attention
from moed.moe.block_scaled import BlockScaled, WeightFormat
from moed.moe.decoder import Attention, Decoder, DenseMLP, Layer
from moed.moe.experts import (
    Experts,
    ExpertWeights,
    can_compute,
    experts_to_fill,
    make_experts,
)
from moed.moe.families import DecoderFeatures, Family, FusedNames, QueryKeyNorm, family_of
from moed.moe.fused_moe import FusedMoE
from moed.moe.latent_weights import load_latent_attention
from moed.moe.linear import Linear, join_rows
from moed.moe.loader import Checkpoint, Dummy, Source, first_names
from moed.moe.mla import LatentAttention
from moed.moe.norm import Norm
from moed.moe.output_projection import load_output
from moed.moe.progress import layer_progress
from moed.moe.router import Router
from moed.moe.shards import Shard, even_shard, head_shard, shard_of
from moed.moe.shared_experts import SharedExperts
from moed.moe.survey import Survey

__all__ = ["Decoder", "load_model"]

logger = logging.getLogger(__name__)


def load_model(
    config: EngineConfig,
    groups: Groups,
    backend: All2AllBackend,
    report: Callable[[str], None],
) -> Decoder:
    """Read the own experts, the own heads and all else. Raises `ModelError`, and `ConfigError` for
    an attention backend or kernels that do not work here.
    """
    device = torch.device(groups.device_type)
    if groups.device_type == "cpu":
        native.use_kernels(config.runner.cpu_kernels)
        if groups.rank == 0:
            logger.info("kernels: %s", native.describe())
    dtype = getattr(torch, config.model.dtype)
    family = family_of(config.model)
    max_length = config.scheduler.max_model_len or config.model.max_position_embeddings
    features = family.features(config.model, max_length)

    attention = make_attention(config, features, groups, device)

    def build(source: Source, on_layer: Callable[[int], None]) -> Decoder:
        builder = _Builder(config, features, family, source, groups, backend, attention)
        return builder.build(on_layer)

    source: Source
    if config.model.load_format == "dummy":
        source = Dummy(config.model.seed, dtype, device)
    else:
        quantization = quantization_of(config.model.hf_config)
        is_multimodal = config.model.whole_model_type is not None
        source = Checkpoint(Path(config.model.path), dtype, device, quantization, is_multimodal)
        if groups.rank == 0 and (others := source.names_of_other_parts):
            logger.info(
                "%s is served as text: %d tensors of its other parts (%s) are not used",
                config.model.whole_model_type,
                len(others),
                first_names(sorted(others)),
            )
        # Once without reading, so that all that does not fit is told together, before any work.
        survey = Survey(source)
        build(survey, lambda _: None)
        survey.finish()
        if groups.rank == 0 and (summary := survey.summary()):
            logger.info("%s", summary)
    with layer_progress(config.model.num_layers, report, groups.rank) as on_layer:
        return build(source, on_layer)


def stack_fp8(parts: list[BlockScaled], per_slot: int, num_slots: int) -> BlockScaled:
    """[num_slots, rows, K] from matrices of equal shape, `per_slot` of them below each other in a
    slot, their scales likewise. Slots without matrices are zero.
    """

    def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
        first = tensors[0]
        shape = (num_slots, per_slot, *first.shape)
        stacked = torch.zeros(shape, dtype=first.dtype, device=first.device)
        for index, tensor in enumerate(tensors):
            stacked[index // per_slot, index % per_slot].copy_(tensor)
        return stacked.view(num_slots, per_slot * first.shape[0], first.shape[1])

    return BlockScaled(stack([p.values for p in parts]), stack([p.scales for p in parts]))


def _gate_and_up(rows: torch.Tensor, is_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[I, ...] each, of `rows` [2I, ...]."""
    if is_interleaved:
        return rows[0::2], rows[1::2]
    half = rows.shape[0] // 2
    return rows[:half], rows[half:]


class _Builder:
    def __init__(
        self,
        config: EngineConfig,
        features: DecoderFeatures,
        family: Family,
        source: Source,
        groups: Groups,
        backend: All2AllBackend,
        attention: AttentionBackend,
    ) -> None:
        self._config = config
        self._model = config.model
        self._features = features
        self._names = family.names
        self._fused = family.fused
        self._source = source
        self._rank = groups.rank
        self._backend = backend
        self._attention_backend = attention
        self._tensor_parallel = TensorParallel(groups)
        self._experts: dict[int, Experts] = {}
        # Of the layer that is being built.
        self._placement = config.placement()

    def build(self, on_layer: Callable[[int], None]) -> Decoder:
        """The decoder; `on_layer` is told the number of each layer before it is read."""
        model, get = self._model, self._source.get
        vocabulary = (model.vocab_size, model.hidden_size)
        embedding = get("model.embed_tokens.weight", vocabulary)
        layers = []
        for index in range(model.num_layers):
            on_layer(index)
            layers.append(self._layer(index))
        # Layers that draft several tokens (MTP) come after the others.
        for extra in range(int(model.hf_config.get("num_nextn_predict_layers") or 0)):
            self._source.skip_below(f"model.layers.{model.num_layers + extra}.")
        final_norm = self._norm("model.norm")
        if self._features.tie_word_embeddings:
            head = embedding
            self._source.skip("lm_head.weight")
        else:
            head = get("lm_head.weight", vocabulary)
        bias = None
        if self._features.has_head_bias:
            bias = get("lm_head.bias", (model.vocab_size,))
        return Decoder(
            model,
            self._features,
            embedding,
            layers,
            self._experts,
            final_norm,
            Linear(head, bias),
            self._tensor_parallel,
            self._attention_backend,
        )

    def _layer(self, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        return Layer(
            input_norm=self._norm(f"{prefix}input_layernorm"),
            attention=self._attention(prefix),
            post_attention_norm=self._norm(f"{prefix}post_attention_layernorm"),
            mlp=(
                self._moe(index, prefix)
                if self._features.moe_layers[index]
                else self._dense(prefix + self._names.dense)
            ),
        )

    def _norm(self, name: str) -> Norm:
        shape, bias = (self._model.hidden_size,), None
        if self._features.has_layer_norm:
            bias = self._source.get(f"{name}.bias", shape)
        weight = self._source.get(f"{name}.weight", shape)
        return Norm(weight, bias, self._features.rms_norm_eps)

    def _attention(self, layer: str) -> Attention | LatentAttention:
        """The own heads: their rows of Q, K and V, their columns of the output."""
        model, features, source = self._model, self._features, self._source
        if features.latent is not None:
            return load_latent_attention(
                source, f"{layer}self_attn.", model, features, self._tensor_parallel
            )
        names, prefix = self._names, f"{layer}self_attn."
        size, rank = self._tensor_parallel.size, self._tensor_parallel.rank
        dim, hidden = model.head_dim, model.hidden_size
        query = head_shard(model.num_attention_heads, dim, size, rank)
        kv = head_shard(model.num_kv_heads, dim, size, rank)
        parts = (("q", query), ("k", kv), ("v", kv))

        def rows_of(name: str, shard: Shard, *columns: int) -> torch.Tensor:
            whole = source.get(f"{prefix}{name}", (shard.whole, *columns))
            return whole[shard.start : shard.stop]

        def norm_of(name: str, shard: Shard) -> torch.Tensor:
            if features.query_key_norm is QueryKeyNorm.WHOLE:
                whole = source.get(layer + name, (shard.whole,))
                return whole[shard.start : shard.stop].view(-1, dim)
            return source.get(layer + name, (dim,)).expand(shard.size // dim, -1)

        return Attention(
            qkv=Linear(
                join_rows([rows_of(f"{name}_proj.weight", own, hidden) for name, own in parts]),
                join_rows([rows_of(f"{name}_proj.bias", own) for name, own in parts])
                if features.attention_bias
                else None,
            ),
            output=load_output(source, prefix, model, features, query, self._tensor_parallel),
            sinks=(
                source.get(f"{prefix}sinks", (query.whole // dim,))[
                    query.start // dim : query.stop // dim
                ]
                if features.has_sinks
                else None
            ),
            query_key_norm=(
                join_rows([norm_of(names.query_norm, query), norm_of(names.key_norm, kv)])
                if features.query_key_norm.has_weights
                else None
            ),
        )

    def _dense(self, prefix: str) -> DenseMLP:
        """The own part of the intermediate dimension."""
        size = self._features.dense_intermediate_size
        shard = even_shard(size, self._tensor_parallel.size, self._tensor_parallel.rank)
        return DenseMLP(*self._mlp(prefix, size, shard))

    def _mlp(self, prefix: str, size: int, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """[2i, D] and [D, i] for the i of `shard`."""
        hidden, get = self._model.hidden_size, self._source.get
        gate_up = [
            get(f"{prefix}{name}_proj.weight", (size, hidden))[shard.start : shard.stop]
            for name in ("gate", "up")
        ]
        down = get(f"{prefix}down_proj.weight", (hidden, size))
        if shard.size < size:
            down = down[:, shard.start : shard.stop].contiguous()
        return join_rows(gate_up), down

    def _moe(self, index: int, prefix: str) -> FusedMoE:
        self._placement = self._config.placement(index)
        fused = self._fused_layout(prefix)
        router = self._router(prefix, fused)
        experts = self._routed_experts(prefix, fused)
        self._experts[index] = experts
        return FusedMoE(
            self._config.fused_moe,
            router,
            experts,
            self._backend,
            SlotMap(self._placement, self._rank, self._source.device),
            self._tensor_parallel,
            self._shared_experts(prefix),
        )

    def _fused_layout(self, prefix: str) -> FusedNames | None:
        """That of this checkpoint; the first, where several have the same names and neither fits.
        None: experts lie one by one.
        """
        present = [f for f in self._fused if self._source.has(prefix + f.gate_up)]
        if len(present) < 2:
            return present[0] if present else None
        size, hidden = self._model.moe_intermediate_size, self._model.hidden_size
        for fused in present:
            shape = (size, hidden) if fused.is_transposed else (hidden, size)
            if self._source.shape_of(prefix + fused.down)[1:] == shape:
                return fused
        return present[0]

    def _router(self, prefix: str, fused: FusedNames | None) -> Router:
        num_experts = self._model.num_experts
        name = self._names.router if fused is None else fused.router
        read = self._source.get_float32 if self._features.router.is_float32 else self._source.get
        weight = read(prefix + name, (num_experts, self._model.hidden_size))
        name_of_correction = self._names.correction
        if fused is not None and fused.correction is not None:
            name_of_correction = fused.correction
        correction = None
        if name_of_correction is not None:
            correction = self._source.get_float32(prefix + name_of_correction, (num_experts,))
        bias = None
        if self._names.router_bias is not None:
            bias = self._source.get(prefix + self._names.router_bias, (num_experts,))
        return Router(weight, self._features.router, correction, bias)

    def _shared_experts(self, prefix: str) -> SharedExperts | None:
        size, names = self._features.shared_intermediate_size, self._names
        if not size:
            return None
        hidden, get = self._model.hidden_size, self._source.get
        if names.shared_gate_up is not None and names.shared_down is not None:
            gate_up = get(prefix + names.shared_gate_up, (2 * size, hidden))
            return SharedExperts(gate_up, get(prefix + names.shared_down, (hidden, size)), None)
        assert names.shared is not None
        gate_up, down = self._mlp(prefix + names.shared, size, Shard(0, size, size))
        gate = None
        if names.shared_gate is not None:
            gate = self._source.get(prefix + names.shared_gate, (1, self._model.hidden_size))
        return SharedExperts(gate_up, down, gate)

    def _routed_experts(self, prefix: str, fused: FusedNames | None) -> Experts:
        """The experts in this rank's slots; an empty slot, which a batched backend may ask for, is
        of zeros.
        """
        placement, model, source = self._placement, self._model, self._source
        activation_format = self._backend.capabilities.activation_format
        device_type = self._config.parallel.device
        if fused is None and self._stays_fp8(prefix):
            return make_experts(activation_format, device_type, self._fp8_experts(prefix))
        own = placement.local_expert_ids(self._rank)
        shard = shard_of(model.moe_intermediate_size, placement, self._rank)
        dtype, hidden = getattr(torch, model.dtype), model.hidden_size
        has_biases = fused is not None and fused.gate_up_bias is not None
        if self._features.activation.is_plain and not has_biases:
            sizes = (len(own), hidden, shard.size)
            filled = experts_to_fill(activation_format, source.device, dtype, sizes)
            if filled is not None:
                for local, matrices in enumerate(self._matrices(prefix, fused, own, shard)):
                    filled.put(local, *matrices)
                return filled
        is_batched = activation_format is ActivationFormat.BATCHED
        num_slots = placement.num_local_slots if is_batched else len(own)
        gate_up = torch.empty(num_slots, 2 * shard.size, hidden, dtype=dtype, device=source.device)
        down = torch.empty(num_slots, hidden, shard.size, dtype=dtype, device=source.device)
        gate_up[len(own) :].zero_()
        down[len(own) :].zero_()
        for local, matrices in enumerate(self._matrices(prefix, fused, own, shard)):
            gate_up[local, : shard.size], gate_up[local, shard.size :], down[local] = matrices
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if fused is not None:
            biases = self._expert_biases(prefix, fused, own, num_slots, shard)
        weights = ExpertWeights(
            BlockScaled.plain(gate_up), BlockScaled.plain(down), *biases, self._features.activation
        )
        return make_experts(activation_format, device_type, weights)

    def _expert_biases(
        self, prefix: str, fused: FusedNames, own: tuple[int, ...], num_slots: int, shard: Shard
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[num_slots, 2i] and [num_slots, D]; None where the family has none."""
        if fused.gate_up_bias is None or fused.down_bias is None:
            return None, None
        source, num_experts = self._source, self._model.num_experts
        dtype = getattr(torch, self._model.dtype)
        gate_up = torch.zeros(num_slots, 2 * shard.size, dtype=dtype, device=source.device)
        down = torch.zeros(num_slots, self._model.hidden_size, dtype=dtype, device=source.device)
        shape, down_shape = (num_experts, 2 * shard.whole), (num_experts, down.shape[1])
        # Added once where each rank holds a part of every expert.
        adds_down = not self._placement.is_sharded or self._rank == 0
        for local, expert in enumerate(own):
            row = source.get_row(prefix + fused.gate_up_bias, shape, expert)
            gate, up = _gate_and_up(row, fused.is_interleaved)
            gate_up[local, : shard.size] = gate[shard.start : shard.stop]
            gate_up[local, shard.size :] = up[shard.start : shard.stop]
            if adds_down:
                down[local] = source.get_row(prefix + fused.down_bias, down_shape, expert)
        source.skip(prefix + fused.gate_up_bias)
        source.skip(prefix + fused.down_bias)
        return gate_up, down

    def _stays_fp8(self, prefix: str) -> bool:
        """Whether all own experts are stored in FP8 and can be computed with as they are."""
        own, names = self._placement.local_expert_ids(self._rank), self._names
        stored = [
            self._source.is_fp8(prefix + name.format(e=expert))
            for expert in own
            for name in (names.gate, names.up, names.down)
        ]
        return (
            bool(own)
            and not self._placement.is_sharded
            and all(stored)
            and can_compute(
                self._backend.capabilities.activation_format,
                self._config.parallel.device,
                WeightFormat.FP8_BLOCK,
            )
        )

    def _fp8_experts(self, prefix: str) -> ExpertWeights:
        """As `_routed_experts`, with the numbers and scales of the files."""
        names, source = self._names, self._source
        size, hidden = self._model.moe_intermediate_size, self._model.hidden_size
        own = self._placement.local_expert_ids(self._rank)
        self._skip_others(prefix, own)
        gate_up, down = [], []
        for expert in own:
            gate, up, out = (
                prefix + name.format(e=expert) for name in (names.gate, names.up, names.down)
            )
            gate_up += [source.get_fp8(gate, (size, hidden)), source.get_fp8(up, (size, hidden))]
            down.append(source.get_fp8(out, (hidden, size)))
        num_slots = len(own)
        if self._backend.capabilities.activation_format is ActivationFormat.BATCHED:
            num_slots = self._placement.num_local_slots
        return ExpertWeights(stack_fp8(gate_up, 2, num_slots), stack_fp8(down, 1, num_slots))

    def _skip_others(self, prefix: str, own: tuple[int, ...]) -> None:
        for expert in set(range(self._model.num_experts)) - set(own):
            for name in (self._names.gate, self._names.up, self._names.down):
                self._source.skip(prefix + name.format(e=expert))

    def _matrices(
        self, prefix: str, fused: FusedNames | None, own: tuple[int, ...], shard: Shard
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Gate and up [i, D] and down [D, i] of each of the `own` experts, read one by one. To be
        read to its end: what is not needed is told there.
        """
        if fused is not None:
            yield from self._fused_matrices(prefix, fused, own, shard)
            return
        names, source, hidden = self._names, self._source, self._model.hidden_size
        self._skip_others(prefix, own)
        taken = slice(shard.start, shard.stop)
        for expert in own:
            gate, up, out = (
                prefix + name.format(e=expert) for name in (names.gate, names.up, names.down)
            )
            yield (
                source.get(gate, (shard.whole, hidden))[taken],
                source.get(up, (shard.whole, hidden))[taken],
                source.get(out, (hidden, shard.whole))[:, taken],
            )

    def _fused_matrices(
        self, prefix: str, fused: FusedNames, own: tuple[int, ...], shard: Shard
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The same from two tensors of all experts, of which only the own rows are read."""
        source, num_experts = self._source, self._model.num_experts
        hidden, taken = self._model.hidden_size, slice(shard.start, shard.stop)

        def matrix(name: str, rows: int, columns: int, expert: int) -> torch.Tensor:
            """[rows, columns], whichever way it lies in the files."""
            if fused.is_transposed and source.is_plain(prefix + name):
                shape = (num_experts, columns, rows)
                return source.get_row(prefix + name, shape, expert).T
            return source.get_row(prefix + name, (num_experts, rows, columns), expert)

        for expert in own:
            row = matrix(fused.gate_up, 2 * shard.whole, hidden, expert)
            gate, up = _gate_and_up(row, fused.is_interleaved)
            down = matrix(fused.down, hidden, shard.whole, expert)
            yield gate[taken], up[taken], down[:, taken]
        # A rank without experts asks for none of it.
        source.skip(prefix + fused.gate_up)
        source.skip(prefix + fused.down)
