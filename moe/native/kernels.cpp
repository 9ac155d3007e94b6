// One rank's forward pass on a CPU; every function has a plain torch twin that tests compare with.
//
// Legend: T tokens, D hidden, H query heads, G KV heads, d head dim, r rotated dims, E experts,
// K top-k, I intermediate size, p (row, expert) pairs. Tensors are contiguous, in float32 or, where
// `Arguments.is_bf16`, in bfloat16; sums are float32. binding.py holds the same structs.
#include <algorithm>
#include <vector>

#include "matmul.h"
#include "attention.h"
#include "draw.h"
#include "pack.h"

// --- One product ------------------------------------------------------------------------------

template <class T, class Out>
void linear(int num_threads, const Matrix& weight, const T* input, int64_t num_rows, Out* out) {
  multiply(num_threads, weight, input, num_rows,
           [&](int64_t row, int64_t column, const float* sums, int count) {
             convert(sums, out + row * weight.num_outputs + column, count);
           });
}

// --- Router -----------------------------------------------------------------------------------

struct RouterLayer {
  Matrix weight;  // [E, D]
  const void* norm;  // [D]
  float eps, scale;
  int64_t top_k, renormalize;
};

// The K largest of softmax(logits [E]), of equals the one with the lower id first.
void choose(float* logits, int64_t num_experts, const RouterLayer& layer, float* weights,
            int64_t* ids) {
  const float largest = *std::max_element(logits, logits + num_experts);
  float total = 0, chosen = 0;
  for (int64_t e = 0; e < num_experts; e += LANES)
    store(logits + e, exponential(load(logits + e) - largest));
  for (int64_t e = 0; e < num_experts; e++) total += logits[e];
  for (int64_t k = 0; k < layer.top_k; k++) {
    int64_t best = -1;
    for (int64_t e = 0; e < num_experts; e++) {
      if (std::find(ids, ids + k, e) != ids + k) continue;
      if (best < 0 || logits[e] > logits[best]) best = e;
    }
    ids[k] = best;
    weights[k] = logits[best] / total;
    chosen += weights[k];
  }
  for (int64_t k = 0; k < layer.top_k; k++)
    weights[k] *= layer.scale / (layer.renormalize ? chosen : 1.0f);
}

template <class T>
void route(int num_threads, const RouterLayer& layer, const T* hidden, int64_t num_tokens,
           T* normed, float* weights, int64_t* ids) {
  const int64_t size = layer.weight.num_inputs, num_experts = layer.weight.num_outputs;
  const int64_t width = layer.weight.num_groups() * LANES;
  const T* bias = static_cast<const T*>(layer.weight.bias);
  auto some_rows = [&](int64_t task) {
    const int64_t start = task * MAX_ROWS;
    const int count = int(std::min<int64_t>(MAX_ROWS, num_tokens - start));
    const T* rows[MAX_ROWS];
    float* logits = scratch<float, 0>(MAX_ROWS * width);
    for (int r = 0; r < count; r++) {
      T* own = normed + (start + r) * size;
      if (layer.norm)
        norm_row(hidden + (start + r) * size, static_cast<const T*>(layer.norm), size, layer.eps, own);
      rows[r] = own;
    }
    for (int64_t first = 0; first < layer.weight.num_groups(); first += PANEL) {
      float sums[MAX_ROWS * PANEL_SIZE];
      const int columns = panel(layer.weight, rows, count, first, sums);
      for (int i = 0; i < count * PANEL_SIZE; i++) {
        const int64_t e = first * LANES + i % PANEL_SIZE;
        if (i % PANEL_SIZE >= columns) continue;
        // Rounded like all that a layer of this dtype gives.
        T logit;
        store_one(&logit, sums[i] + (bias ? to_float(bias[e]) : 0));
        logits[i / PANEL_SIZE * width + e] = to_float(logit);
      }
    }
    for (int r = 0; r < count; r++)
      choose(logits + r * width, num_experts, layer, weights + (start + r) * layer.top_k,
             ids + (start + r) * layer.top_k);
  };
  const int64_t num_tasks = (num_tokens + MAX_ROWS - 1) / MAX_ROWS;
  team().each(num_threads, num_tasks, some_rows);
}

