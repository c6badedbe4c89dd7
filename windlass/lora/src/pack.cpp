// Writes the LoRA weights of an adapter to their targets: scaled, and converted or quantised to int8.
// One call packs a whole adapter, so that reader threads do not contend for the GIL.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

using Bf16 = uint16_t;  // the bits of a bfloat16

// The weights of one module. packing.py fills it in (_TASK).
struct Task {
    const void* down;  // [rank, in]
    const void* up;    // [out, rank]
    void* down_to;     // [rank, in]
    void* up_to;       // [out, rank], or [rank, out] if transposed
    float* scales;     // [rank], int8 codes only
    int64_t rank, in, out;
    int64_t down_is_bf16, up_is_bf16, transposed;
    double scaling;
};

constexpr uint32_t kInfinity = 0x7f800000;
constexpr int64_t kMaxChunk = 512;        // values of several outputs, handled as one row
constexpr int64_t kTransposeBlock = 64;   // outputs transposed together
constexpr float kRoundingBias = 3 << 22;  // after adding it, the last byte is the nearest code

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// A value as stored.
struct Identity {
    float operator()(Bf16 x) const { return from_bits(uint32_t(x) << 16); }
    float operator()(float x) const { return x; }
};

// A value times the scaling, rounded to its own type.
struct Scaled {
    float scaling;
    float operator()(Bf16 x) const {
        return from_bits(to_bf16(Identity()(x) * scaling) << 16);
    }
    float operator()(float x) const { return x * scaling; }
};

inline void store(float x, float* to) { *to = x; }
inline void store(float x, Bf16* to) { *to = Bf16(to_bf16(x)); }
inline void store(float x, int8_t* to) { *to = int8_t(bits_of(x + kRoundingBias)); }

// Transposes [outputs, ranks] to [ranks, outputs], with the given stride between rows.
template <class To>
void transpose(const To* from, int64_t ranks, int64_t outputs, To* to, int64_t stride) {
    for (int64_t r = 0; r < ranks; r++)
        for (int64_t o = 0; o < outputs; o++) to[r * stride + o] = from[o * ranks + r];
}

// Magnitudes compare like their bits; infinity and NaN are above all finite values.
inline uint32_t max_bits(uint32_t max, float x) {
    const uint32_t bits = bits_of(x) & 0x7fffffff;
    return bits > max ? bits : max;
}

template <class From, class Read>
uint32_t max_bits_of(const From* from, int64_t count, Read read) {
    uint32_t max = 0;
    for (int64_t i = 0; i < count; i++) max = max_bits(max, read(from[i]));
    return max;
}

// The scale of a rank's codes, and the divisor that quantises its values.
inline float scale_of(uint32_t bits) { return from_bits(bits) / 127; }
inline float divisor_of(float scale) { return scale > 0 ? scale : 1; }

template <class From, class Read>
void update_max(const From* __restrict from, int64_t count, Read read, uint32_t* __restrict max) {
    for (int64_t i = 0; i < count; i++) max[i] = max_bits(max[i], read(from[i]));
}

template <class From, class Read>
void divide(const From* __restrict from, int64_t count, Read read, float divisor, int8_t* __restrict to) {
    for (int64_t i = 0; i < count; i++) store(read(from[i]) / divisor, to + i);
}

template <class From, class Read>
void divide(
    const From* __restrict from, int64_t count, Read read, const float* __restrict divisors, int8_t* __restrict to
) {
    for (int64_t i = 0; i < count; i++) store(read(from[i]) / divisors[i], to + i);
}

template <class From>
bool quantise_down(const From* from, const Task& task, int8_t* to) {
    const Identity read;
    for (int64_t r = 0; r < task.rank; r++, from += task.in, to += task.in) {
        const uint32_t max = max_bits_of(from, task.in, read);
        if (max >= kInfinity) return false;
        task.scales[r] = scale_of(max);
        divide(from, task.in, read, divisor_of(task.scales[r]), to);
    }
    return true;
}

