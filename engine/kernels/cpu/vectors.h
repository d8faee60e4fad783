// Sixteen numbers at once: one register of AVX-512, or two of AVX2.
//
// Integer products take four bytes a lane: by AVX-512 VNNI, AVX-VNNI, or the multiply-add of bytes
// that every AVX2 processor has. All of them are exact, so a sum never depends on which.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

using bf16 = uint16_t;
constexpr int LANES = 16;

// How large codes are: sums of the products of up to 4 bits fit 16 bits, those of a pair of up to 6
// bits do, and those of 8 bits do where 128 is taken off the code, whose sign moves to the other
// factor.
enum class Width { narrow, middle, wide };

// What a sum of 32-bit integers begins with.
inline int32_t begin_of(Width width, int32_t total, int offset) {
    return width == Width::narrow ? 0 : (width == Width::wide ? 128 - offset : -offset) * total;
}

inline float from_bf16(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

#ifdef __AVX512F__

struct F { __m512 v; };
struct I { __m512i v; };  // 16 int32, or 64 bytes

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F abs(F x) { return {_mm512_abs_ps(x.v)}; }
inline F round(F x) { return {_mm512_roundscale_ps(x.v, 8)}; }
inline F times_power_of_2(F x, F n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline float reduce_add(F x) { return _mm512_reduce_add_ps(x.v); }
inline float reduce_max(F x) { return _mm512_reduce_max_ps(x.v); }

inline __mmask16 first_lanes(int count) { return count >= 16 ? 0xffff : (1u << count) - 1; }
// The first `count` numbers at p, then `rest`.
inline F load_some(const float* p, int count, float rest) {
    return {_mm512_mask_loadu_ps(_mm512_set1_ps(rest), first_lanes(count), p)};
}
inline void store_some(float* p, int count, F x) {
    _mm512_mask_storeu_ps(p, first_lanes(count), x.v);
}
// A bit a lane.
inline uint32_t equal(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline uint32_t greater(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
// a where x is negative, else b.
inline F where_negative(F x, F a, F b) {
    return {_mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x.v)), b.v, a.v)};
}

inline F load_half(const void* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
inline F load_bf16(const bf16* p) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
inline void store_bf16(bf16* p, F x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.v));
#else
    const __m512i bits = _mm512_castps_si512(x.v), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q),
                               _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
#endif
}

inline F to_float(I x) { return {_mm512_cvtepi32_ps(x.v)}; }
// Numbers of -127 ... 127 as bytes.
inline void store_int8(int8_t* p, F x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
inline I load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// Bits BITS * place ... of each byte.
template <int BITS>
inline I bits_of(I x, int place) {
    return {_mm512_and_si512(_mm512_srli_epi16(x.v, BITS * place), _mm512_set1_epi8((1 << BITS) - 1))};
}
// Sets a bit in the bytes that 64 bits at p say.
inline I set_bits(I x, const uint8_t* p, int bit) {
    uint64_t which;
    std::memcpy(&which, p, 8);
    const __m512i with = _mm512_or_si512(x.v, _mm512_set1_epi8(char(bit)));
    return {_mm512_mask_mov_epi8(x.v, which, with)};
}
// The byte of the table that each byte, below 16, is the place of.
inline I look_up(I x, const uint8_t* table) {
    const __m512i both = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
    return {_mm512_shuffle_epi8(both, x.v)};
}
// 16 signed bytes.
inline F load_int8(const void* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}

// Two bfloat16 a lane, times a pair that every lane meets.
struct Pairs { __m512i v; };
inline Pairs load_pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
#ifdef __AVX512BF16__
struct Pair { __m512bh v; };
inline Pair same_pair(const bf16* p) {
    int32_t both;
    std::memcpy(&both, p, 4);
    return {(__m512bh)_mm512_set1_epi32(both)};
}
inline F dot(F sum, Pairs w, Pair x) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)w.v, x.v)}; }
#else
struct Pair { F low, high; };
inline Pair same_pair(const bf16* p) { return {set1(from_bf16(p[0])), set1(from_bf16(p[1]))}; }
inline F dot(F sum, Pairs w, Pair x) {
    const F low{_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16))};
    const F high{_mm512_castsi512_ps(_mm512_and_si512(w.v, _mm512_set1_epi32(0xffff0000)))};
    return fma(high, x.high, fma(low, x.low, sum));
}
#endif

