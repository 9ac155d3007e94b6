"""From a checkpoint to a `Decoder` that holds this rank's experts."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from moed.config.engine_config import EngineConfig
from moed.config.quantization import quantization_of
from moed.dist.all2all.base import All2AllBackend
from moed.dist.groups import Groups
from moed.dist.placement import ExpertPlacement
from moed.moe.decoder import Attention, Decoder, DenseMLP, Layer
from moed.moe.experts import Experts, ExpertWeights, make_experts
from moed.moe.families import DecoderFeatures, FusedNames, Names, family_of
from moed.moe.fused_moe import FusedMoE
from moed.moe.loader import Checkpoint, Dummy, Source
from moed.moe.progress import layer_progress
from moed.moe.survey import Survey

__all__ = ["Decoder", "load_model"]

logger = logging.getLogger(__name__)


def load_model(
    config: EngineConfig,
    groups: Groups,
    backend: All2AllBackend,
    placement: ExpertPlacement,
    report: Callable[[str], None],
) -> Decoder:
    """Read the replicated weights and the own experts. Raises `ModelError`."""
    device = torch.device(groups.device_type)
    dtype = getattr(torch, config.model.dtype)
    family = family_of(config.model)
    features = family.features(config.model)

    def build(source: Source, on_layer: Callable[[int], None]) -> Decoder:
        return _Builder(
            config, features, family.names, source, groups.rank, backend, placement
        ).build(on_layer)

    source: Source
    if config.model.load_format == "dummy":
        source = Dummy(config.model.seed, dtype, device)
    else:
        quantization = quantization_of(config.model.hf_config)
        source = Checkpoint(Path(config.model.path), dtype, device, quantization)
        # Once without reading, so that all that does not fit is told together, before any work.
        survey = Survey(source)
        build(survey, lambda _: None)
        survey.finish()
        if groups.rank == 0 and (summary := survey.summary()):
            logger.info("%s", summary)
    with layer_progress(config.model.num_layers, report, groups.rank) as on_layer:
        return build(source, on_layer)


def join_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """`torch.cat` over the first dim. On the meta device, where a survey runs, `torch.cat` itself
    would import torch's compiler, which takes seconds.
    """
    first = parts[0]
    joined = first.new_empty((sum(part.shape[0] for part in parts), *first.shape[1:]))
    start = 0
    for part in parts:
        joined[start : start + part.shape[0]] = part
        start += part.shape[0]
    return joined


class _Builder:
    def __init__(
        self,
        config: EngineConfig,
        features: DecoderFeatures,
        names: Names,
        source: Source,
        rank: int,
        backend: All2AllBackend,
        placement: ExpertPlacement,
    ) -> None:
        self._config = config
        self._model = config.model
        self._features = features
        self._names = names
        self._source = source
        self._rank = rank
        self._backend = backend
        self._placement = placement
        self._experts: list[Experts] = []

    def build(self, on_layer: Callable[[int], None]) -> Decoder:
        """The decoder; `on_layer` is told the number of each layer before it is read."""
        model, get = self._model, self._source.get
        vocabulary = (model.vocab_size, model.hidden_size)
        embedding = get("model.embed_tokens.weight", vocabulary)
        layers = []
        for index in range(model.num_layers):
            on_layer(index)
            layers.append(self._layer(index))
        final_norm = get("model.norm.weight", (model.hidden_size,))
        if self._features.tie_word_embeddings:
            head = embedding
            self._source.skip("lm_head.weight")
        else:
            head = get("lm_head.weight", vocabulary)
        return Decoder(model, self._features, embedding, layers, self._experts, final_norm, head)

    def _layer(self, index: int) -> Layer:
        prefix, hidden = f"model.layers.{index}.", self._model.hidden_size
        return Layer(
            input_norm=self._source.get(f"{prefix}input_layernorm.weight", (hidden,)),
            attention=self._attention(f"{prefix}self_attn."),
            post_attention_norm=self._source.get(
                f"{prefix}post_attention_layernorm.weight", (hidden,)
            ),
            mlp=(
                self._moe(prefix)
                if self._features.moe_layers[index]
                else self._dense(f"{prefix}mlp.")
            ),
        )

    def _attention(self, prefix: str) -> Attention:
        model, get = self._model, self._source.get
        query = model.num_attention_heads * model.head_dim
        kv = model.num_kv_heads * model.head_dim
        parts = (("q_proj", query), ("k_proj", kv), ("v_proj", kv))
        has_bias, has_norm = self._features.attention_bias, self._features.has_qk_norm
        return Attention(
            qkv=join_rows(
                [get(f"{prefix}{name}.weight", (rows, model.hidden_size)) for name, rows in parts]
            ),
            qkv_bias=(
                join_rows([get(f"{prefix}{name}.bias", (rows,)) for name, rows in parts])
                if has_bias
                else None
            ),
            output=get(f"{prefix}o_proj.weight", (model.hidden_size, query)),
            output_bias=get(f"{prefix}o_proj.bias", (model.hidden_size,)) if has_bias else None,
            query_key_norm=(
                join_rows(
                    [
                        get(f"{prefix}{name}_norm.weight", (model.head_dim,)).expand(heads, -1)
                        for name, heads in (
                            ("q", model.num_attention_heads),
                            ("k", model.num_kv_heads),
                        )
                    ]
                )
                if has_norm
                else None
            ),
        )

    def _dense(self, prefix: str) -> DenseMLP:
        size, hidden = self._features.dense_intermediate_size, self._model.hidden_size
        get = self._source.get
        return DenseMLP(
            gate_up=join_rows(
                [get(f"{prefix}{name}_proj.weight", (size, hidden)) for name in ("gate", "up")]
            ),
            down=get(f"{prefix}down_proj.weight", (hidden, size)),
        )

    def _moe(self, prefix: str) -> FusedMoE:
        model = self._model
        fused = FusedNames()
        is_fused = self._source.has(prefix + fused.gate_up)
        router = self._source.get(
            prefix + (fused.router if is_fused else self._names.router),
            (model.num_experts, model.hidden_size),
        )
        own = self._placement.local_expert_ids(self._rank)
        size, hidden = model.moe_intermediate_size, model.hidden_size
        dtype, device = getattr(torch, model.dtype), self._source.device
        gate_up = torch.empty(len(own), 2 * size, hidden, dtype=dtype, device=device)
        down = torch.empty(len(own), hidden, size, dtype=dtype, device=device)
        if is_fused:
            self._fill_fused(prefix, own, gate_up, down)
        else:
            self._fill(prefix, own, gate_up, down)
        experts = make_experts(
            self._backend.capabilities.activation_format,
            self._config.parallel.device,
            ExpertWeights.plain(gate_up, down),
        )
        self._experts.append(experts)
        return FusedMoE(
            self._config.fused_moe, router, self._features.renormalize, experts, self._backend
        )

    def _fill(
        self, prefix: str, own: tuple[int, ...], gate_up: torch.Tensor, down: torch.Tensor
    ) -> None:
        """Into [e, 2I, D] and [e, D, I], from a checkpoint with three matrices per expert."""
        names, source = self._names, self._source
        size, hidden = self._model.moe_intermediate_size, self._model.hidden_size
        for expert in set(range(self._model.num_experts)) - set(own):
            for name in (names.gate, names.up, names.down):
                source.skip(prefix + name.format(e=expert))
        for local, expert in enumerate(own):
            gate, up, out = (
                prefix + name.format(e=expert) for name in (names.gate, names.up, names.down)
            )
            gate_up[local, :size] = source.get(gate, (size, hidden))
            gate_up[local, size:] = source.get(up, (size, hidden))
            down[local] = source.get(out, (hidden, size))

    def _fill_fused(
        self, prefix: str, own: tuple[int, ...], gate_up: torch.Tensor, down: torch.Tensor
    ) -> None:
        """The same from two tensors of all experts, of which only the own rows are read."""
        fused, source, num_experts = FusedNames(), self._source, self._model.num_experts
        for local, expert in enumerate(own):
            shape = (num_experts, *gate_up.shape[1:])
            gate_up[local] = source.get_row(prefix + fused.gate_up, shape, expert)
            shape = (num_experts, *down.shape[1:])
            down[local] = source.get_row(prefix + fused.down, shape, expert)
        # A rank without experts asks for none of it.
        source.skip(prefix + fused.gate_up)
        source.skip(prefix + fused.down)
