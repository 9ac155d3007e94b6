// From a row of logits to one token: temperature, min_p, top_k, top_p, in this order, and one draw.
// What is left of the distribution is cumulated in the order of the vocabulary, as in server/draw.py.
#pragma once
#include "rows.h"

#include <algorithm>
#include <limits>

// One per token to draw; draw.py names the fields.
struct Drawing {
  int64_t row;
  double number;  // in [0, 1)
  double top_p;   // 1: all
  int64_t top_k;  // the vocabulary's size: all
  float temperature, min_p;
};

// The first number in [0, 1) of numpy's Philox with that key and counter: Philox4x64-10 of Salmon et
// al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
inline double uniform(uint64_t seed, uint64_t output_index) {
  uint64_t c[4] = {output_index + 1, output_index == UINT64_MAX, 0, 0}, key[2] = {seed, 0};
  for (int round = 0; round < 10; round++) {
    const unsigned __int128 first = (unsigned __int128)0xD2E7470EE14C6C93u * c[0];
    const unsigned __int128 second = (unsigned __int128)0xCA5A826395121157u * c[2];
    const uint64_t mixed[4] = {uint64_t(second >> 64) ^ c[1] ^ key[0], uint64_t(second),
                               uint64_t(first >> 64) ^ c[3] ^ key[1], uint64_t(first)};
    std::copy(mixed, mixed + 4, c);
    key[0] += 0x9E3779B97F4A7C15u;
    key[1] += 0xBB67AE8584CAA73Bu;
  }
  return (c[0] >> 11) * 0x1p-53;
}

struct Candidate {
  float weight;
  int32_t id;
};
INLINE bool is_likelier(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
}

constexpr int64_t DRAW_BLOCK = 256;
// Relative to the likeliest token: the first look at candidates, nearly always enough.
constexpr float CANDIDATE_SHARE = 1e-3f;
constexpr int64_t FEW_CANDIDATES = 32;
// Fewer than these are weighed by one thread in less time than it takes to wake others.
constexpr int64_t MANY_WEIGHTS = 1 << 17;

INLINE float largest(const float* row, int64_t size) {
  float best = -std::numeric_limits<float>::infinity();
  int64_t i = 0;
  if (size >= LANES) {
    Vec most = load(row);
    for (i = LANES; i + LANES <= size; i += LANES) {
      const Vec values = load(row + i);
      most = values > most ? values : most;
    }
    for (int lane = 0; lane < LANES; lane++) best = std::max(best, most[lane]);
  }
  for (; i < size; i++) best = std::max(best, row[i]);
  return best;
}

// weights[i] = exp((row[i] - maximum) / temperature), 0 where that is less than min_p, over whole
// vectors of LANES (`weights` has room for them); `sums` gets the sum of each block.
INLINE void weigh(const float* row, int64_t size, const Drawing& drawing, float* weights,
                  double* sums) {
  const float maximum = largest(row, size), factor = 1.0f / drawing.temperature;
  // 1 / temperature overflows below 3e-39, where only the maximum itself is left anyway.
  const float scale = std::min(factor, std::numeric_limits<float>::max());
  for (int64_t start = 0, block = 0; start < size; start += DRAW_BLOCK, block++) {
    Vec total{};
    const int64_t end = std::min(size, start + DRAW_BLOCK);
    for (int64_t i = start; i < end; i += LANES) {
      Vec values = broadcast(-std::numeric_limits<float>::infinity());
      if (i + LANES <= end)
        values = load(row + i);
      else
        memcpy(&values, row + i, (end - i) * sizeof(float));
      Vec weight = exponential((values - maximum) * scale);
      weight = weight >= drawing.min_p ? weight : Vec{};
      store(weights + i, weight);
      total += weight;
    }
    sums[block] = sum(total);
  }
}

// All tokens whose weight is above 0 and at least `least`, in the order of the vocabulary.
inline int64_t gather(const float* weights, int64_t size, float least, Candidate* found) {
  int64_t count = 0;
  for (int64_t i = 0; i < size; i += LANES) {
    const Bits is_found = (Bits)((load(weights + i) >= least) & (load(weights + i) > 0.0f));
    uint32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= is_found[lane];
    if (!any) continue;
    for (int lane = 0; lane < LANES; lane++)
      if (is_found[lane]) found[count++] = {weights[i + lane], int32_t(i + lane)};
  }
  return count;
}

