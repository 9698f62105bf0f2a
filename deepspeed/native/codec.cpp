// Block quantisation of communicated values: encode, decode, and the sum of encoded parts, each in one pass over
// memory. deepspeed/comm/collectives/block_codec.py defines the format and has the same arithmetic in torch; all
// versions compute the same bits. For little-endian processors.
#include <algorithm>

#include "numbers.h"

namespace ds {

// Mirrored by `_NativeLayout` in deepspeed/comm/collectives/block_codec.py.
struct BlockLayout {
    int64_t bits, block, segments, blocks;
    const int64_t* borders;  // first element of each segment, and the end
    const int64_t* firsts;   // first block of each segment, and the end
    const int64_t* places;   // first byte of each segment's codes, behind the scales
};

namespace {

constexpr int64_t BLOCK = 256;  // elements of the usual block, for which the loops have fixed bounds
constexpr int64_t LARGEST = 1024;
// Number of elements below which a second thread does not pay off.
constexpr int64_t PER_THREAD = 1 << 15;
constexpr uint32_t INFINITE = 0x7f800000u;
constexpr uint16_t SMALLEST = 0x0080u;  // smallest normal bf16
// Prefetch distance in bytes: hardware prefetching stops at each 4 KiB page.
constexpr int64_t FAR = 4096;
constexpr float ROUND = 0x1.8p23f;      // adding it rounds to an integer, ties to even, in the low bits
constexpr int32_t PAYLOAD = 3;          // kind of an encoded part of a sum; the others are those of numbers.h

// Position of one block.
struct Place {
    int64_t start, count, byte;
};

// Blocks in ascending order, with the segment of the last one.
struct Walk {
    const BlockLayout& layout;
    int64_t segment;

    Walk(const BlockLayout& layout, int64_t block) : layout(layout) {
        segment = std::upper_bound(layout.firsts, layout.firsts + layout.segments, block) - layout.firsts - 1;
    }

    DS_INLINE Place at(int64_t block) {
        while (layout.firsts[segment + 1] <= block) segment++;
        const int64_t offset = (block - layout.firsts[segment]) * layout.block;
        const int64_t start = layout.borders[segment] + offset;
        const int64_t count = std::min(layout.block, layout.borders[segment + 1] - start);
        return {start, count, 2 * layout.blocks + layout.places[segment] + offset * layout.bits / 8};
    }
};

// `to_bf16` of a number that is not NaN.
DS_INLINE uint16_t finite_bf16(float value) {
    const uint32_t bits = as_bits(value);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// -- codes ------------------------------------------------------------------------------------------------------------

// Two codes per byte, the first one in the low half.
DS_INLINE void pack(const int8_t* __restrict codes, int64_t count, uint8_t* __restrict bytes) {
    for (int64_t i = 0; i < (count + 1) / 2; i++) {
        uint16_t two;
        std::memcpy(&two, codes + 2 * i, sizeof two);
        bytes[i] = static_cast<uint8_t>((two & 0x0fu) | ((two >> 4) & 0xf0u));
    }
}

// Four-bit codes without their sign extension.
DS_INLINE void unpack(const uint8_t* __restrict bytes, int64_t count, int8_t* __restrict codes) {
    for (int64_t i = 0; i < (count + 1) / 2; i++) {
        const auto two = static_cast<uint16_t>((bytes[i] & 0x0fu) | ((bytes[i] & 0xf0u) << 4));
        std::memcpy(codes + 2 * i, &two, sizeof two);
    }
}

DS_INLINE int32_t extended(int8_t code, bool packed) { return packed ? (code ^ 8) - 8 : code; }

// Codes of a block with values that are not finite: infinities are 1 and -1, NaN is the lowest code.
void encode_special(const float* values, int64_t count, bool packed, int8_t* codes) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = as_bits(values[i]), magnitude = bits & 0x7fffffffu;
        const int infinity = magnitude < INFINITE ? 0 : bits >> 31 ? -1 : 1;
        codes[i] = static_cast<int8_t>(magnitude > INFINITE ? (packed ? -8 : -128) : infinity);
    }
}

float special(int32_t code, bool packed) {
    const uint32_t infinity = code == 0 ? 0u : code > 0 ? INFINITE : INFINITE | 0x80000000u;
    return as_float(code == (packed ? -8 : -128) ? 0x7fc00000u : infinity);
}

// -- encoding ---------------------------------------------------------------------------------------------------------

struct Encoding {
    const BlockLayout* layout;
    const void* values;
    Kind kind;
    uint8_t* payload;
    uint16_t* memory;  // errors of earlier encodings in bf16, or null
    float kept, renewed;
};

// Bits of the largest magnitude; infinity and then NaN are the largest of all.
DS_INLINE uint32_t largest(const float* values, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) most = std::max(most, as_bits(values[i]) & 0x7fffffffu);
    return most;
}

