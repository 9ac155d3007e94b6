// Sixteen floats at a time, in the compiler's own vector types: one file for every instruction set.
// What the flags allow decides what comes out; only the product of bfloat16 pairs is spelled out.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

INLINE Vec broadcast(float value) { return Vec{} + value; }

INLINE float to_float(float value) { return value; }
INLINE float to_float(bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

INLINE Vec load(const float* from) {
  Vec result;
  memcpy(&result, from, sizeof(result));
  return result;
}
INLINE Vec load(const bf16* from) {
  Halves halves;
  memcpy(&halves, from, sizeof(halves));
  return (Vec)(__builtin_convertvector(halves, Bits) << 16);
}

// Rounds to the nearest, ties to even; NaN stays NaN.
INLINE Halves rounded(Vec values) {
  Bits bits = (Bits)values;
  Bits up = (bits + (0x7fff + ((bits >> 16) & 1))) >> 16;
  Bits is_nan = (Bits)(values != values);
  return __builtin_convertvector((up & ~is_nan) | (is_nan & 0x7fc0), Halves);
}
INLINE void store(float* to, Vec values) { memcpy(to, &values, sizeof(values)); }
INLINE void store(bf16* to, Vec values) {
  Halves halves = rounded(values);
  memcpy(to, &halves, sizeof(halves));
}
// The first `count` lanes only.
template <class T>
INLINE void store(T* to, Vec values, int count) {
  if (count >= LANES) return store(to, values);
  T whole[LANES];
  store(whole, values);
  memcpy(to, whole, count * sizeof(T));
}
template <class T>
INLINE void store_one(T* to, float value) {
  store(to, broadcast(value), 1);
}

INLINE float sum(Vec v) {
  float lanes[LANES];
  store(lanes, v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Lane i of the result is the sum of rows[i]: four rounds that each halve the number of vectors.
INLINE Vec sums(Vec* rows) {
#define MERGE(count, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, aa, ab, ac, ad, ae, af)               \
  for (int i = 0; i < count; i++) {                                                               \
    Vec x = rows[i], y = rows[i + count];                                                         \
    rows[i] = __builtin_shufflevector(x, y, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, aa, ab, ac,   \
                                      ad, ae, af) +                                               \
              __builtin_shufflevector(x, y, a0 ^ count, a1 ^ count, a2 ^ count, a3 ^ count,       \
                                      a4 ^ count, a5 ^ count, a6 ^ count, a7 ^ count, a8 ^ count, \
                                      a9 ^ count, aa ^ count, ab ^ count, ac ^ count, ad ^ count, \
                                      ae ^ count, af ^ count);                                    \
  }
  MERGE(8, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31)
  MERGE(4, 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31)
  MERGE(2, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31)
  MERGE(1, 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31)
#undef MERGE
  return rows[0];
}

// e to the x, to about 1e-7 of it: 2 to the whole part times a polynomial of the rest.
INLINE Vec exponential(Vec x) {
  x = x > 88.0f ? broadcast(88.0f) : x;
  Bits is_tiny = (Bits)(x < -87.0f);
  x = x < -87.0f ? broadcast(-87.0f) : x;
  // Adding 1.5 x 2^23 rounds to a whole number, which then lies in the low bits.
  const float magic = 12582912.0f;
  Vec shifted = x * 1.44269504f + magic;
  Vec whole = shifted - magic;
  Vec rest = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  Vec p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  Bits power = ((Bits)shifted + 127) << 23;
  return (Vec)((Bits)(p * (Vec)power) & ~is_tiny);
}

INLINE Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

// Pairs of neighbours of K: acc += w[2k] x[2k] + w[2k + 1] x[2k + 1], or one at a time in float32.
template <class T>
struct Step;
template <>
struct Step<float> {
  static constexpr int SIZE = 1;
  Vec input;
  INLINE explicit Step(const float* x) : input(broadcast(*x)) {}
  INLINE Vec add(Vec acc, const float* w) const { return acc + load(w) * input; }
};
template <>
struct Step<bf16> {
  static constexpr int SIZE = 2;
#ifdef __AVX512BF16__
  __m512bh input;
  INLINE explicit Step(const bf16* x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    input = (__m512bh)_mm512_set1_epi32(pair);
  }
  INLINE Vec add(Vec acc, const bf16* w) const {
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(w), input);
  }
#else
  Vec first, second;
  INLINE explicit Step(const bf16* x)
      : first(broadcast(to_float(x[0]))), second(broadcast(to_float(x[1]))) {}
  INLINE Vec add(Vec acc, const bf16* w) const {
    Bits pairs;
    memcpy(&pairs, w, sizeof(pairs));
    return acc + (Vec)(pairs << 16) * first + (Vec)(pairs & 0xffff0000u) * second;
  }
#endif
};
