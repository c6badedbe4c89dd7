// Writes the changes of an adapter into their places, scaled: as they are, or as codes.
// One call for a whole adapter, so that threads of an interpreter do not wait for each other.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

using Bf16 = uint16_t;  // the bits of a bfloat16

// As packing.py fills it in.
struct Change {
    const void* down;  // [rank, in]
    const void* up;    // [out, rank]
    void* down_to;     // [rank, in]
    void* up_to;       // [out, rank], or [rank, out] if turned
    float* scales;     // [rank], of codes
    int64_t rank, in, out;
    int64_t down_is_bf16, up_is_bf16, turned;
    double scaling;
};

constexpr uint32_t kInfinity = 0x7f800000;
constexpr int64_t kWide = 512;   // numbers of some outputs that are handled as one row
constexpr int64_t kBlock = 64;   // outputs that are turned at once
constexpr float kRounding = 3 << 22;  // added to a small number, its last byte is the nearest code

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

// A number as it is stored.
struct Same {
    float operator()(Bf16 x) const { return from_bits(uint32_t(x) << 16); }
    float operator()(float x) const { return x; }
};

// A number times the scaling, rounded to its own type.
struct Times {
    float scaling;
    float operator()(Bf16 x) const {
        return from_bits(to_bf16(Same()(x) * scaling) << 16);
    }
    float operator()(float x) const { return x * scaling; }
};

inline void store(float x, float* to) { *to = x; }
inline void store(float x, Bf16* to) { *to = Bf16(to_bf16(x)); }
inline void store(float x, int8_t* to) { *to = int8_t(bits_of(x + kRounding)); }

// From [outputs, ranks] to [ranks, outputs], whose rows lie so far apart.
template <class To>
void turn(const To* from, int64_t ranks, int64_t outputs, To* to, int64_t apart) {
    for (int64_t r = 0; r < ranks; r++)
        for (int64_t o = 0; o < outputs; o++) to[r * apart + o] = from[o * ranks + r];
}

// Magnitudes are in the order of their bits, and what is not finite is above the rest.
inline uint32_t larger(uint32_t most, float x) {
    const uint32_t bits = bits_of(x) & 0x7fffffff;
    return bits > most ? bits : most;
}

template <class From, class Read>
uint32_t largest(const From* from, int64_t count, Read read) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) most = larger(most, read(from[i]));
    return most;
}

// What codes of a rank are to be multiplied by, and what its numbers are divided by.
inline float scale_of(uint32_t bits) { return from_bits(bits) / 127; }
inline float step_of(float scale) { return scale > 0 ? scale : 1; }

template <class From, class Read>
void note_largest(const From* __restrict from, int64_t count, Read read, uint32_t* __restrict most) {
    for (int64_t i = 0; i < count; i++) most[i] = larger(most[i], read(from[i]));
}

template <class From, class Read>
void divide(const From* __restrict from, int64_t count, Read read, float step, int8_t* __restrict to) {
    for (int64_t i = 0; i < count; i++) store(read(from[i]) / step, to + i);
}

template <class From, class Read>
void divide(
    const From* __restrict from, int64_t count, Read read, const float* __restrict steps, int8_t* __restrict to
) {
    for (int64_t i = 0; i < count; i++) store(read(from[i]) / steps[i], to + i);
}

template <class From>
bool encode_down(const From* from, const Change& change, int8_t* to) {
    const Same read;
    for (int64_t r = 0; r < change.rank; r++, from += change.in, to += change.in) {
        const uint32_t most = largest(from, change.in, read);
        if (most >= kInfinity) return false;
        change.scales[r] = scale_of(most);
        divide(from, change.in, read, step_of(change.scales[r]), to);
    }
    return true;
}