// No clamp: the rounded scale is at most 2^-9 smaller, so that no quotient rounds to more than the largest code.
DS_INLINE void quantise(const float* __restrict values, int64_t count, float inverse, int8_t* __restrict codes) {
    for (int64_t i = 0; i < count; i++) codes[i] = static_cast<int8_t>(as_bits(values[i] * inverse + ROUND));
}

DS_INLINE void remember(const float* __restrict values, int64_t count, float inverse, float scale, const Encoding& e,
                        uint16_t* __restrict memory) {
    for (int64_t i = 0; i < count; i++) {
        const float decoded = (values[i] * inverse + ROUND - ROUND) * scale;
        memory[i] = finite_bf16(e.kept * from_bf16(memory[i]) + e.renewed * (values[i] - decoded));
    }
}

// sum = values + memory
DS_INLINE void add_memory(const Encoding& e, int64_t start, int64_t count, const uint16_t* memory,
                          float* __restrict sum) {
    if (e.kind == FP32) {
        const float* values = static_cast<const float*>(e.values) + start;
        for (int64_t i = 0; i < count; i++) sum[i] = values[i] + from_bf16(memory[i]);
    } else {
        widen(static_cast<const uint16_t*>(e.values) + start, e.kind, sum, count);
        for (int64_t i = 0; i < count; i++) sum[i] += from_bf16(memory[i]);
    }
}

// Prefetch a later block, for reading or also for writing.
template <bool written> DS_INLINE void fetch(const void* base, int64_t bytes) {
    const char* start = static_cast<const char*>(base) + FAR;
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(start + byte, written);
}

DS_INLINE void encode_block(const Encoding& e, int64_t block, int64_t start, int64_t count, uint8_t* bytes) {
    alignas(64) float scratch[LARGEST];
    alignas(64) int8_t unpacked[LARGEST + 1];
    const bool packed = e.layout->bits == 4;
    uint16_t* memory = e.memory ? e.memory + start : nullptr;
    fetch<false>(static_cast<const char*>(e.values) + start * width(e.kind), count * width(e.kind));
    if (memory) fetch<true>(memory, count * 2);
    const float* values = scratch;
    if (memory)
        add_memory(e, start, count, memory, scratch);
    else if (e.kind == FP32)
        values = static_cast<const float*>(e.values) + start;
    else
        widen(static_cast<const uint16_t*>(e.values) + start, e.kind, scratch, count);
    const uint32_t most = largest(values, count);
    uint16_t half = to_bf16(as_float(most) / (packed ? 7.0f : 127.0f));
    if (half < SMALLEST) half = 0;
    const float scale = from_bf16(half);
    reinterpret_cast<uint16_t*>(e.payload)[block] = half;
    int8_t* codes = packed ? unpacked : reinterpret_cast<int8_t*>(bytes);
    if (most >= INFINITE) {
        encode_special(values, count, packed, codes);
        if (memory) std::fill_n(memory, count, uint16_t{0});
    } else {
        const float inverse = half ? 1.0f / scale : 0.0f;
        quantise(values, count, inverse, codes);
        if (memory) remember(values, count, inverse, scale, e, memory);
    }
    if (packed) {
        unpacked[count] = 0;
        pack(unpacked, count, bytes);
    }
}

DS_INLINE void encode_range(const Encoding& e, int64_t begin, int64_t end) {
    Walk walk(*e.layout, begin);
    for (int64_t block = begin; block < end; block++) {
        const Place place = walk.at(block);
        if (place.count == BLOCK)
            encode_block(e, block, place.start, BLOCK, e.payload + place.byte);
        else
            encode_block(e, block, place.start, place.count, e.payload + place.byte);
    }
}

