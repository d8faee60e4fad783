// One register of AVX2; see vectors.h.
#pragma once

inline Floats set1_register(float x) { return _mm256_set1_ps(x); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats round(Floats x) { return _mm256_round_ps(x, 8); }
inline float reduce_add(Floats x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float reduce_max(Floats x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline uint32_t equal(Floats a, Floats b) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
}
inline uint32_t greater(Floats a, Floats b) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
}

inline Floats half_register(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
inline Floats bf16_register(const bf16* p) {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
inline void store_bf16(bf16* p, Floats x) {
    const __m256i high = (__m256i)(rounded_to_bf16(x) >> 16);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(high),
                                                   _mm256_extracti128_si256(high, 1)));
}
inline Floats int8_register(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline void store_int8(int8_t* p, Floats x) {
    const __m256i all = _mm256_cvtps_epi32(x);
    const __m128i halves =
        _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
}

inline Ints set_bits(Ints x, const uint8_t* p, int bit) {
    int32_t which;
    std::memcpy(&which, p, 4);
    const __m256i bytes = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202,
                                            0x0101010101010101, 0x0000000000000000);
    const __m256i masks = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i own = _mm256_shuffle_epi8(_mm256_set1_epi32(which), bytes);
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(own, masks), masks);
    return x | (Ints)_mm256_and_si256(is_set, _mm256_set1_epi8(char(bit)));
}
inline Ints table_lookup(Ints x, const uint8_t* table) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return (Ints)_mm256_shuffle_epi8(both, (__m256i)x);
}

#ifdef __AVXVNNI__
constexpr bool NARROW_IN_16 = false, WIDE_IS_SIGNED = false;
template <Width>
inline Ints add_products(Ints sum, Ints codes, Ints x) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
}
#else
constexpr bool NARROW_IN_16 = true, WIDE_IS_SIGNED = true;
inline Ints sum_pairs(Ints x) {
    return (Ints)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1));
}
template <Width WIDTH>
inline Ints add_products(Ints sum, Ints codes, Ints four) {
    const __m256i v = (__m256i)sum, x = (__m256i)four;
    if constexpr (WIDTH == Width::wide) {
        const __m256i w = _mm256_xor_si256((__m256i)codes, _mm256_set1_epi8(-128));
        return sum + sum_pairs((Ints)_mm256_maddubs_epi16(_mm256_abs_epi8(w),
                                                          _mm256_sign_epi8(x, w)));
    }
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, x);
    if constexpr (WIDTH == Width::narrow) return (Ints)_mm256_add_epi16(v, pairs);
    return sum + sum_pairs((Ints)pairs);
}
#endif
