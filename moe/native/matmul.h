// Products of rows with packed weights.
//
// A weight [N, K] is packed as [N / 16, K / s, 16, s], s = 2 in bfloat16 (the pairs that one
// instruction takes) and 1 in float32: the 16 outputs of a group lie side by side, and a group is
// read from its beginning to its end. N is filled up with zeros to a multiple of 16.
// Every output is summed over K in the same order, whatever the number of rows.
#pragma once
#include "team.h"
#include "vectors.h"

struct Matrix {
  const void* packed;
  const void* bias;  // [N] or null
  int64_t num_outputs, num_inputs;

  int64_t num_groups() const { return (num_outputs + LANES - 1) / LANES; }
  template <class T>
  const T* group(int64_t index) const {
    return static_cast<const T*>(packed) + index * LANES * num_inputs;
  }
};

// Accumulators that fit into the registers.
#ifdef __AVX512F__
constexpr int MAX_ROWS = 6;
constexpr int groups_beside(int) { return 4; }
#else
constexpr int MAX_ROWS = 4;
constexpr int groups_beside(int num_rows) { return num_rows == 1 ? 4 : num_rows == 2 ? 2 : 1; }
#endif
constexpr int PANEL = 4;  // groups of one task
constexpr int PANEL_SIZE = PANEL * LANES;
constexpr int ROWS_OF_TASK = 96;

// R rows by G groups, into `out`: [R, G x 16], rows PANEL_SIZE apart.
template <class T, int R, int G>
INLINE void tile(const T* const* rows, const T* weight, int64_t size, float* out) {
  const int64_t stride = LANES * size;
  Vec acc[R][G]{};
  for (int64_t k = 0; k < size; k += Step<T>::SIZE) {
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) __builtin_prefetch(weight + g * stride + k * LANES + 1024);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Step<T> step(rows[r] + k);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) acc[r][g] = step.add(acc[r][g], weight + g * stride + k * LANES);
    }
  }
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) store(out + r * PANEL_SIZE + g * LANES, acc[r][g]);
}

template <class T, int R>
void some_rows(const T* const* rows, const T* weight, int64_t num_groups, int64_t size, float* out) {
  constexpr int G = groups_beside(R);
  int64_t g = 0;
  for (; g + G <= num_groups; g += G)
    tile<T, R, G>(rows, weight + g * LANES * size, size, out + g * LANES);
  for (; g < num_groups; g++)
    tile<T, R, 1>(rows, weight + g * LANES * size, size, out + g * LANES);
}

// `num_rows` rows times the groups `first`, ..., at most PANEL of them and below `last`, into `out`
// [num_rows, PANEL_SIZE]. Returns the number of columns that have come out.
template <class T>
__attribute__((noinline)) int panel(const Matrix& weight, const T* const* rows, int num_rows,
                                    int64_t first, float* out) {
  const int64_t size = weight.num_inputs, left = weight.num_groups() - first;
  const int64_t groups = left < PANEL ? left : PANEL;
  const T* from = weight.group<T>(first);
  while (num_rows > 0) {
    const int count = num_rows < MAX_ROWS ? num_rows : MAX_ROWS;
    switch (count) {
      case 1: some_rows<T, 1>(rows, from, groups, size, out); break;
      case 2: some_rows<T, 2>(rows, from, groups, size, out); break;
      case 3: some_rows<T, 3>(rows, from, groups, size, out); break;
      case 4: some_rows<T, 4>(rows, from, groups, size, out); break;
      case 5: some_rows<T, 5>(rows, from, groups, size, out); break;
      default: some_rows<T, MAX_ROWS>(rows, from, groups, size, out);
    }
    rows += count, num_rows -= count, out += count * PANEL_SIZE;
  }
  const int64_t columns = weight.num_outputs - first * LANES;
  return int(columns < PANEL_SIZE ? columns : PANEL_SIZE);
}

// All rows of `input` [num_rows, K] with all of `weight`, and its bias:
// put(row, first column, sums, number of columns).
template <class T, class Put>
void multiply(int num_threads, const Matrix& weight, const T* input, int64_t num_rows, Put put) {
  const int64_t num_panels = (weight.num_groups() + PANEL - 1) / PANEL;
  const int64_t num_parts = (num_rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
  const T* bias = static_cast<const T*>(weight.bias);
  team().each(num_threads, num_panels * num_parts, [&](int64_t task) {
    const int64_t first = task / num_parts * PANEL, start = task % num_parts * ROWS_OF_TASK;
    const int count = int(num_rows - start < ROWS_OF_TASK ? num_rows - start : ROWS_OF_TASK);
    const T* rows[ROWS_OF_TASK];
    float sums[ROWS_OF_TASK * PANEL_SIZE];
    for (int r = 0; r < count; r++) rows[r] = input + (start + r) * weight.num_inputs;
    const int columns = panel(weight, rows, count, first, sums);
    for (int r = 0; r < count; r++) {
      float* own = sums + r * PANEL_SIZE;
      for (int i = 0; bias && i < columns; i++) own[i] += to_float(bias[first * LANES + i]);
      put(start + r, first * LANES, own, columns);
    }
  });
}