void portable(const Encoding& e, int64_t begin, int64_t end) { encode_range(e, begin, end); }
DS_AVX2 void avx2(const Encoding& e, int64_t begin, int64_t end) { encode_range(e, begin, end); }
DS_AVX512 void avx512(const Encoding& e, int64_t begin, int64_t end) { encode_range(e, begin, end); }

// -- decoding ---------------------------------------------------------------------------------------------------------

// Element of a sum, to which decoded values are added.
struct Total {
    float value;
};

DS_INLINE void put(float value, float* to) { *to = value; }
DS_INLINE void put(float value, uint16_t* to) { *to = finite_bf16(value); }
DS_INLINE void put(float value, Total* to) { to->value += value; }

// Values of a block whose scale is finite.
template <class Out>
DS_INLINE void dequantise(const int8_t* __restrict codes, int64_t count, bool packed, float scale, Out* __restrict to) {
    if (packed)
        for (int64_t i = 0; i < count; i++) put(static_cast<float>(extended(codes[i], true)) * scale, to + i);
    else
        for (int64_t i = 0; i < count; i++) put(static_cast<float>(codes[i]) * scale, to + i);
}

// Values of a block with infinities or NaN; their bf16 is the high half.
void decode_special(const int8_t* codes, int64_t count, bool packed, float* to) {
    for (int64_t i = 0; i < count; i++) to[i] = special(extended(codes[i], packed), packed);
}

void decode_special(const int8_t* codes, int64_t count, bool packed, uint16_t* to) {
    for (int64_t i = 0; i < count; i++) to[i] = as_bits(special(extended(codes[i], packed), packed)) >> 16;
}

void decode_special(const int8_t* codes, int64_t count, bool packed, Total* to) {
    for (int64_t i = 0; i < count; i++) to[i].value += special(extended(codes[i], packed), packed);
}

// Values of a block: fp32, bf16, or added to a sum.
template <class Out>
DS_INLINE void decode_block(const BlockLayout& layout, const uint8_t* payload, int64_t block, int64_t byte,
                            int64_t count, Out* to) {
    alignas(64) int8_t unpacked[LARGEST + 1];
    const bool packed = layout.bits == 4;
    const auto* codes = reinterpret_cast<const int8_t*>(payload + byte);
    if (packed) {
        unpack(payload + byte, count, unpacked);
        codes = unpacked;
    }
    const float scale = from_bf16(reinterpret_cast<const uint16_t*>(payload)[block]);
    if ((as_bits(scale) & INFINITE) == INFINITE)
        decode_special(codes, count, packed, to);
    else
        dequantise(codes, count, packed, scale, to);
}

struct Decoding {
    const BlockLayout* layout;
    const uint8_t* payload;
    void* out;
    Kind kind;
};

DS_INLINE void decode_to(const Decoding& d, int64_t block, int64_t start, int64_t count, int64_t byte) {
    alignas(64) float scratch[LARGEST];
    auto* halves = static_cast<uint16_t*>(d.out) + start;
    if (d.kind == FP32) {
        decode_block(*d.layout, d.payload, block, byte, count, static_cast<float*>(d.out) + start);
    } else if (d.kind == BF16) {
        decode_block(*d.layout, d.payload, block, byte, count, halves);
    } else {
        decode_block(*d.layout, d.payload, block, byte, count, scratch);
        narrow(scratch, FP16, halves, count);
    }
}

DS_INLINE void decode_range(const Decoding& d, int64_t begin, int64_t end) {
    Walk walk(*d.layout, begin);
    for (int64_t block = begin; block < end; block++) {
        const Place place = walk.at(block);
        decode_to(d, block, place.start, place.count, place.byte);
    }
}

void portable(const Decoding& d, int64_t begin, int64_t end) { decode_range(d, begin, end); }
DS_AVX2 void avx2(const Decoding& d, int64_t begin, int64_t end) { decode_range(d, begin, end); }
DS_AVX512 void avx512(const Decoding& d, int64_t begin, int64_t end) { decode_range(d, begin, end); }

// -- sums -------------------------------------------------------------------------------------------------------------

struct Sum {
    const BlockLayout* layout;
    const void* const* parts;
    const int32_t* kinds;
    int count;
    void* out;
    Kind out_kind;
    float scale;
    bool add;
};

