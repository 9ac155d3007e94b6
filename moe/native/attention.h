// The attention half of a layer. Scores are never held as a whole: a block of queries goes over the
// context in tiles of keys and keeps the sums so far (as in FlashAttention, arXiv:2205.14135,
// algorithm 1). Tiles begin at multiples of their size, so that a token's result does not depend on
// the pieces in which its prompt comes, nor on other requests.
#pragma once
#include <algorithm>
#include <vector>

#include "matmul.h"
#include "pack.h"
#include "rows.h"

struct AttentionLayer {
  Matrix qkv, output;      // [(H + 2G) d, D] and [D, H d]
  const void* input_norm;  // [D]
  const void* head_norm;   // [H + G, d] or null
  const void* sinks;       // [H] or null
  int64_t num_heads, num_kv_heads, head_dim, num_rotated, is_interleaved, norm_after_rotary;
  int64_t window;  // 0: none
  float eps, scale, residual_scale;
};

// Tokens of one request that follow each other.
struct Piece {
  int64_t row, num_tokens;  // of T
  int64_t request;          // of the tables
};

struct StepState {
  int64_t num_tokens, block_size, table_width;
  const int64_t* positions;  // [T]
  const int64_t* slots;      // [T]
  const void* cosine;        // [T, r]
  const void* sine;          // [T, r], signed
  int64_t num_pieces;
  const Piece* pieces;    // [num_pieces]
  const int64_t* tables;  // [requests, table_width]
};

// Queries and keys of one token turned and normed, keys and values into the cache.
template <class T>
void finish_heads(const AttentionLayer& layer, const StepState& step, int64_t token,
                  const T* states, T* query, T* keys, T* values) {
  const int64_t d = layer.head_dim, r = layer.num_rotated;
  const int64_t kv_row = step.slots[token] * layer.num_kv_heads * d;
  const T* cosine = static_cast<const T*>(step.cosine) + token * r;
  const T* sine = static_cast<const T*>(step.sine) + token * r;
  T* normed = scratch<T, 7>(d);
  for (int64_t head = 0; head < layer.num_heads + layer.num_kv_heads; head++) {
    const T* state = states + head * d;
    const int64_t kv_head = head - layer.num_heads;
    T* to = kv_head < 0 ? query + head * d : keys + kv_row + kv_head * d;
    const T* weight = static_cast<const T*>(layer.head_norm) + head * d;
    if (layer.head_norm && !layer.norm_after_rotary) {
      norm_row(state, weight, d, layer.eps, normed);
      state = normed;
    }
    int64_t i = 0;
    if (!layer.is_interleaved && r / 2 % LANES == 0)
      for (; i < r; i += LANES) {
        const T* other = state + (i < r / 2 ? i + r / 2 : i - r / 2);
        store(to + i, load(state + i) * load(cosine + i) + load(other) * load(sine + i));
      }
    for (; i < r; i++) {
      const int64_t other = layer.is_interleaved ? i ^ 1 : i < r / 2 ? i + r / 2 : i - r / 2;
      store_one(to + i, to_float(state[i]) * to_float(cosine[i]) +
                            to_float(state[other]) * to_float(sine[i]));
    }
    std::copy(state + r, state + d, to + r);
    if (layer.head_norm && layer.norm_after_rotary) {
      norm_row(to, weight, d, layer.eps, normed);
      std::copy(normed, normed + d, to);
    }
  }
  const T* own = states + (layer.num_heads + layer.num_kv_heads) * d;
  std::copy(own, own + layer.num_kv_heads * d, values + kv_row);
}

// Keys that are looked at together: a panel of scores.
constexpr int TILE = PANEL_SIZE;

// Where the rows of a tile lie in the cache; null for what is not seen.
template <class T>
struct TileRows {
  const T *keys[TILE], *values[TILE];

  // Those of `first`, ..., `last` of one KV head, of keys from `base` on.
  TileRows(const StepState& step, const int64_t* table, int64_t base, int64_t first, int64_t last,
           const T* all_keys, const T* all_values, int64_t row_size) {
    int64_t block = base / step.block_size, inside = base % step.block_size;
    for (int64_t i = 0; i < TILE; i++) {
      const bool is_seen = base + i >= first && base + i <= last;
      const int64_t at = is_seen ? (table[block] * step.block_size + inside) * row_size : 0;
      keys[i] = is_seen ? all_keys + at : nullptr;
      values[i] = is_seen ? all_values + at : nullptr;
      if (++inside == step.block_size) block++, inside = 0;
    }
  }