inline double mass_of(const Candidate* candidates, int64_t count) {
  double mass = 0;
  for (int64_t i = 0; i < count; i++) mass += candidates[i].weight;
  return mass;
}

// Moves the `limit` likeliest, and those equal to the last of them, to the front: returns how many.
inline int64_t keep_top_k(Candidate* candidates, int64_t count, int64_t limit) {
  if (count <= limit) return count;
  std::nth_element(candidates, candidates + limit - 1, candidates + count, is_likelier);
  const float smallest = candidates[limit - 1].weight;
  return std::partition(candidates + limit, candidates + count,
                        [&](const Candidate& own) { return own.weight >= smallest; }) -
         candidates;
}

// Moves the fewest likeliest that hold `target` to the front, one at least: returns how many.
inline int64_t keep_top_p(Candidate* candidates, int64_t count, double target) {
  int64_t begin = 0, end = count;
  double before = 0;
  while (end - begin > FEW_CANDIDATES) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(candidates + begin, candidates + middle, candidates + end, is_likelier);
    const double mass = mass_of(candidates + begin, middle - begin);
    if (before + mass >= target) {
      end = middle;
    } else {
      before += mass;
      begin = middle;
    }
  }
  std::sort(candidates + begin, candidates + end, is_likelier);
  while (begin < end && (before < target || begin == 0)) before += candidates[begin++].weight;
  return begin;
}

// The one whose stretch of the cumulated weights holds the number.
inline int64_t pick(Candidate* candidates, int64_t count, double number) {
  std::sort(candidates, candidates + count,
            [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  double left = number * mass_of(candidates, count);
  for (int64_t i = 0; i < count; i++) {
    left -= candidates[i].weight;
    if (left < 0) return candidates[i].id;
  }
  // Rounding could lift the product to the total itself.
  return candidates[count - 1].id;
}

// The same over all tokens: the block first, then the token in it.
inline int64_t pick(const float* weights, int64_t size, const double* sums, double total,
                    double number) {
  double left = number * total;
  int64_t block = 0, last = 0;
  const int64_t num_blocks = (size + DRAW_BLOCK - 1) / DRAW_BLOCK;
  while (block < num_blocks - 1 && left >= sums[block]) left -= sums[block++];
  while (block > 0 && sums[block] == 0) block--;
  const int64_t end = std::min(size, (block + 1) * DRAW_BLOCK);
  for (int64_t i = block * DRAW_BLOCK; i < end; i++) {
    if (weights[i] == 0) continue;
    left -= weights[i];
    last = i;
    if (left < 0) break;
  }
  return last;
}

// `row` has a finite maximum; of others some valid token comes out.
inline int64_t draw_token(const float* row, int64_t size, const Drawing& drawing) {
  const int64_t num_blocks = (size + DRAW_BLOCK - 1) / DRAW_BLOCK;
  float* weights = scratch<float, 20>(num_blocks * DRAW_BLOCK);
  double* sums = scratch<double, 21>(num_blocks);
  weigh(row, size, drawing, weights, sums);
  double total = 0;
  for (int64_t block = 0; block < num_blocks; block++) total += sums[block];
  const bool has_top_k = drawing.top_k < size, has_top_p = drawing.top_p < 1;
  if (!has_top_k && !has_top_p) return pick(weights, size, sums, total, drawing.number);
  Candidate* candidates = scratch<Candidate, 22>(num_blocks * DRAW_BLOCK);
  int64_t count = gather(weights, size, CANDIDATE_SHARE, candidates);
  const bool is_enough = has_top_k ? count >= drawing.top_k
                                   : mass_of(candidates, count) >= drawing.top_p * total;
  if (!is_enough) count = gather(weights, size, 0.0f, candidates);
  if (has_top_k) {
    count = keep_top_k(candidates, count, drawing.top_k);
    total = mass_of(candidates, count);
  }
  if (has_top_p) count = keep_top_p(candidates, count, drawing.top_p * total);
  return count ? pick(candidates, count, drawing.number) : 0;
}