DS_INLINE void first_part(const Sum& s, int64_t block, const Place& place, int64_t count, float* __restrict total) {
    if (s.kinds[0] == PAYLOAD)
        decode_block(*s.layout, static_cast<const uint8_t*>(s.parts[0]), block, place.byte, count, total);
    else if (s.kinds[0] == FP32)
        std::copy_n(static_cast<const float*>(s.parts[0]) + place.start, count, total);
    else
        widen(static_cast<const uint16_t*>(s.parts[0]) + place.start, static_cast<Kind>(s.kinds[0]), total, count);
}

// total += values
DS_INLINE void add_plain(const void* base, int32_t kind, int64_t start, int64_t count, float* __restrict total) {
    const auto* whole = static_cast<const float*>(base) + start;
    const auto* half = static_cast<const uint16_t*>(base) + start;
    if (kind == FP32) {
        for (int64_t i = 0; i < count; i++) total[i] += whole[i];
    } else if (kind == BF16) {
        for (int64_t i = 0; i < count; i++) total[i] += from_bf16(half[i]);
    } else {
        for (int64_t i = 0; i < count; i++) total[i] += from_fp16(half[i]);
    }
}

DS_INLINE void sum_block(const Sum& s, int64_t block, const Place& place, int64_t count) {
    alignas(64) Total totals[LARGEST];
    float* total = &totals[0].value;
    first_part(s, block, place, count, total);
    for (int part = 1; part < s.count; part++)
        if (s.kinds[part] == PAYLOAD)
            decode_block(*s.layout, static_cast<const uint8_t*>(s.parts[part]), block, place.byte, count, totals);
        else
            add_plain(s.parts[part], s.kinds[part], place.start, count, total);
    if (s.scale != 1.0f)
        for (int64_t i = 0; i < count; i++) total[i] *= s.scale;
    if (s.add) add_plain(s.out, s.out_kind, place.start, count, total);
    if (s.out_kind == FP32)
        std::copy_n(total, count, static_cast<float*>(s.out) + place.start);
    else
        narrow(total, s.out_kind, static_cast<uint16_t*>(s.out) + place.start, count);
}

DS_INLINE void sum_range(const Sum& s, int64_t begin, int64_t end) {
    Walk walk(*s.layout, begin);
    for (int64_t block = begin; block < end; block++) {
        const Place place = walk.at(block);
        sum_block(s, block, place, place.count);
    }
}

void portable(const Sum& s, int64_t begin, int64_t end) { sum_range(s, begin, end); }
DS_AVX2 void avx2(const Sum& s, int64_t begin, int64_t end) { sum_range(s, begin, end); }
DS_AVX512 void avx512(const Sum& s, int64_t begin, int64_t end) { sum_range(s, begin, end); }

// ---------------------------------------------------------------------------------------------------------------------

// Do the work on ranges of blocks, one per thread.
template <class Work> void run(const Work& work, int threads) {
    using Function = void (*)(const Work&, int64_t, int64_t);
    const Function range = Versions<Function>{portable, avx2, avx512}.pick();
    const int64_t blocks = work.layout->blocks, most = blocks * work.layout->block / PER_THREAD;
    const int useful = static_cast<int>(std::clamp<int64_t>(most, 1, threads));
    const int64_t share = (blocks + useful - 1) / useful;
#pragma omp parallel for num_threads(useful) schedule(static, 1)
    for (int thread = 0; thread < useful; thread++)
        if (thread * share < blocks) range(work, thread * share, std::min((thread + 1) * share, blocks));
}

}  // namespace
}  // namespace ds

extern "C" {

void ds_block_encode(const ds::BlockLayout* layout, const void* values, ds::Kind kind, void* payload, void* memory,
                     float kept, float renewed, int threads) {
    auto *bytes = static_cast<uint8_t*>(payload);
    ds::run(ds::Encoding{layout, values, kind, bytes, static_cast<uint16_t*>(memory), kept, renewed}, threads);
}

void ds_block_decode(const ds::BlockLayout* layout, const void* payload, void* out, ds::Kind kind, int threads) {
    ds::run(ds::Decoding{layout, static_cast<const uint8_t*>(payload), out, kind}, threads);
}

// kinds[i]: that of a plain part, or 3: the part is a payload.
void ds_block_sum(const ds::BlockLayout* layout, const void* const* parts, const int32_t* kinds, int count, void* out,
                  ds::Kind kind, float scale, bool add, int threads) {
    ds::run(ds::Sum{layout, parts, kinds, count, out, kind, scale, add}, threads);
}

}
