// Weights laid out as matmul.h reads them.
#pragma once
#include "vectors.h"

// A unit is what one lane takes at a time: a float32, or two bfloat16. 16 rows of 16 of them change
// places with their columns: each of four rounds turns the eight bits of (row, column) by one place.
INLINE void transpose(Bits* rows) {
  for (int round = 0; round < 4; round++) {
    Bits turned[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      const Bits x = rows[i], y = rows[i + LANES / 2];
      turned[2 * i] = __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                              7, 23);
      turned[2 * i + 1] = __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                                  29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = turned[i];
  }
}

// One group: 16 rows of `num_units`, those that are null are zeros, into [num_units, 16].
INLINE void pack_group(const char* const* rows, int64_t num_units, char* to) {
  constexpr int64_t UNIT = 4;
  for (int64_t unit = 0; unit < num_units; unit += LANES) {
    const int64_t count = num_units - unit < LANES ? num_units - unit : LANES;
    Bits block[LANES] = {};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (!rows[i]) continue;
      if (count == LANES)
        memcpy(&block[i], rows[i] + unit * UNIT, sizeof(Bits));
      else
        memcpy(&block[i], rows[i] + unit * UNIT, count * UNIT);
    }
    transpose(block);
    memcpy(to + unit * LANES * UNIT, block, count * sizeof(Bits));
  }
}

// `from`: `num_rows` rows of `num_units`, `row_bytes` apart. Groups of 16 rows into [num_units, 16]
// each, `group_bytes` apart; rows that the last group lacks are zeros.
inline void pack(const char* from, int64_t row_bytes, int64_t num_rows, int64_t num_units, char* to,
                 int64_t group_bytes) {
  for (int64_t row = 0; row < num_rows; row += LANES, to += group_bytes) {
    const char* rows[LANES];
    for (int i = 0; i < LANES; i++)
      rows[i] = row + i < num_rows ? from + (row + i) * row_bytes : nullptr;
    pack_group(rows, num_units, to);
  }
}

// 16 numbers of each of `count` rows (those that are null are zeros) as a group whose K are the
// rows: [count / s, 16, s].
INLINE void pack_columns(const float* const* rows, int64_t count, int64_t column, float* to) {
  for (int64_t k = 0; k < count; k++) store(to + k * LANES, rows[k] ? load(rows[k] + column) : Vec{});
}
INLINE void pack_columns(const bf16* const* rows, int64_t count, int64_t column, bf16* to) {
  for (int64_t k = 0; k < count; k += 2) {
    Halves pair[2] = {};
    for (int i = 0; i < 2; i++)
      if (rows[k + i]) memcpy(&pair[i], rows[k + i] + column, sizeof(Halves));
    const Bits both = __builtin_convertvector(pair[0], Bits) |
                      __builtin_convertvector(pair[1], Bits) << 16;
    memcpy(to + k * LANES, &both, sizeof(both));
  }
}
