// Ranks of one host exchange rows and records through memory that all of them have mapped.
//
// Each rank writes to its own region only, and says so by raising the number at its beginning
// (`post`); who has seen that number of every rank (`wait`) may read what they wrote. What is read
// after one exchange is overwritten after the next but one at the earliest: between the two lies an
// exchange that the reader joins only when it has read.
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

struct Flag {  // at the beginning of a region
  std::atomic<uint32_t> number, num_waiting, is_closed;
  char rest[52];
};
static_assert(sizeof(Flag) == 64, "data begins on the next line of the cache");

struct Channel {
  int64_t rank, num_ranks;
  int64_t timeout_ns, spin_ns;
  uint8_t* const* regions;   // [R], each mapped here
  const int32_t* processes;  // [R] file descriptors that become readable when a rank has ended
  uint32_t number;           // of the last exchange
  int32_t culprit;           // the rank that was waited for in vain

  Flag& flag(int64_t of) const { return *reinterpret_cast<Flag*>(regions[of]); }
  uint8_t* data(int64_t of) const { return regions[of] + sizeof(Flag); }
};

enum Status { OK = 0, TIMED_OUT = 1, ENDED = 2, CLOSED = 3 };
constexpr int64_t LOOK_NS = 10'000'000;  // between looks at whether a peer is still there

static int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

static void pause_briefly() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

static long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* wait) {
  return syscall(SYS_futex, &word, operation, value, wait, nullptr, 0);
}

static void post(Channel& channel) {
  Flag& own = channel.flag(channel.rank);
  own.number.store(++channel.number);
  if (own.num_waiting.load()) futex(own.number, FUTEX_WAKE, INT32_MAX, nullptr);
}

// Numbers go round, so their distance counts.
static bool has_come(const Flag& flag, uint32_t number) {
  return int32_t(flag.number.load() - number) >= 0;
}

static Status wait_for(Channel& channel, int64_t rank) {
  Flag& flag = channel.flag(rank);
  const uint32_t wanted = channel.number;
  for (int turn = 0; turn < 100; turn++)
    if (has_come(flag, wanted)) return OK;
  const int64_t started = now_ns();
  while (now_ns() - started < channel.spin_ns) {
    for (int turn = 0; turn < 20; turn++) pause_briefly();
    if (has_come(flag, wanted)) return OK;
  }
  channel.culprit = int32_t(rank);
  for (;;) {
    const uint32_t seen = flag.number.load();
    if (int32_t(seen - wanted) >= 0) return OK;
    if (flag.is_closed.load()) return CLOSED;
    // Another thread of this rank has called it off.
    if (channel.flag(channel.rank).is_closed.load()) {
      channel.culprit = int32_t(channel.rank);
      return CLOSED;
    }
    const timespec wait{0, LOOK_NS};
    flag.num_waiting++;
    futex(flag.number, FUTEX_WAIT, seen, &wait);
    flag.num_waiting--;
    if (has_come(flag, wanted)) return OK;
    pollfd process{channel.processes[rank], POLLIN, 0};
    // It may have posted just before it ended.
    if (poll(&process, 1, 0) > 0) return has_come(flag, wanted) ? OK : ENDED;
    if (now_ns() - started > channel.timeout_ns) return TIMED_OUT;
  }
}

static Status exchange(Channel& channel) {
  post(channel);
  for (int64_t rank = 0; rank < channel.num_ranks; rank++)
    if (rank != channel.rank)
      if (Status status = wait_for(channel, rank)) return status;
  return OK;
}

// What a region of rows holds behind its flag, one part after the other.
struct RowSizes {
  int64_t capacity, top_k, row_bytes, num_local_slots, is_bf16;

  int64_t* ids(uint8_t* data) const { return reinterpret_cast<int64_t*>(data); }
  float* weights(uint8_t* data) const {
    return reinterpret_cast<float*>(data + capacity * top_k * sizeof(int64_t));
  }
  uint8_t* hidden(uint8_t* data) const {
    return data + capacity * top_k * (sizeof(int64_t) + sizeof(float));
  }
  uint8_t* results(uint8_t* data) const { return hidden(data) + capacity * row_bytes; }
  // Does a row with these K slots go to `rank`?
  bool goes_to(const int64_t* slots, int64_t rank) const {
    for (int64_t k = 0; k < top_k; k++)
      if (slots[k] >= rank * num_local_slots && slots[k] < (rank + 1) * num_local_slots) return true;
    return false;
  }
};

static float to_float(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float result;
  memcpy(&result, &wide, sizeof(result));
  return result;
}
static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const uint32_t up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return value != value ? uint16_t(bits >> 16 | 0x40) : uint16_t(up);
}

// total += row, both in float32.
static void add(float* total, const uint8_t* row, int64_t size, bool is_bf16) {
  if (is_bf16) {
    const uint16_t* values = reinterpret_cast<const uint16_t*>(row);
    for (int64_t i = 0; i < size; i++) total[i] += to_float(values[i]);
  } else {
    const float* values = reinterpret_cast<const float*>(row);
    for (int64_t i = 0; i < size; i++) total[i] += values[i];
  }
}

