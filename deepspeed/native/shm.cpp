// Shared memory between the ranks of one machine: message rings, waiting, and collectives in rank order.
//
// Every rank owns one segment, which all ranks of the group map. In it: a ring of small messages to each peer, version
// counters, and a few slots through which collectives stream. A rank writes its own segment only, ring tails and
// consumed counters excepted. In addition, every process has one bell (a futex), shared by all its groups; other ranks
// ring it after an event for this process in any group.
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sum.h"

namespace {

constexpr int kSlots = 4;
constexpr uint64_t kRing = 1024;        // messages under way from one rank to another
constexpr uint64_t kVersions = 1 << 16;  // channels with a version
constexpr uint64_t kLine = 64;

struct Message {
  uint64_t words[8];
};

struct alignas(kLine) Ring {
  alignas(kLine) std::atomic<uint64_t> head;
  alignas(kLine) std::atomic<uint64_t> tail;
  alignas(kLine) Message messages[kRing];
};

// Operation of a chunk in a slot; readers detect a mismatch with their own operation here.
struct Header {
  uint64_t sequence, operation, bytes, mark;
};

struct Bell {
  alignas(kLine) std::atomic<uint32_t> rung;
  alignas(kLine) std::atomic<uint32_t> sleeping;
};

struct Control {
  alignas(kLine) std::atomic<uint64_t> written;  // chunks that this rank has written so far
  alignas(kLine) Header headers[kSlots];
  alignas(kLine) std::atomic<uint64_t> versions[kVersions];
};

struct Counter {
  alignas(kLine) std::atomic<uint64_t> value;
};

uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

struct Segment {
  Control* control;
  Counter* consumed;  // by rank: chunks of this segment that it has read
  Ring* rings;        // to each rank
  char* slots;
};

uint64_t lay_out(char* base, uint64_t size, uint64_t slot_bytes, Segment* segment) {
  uint64_t at = round_up(sizeof(Control), kLine);
  const uint64_t consumed = at;
  at += size * sizeof(Counter);
  const uint64_t rings = at;
  at = round_up(at + size * sizeof(Ring), 4096);
  const uint64_t slots = at;
  if (segment != nullptr) {
    segment->control = reinterpret_cast<Control*>(base);
    segment->consumed = reinterpret_cast<Counter*>(base + consumed);
    segment->rings = reinterpret_cast<Ring*>(base + rings);
    segment->slots = base + slots;
  }
  return at + kSlots * slot_bytes;
}

struct Peer {
  Segment segment;
  Bell* bell;
  uint64_t read;  // chunks read from its segment
};

// Called during a wait; a nonzero result ends the collective with that code.
using Meanwhile = int (*)();

struct Context {
  uint64_t rank, size, slot_bytes, spin_ns;
  int64_t nap_us;
  Meanwhile meanwhile;
  uint64_t sequence;  // collectives so far
  Peer peers[1];      // `size` entries, including this rank

  Segment& mine() { return peers[rank].segment; }
  Bell* bell() { return peers[rank].bell; }
};

constexpr int kMismatch = -1000;

int futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return static_cast<int>(syscall(SYS_futex, word, operation, value, timeout, nullptr, 0));
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void ring(Bell* bell) {
  bell->rung.fetch_add(1, std::memory_order_seq_cst);
  if (bell->sleeping.load(std::memory_order_seq_cst) != 0) futex(&bell->rung, FUTEX_WAKE, INT_MAX, nullptr);
}

void sleep_until_rung(Bell* bell, uint32_t seen, int64_t microseconds) {
  const timespec limit{microseconds / 1000000, (microseconds % 1000000) * 1000};
  bell->sleeping.fetch_add(1, std::memory_order_seq_cst);
  if (bell->rung.load(std::memory_order_seq_cst) == seen) futex(&bell->rung, FUTEX_WAIT, seen, &limit);
  bell->sleeping.fetch_sub(1, std::memory_order_seq_cst);
}

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

// Duration of spinning before a sleep. It must exceed the time to wake up: otherwise two ranks that wait for each other
// in turn would always find the other asleep. The other rank may need this core, so spinning yields.
template <typename Ready>
bool spin(Context* context, Ready ready) {
  if (context->spin_ns == 0) return ready();
  const uint64_t end = now_ns() + context->spin_ns;
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      pause_cpu();
    }
    sched_yield();
  } while (now_ns() < end);
  return false;
}

