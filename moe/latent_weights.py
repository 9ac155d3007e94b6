"""The tensors of one layer's latent attention (MLA), for the heads of this process.

Legend: D hidden, H query heads of the model, h of this process, L numbers cached for a token, and
the sizes of `Latent`.
"""

import torch

from moed.config.engine_config import ModelConfig
from moed.config.weight_bytes import Latent
from moed.dist.tensor_parallel import TensorParallel
from moed.moe.families import DecoderFeatures
from moed.moe.linear import Linear, join_rows
from moed.moe.loader import Source
from moed.moe.mla import LatentAttention, LatentWeights
from moed.moe.output_projection import load_output
from moed.moe.shards import head_shard


def load_latent_attention(
    source: Source,
    prefix: str,
    model: ModelConfig,
    features: DecoderFeatures,
    tensor_parallel: TensorParallel,
) -> LatentAttention:
    """`prefix` is the attention's. What compresses is held by each member of a tensor-parallel
    group, and heads are divided among them.
    """
    sizes, scale = features.latent, features.attention_scale
    assert sizes is not None and scale is not None
    heads = head_shard(
        model.num_attention_heads, sizes.value_dim, tensor_parallel.size, tensor_parallel.rank
    )
    compress, query_norm = _compress(source, prefix, model, features, sizes)
    expand_key, expand_value = _expand(source, prefix, model, sizes, tensor_parallel)
    weights = LatentWeights(
        compress=compress,
        query_norm=query_norm,
        query=_query(source, prefix, model, sizes, tensor_parallel),
        norm=source.get(f"{prefix}kv_a_layernorm.weight", (sizes.kv_rank,)),
        expand_key=expand_key,
        expand_value=expand_value,
        output=load_output(source, prefix, model, features, heads, tensor_parallel),
    )
    return LatentAttention(sizes, weights, features.rotary, scale)


def _compress(
    source: Source, prefix: str, model: ModelConfig, features: DecoderFeatures, sizes: Latent
) -> tuple[Linear, torch.Tensor | None]:
    """From D to the query's latent and L at once; the norm of the former."""
    parts = [("kv_a_proj_with_mqa", sizes.row_size)]
    norm = None
    if sizes.query_rank:
        parts.insert(0, ("q_a_proj", sizes.query_rank))
        norm = source.get(f"{prefix}q_a_layernorm.weight", (sizes.query_rank,))
    weight = [source.get(f"{prefix}{name}.weight", (n, model.hidden_size)) for name, n in parts]
    bias = None
    if features.attention_bias:
        bias = join_rows([source.get(f"{prefix}{name}.bias", (n,)) for name, n in parts])
    return Linear(join_rows(weight), bias), norm


def _query(
    source: Source, prefix: str, model: ModelConfig, sizes: Latent, members: TensorParallel
) -> Linear:
    """To the h own heads, from the query's latent or from D."""
    own = head_shard(model.num_attention_heads, sizes.query_dim, members.size, members.rank)
    name = "q_b_proj" if sizes.query_rank else "q_proj"
    shape = (own.whole, sizes.query_rank or model.hidden_size)
    return Linear(source.get(f"{prefix}{name}.weight", shape)[own.start : own.stop], None)


def _expand(
    source: Source, prefix: str, model: ModelConfig, sizes: Latent, members: TensorParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """[h, plain, kv_rank] and [h, value, kv_rank], which lie head by head in one tensor."""
    num_rows = sizes.plain_dim + sizes.value_dim
    own = head_shard(model.num_attention_heads, num_rows, members.size, members.rank)
    whole = source.get(f"{prefix}kv_b_proj.weight", (own.whole, sizes.kv_rank))
    by_head = whole[own.start : own.stop].view(-1, num_rows, sizes.kv_rank)
    key, value = by_head.split_with_sizes([sizes.plain_dim, sizes.value_dim], dim=1)
    return key.contiguous(), value.contiguous()