  // Blocks lie anywhere: without it, each waits for memory in turn.
  INLINE void prefetch(int64_t d) const {
    for (int64_t i = 0; i < TILE && keys[i]; i++)
      for (int64_t c = 0; c < d; c += 64 / sizeof(T)) {
        __builtin_prefetch(keys[i] + c);
        __builtin_prefetch(values[i] + c);
      }
  }
};

// As packed weights, the first `count` of them, in whole groups.
template <class T>
struct KeyTile {
  int64_t count;
  Matrix keys, values;

  KeyTile(const TileRows<T>& rows, int64_t num_keys, int64_t d) {
    count = (std::min<int64_t>(num_keys, TILE) + LANES - 1) / LANES * LANES;
    T* packed_keys = scratch<T, 8>(TILE * d);
    T* packed_values = scratch<T, 9>(TILE * d);
    for (int64_t i = 0; i < count; i += LANES)
      pack_group((const char* const*)rows.keys + i, d * sizeof(T) / 4,
                 (char*)(packed_keys + i * d));
    for (int64_t c = 0; c < d; c += LANES)
      pack_columns(rows.values, count, c, packed_values + c * count);
    keys = {packed_keys, nullptr, count, d};
    values = {packed_values, nullptr, d, count};
  }
};

// Of one query and head: exp(score - largest) of the `count` keys of a tile, of which it sees
// [low, high), into `weights`. What was summed before is to be multiplied by the result.
template <class T>
INLINE float soften(float* scores, int64_t count, int64_t low, int64_t high, float scale,
                    float* largest, float* total, T* weights) {
  std::fill(scores, scores + std::clamp<int64_t>(low, 0, count), -INFINITY);
  std::fill(scores + std::clamp<int64_t>(high, 0, count), scores + count, -INFINITY);
  Vec most = broadcast(-INFINITY);
  for (int64_t i = 0; i < count; i += LANES) {
    const Vec scaled = load(scores + i) * scale;
    store(scores + i, scaled);
    most = scaled > most ? scaled : most;
  }
  const float before = *largest;
  for (int i = 0; i < LANES; i++) *largest = std::max(*largest, most[i]);
  if (*largest == -INFINITY) {
    std::fill(weights, weights + count, T{});
    return 1.0f;
  }
  const float factor = exponential(broadcast(before - *largest))[0];
  Vec sums{};
  for (int64_t i = 0; i < count; i += LANES) {
    const Vec weight = exponential(load(scores + i) - *largest);
    store(weights + i, weight);
    sums += weight;
  }
  *total = *total * factor + sum(sums);
  return factor;
}

// The query heads of one KV head, for `num_tokens` tokens of a request from row `token` on.
template <class T>
void attend(const AttentionLayer& layer, const StepState& step, const int64_t* table, int64_t token,
            int64_t num_tokens, int64_t kv_head, const T* query, const T* keys, const T* values,
            T* out) {
  const int64_t d = layer.head_dim, heads = layer.num_heads / layer.num_kv_heads;
  const int64_t num_rows = num_tokens * heads, row_size = layer.num_kv_heads * d;
  auto row_of = [&](int64_t r) {
    return ((token + r / heads) * layer.num_heads + kv_head * heads + r % heads) * d;
  };
  auto first_seen = [&](int64_t position) {
    return layer.window ? std::max<int64_t>(0, position + 1 - layer.window) : 0;
  };
  const T** queries = scratch<const T*, 10>(num_rows);
  const T** weight_rows = scratch<const T*, 11>(num_rows);
  T* weights = scratch<T, 12>(num_rows * TILE);
  float* scores = scratch<float, 13>(num_rows * PANEL_SIZE);
  float* sums = scratch<float, 14>(num_rows * d);
  float* largest = scratch<float, 15>(num_rows);
  float* totals = scratch<float, 16>(num_rows);
  float* factors = scratch<float, 17>(num_rows);
  const T* sinks = static_cast<const T*>(layer.sinks) + kv_head * heads;
  for (int64_t r = 0; r < num_rows; r++) {
    queries[r] = query + row_of(r);
    weight_rows[r] = weights + r * TILE;
    largest[r] = layer.sinks ? to_float(sinks[r % heads]) : -INFINITY;
    totals[r] = layer.sinks ? 1.0f : 0.0f;
  }
  std::fill(sums, sums + num_rows * d, 0.0f);
  const int64_t first = first_seen(step.positions[token]);
  const int64_t last = step.positions[token] + num_tokens - 1;
  auto rows_from = [&](int64_t base) {
    return TileRows<T>(step, table, base, first, last, keys + kv_head * d, values + kv_head * d,
                       row_size);
  };
  TileRows<T> next = rows_from(first / TILE * TILE);
  for (int64_t base = first / TILE * TILE; base <= last; base += TILE) {
    const KeyTile<T> tile(next, last + 1 - base, d);
    next = rows_from(base + TILE);
    next.prefetch(d);
    panel(tile.keys, queries, int(num_rows), 0, scores);
    for (int64_t r = 0; r < num_rows; r++) {
      const int64_t position = step.positions[token + r / heads];
      factors[r] = soften(scores + r * PANEL_SIZE, tile.count, first_seen(position) - base,
                          position + 1 - base, layer.scale, largest + r, totals + r,
                          weights + r * TILE);
    }
    for (int64_t group = 0; group * LANES < d; group += PANEL) {
      const int columns = panel(tile.values, weight_rows, int(num_rows), group, scores);
      for (int64_t r = 0; r < num_rows; r++)
        for (int i = 0; i < columns; i += LANES) {
          float* own = sums + r * d + group * LANES + i;
          store(own, load(own) * factors[r] + load(scores + r * PANEL_SIZE + i));
        }
    }
  }
  for (int64_t r = 0; r < num_rows; r++)
    for (int64_t i = 0; i < d; i += LANES)
      store(out + row_of(r) + i, load(sums + r * d + i) / totals[r]);
}

