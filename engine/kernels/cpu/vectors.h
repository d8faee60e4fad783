// Sixteen numbers at once: one register of AVX-512, two of AVX2, or four of NEON.
//
// registers/ has, per instruction set, the operations on one register that GCC's and Clang's vector
// types do not provide; several registers are `Two` halves, and operations apply to both.
//
// Integer products take four bytes a lane: by AVX-512 VNNI, AVX-VNNI, NEON's dot products, or the
// multiply-add of bytes that every AVX2 processor has. All of them are exact, so a sum never
// depends on which.
#pragma once

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;
constexpr int LANES = 16;

// The width of codes: sums of products of up to 4 bits fit 16 bits, those of a pair of up to 6 bits
// do, and those of 8 bits do once 128 is subtracted from the code and its sign moved to the other
// factor.
enum class Width { narrow, middle, wide };

inline float bf16_to_float(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// ---- one register

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int NUM_FLOATS = REGISTER / 4;

typedef float Floats __attribute__((vector_size(REGISTER)));
typedef int32_t Ints __attribute__((vector_size(REGISTER)));  // or four bytes a lane
typedef uint32_t Words __attribute__((vector_size(REGISTER)));
#ifdef __aarch64__
using Shift = uint8_t;
#else  // x86 cannot shift single bytes
using Shift = uint16_t;
#endif
typedef Shift Shifted __attribute__((vector_size(REGISTER)));
// Unaligned.
typedef float FloatsAt __attribute__((vector_size(REGISTER), aligned(4), may_alias));
typedef int32_t IntsAt __attribute__((vector_size(REGISTER), aligned(1), may_alias));

inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats sub(Floats a, Floats b) { return a - b; }
inline Floats mul(Floats a, Floats b) { return a * b; }
inline Floats div(Floats a, Floats b) { return a / b; }
inline Floats abs(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }
inline Floats to_float(Ints x) { return __builtin_convertvector(x, Floats); }
// a where x is negative, else b.
inline Floats where_negative(Floats x, Floats a, Floats b) { return (Ints)x < 0 ? a : b; }
inline void store(float* p, Floats x) { *(FloatsAt*)p = x; }
inline Ints add(Ints a, Ints b) { return a + b; }
// Bits BITS * place ... of each byte.
template <int BITS>
inline Ints bits_of(Ints x, int place) {
    constexpr Shift MASK = Shift(0x0101 * ((1 << BITS) - 1));
    return (Ints)((Shifted)x >> Shift(BITS * place) & MASK);
}
// Rounded to the nearest of the numbers whose high half is a bfloat16; NaN stays NaN.
inline Words rounded_to_bf16(Floats x) {
    const Words bits = (Words)x, up = bits + ((bits >> 16 & 1) + 0x7fff);
    return x == x ? up : Words{} + 0x7fc00000;
}

#if defined(__AVX512F__)
#include "registers/avx512.h"
#elif defined(__AVX2__)
#include "registers/avx2.h"
#else
#include "registers/neon.h"
#endif

#ifdef __aarch64__
inline void spin_pause() { asm volatile("yield"); }
inline float half_to_float(uint16_t x) {
    __fp16 half;
    std::memcpy(&half, &x, 2);
    return half;
}
inline uint16_t float_to_half(float x) {
    const __fp16 half = __fp16(x);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
#else
inline void spin_pause() { _mm_pause(); }
inline float half_to_float(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#endif

#ifndef __AVX512F__
// x times 2^n, n a whole number of -126 ... 127.
inline Floats times_power_of_2(Floats x, Floats n) {
    return x * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
}
#endif

// Of two bfloat16 a lane.
inline Floats low_bf16(Ints x) { return (Floats)((Words)x << 16); }
inline Floats high_bf16(Ints x) { return (Floats)((Words)x & 0xffff0000u); }

// ---- several registers

template <class Half>
struct Two { Half a, b; };
template <class Half>
inline Two<Half> two(Half a, Half b) { return {a, b}; }

// Sixteen numbers: of float32, and of int32 or four bytes a lane.
#if defined(__AVX512F__)
using F = Floats;
using I = Ints;
#elif defined(__AVX2__)
using F = Two<Floats>;
using I = Two<Ints>;
#else
using F = Two<Two<Floats>>;
using I = Two<Two<Ints>>;
#endif

#define OF_BOTH(name)                                          \
    template <class Half, class... Rest>                       \
    inline auto name(Two<Half> x, Rest... rest) {              \
        return two(name(x.a, rest.a...), name(x.b, rest.b...)); \
    }
OF_BOTH(add) OF_BOTH(sub) OF_BOTH(mul) OF_BOTH(div) OF_BOTH(max) OF_BOTH(fma) OF_BOTH(abs)
OF_BOTH(round) OF_BOTH(times_power_of_2) OF_BOTH(where_negative) OF_BOTH(to_float)
OF_BOTH(sum_pairs) OF_BOTH(low_bf16) OF_BOTH(high_bf16)
#undef OF_BOTH

template <class Half>
constexpr int lanes(Two<Half>) { return sizeof(Half) / 4; }

// Registers made for number 0, 1, ... of V.
template <class V, class Make>
inline V each(Make make, int i = 0) {
    if constexpr (sizeof(V) == REGISTER) return make(i);
    else {
        using Half = decltype(V::a);
        return {each<Half>(make, i), each<Half>(make, i + int(sizeof(Half)) / REGISTER)};
    }
}
inline F load(const float* p) {
    return each<F>([=](int i) -> Floats { return *(const FloatsAt*)(p + i * NUM_FLOATS); });
}
inline F set1(float x) {
    return each<F>([=](int) { return set1_register(x); });
}
inline F load_half(const void* p) {
    return each<F>([=](int i) { return half_register((const uint16_t*)p + i * NUM_FLOATS); });
}
inline F load_bf16(const bf16* p) {
    return each<F>([=](int i) { return bf16_register(p + i * NUM_FLOATS); });
}
// 16 signed bytes.
inline F load_int8(const void* p) {
    return each<F>([=](int i) { return int8_register((const int8_t*)p + i * NUM_FLOATS); });
}
inline I load_bytes(const uint8_t* p) {
    return each<I>([=](int i) -> Ints { return *(const IntsAt*)(p + i * REGISTER); });
}
inline F zero() { return set1(0.0f); }

#define STORE_BOTH(name, Number)                 \
    template <class Half>                        \
    inline void name(Number* p, Two<Half> x) {   \
        name(p, x.a);                            \
        name(p + lanes(x), x.b);                 \
    }
STORE_BOTH(store, float)
STORE_BOTH(store_bf16, bf16)
STORE_BOTH(store_int8, int8_t)  // numbers of -127 ... 127 as bytes
#undef STORE_BOTH

template <class Half>
inline float reduce_add(Two<Half> x) { return reduce_add(add(x.a, x.b)); }
template <class Half>
inline float reduce_max(Two<Half> x) { return reduce_max(max(x.a, x.b)); }
// A bit a lane.
template <class Half>
inline uint32_t equal(Two<Half> x, Two<Half> y) {
    return equal(x.a, y.a) | equal(x.b, y.b) << lanes(x);
}
template <class Half>
inline uint32_t greater(Two<Half> x, Two<Half> y) {
    return greater(x.a, y.a) | greater(x.b, y.b) << lanes(x);
}
#ifndef __AVX512F__
// The first `count` numbers at p, then `rest`.
inline F load_partial(const float* p, int count, float rest) {
    if (count >= LANES) return load(p);
    float all[LANES];
    for (int i = 0; i < LANES; ++i) all[i] = i < count ? p[i] : rest;
    return load(all);
}
inline void store_partial(float* p, int count, F x) {
    if (count >= LANES) return store(p, x);
    float all[LANES];
    store(all, x);
    std::memcpy(p, all, count * sizeof(float));
}
#endif

template <int BITS, class Half>
inline Two<Half> bits_of(Two<Half> x, int place) {
    return {bits_of<BITS>(x.a, place), bits_of<BITS>(x.b, place)};
}
// Sets a bit in the bytes selected by the bits at p.
template <class Half>
inline Two<Half> set_bits(Two<Half> x, const uint8_t* p, int bit) {
    return {set_bits(x.a, p, bit), set_bits(x.b, p + sizeof(Half) / 8, bit)};
}
// Each byte, below 16, replaced by the table's byte at that index.
template <class Half>
inline Two<Half> table_lookup(Two<Half> x, const uint8_t* table) {
    return {table_lookup(x.a, table), table_lookup(x.b, table)};
}

// Two bfloat16 a lane, multiplied by a pair that is the same in every lane.
using Pairs = I;
inline Pairs load_pairs(const void* p) { return load_bytes((const uint8_t*)p); }
#ifndef __AVX512BF16__
struct Pair { F low, high; };
inline Pair broadcast_pair(const bf16* p) {
    return {set1(bf16_to_float(p[0])), set1(bf16_to_float(p[1]))};
}
inline F dot(F sum, Pairs w, Pair x) {
    return fma(high_bf16(w), x.high, fma(low_bf16(w), x.low, sum));
}
#endif

using Four = Ints;
inline Four broadcast_four(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return Ints{} + four;
}
template <Width WIDTH, class Half>
inline Two<Half> add_products(Two<Half> sum, Two<Half> codes, Four x) {
    return {add_products<WIDTH>(sum.a, codes.a, x), add_products<WIDTH>(sum.b, codes.b, x)};
}
// The sum of codes times bytes, four to a lane, less `offset` times the `total` of the bytes.
template <Width WIDTH, class V = I>
struct SumOf {
    V v;
    static constexpr bool IN_16 = WIDTH == Width::narrow && NARROW_IN_16;
    static constexpr int LESS = WIDTH == Width::wide && WIDE_IS_SIGNED ? 128 : 0;

    static V all(int32_t value) {
        return each<V>([=](int) { return Ints{} + value; });
    }
    static SumOf begin(int32_t total, int offset) {
        return {all(IN_16 ? 0 : (LESS - offset) * total)};
    }
    void add(V codes, Four x) { v = add_products<WIDTH>(v, codes, x); }
    V end(int32_t total, int offset) const {
        if constexpr (IN_16) return ::add(sum_pairs(v), all(-offset * total));
        else return v;
    }
};

// e^x for -87 <= x <= 88 (smaller ones as -87), to about 2 units in the last place: 2^n times a
// polynomial of the rest. NaN stays NaN: of two operands, one of them NaN, max returns the second.
inline F exp(F x) {
    x = max(set1(-87.0f), x);
    const F n = round(mul(x, set1(1.44269504f)));
    F r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F p = set1(1.0f / 720);
    for (const float next : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = fma(p, r, set1(next));
    return times_power_of_2(p, n);
}

// 1 / (1 + e^-x)
inline F sigmoid(F x) {
    const F one = set1(1.0f), e = exp(sub(zero(), abs(x)));  // e^-|x|
    return div(where_negative(x, e, one), add(one, e));
}

// cap * tanh(x / cap); cap 0 = none
inline F softcap(F x, float cap) {
    if (cap == 0.0f) return x;
    const F half = sub(sigmoid(mul(x, set1(2.0f / cap))), set1(0.5f));
    return mul(half, set1(2.0f * cap));
}