// Some outputs are one long row, since ranks are few. Scales have those of down.
template <class From, class Read>
bool encode_up(const From* from, const Change& change, Read read, int8_t* to) {
    const int64_t rank = change.rank, total = rank * change.out;
    const int64_t wide = rank * (kWide / rank > 1 ? kWide / rank : 1);
    std::vector<uint32_t> most(wide);
    for (int64_t at = 0; at < total; at += wide) {
        const int64_t count = std::min(wide, total - at);
        note_largest(from + at, count, read, most.data());
    }
    std::vector<float> steps(wide);
    for (int64_t r = 0; r < rank; r++) {
        for (int64_t i = r; i < wide; i += rank) most[r] = std::max(most[r], most[i]);
        if (most[r] >= kInfinity) return false;
        const float scale = scale_of(most[r]);
        change.scales[r] *= scale;
        for (int64_t i = r; i < wide; i += rank) steps[i] = step_of(scale);
    }
    std::vector<int8_t> turning(wide);
    for (int64_t at = 0; at < total; at += wide) {
        const int64_t count = std::min(wide, total - at);
        int8_t* codes = change.turned ? turning.data() : to + at;
        divide(from + at, count, read, steps.data(), codes);
        if (change.turned) turn(codes, rank, count / rank, to + at / rank, change.out);
    }
    return true;
}

template <class From, class Read, class To>
bool copy(const From* from, int64_t count, Read read, To* to) {
    if (largest(from, count, read) >= kInfinity) return false;
    for (int64_t i = 0; i < count; i++) store(read(from[i]), to + i);
    return true;
}

template <class From, class Read, class To>
bool copy_turned(const From* from, const Change& change, Read read, To* to) {
    const int64_t rank = change.rank;
    if (largest(from, rank * change.out, read) >= kInfinity) return false;
    std::vector<To> turning(rank * kBlock);
    for (int64_t at = 0; at < change.out; at += kBlock) {
        const int64_t count = std::min(kBlock, change.out - at);
        const From* these = from + at * rank;
        for (int64_t i = 0; i < count * rank; i++) store(read(these[i]), turning.data() + i);
        turn(turning.data(), rank, count, to + at, change.out);
    }
    return true;
}

template <class To, class From>
bool write_down(const Change& change) {
    const auto* from = static_cast<const From*>(change.down);
    auto* to = static_cast<To*>(change.down_to);
    if constexpr (std::is_same_v<To, int8_t>)
        return encode_down(from, change, to);
    else
        return copy(from, change.rank * change.in, Same(), to);
}

template <class To, class From, class Read>
bool write_up(const Change& change, Read read) {
    const auto* from = static_cast<const From*>(change.up);
    auto* to = static_cast<To*>(change.up_to);
    if constexpr (std::is_same_v<To, int8_t>)
        return encode_up(from, change, read, to);
    else if (change.turned)
        return copy_turned(from, change, read, to);
    else
        return copy(from, change.rank * change.out, read, to);
}

template <class To, class From>
bool write_up(const Change& change) {
    if (change.scaling == 1) return write_up<To, From>(change, Same());
    return write_up<To, From>(change, Times{float(change.scaling)});
}

template <class To>
int64_t write_all(const Change* changes, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const Change& one = changes[i];
        if (!(one.down_is_bf16 ? write_down<To, Bf16>(one) : write_down<To, float>(one))) return i;
        if (!(one.up_is_bf16 ? write_up<To, Bf16>(one) : write_up<To, float>(one))) return i;
    }
    return -1;
}

}  // namespace

extern "C" {

const char* windlass_simd() { return "as the compiler chose"; }

// The first change with numbers that are not finite, or -1.
int64_t windlass_pack_codes(const void* changes, int64_t count) {
    return write_all<int8_t>(static_cast<const Change*>(changes), count);
}
int64_t windlass_pack_bf16(const void* changes, int64_t count) {
    return write_all<Bf16>(static_cast<const Change*>(changes), count);
}
int64_t windlass_pack_floats(const void* changes, int64_t count) {
    return write_all<float>(static_cast<const Change*>(changes), count);
}
}
