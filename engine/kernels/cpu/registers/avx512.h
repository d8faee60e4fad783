// One register of AVX-512; see vectors.h.
#pragma once

inline Floats set1_register(float x) { return _mm512_set1_ps(x); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats round(Floats x) { return _mm512_roundscale_ps(x, 8); }
inline Floats times_power_of_2(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
inline float reduce_add(Floats x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Floats x) { return _mm512_reduce_max_ps(x); }

inline __mmask16 first_lanes(int count) { return count >= 16 ? 0xffff : (1u << count) - 1; }
inline Floats load_partial(const float* p, int count, float rest) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(rest), first_lanes(count), p);
}
inline void store_partial(float* p, int count, Floats x) {
    _mm512_mask_storeu_ps(p, first_lanes(count), x);
}
inline uint32_t equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline uint32_t greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }

inline Floats half_register(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline Floats bf16_register(const bf16* p) {
    const __m256i x = _mm256_loadu_si256((const __m256i*)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline void store_bf16(bf16* p, Floats x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    const __m512i high = (__m512i)(rounded_to_bf16(x) >> 16);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(high));
#endif
}
inline Floats int8_register(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline void store_int8(int8_t* p, Floats x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

inline Ints set_bits(Ints x, const uint8_t* p, int bit) {
    uint64_t which;
    std::memcpy(&which, p, 8);
    const __m512i with = _mm512_or_si512((__m512i)x, _mm512_set1_epi8(char(bit)));
    return (Ints)_mm512_mask_mov_epi8((__m512i)x, which, with);
}
inline Ints table_lookup(Ints x, const uint8_t* table) {
    const __m512i both = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
    return (Ints)_mm512_shuffle_epi8(both, (__m512i)x);
}

#ifdef __AVX512BF16__
struct Pair { __m512bh v; };
inline Pair broadcast_pair(const bf16* p) {
    int32_t both;
    std::memcpy(&both, p, 4);
    return {(__m512bh)_mm512_set1_epi32(both)};
}
inline Floats dot(Floats sum, Ints w, Pair x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, x.v); }
#endif

constexpr bool NARROW_IN_16 = false, WIDE_IS_SIGNED = false;
template <Width>
inline Ints add_products(Ints sum, Ints codes, Ints x) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
}
