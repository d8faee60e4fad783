// One register of NEON; see vectors.h.
#pragma once

inline Floats set1_register(float x) { return vdupq_n_f32(x); }
inline Floats max(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats round(Floats x) { return vrndnq_f32(x); }
// In the order of the other kinds of registers: first halves are added to each other.
inline float reduce_add(Floats x) {
    const float32x2_t half = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    return vget_lane_f32(half, 0) + vget_lane_f32(half, 1);
}
inline float reduce_max(Floats x) { return vmaxvq_f32(x); }
inline uint32_t lane_bits(uint32x4_t x) {
    const uint32x4_t bits = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(x, bits));
}
inline uint32_t equal(Floats a, Floats b) { return lane_bits(vceqq_f32(a, b)); }
inline uint32_t greater(Floats a, Floats b) { return lane_bits(vcgtq_f32(a, b)); }

inline Floats half_register(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
inline Floats bf16_register(const bf16* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
inline void store_bf16(bf16* p, Floats x) {
    vst1_u16(p, vshrn_n_u32((uint32x4_t)rounded_to_bf16(x), 16));
}
inline Floats int8_register(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
inline void store_int8(int8_t* p, Floats x) {
    const int16x4_t halves = vqmovn_s32(vcvtnq_s32_f32(x));
    const int8x8_t bytes = vqmovn_s16(vcombine_s16(halves, halves));
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
    std::memcpy(p, &four, 4);
}

inline Ints set_bits(Ints x, const uint8_t* p, int bit) {
    const uint8x16_t masks = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    const uint8x16_t own = vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1]));
    return x | (Ints)vandq_u8(vtstq_u8(own, masks), vdupq_n_u8(uint8_t(bit)));
}
inline Ints table_lookup(Ints x, const uint8_t* table) {
    return (Ints)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)x);
}

constexpr bool NARROW_IN_16 = false, WIDE_IS_SIGNED = true;
template <Width WIDTH>
inline Ints add_products(Ints sum, Ints codes, Ints x) {
    int8x16_t w = (int8x16_t)codes;
    if constexpr (WIDTH == Width::wide) w = veorq_s8(w, vdupq_n_s8(-128));
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sum, w, (int8x16_t)x);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8((int8x16_t)x));
    return vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(w, (int8x16_t)x)));
#endif
}