extern "C" {

int moed_exchange_records(Channel* channel, const int64_t* own, int64_t num_fields, int64_t* all) {
  // Two records take turns: a fast rank may write the next while a slow one reads the last.
  const int64_t turn = (channel->number & 1) * num_fields;
  auto record = [&](int64_t rank) {
    return reinterpret_cast<int64_t*>(channel->data(rank)) + turn;
  };
  std::copy(own, own + num_fields, record(channel->rank));
  if (Status status = exchange(*channel)) return status;
  for (int64_t rank = 0; rank < channel->num_ranks; rank++)
    std::copy(record(rank), record(rank) + num_fields, all + rank * num_fields);
  return OK;
}

// Own rows: `hidden` [n], `slots` [n, K], `weights` [n, K], where n = sizes[own rank]. Received, in
// the order of ranks: `to_hidden`, `to_slots` (local, -1 elsewhere), `to_weights`, and of each row
// its place among the rows of all ranks.
int moed_dispatch(Channel* channel, const RowSizes* rows, const int64_t* sizes,
                  const uint8_t* hidden, const int64_t* slots, const float* weights,
                  uint8_t* to_hidden, int64_t* to_slots, float* to_weights, int64_t* places,
                  int64_t* num_received) {
  const int64_t num_own = sizes[channel->rank], top_k = rows->top_k;
  uint8_t* own = channel->data(channel->rank);
  memcpy(rows->ids(own), slots, num_own * top_k * sizeof(int64_t));
  memcpy(rows->weights(own), weights, num_own * top_k * sizeof(float));
  memcpy(rows->hidden(own), hidden, num_own * rows->row_bytes);
  if (Status status = exchange(*channel)) return status;
  const int64_t first = channel->rank * rows->num_local_slots;
  int64_t received = 0, place = 0;
  for (int64_t rank = 0; rank < channel->num_ranks; rank++) {
    uint8_t* from = channel->data(rank);
    for (int64_t row = 0; row < sizes[rank]; row++, place++) {
      const int64_t* chosen = rows->ids(from) + row * top_k;
      if (!rows->goes_to(chosen, channel->rank)) continue;
      for (int64_t k = 0; k < top_k; k++) {
        const int64_t local = chosen[k] - first;
        to_slots[received * top_k + k] = local >= 0 && local < rows->num_local_slots ? local : -1;
      }
      memcpy(to_weights + received * top_k, rows->weights(from) + row * top_k,
             top_k * sizeof(float));
      memcpy(to_hidden + received * rows->row_bytes, rows->hidden(from) + row * rows->row_bytes,
             rows->row_bytes);
      places[received++] = place;
    }
  }
  *num_received = received;
  return OK;
}

// `results` [r] of the received rows at their `places`; `to` [n]: the sums of own rows, added in the
// order of ranks, in `total` [D] float32. `num_sent` [R] is counted up by the own rows that each rank
// has had.
int moed_combine(Channel* channel, const RowSizes* rows, const int64_t* sizes,
                 const uint8_t* results, const int64_t* places, int64_t num_received, float* total,
                 uint8_t* to, int64_t* num_sent) {
  uint8_t* own = channel->data(channel->rank);
  for (int64_t i = 0; i < num_received; i++)
    memcpy(rows->results(own) + places[i] * rows->row_bytes, results + i * rows->row_bytes,
           rows->row_bytes);
  if (Status status = exchange(*channel)) return status;
  int64_t first = 0;
  for (int64_t rank = 0; rank < channel->rank; rank++) first += sizes[rank];
  const int64_t size = rows->row_bytes / (rows->is_bf16 ? 2 : 4);
  for (int64_t row = 0; row < sizes[channel->rank]; row++) {
    std::fill(total, total + size, 0.0f);
    for (int64_t rank = 0; rank < channel->num_ranks; rank++) {
      if (!rows->goes_to(rows->ids(own) + row * rows->top_k, rank)) continue;
      num_sent[rank]++;
      add(total, rows->results(channel->data(rank)) + (first + row) * rows->row_bytes, size,
          rows->is_bf16);
    }
    uint8_t* out = to + row * rows->row_bytes;
    if (!rows->is_bf16) {
      memcpy(out, total, rows->row_bytes);
      continue;
    }
    uint16_t* values = reinterpret_cast<uint16_t*>(out);
    for (int64_t i = 0; i < size; i++) values[i] = to_bf16(total[i]);
  }
  return OK;
}

// Whoever waits for this rank need not wait any longer, nor this rank for others.
void moed_close(Channel* channel) {
  Flag& own = channel->flag(channel->rank);
  own.is_closed.store(1);
  futex(own.number, FUTEX_WAKE, INT32_MAX, nullptr);
}

}  // extern "C"