// Wait until `ready()`: spin, then sleep, with a call of `meanwhile` before each sleep except the first.
template <typename Ready>
int wait_for(Context* context, Ready ready) {
  if (ready() || spin(context, ready)) return 0;
  Bell* bell = context->bell();
  for (int64_t naps = 0;; ++naps) {
    const uint32_t seen = bell->rung.load(std::memory_order_seq_cst);
    if (ready()) return 0;
    if (naps > 0) {
      const int code = context->meanwhile();
      if (code != 0) return code;
      if (ready()) return 0;
    }
    sleep_until_rung(bell, seen, naps == 0 ? 300 : context->nap_us);
  }
}

void ring_peers(Context* context) {
  for (uint64_t r = 0; r < context->size; ++r)
    if (r != context->rank) ring(context->peers[r].bell);
}

struct Stream {
  Context* context;
  Header header;

  // Slot for this rank's next chunk, after all ranks have read its previous content.
  int slot(char** out) {
    Segment& mine = context->mine();
    const uint64_t next = mine.control->written.load(std::memory_order_relaxed);
    const uint64_t rank = context->rank, size = context->size;
    const int code = wait_for(context, [&] {
      for (uint64_t r = 0; r < size; ++r)
        if (r != rank && mine.consumed[r].value.load(std::memory_order_acquire) + kSlots <= next) return false;
      return true;
    });
    if (code != 0) return code;
    mine.control->headers[next % kSlots] = header;
    *out = mine.slots + (next % kSlots) * context->slot_bytes;
    return 0;
  }

  void publish() {
    context->mine().control->written.fetch_add(1, std::memory_order_seq_cst);
    ring_peers(context);
  }

  // Next chunk from a peer.
  int peek(uint64_t peer, const char** out) {
    Segment& theirs = context->peers[peer].segment;
    const uint64_t next = context->peers[peer].read;
    const int code =
        wait_for(context, [&] { return theirs.control->written.load(std::memory_order_acquire) > next; });
    if (code != 0) return code;
    if (std::memcmp(&theirs.control->headers[next % kSlots], &header, sizeof(Header)) != 0)
      return kMismatch - static_cast<int>(peer);
    *out = theirs.slots + (next % kSlots) * context->slot_bytes;
    return 0;
  }

  void consumed(uint64_t peer) {
    Peer& theirs = context->peers[peer];
    theirs.segment.consumed[context->rank].value.store(++theirs.read, std::memory_order_seq_cst);
    ring(theirs.bell);
  }
};

Stream begin(Context* context, uint64_t operation, uint64_t bytes, uint64_t mark) {
  return Stream{context, Header{++context->sequence, operation, bytes, mark}};
}

constexpr uint64_t kMaxRanks = 512;

#define CHECK(call)                  \
  do {                               \
    const int code_ = (call);        \
    if (code_ != 0) return code_;    \
  } while (0)

// Sum `data` over all ranks, chunk by chunk; every rank computes the whole sum.
int all_reduce_whole(Stream stream, char* data, uint64_t n, ds::Kind dtype) {
  Context* context = stream.context;
  const uint64_t width = static_cast<uint64_t>(ds::width(dtype)), per_chunk = context->slot_bytes / width;
  const void* parts[kMaxRanks];
  for (uint64_t at = 0; at < n; at += per_chunk) {
    const uint64_t count = n - at < per_chunk ? n - at : per_chunk;
    char* slot;
    CHECK(stream.slot(&slot));
    std::memcpy(slot, data + at * width, count * width);
    stream.publish();
    for (uint64_t r = 0; r < context->size; ++r) {
      if (r == context->rank) {
        parts[r] = slot;
      } else {
        const char* theirs = nullptr;
        CHECK(stream.peek(r, &theirs));
        parts[r] = theirs;
      }
    }
    ds::sum(parts, static_cast<int>(context->size), count, dtype, data + at * width, dtype, 1.0f, false);
    for (uint64_t r = 0; r < context->size; ++r)
      if (r != context->rank) stream.consumed(r);
  }
  return 0;
}