// --- Experts ----------------------------------------------------------------------------------

struct ExpertLayer {
  const void* gate_up;  // of each expert [2I, D] packed, groups of gate and of up in turn
  const void* down;     // of each expert [D, I] packed
  int64_t num_experts, hidden_size, size;
  int64_t* rows_per_slot;  // [e], counted up
};

template <class T>
void experts(int num_threads, const ExpertLayer& layer, const T* hidden, const int64_t* ids,
             const float* weights, int64_t num_rows, int64_t top_k, T* out) {
  const int64_t num_flat = num_rows * top_k, num_experts = layer.num_experts;
  const int64_t size = layer.size, width = layer.hidden_size;
  const int64_t size_groups = (size + LANES - 1) / LANES, groups = (width + LANES - 1) / LANES;
  // Pairs in the order of experts: `flat_of` [p], and the other way round, -1 for other ranks'.
  int64_t* starts = scratch<int64_t, 0>(num_experts + 1);
  int64_t* place_of = scratch<int64_t, 1>(num_flat);
  std::fill(starts, starts + num_experts + 1, 0);
  for (int64_t i = 0; i < num_flat; i++)
    if (ids[i] >= 0) starts[ids[i] + 1]++;
  for (int64_t e = 0; e < num_experts; e++) {
    layer.rows_per_slot[e] += starts[e + 1];
    starts[e + 1] += starts[e];
  }
  const int64_t num_pairs = starts[num_experts];
  int64_t* next = scratch<int64_t, 2>(num_experts);
  std::copy(starts, starts + num_experts, next);
  const T** row_of = scratch<const T*, 3>(num_pairs);
  const T** active_rows = scratch<const T*, 4>(num_pairs);
  T* active = scratch<T, 5>(num_pairs * size);
  float* results = scratch<float, 6>(num_pairs * width);
  for (int64_t i = 0; i < num_flat; i++) {
    place_of[i] = ids[i] < 0 ? -1 : next[ids[i]]++;
    if (ids[i] >= 0) row_of[place_of[i]] = hidden + i / top_k * width;
  }
  for (int64_t p = 0; p < num_pairs; p++) active_rows[p] = active + p * size;
  // Parts of experts with rows: {expert, first pair, pairs}.
  struct Part {
    int64_t expert, first;
    int count;
  };
  std::vector<Part> parts;
  for (int64_t e = 0; e < num_experts; e++)
    for (int64_t p = starts[e]; p < starts[e + 1]; p += ROWS_OF_TASK)
      parts.push_back({e, p, int(std::min<int64_t>(ROWS_OF_TASK, starts[e + 1] - p))});
  const int64_t num_parts = parts.size();
  // A panel of gate and up has PANEL groups in all.
  const int64_t up_panels = (2 * size_groups + PANEL - 1) / PANEL;
  const int64_t down_panels = (groups + PANEL - 1) / PANEL;
  team().each(num_threads, num_parts * up_panels, [&](int64_t task) {
    const Part& part = parts[task / up_panels];
    const Matrix gate_up{static_cast<const T*>(layer.gate_up) +
                             part.expert * 2 * size_groups * LANES * width,
                         nullptr, 2 * size_groups * LANES, width};
    float sums[ROWS_OF_TASK * PANEL_SIZE];
    const int64_t start = task % up_panels * PANEL;
    const int columns = panel(gate_up, row_of + part.first, part.count, start, sums);
    for (int r = 0; r < part.count; r++)
      for (int i = 0; i < columns; i += 2 * LANES) {
        const float* own = sums + r * PANEL_SIZE + i;
        const int64_t column = (start * LANES + i) / 2;
        store(active + (part.first + r) * size + column, silu(load(own)) * load(own + LANES),
              int(std::min<int64_t>(LANES, size - column)));
      }
  });
  team().each(num_threads, num_parts * down_panels, [&](int64_t task) {
    const Part& part = parts[task / down_panels];
    const Matrix down{static_cast<const T*>(layer.down) + part.expert * groups * LANES * size,
                      nullptr, width, size};
    float sums[ROWS_OF_TASK * PANEL_SIZE];
    const int64_t start = task % down_panels * PANEL;
    const int columns = panel(down, active_rows + part.first, part.count, start, sums);
    for (int r = 0; r < part.count; r++)
      std::copy(sums + r * PANEL_SIZE, sums + r * PANEL_SIZE + columns,
                results + (part.first + r) * width + start * LANES);
  });
  team().each_row(num_threads, num_rows, [&](int64_t row) {
    for (int64_t column = 0; column < width; column += LANES) {
      Vec total{};
      const int count = int(std::min<int64_t>(LANES, width - column));
      for (int64_t k = row * top_k; k < (row + 1) * top_k; k++) {
        if (place_of[k] < 0) continue;
        Vec result{};
        memcpy(&result, results + place_of[k] * width + column, count * sizeof(float));
        total += result * (weights ? weights[k] : 1.0f);
      }
      store(out + row * width + column, total, count);
    }
  });
}