// Handles several outputs as one long row, since ranks are few. `scales` already holds those of down.
template <class From, class Read>
bool quantise_up(const From* from, const Task& task, Read read, int8_t* to) {
    const int64_t rank = task.rank, total = rank * task.out;
    const int64_t chunk = rank * (kMaxChunk / rank > 1 ? kMaxChunk / rank : 1);
    std::vector<uint32_t> max(chunk);
    for (int64_t start = 0; start < total; start += chunk) {
        const int64_t count = std::min(chunk, total - start);
        update_max(from + start, count, read, max.data());
    }
    std::vector<float> divisors(chunk);
    for (int64_t r = 0; r < rank; r++) {
        for (int64_t i = r; i < chunk; i += rank) max[r] = std::max(max[r], max[i]);
        if (max[r] >= kInfinity) return false;
        const float scale = scale_of(max[r]);
        task.scales[r] *= scale;
        for (int64_t i = r; i < chunk; i += rank) divisors[i] = divisor_of(scale);
    }
    std::vector<int8_t> buffer(chunk);
    for (int64_t start = 0; start < total; start += chunk) {
        const int64_t count = std::min(chunk, total - start);
        int8_t* codes = task.transposed ? buffer.data() : to + start;
        divide(from + start, count, read, divisors.data(), codes);
        if (task.transposed) transpose(codes, rank, count / rank, to + start / rank, task.out);
    }
    return true;
}

template <class From, class Read, class To>
bool copy(const From* from, int64_t count, Read read, To* to) {
    if (max_bits_of(from, count, read) >= kInfinity) return false;
    for (int64_t i = 0; i < count; i++) store(read(from[i]), to + i);
    return true;
}

template <class From, class Read, class To>
bool copy_transposed(const From* from, const Task& task, Read read, To* to) {
    const int64_t rank = task.rank;
    if (max_bits_of(from, rank * task.out, read) >= kInfinity) return false;
    std::vector<To> buffer(rank * kTransposeBlock);
    for (int64_t start = 0; start < task.out; start += kTransposeBlock) {
        const int64_t count = std::min(kTransposeBlock, task.out - start);
        const From* rows = from + start * rank;
        for (int64_t i = 0; i < count * rank; i++) store(read(rows[i]), buffer.data() + i);
        transpose(buffer.data(), rank, count, to + start, task.out);
    }
    return true;
}

template <class To, class From>
bool write_down(const Task& task) {
    const auto* from = static_cast<const From*>(task.down);
    auto* to = static_cast<To*>(task.down_to);
    if constexpr (std::is_same_v<To, int8_t>)
        return quantise_down(from, task, to);
    else
        return copy(from, task.rank * task.in, Identity(), to);
}

template <class To, class From, class Read>
bool write_up(const Task& task, Read read) {
    const auto* from = static_cast<const From*>(task.up);
    auto* to = static_cast<To*>(task.up_to);
    if constexpr (std::is_same_v<To, int8_t>)
        return quantise_up(from, task, read, to);
    else if (task.transposed)
        return copy_transposed(from, task, read, to);
    else
        return copy(from, task.rank * task.out, read, to);
}

template <class To, class From>
bool write_up(const Task& task) {
    if (task.scaling == 1) return write_up<To, From>(task, Identity());
    return write_up<To, From>(task, Scaled{float(task.scaling)});
}

template <class To>
int64_t write_all(const Task* tasks, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const Task& task = tasks[i];
        if (!(task.down_is_bf16 ? write_down<To, Bf16>(task) : write_down<To, float>(task))) return i;
        if (!(task.up_is_bf16 ? write_up<To, Bf16>(task) : write_up<To, float>(task))) return i;
    }
    return -1;
}

}  // namespace

extern "C" {

const char* windlass_simd() { return "compiler default"; }

// Returns the index of the first task with a value that is not finite, or -1.
int64_t windlass_pack_codes(const void* tasks, int64_t count) {
    return write_all<int8_t>(static_cast<const Task*>(tasks), count);
}
int64_t windlass_pack_bf16(const void* tasks, int64_t count) {
    return write_all<Bf16>(static_cast<const Task*>(tasks), count);
}
int64_t windlass_pack_floats(const void* tasks, int64_t count) {
    return write_all<float>(static_cast<const Task*>(tasks), count);
}
}
