"""Multi-head latent attention (MLA) over the paged cache of latent rows.

A row holds a token's K and V of all heads compressed to c numbers, then r rotated numbers that the
keys of all heads share. There are two ways to the same scores:

- expanded: each head's K and V are made from the rows of the context, once per step;
- absorbed: the making of K is moved over to the query and that of V behind the sum, and heads
  attend to the rows as they are, as if these were one KV head.

Absorbed, a pair of query and key costs more but the context costs nothing beforehand: right for one
token, and for short pieces.

Legend: T tokens, R requests, n tokens of one request, N its context, S padded context, D hidden,
H query heads of this process, c latent size, r rotary dim, p plain dim, v value dim, L = c + r.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moed.config.attention import LATENT_EXPANDED_BYTES
from moed.config.weight_bytes import Latent
from moed.moe.attention import AttentionPlan, Decodes, Prefill
from moed.moe.kv_cache import LatentCache
from moed.moe.linear import Linear
from moed.moe.norm import rms_norm
from moed.moe.rotary import Rotary, Tables

# Of the RMS norms of latents, in all families and whatever config.json says of the others.
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class LatentWeights:
    """Of one layer, for the H heads of this process."""

    compress: Linear
    """From D to the query's latent, if queries are compressed, then to L."""
    query_norm: torch.Tensor | None
    """Of the query's latent; None: queries are not compressed."""
    query: Linear
    """From the query's latent, else from D, to H (p + r)."""
    norm: torch.Tensor
    """[c]."""
    expand_key: torch.Tensor
    """[H, p, c], contiguous: from a latent to the plain part of a head's K."""
    expand_value: torch.Tensor
    """[H, v, c], contiguous: to its V."""
    output: Linear
    """From H v."""