// The same, but every rank sums a share of each chunk, which the others copy.
int all_reduce_shared(Stream stream, char* data, uint64_t n, ds::Kind dtype) {
  Context* context = stream.context;
  const uint64_t size = context->size, rank = context->rank, width = static_cast<uint64_t>(ds::width(dtype));
  const uint64_t per_chunk = context->slot_bytes / width / size * size, share = per_chunk / size;
  const void* parts[kMaxRanks];
  for (uint64_t at = 0; at < n; at += per_chunk) {
    const uint64_t count = n - at < per_chunk ? n - at : per_chunk;
    const auto low = [&](uint64_t r) { return r * share < count ? r * share : count; };
    char* slot;
    CHECK(stream.slot(&slot));
    std::memcpy(slot, data + at * width, count * width);
    stream.publish();
    for (uint64_t r = 0; r < size; ++r) {
      const char* theirs = slot;
      if (r != rank) CHECK(stream.peek(r, &theirs));
      parts[r] = theirs + low(rank) * width;
    }
    char* result;
    CHECK(stream.slot(&result));
    ds::sum(parts, static_cast<int>(size), low(rank + 1) - low(rank), dtype, result, dtype, 1.0f, false);
    for (uint64_t r = 0; r < size; ++r)
      if (r != rank) stream.consumed(r);
    stream.publish();
    std::memcpy(data + (at + low(rank)) * width, result, (low(rank + 1) - low(rank)) * width);
    for (uint64_t r = 0; r < size; ++r) {
      if (r == rank) continue;
      const char* theirs = nullptr;
      CHECK(stream.peek(r, &theirs));
      std::memcpy(data + (at + low(r)) * width, theirs, (low(r + 1) - low(r)) * width);
      stream.consumed(r);
    }
  }
  return 0;
}

}  // namespace