using Four = __m512i;
inline Four same_four(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
// The sum of codes times bytes, four to a lane, less `offset` times the `total` of the bytes.
#ifdef __AVX512VNNI__
template <Width>
struct SumOf {
    __m512i v;
    static SumOf begin(int32_t total, int offset) { return {_mm512_set1_epi32(-offset * total)}; }
    void add(I codes, Four x) { v = _mm512_dpbusd_epi32(v, codes.v, x); }
    I end(int32_t, int) const { return {v}; }
};
#else
template <Width WIDTH>
struct SumOf {
    __m512i v;
    static SumOf begin(int32_t total, int offset) {
        return {_mm512_set1_epi32(begin_of(WIDTH, total, offset))};
    }
    void add(I codes, Four x) {
        const __m512i one = _mm512_set1_epi16(1);
        if constexpr (WIDTH == Width::narrow) {
            v = _mm512_add_epi16(v, _mm512_maddubs_epi16(codes.v, x));
        } else if constexpr (WIDTH == Width::middle) {
            v = _mm512_add_epi32(v, _mm512_madd_epi16(_mm512_maddubs_epi16(codes.v, x), one));
        } else {
            const __m512i w = _mm512_xor_si512(codes.v, _mm512_set1_epi8(-128));
            const __m512i turned =
                _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
            const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
            v = _mm512_add_epi32(v, _mm512_madd_epi16(pairs, one));
        }
    }
    I end(int32_t total, int offset) const {
        if constexpr (WIDTH != Width::narrow) return {v};
        return {_mm512_add_epi32(_mm512_madd_epi16(v, _mm512_set1_epi16(1)),
                                 _mm512_set1_epi32(-offset * total))};
    }
};
#endif

#else  // AVX2

struct F { __m256 a, b; };
struct I { __m256i a, b; };

#define BOTH(name, call) \
    inline F name(F x, F y) { return {call(x.a, y.a), call(x.b, y.b)}; }
BOTH(add, _mm256_add_ps)
BOTH(sub, _mm256_sub_ps)
BOTH(mul, _mm256_mul_ps)
BOTH(div, _mm256_div_ps)
BOTH(max, _mm256_max_ps)
#undef BOTH
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}
inline F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F round(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
inline __m256 power_of_2(__m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline F times_power_of_2(F x, F n) { return mul(x, {power_of_2(n.a), power_of_2(n.b)}); }
inline float reduce_add(F x) {
    const __m256 both = _mm256_add_ps(x.a, x.b);
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float reduce_max(F x) {
    const __m256 both = _mm256_max_ps(x.a, x.b);
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline F load_some(const float* p, int count, float rest) {
    if (count >= LANES) return load(p);
    float all[LANES];
    for (int i = 0; i < LANES; ++i) all[i] = i < count ? p[i] : rest;
    return load(all);
}
inline void store_some(float* p, int count, F x) {
    if (count >= LANES) return store(p, x);
    float all[LANES];
    store(all, x);
    std::memcpy(p, all, count * sizeof(float));
}
inline uint32_t bits(__m256 a, __m256 b) {
    return uint32_t(_mm256_movemask_ps(a)) | uint32_t(_mm256_movemask_ps(b)) << 8;
}
inline uint32_t equal(F x, F y) {
    return bits(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ));
}
inline uint32_t greater(F x, F y) {
    return bits(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
}
inline F where_negative(F x, F a, F b) {
    return {_mm256_blendv_ps(b.a, a.a, x.a), _mm256_blendv_ps(b.b, a.b, x.b)};
}

inline F load_half(const void* p) {
    const __m128i* at = (const __m128i*)p;
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline __m256 widen(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline F load_bf16(const bf16* p) {
    return {widen(_mm_loadu_si128((const __m128i*)p)),
            widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline __m256i rounded_to_bf16(__m256 x) {
    const __m256i value = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(value, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(value, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(up),
                                         _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)),
                                         _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
}
inline void store_bf16(bf16* p, F x) {
    const __m256i both = _mm256_packus_epi32(rounded_to_bf16(x.a), rounded_to_bf16(x.b));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}

inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline void store_int8(int8_t* p, F x) {
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    const __m256i ordered = _mm256_permute4x64_epi64(both, 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(ordered),
                                                  _mm256_extracti128_si256(ordered, 1)));
}
inline I load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
template <int BITS>
inline I bits_of(I x, int place) {
    const __m256i mask = _mm256_set1_epi8((1 << BITS) - 1);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, BITS * place), mask),
            _mm256_and_si256(_mm256_srli_epi16(x.b, BITS * place), mask)};
}
inline __m256i set_bits(__m256i x, const uint8_t* p, int bit) {
    int32_t which;
    std::memcpy(&which, p, 4);
    const __m256i bytes = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202,
                                            0x0101010101010101, 0x0000000000000000);
    const __m256i masks = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i own = _mm256_shuffle_epi8(_mm256_set1_epi32(which), bytes);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(own, masks), masks);
    return _mm256_or_si256(x, _mm256_and_si256(is_set, _mm256_set1_epi8(char(bit))));
}
inline I set_bits(I x, const uint8_t* p, int bit) {
    return {set_bits(x.a, p, bit), set_bits(x.b, p + 4, bit)};
}
inline I look_up(I x, const uint8_t* table) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(both, x.a), _mm256_shuffle_epi8(both, x.b)};
}
inline F load_int8(const void* p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

struct Pairs { __m256i a, b; };
struct Pair { F low, high; };
inline Pairs load_pairs(const void* p) {
    const I both = load_bytes((const uint8_t*)p);
    return {both.a, both.b};
}
inline Pair same_pair(const bf16* p) { return {set1(from_bf16(p[0])), set1(from_bf16(p[1]))}; }
inline F dot(F sum, Pairs w, Pair x) {
    const __m256i mask = _mm256_set1_epi32(0xffff0000);
    const F low{_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
    const F high{_mm256_castsi256_ps(_mm256_and_si256(w.a, mask)),
                 _mm256_castsi256_ps(_mm256_and_si256(w.b, mask))};
    return fma(high, x.high, fma(low, x.low, sum));
}

using Four = __m256i;
inline Four same_four(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
#ifdef __AVXVNNI__
template <Width>
struct SumOf {
    __m256i a, b;
    static SumOf begin(int32_t total, int offset) {
        const __m256i start = _mm256_set1_epi32(-offset * total);
        return {start, start};
    }
    void add(I codes, Four x) {
        a = _mm256_dpbusd_avx_epi32(a, codes.a, x);
        b = _mm256_dpbusd_avx_epi32(b, codes.b, x);
    }
    I end(int32_t, int) const { return {a, b}; }
};
#else
template <Width WIDTH>
struct SumOf {
    __m256i a, b;
    static SumOf begin(int32_t total, int offset) {
        const __m256i start = _mm256_set1_epi32(begin_of(WIDTH, total, offset));
        return {start, start};
    }
    static __m256i add(__m256i sum, __m256i codes, __m256i x) {
        const __m256i one = _mm256_set1_epi16(1);
        if constexpr (WIDTH == Width::narrow)
            return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
        __m256i pairs;
        if constexpr (WIDTH == Width::middle) {
            pairs = _mm256_maddubs_epi16(codes, x);
        } else {
            const __m256i w = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
            pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        }
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, one));
    }
    void add(I codes, Four x) {
        a = add(a, codes.a, x);
        b = add(b, codes.b, x);
    }
    I end(int32_t total, int offset) const {
        if constexpr (WIDTH != Width::narrow) return {a, b};
        const __m256i one = _mm256_set1_epi16(1), start = _mm256_set1_epi32(-offset * total);
        return {_mm256_add_epi32(_mm256_madd_epi16(a, one), start),
                _mm256_add_epi32(_mm256_madd_epi16(b, one), start)};
    }
};
#endif
#endif

inline F zero() { return set1(0.0f); }

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
inline F capped(F x, float cap) {
    if (cap == 0.0f) return x;
    const F half = sub(sigmoid(mul(x, set1(2.0f / cap))), set1(0.5f));
    return mul(half, set1(2.0f * cap));
}