// --- What binding.py calls --------------------------------------------------------------------

struct Arguments {
  int64_t is_bf16, num_threads;
};

#define BY_DTYPE(call)                                      \
  if (arguments->is_bf16) {                                 \
    using T = bf16;                                         \
    call;                                                   \
  } else {                                                  \
    using T = float;                                        \
    call;                                                   \
  }

extern "C" {

void moed_pack(const Arguments*, const void* from, int64_t row_bytes, int64_t num_rows,
               int64_t num_units, void* to, int64_t group_bytes) {
  pack((const char*)from, row_bytes, num_rows, num_units, (char*)to, group_bytes);
}

void moed_linear(const Arguments* arguments, const Matrix* weight, const void* input,
                 int64_t num_rows, void* out) {
  BY_DTYPE(linear(arguments->num_threads, *weight, (const T*)input, num_rows, (T*)out))
}

void moed_norm(const Arguments* arguments, const void* input, const void* weight, int64_t num_rows,
               int64_t size, float eps, void* out) {
  BY_DTYPE(team().each_row(arguments->num_threads, num_rows, [&](int64_t row) {
    norm_row((const T*)input + row * size, (const T*)weight, size, eps, (T*)out + row * size);
  }))
}

void moed_route(const Arguments* arguments, const RouterLayer* layer, const void* hidden,
                int64_t num_tokens, void* normed, float* weights, int64_t* ids) {
  BY_DTYPE(route(arguments->num_threads, *layer, (const T*)hidden, num_tokens, (T*)normed, weights,
                 ids))
}

void moed_experts(const Arguments* arguments, const ExpertLayer* layer, const void* hidden,
                  const int64_t* ids, const float* weights, int64_t num_rows, int64_t top_k,
                  void* out) {
  BY_DTYPE(experts(arguments->num_threads, *layer, (const T*)hidden, ids, weights, num_rows, top_k,
                   (T*)out))
}

void moed_attend(const Arguments* arguments, const AttentionLayer* layer, const StepState* step,
                 const void* query, const void* keys, const void* values, void* out) {
  const std::vector<Piece> parts = parts_of(*layer, *step);
  BY_DTYPE(attend_all(arguments->num_threads, parts, *layer, *step, (const T*)query,
                      (const T*)keys, (const T*)values, (T*)out))
}

void moed_attention(const Arguments* arguments, const AttentionLayer* layer, const StepState* step,
                    void* hidden, void* query, void* attended, void* keys, void* values) {
  BY_DTYPE(attention(arguments->num_threads, *layer, *step, (T*)hidden, (T*)query, (T*)attended,
                     (T*)keys, (T*)values))
}

void moed_uniform(const Arguments*, const uint64_t* seeds, const int64_t* output_indices,
                  int64_t count, double* out) {
  for (int64_t i = 0; i < count; i++) out[i] = uniform(seeds[i], output_indices[i]);
}

void moed_draw(const Arguments* arguments, const float* logits, int64_t vocab_size,
               const Drawing* drawings, int64_t count, int64_t* ids) {
  const bool is_much = count > 1 && count * vocab_size >= MANY_WEIGHTS;
  team().each(is_much ? arguments->num_threads : 1, count, [&](int64_t i) {
    ids[i] = draw_token(logits + drawings[i].row * vocab_size, vocab_size, drawings[i]);
  });
}

}  // extern "C"