// Parts of pieces, so that each has about as many rows as a product takes at a time.
inline std::vector<Piece> parts_of(const AttentionLayer& layer, const StepState& step) {
  const int64_t heads = layer.num_heads / layer.num_kv_heads;
  const int64_t most = std::max<int64_t>(1, ROWS_OF_TASK / heads);
  std::vector<Piece> parts;
  for (const Piece* piece = step.pieces; piece < step.pieces + step.num_pieces; piece++)
    for (int64_t done = 0; done < piece->num_tokens; done += most)
      parts.push_back({piece->row + done, std::min(most, piece->num_tokens - done), piece->request});
  return parts;
}

// All tokens of all heads.
template <class T>
void attend_all(int num_threads, const std::vector<Piece>& parts, const AttentionLayer& layer,
                const StepState& step, const T* query, const T* keys, const T* values, T* out) {
  const int64_t num_parts = parts.size();
  team().each(num_threads, num_parts * layer.num_kv_heads, [&](int64_t task) {
    // The last first: they see most, and nobody should wait for one of them in the end.
    const Piece& part = parts[num_parts - 1 - task / layer.num_kv_heads];
    attend(layer, step, step.tables + part.request * step.table_width, part.row, part.num_tokens,
           task % layer.num_kv_heads, query, keys, values, out);
  });
}

// Queries from `hidden`, K and V into the cache; all attend; `hidden` plus what the output
// projection makes of `attended`.
template <class T>
void attention(int num_threads, const AttentionLayer& layer, const StepState& step, T* hidden,
               T* query, T* attended, T* keys, T* values) {
  const int64_t size = layer.qkv.num_inputs, width = layer.qkv.num_outputs;
  const int64_t num_tokens = step.num_tokens;
  const int64_t query_size = layer.num_heads * layer.head_dim;
  T* normed = scratch<T, 0>(num_tokens * size);
  T* states = scratch<T, 1>(num_tokens * width);
  const std::vector<Piece> parts = parts_of(layer, step);
  team().each_row(num_threads, num_tokens, [&](int64_t token) {
    norm_row(hidden + token * size, static_cast<const T*>(layer.input_norm), size, layer.eps,
             normed + token * size);
  });
  multiply(num_threads, layer.qkv, normed, num_tokens,
           [&](int64_t row, int64_t column, const float* sums, int count) {
             convert(sums, states + row * width + column, count);
           });
  team().each_row(num_threads, num_tokens, [&](int64_t token) {
    finish_heads(layer, step, token, states + token * width, query + token * query_size, keys,
                 values);
  });
  attend_all(num_threads, parts, layer, step, query, keys, values, attended);
  multiply(num_threads, layer.output, attended, num_tokens,
           [&](int64_t row, int64_t column, const float* sums, int count) {
             T* to = hidden + row * size + column;
             T part[PANEL_SIZE];
             convert(sums, part, count);
             int i = 0;
             for (; i + LANES <= count; i += LANES)
               store(to + i, load(to + i) + load(part + i) * layer.residual_scale);
             for (; i < count; i++)
               store_one(to + i, to_float(to[i]) + to_float(part[i]) * layer.residual_scale);
           });
}