extern "C" {

// Size in bytes of a rank's segment, for a group of `size` ranks.
uint64_t ds_shm_bytes(uint64_t size, uint64_t slot_bytes) { return lay_out(nullptr, size, slot_bytes, nullptr); }

// Create a context over the mapped segments and bells of all ranks, which must be zero initially; null if there are too
// many. A wait sleeps at most `nap_us` microseconds between two calls of `meanwhile`.
void* ds_shm_open(uint64_t rank, uint64_t size, uint64_t slot_bytes, uint64_t spin_ns, int64_t nap_us, void** segments,
                  void** bells, int (*meanwhile)()) {
  if (size > kMaxRanks) return nullptr;
  const uint64_t bytes = sizeof(Context) + size * sizeof(Peer);
  auto* context = static_cast<Context*>(::operator new(bytes));
  std::memset(static_cast<void*>(context), 0, bytes);
  context->rank = rank;
  context->size = size;
  context->slot_bytes = slot_bytes;
  context->spin_ns = spin_ns;
  context->nap_us = nap_us;
  context->meanwhile = meanwhile;
  for (uint64_t r = 0; r < size; ++r) {
    lay_out(static_cast<char*>(segments[r]), size, slot_bytes, &context->peers[r].segment);
    context->peers[r].bell = static_cast<Bell*>(bells[r]);
  }
  return context;
}

void ds_shm_close(void* context) { ::operator delete(context); }

// Send a message of 64 bytes; 0 if the ring to that rank is full.
int ds_shm_push(void* handle, uint64_t peer, const void* message) {
  auto* context = static_cast<Context*>(handle);
  Ring& ring_to = context->mine().rings[peer];
  const uint64_t head = ring_to.head.load(std::memory_order_relaxed);
  if (head - ring_to.tail.load(std::memory_order_acquire) >= kRing) return 0;
  std::memcpy(&ring_to.messages[head % kRing], message, sizeof(Message));
  ring_to.head.store(head + 1, std::memory_order_seq_cst);
  ring(context->peers[peer].bell);
  return 1;
}

// Receive a message; returns its source rank, or -1 if there is none.
int ds_shm_pop(void* handle, void* message) {
  auto* context = static_cast<Context*>(handle);
  for (uint64_t peer = 0; peer < context->size; ++peer) {
    if (peer == context->rank) continue;
    Ring& ring_from = context->peers[peer].segment.rings[context->rank];
    const uint64_t tail = ring_from.tail.load(std::memory_order_relaxed);
    if (ring_from.head.load(std::memory_order_acquire) == tail) continue;
    std::memcpy(message, &ring_from.messages[tail % kRing], sizeof(Message));
    ring_from.tail.store(tail + 1, std::memory_order_seq_cst);
    return static_cast<int>(peer);
  }
  return -1;
}

// Number of rings of this process's bell so far.
uint32_t ds_shm_bell(void* handle) {
  return static_cast<Context*>(handle)->bell()->rung.load(std::memory_order_seq_cst);
}

// Wait until the bell has rung more often than `seen`, or until the timeout (microseconds): spin, then sleep.
void ds_shm_nap(void* handle, uint32_t seen, int64_t microseconds) {
  auto* context = static_cast<Context*>(handle);
  Bell* bell = context->bell();
  if (spin(context, [&] { return bell->rung.load(std::memory_order_seq_cst) != seen; })) return;
  sleep_until_rung(bell, seen, microseconds);
}

// Increment this rank's version of a channel, and notify all ranks.
void ds_shm_advance(void* handle, uint64_t channel) {
  auto* context = static_cast<Context*>(handle);
  context->mine().control->versions[channel].fetch_add(1, std::memory_order_seq_cst);
  ring_peers(context);
}

uint64_t ds_shm_version(void* handle, uint64_t rank, uint64_t channel) {
  return static_cast<Context*>(handle)->peers[rank].segment.control->versions[channel].load(std::memory_order_seq_cst);
}

uint64_t ds_shm_channels() { return kVersions; }

// Collectives return 0, the result of `meanwhile`, or -1000 - r if rank r is in another collective: a different
// operation, size or mark.

int ds_shm_all_reduce(void* handle, void* data, uint64_t n, ds::Kind dtype) {
  auto* context = static_cast<Context*>(handle);
  const uint64_t bytes = n * static_cast<uint64_t>(ds::width(dtype));
  const Stream stream = begin(context, 1, bytes, static_cast<uint64_t>(dtype));
  const bool whole = context->size == 2 || bytes <= 32768;
  return (whole ? all_reduce_whole : all_reduce_shared)(stream, static_cast<char*>(data), n, dtype);
}

// Reduce-scatter: `data` has all slices, split at `cuts` (size + 1 element counts); `out` gets the own sum.
int ds_shm_reduce_scatter(void* handle, const void* data, const uint64_t* cuts, ds::Kind dtype, void* out) {
  auto* context = static_cast<Context*>(handle);
  const uint64_t size = context->size, rank = context->rank, width = static_cast<uint64_t>(ds::width(dtype));
  Stream stream = begin(context, 2, cuts[size] * width, static_cast<uint64_t>(dtype));
  const uint64_t step = context->slot_bytes / width / (size - 1);
  const auto* source = static_cast<const char*>(data);
  uint64_t longest = 0;
  for (uint64_t r = 0; r < size; ++r) longest = cuts[r + 1] - cuts[r] > longest ? cuts[r + 1] - cuts[r] : longest;
  const void* parts[kMaxRanks];
  for (uint64_t at = 0; at < longest; at += step) {
    // Piece of rank r's slice that is sent in this step.
    const auto count = [&](uint64_t r) {
      const uint64_t left = cuts[r + 1] - cuts[r] > at ? cuts[r + 1] - cuts[r] - at : 0;
      return left < step ? left : step;
    };
    char* slot;
    CHECK(stream.slot(&slot));
    for (uint64_t r = 0; r < size; ++r) {
      if (r == rank) continue;
      std::memcpy(slot, source + (cuts[r] + at) * width, count(r) * width);
      slot += count(r) * width;
    }
    stream.publish();
    for (uint64_t r = 0; r < size; ++r) {
      if (r == rank) {
        parts[r] = source + (cuts[rank] + at) * width;
        continue;
      }
      const char* theirs = nullptr;
      CHECK(stream.peek(r, &theirs));
      for (uint64_t q = 0; q < rank; ++q)
        if (q != r) theirs += count(q) * width;
      parts[r] = theirs;
    }
    ds::sum(parts, static_cast<int>(size), count(rank), dtype, static_cast<char*>(out) + at * width, dtype, 1.0f,
            false);
    for (uint64_t r = 0; r < size; ++r)
      if (r != rank) stream.consumed(r);
  }
  return 0;
}

// All-gather: `full` gets the concatenation of all ranks' slices `own`, split at `cuts` (size + 1 byte counts).
int ds_shm_all_gather(void* handle, void* full, const uint64_t* cuts, const void* own, uint64_t mark) {
  auto* context = static_cast<Context*>(handle);
  const uint64_t size = context->size, rank = context->rank, step = context->slot_bytes;
  Stream stream = begin(context, 3, cuts[size], mark);
  auto* target = static_cast<char*>(full);
  const auto* source = static_cast<const char*>(own);
  uint64_t longest = 0;
  for (uint64_t r = 0; r < size; ++r) longest = cuts[r + 1] - cuts[r] > longest ? cuts[r + 1] - cuts[r] : longest;
  for (uint64_t at = 0; at < longest; at += step) {
    const auto count = [&](uint64_t r) {
      const uint64_t left = cuts[r + 1] - cuts[r] > at ? cuts[r + 1] - cuts[r] - at : 0;
      return left < step ? left : step;
    };
    if (count(rank) != 0) {
      char* slot;
      CHECK(stream.slot(&slot));
      std::memcpy(slot, source + at, count(rank));
      stream.publish();
      if (target + cuts[rank] != source) std::memcpy(target + cuts[rank] + at, source + at, count(rank));
    }
    for (uint64_t r = 0; r < size; ++r) {
      if (r == rank || count(r) == 0) continue;
      const char* theirs = nullptr;
      CHECK(stream.peek(r, &theirs));
      std::memcpy(target + cuts[r] + at, theirs, count(r));
      stream.consumed(r);
    }
  }
  return 0;
}

int ds_shm_broadcast(void* handle, void* data, uint64_t bytes, uint64_t root, uint64_t mark) {
  auto* context = static_cast<Context*>(handle);
  Stream stream = begin(context, 4 + root, bytes, mark);
  auto* at = static_cast<char*>(data);
  for (uint64_t left = bytes; left != 0;) {
    const uint64_t count = left < context->slot_bytes ? left : context->slot_bytes;
    if (context->rank == root) {
      char* slot;
      CHECK(stream.slot(&slot));
      std::memcpy(slot, at, count);
      stream.publish();
    } else {
      const char* theirs = nullptr;
      CHECK(stream.peek(root, &theirs));
      std::memcpy(at, theirs, count);
      stream.consumed(root);
    }
    at += count;
    left -= count;
  }
  return 0;
}

// out (+)= scale * (parts[0] + parts[1] + …) in fp32.
void ds_sum(const void* const* parts, int count, uint64_t n, ds::Kind dtype, void* out, ds::Kind out_dtype, float scale,
            int add) {
  ds::sum(parts, count, n, dtype, out, out_dtype, scale, add != 0);
}
}