class LatentAttention:
    """One layer's attention."""

    def __init__(self, sizes: Latent, weights: LatentWeights, rotary: Rotary, scale: float) -> None:
        """`scale` is that of the scores."""
        self._sizes = sizes
        self._weights = weights
        self._rotary = rotary
        self._scale = scale
        self._num_heads = weights.expand_key.shape[0]

    def __call__(
        self,
        hidden: torch.Tensor,
        layer: int,
        tables: Tables,
        plan: AttentionPlan,
        slots: torch.Tensor,
        cache: LatentCache,
    ) -> torch.Tensor:
        """[T, D] for `hidden` [T, D]: the part of this process's heads; rows go to the cache."""
        query, rows = self._project(hidden, tables)
        cache.write(layer, rows, slots)
        attended = query.new_empty(query.shape[0], self._num_heads, self._sizes.value_dim)
        for prefill in plan.prefills:
            context = cache.read(layer, prefill.blocks)[: prefill.context]
            attended[prefill.rows] = self._prefill(query[prefill.rows], context, prefill)
        for decodes in plan.decodes:
            context = cache.read(layer, decodes.blocks)
            if decodes.rows is None:
                attended = self._decode(query, context, decodes)
            else:
                own = query[decodes.rows]
                attended[decodes.rows] = self._decode(own, context, decodes)
        return self._weights.output(attended.flatten(1))

    def _project(self, hidden: torch.Tensor, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries [T, H, p + r] and rows [T, L]."""
        sizes, weights = self._sizes, self._weights
        compressed = weights.compress(hidden)
        latent_query, latent, shared = compressed.split_with_sizes(
            [compressed.shape[1] - sizes.row_size, sizes.kv_rank, sizes.rotary_dim], dim=1
        )
        if weights.query_norm is not None:
            hidden = rms_norm(latent_query, weights.query_norm, LATENT_EPS)
        query = weights.query(hidden).view(-1, self._num_heads, sizes.query_dim)
        plain, turned = query.split_with_sizes([sizes.plain_dim, sizes.rotary_dim], dim=2)
        query = torch.cat([plain, self._rotary.rotate(turned, tables)], dim=2)
        shared = self._rotary.rotate(shared[:, None], tables)[:, 0]
        return query, torch.cat([rms_norm(latent, weights.norm, LATENT_EPS), shared], dim=1)

    def _prefill(
        self, query: torch.Tensor, context: torch.Tensor, prefill: Prefill
    ) -> torch.Tensor:
        """[n, H, v] for `query` [n, H, p + r] and the `context` [N, L]."""
        if self._absorbs(query.shape[0], context.shape[0]):
            return self._absorbed_prefill(query, context, prefill)
        sizes, parts = self._sizes, []
        head_bytes = context.shape[0] * (sizes.query_dim + sizes.value_dim) * context.itemsize
        num_heads = max(1, LATENT_EXPANDED_BYTES // head_bytes)
        latent, shared = context.split_with_sizes([sizes.kv_rank, sizes.rotary_dim], dim=1)
        for first in range(0, self._num_heads, num_heads):
            heads = slice(first, first + num_heads)
            plain = _expanded(latent, self._weights.expand_key[heads])
            key = torch.cat([plain, shared[:, None].expand(-1, plain.shape[1], -1)], dim=2)
            value = _expanded(latent, self._weights.expand_value[heads])
            parts.append(_attend(query[:, heads], key, value, prefill.mask, self._scale))
        return torch.cat(parts, dim=1)

    def _absorbs(self, num_rows: int, length: int) -> bool:
        """Whether absorbing takes fewer multiplications for so many rows over such a context."""
        sizes = self._sizes
        expanded = num_rows * (sizes.query_dim + sizes.value_dim)
        expanded += sizes.kv_rank * (sizes.plain_dim + sizes.value_dim)
        absorbed = num_rows * 2 * sizes.row_size
        moved = num_rows * sizes.kv_rank * (sizes.plain_dim + sizes.value_dim)
        return absorbed * length + moved < expanded * length

    def _absorbed_prefill(
        self, query: torch.Tensor, context: torch.Tensor, prefill: Prefill
    ) -> torch.Tensor:
        rows = context[:, None].expand(-1, self._num_heads, -1)
        moved = self._absorb(query)
        return self._from_latents(_attend(moved, rows, rows, prefill.mask, self._scale))

    def _decode(self, query: torch.Tensor, context: torch.Tensor, decodes: Decodes) -> torch.Tensor:
        """[R, H, v] for `query` [R, H, p + r] and `context` [R x S, L]."""
        rows = context.view(query.shape[0], 1, -1, self._sizes.row_size)
        # All heads share one row a token: they take the place of the query's tokens.
        attended = F.scaled_dot_product_attention(
            self._absorb(query)[:, None], rows, rows, attn_mask=decodes.mask, scale=self._scale
        )
        return self._from_latents(attended[:, 0])

    def _absorb(self, query: torch.Tensor) -> torch.Tensor:
        """[n, H, L]: queries to multiply with rows, from `query` [n, H, p + r]."""
        sizes = self._sizes
        plain, turned = query.split_with_sizes([sizes.plain_dim, sizes.rotary_dim], dim=2)
        moved = torch.bmm(plain.transpose(0, 1), self._weights.expand_key).transpose(0, 1)
        return torch.cat([moved, turned], dim=2)

    def _from_latents(self, attended: torch.Tensor) -> torch.Tensor:
        """[n, H, v] from sums of rows [n, H, L], whose rotated part means nothing."""
        latent = attended[..., : self._sizes.kv_rank].transpose(0, 1)
        return torch.bmm(latent, self._weights.expand_value.transpose(1, 2)).transpose(0, 1)


def _expanded(latent: torch.Tensor, expand: torch.Tensor) -> torch.Tensor:
    """[N, heads, rows] for `latent` [N, c] and `expand` [heads, rows, c]."""
    return F.linear(latent, expand.flatten(0, 1)).view(len(latent), *expand.shape[:2])


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """[n, H, size of a value] for `query` [n, H, q], `key` [N, H, q] and `value` [N, H, ...];
    without a `mask` plainly causal.
    """
    # Kernels that never hold all scores ask for K and V of one size: the smaller is filled up.
    size = value.shape[2]
    common = max(size, key.shape[2])
    query, key, value = (
        (part if part.shape[2] == common else F.pad(part, (0, common - part.shape[2]))).transpose(
            0, 1
        )[None]
        for part in (query, key, value)
    )
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return attended[0].transpose(0, 1)[..., :size]
