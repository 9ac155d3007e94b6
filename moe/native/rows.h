// What is done to single rows of numbers.
#pragma once
#include "vectors.h"

#include <vector>

// Memory that stays with the thread that asked for it.
template <class T, int PURPOSE>
T* scratch(int64_t count) {
  static thread_local std::vector<T> memory;
  if (int64_t(memory.size()) < count) memory.resize(count);
  return memory.data();
}

template <class T>
INLINE void norm_row(const T* row, const T* weight, int64_t size, float eps, T* out) {
  Vec squares{};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) squares += load(row + i) * load(row + i);
  float total = sum(squares);
  for (int64_t j = i; j < size; j++) total += to_float(row[j]) * to_float(row[j]);
  const float factor = 1.0f / std::sqrt(total / size + eps);
  for (i = 0; i + LANES <= size; i += LANES)
    store(out + i, load(row + i) * factor * load(weight + i));
  for (; i < size; i++) store_one(out + i, to_float(row[i]) * factor * to_float(weight[i]));
}

// `count` numbers in another dtype.
template <class T>
INLINE void convert(const float* from, T* to, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; i++) store_one(to + i, from[i]);
}
