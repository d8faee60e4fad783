// The formats of packed matrices, and the conversion of GGUF blocks and floats to them.
//
// A matrix (out, in) is stored by blocks of 16 rows, so that one instruction meets 16 columns of the
// product. bfloat16 is [in / 2][16][2]. All others have, per block of rows,
//
//     factors   scales, then minima if there are any, one per row and `group` columns: float16
//               [in / group][16]; or int8 [in / group][16] in units of a float16 [in / 256][16]
//     codes     quantized values: per 32 columns `base` bits of each [32 / 4][16][4], several groups
//               of four columns to a byte, lowest first; then a plane [8][16][4] per further bit
//
//     value = scale * (code - offset)       formats without minima
//     value = scale * code + minimum        the others
//
// Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and its block types.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

constexpr int BLOCK = 32;   // columns of a row's activations that share a scale
constexpr int SUPER = 256;  // columns of a block of the K formats

struct Layout {
    int base, planes;  // bits of a code: `base` together, then one per plane
    bool minimum;
    int group;         // columns under one scale
    bool bytes;        // whether factors are bytes in units of a float16
    int table;         // codes are indices into TABLES[table - 1]; 0 = values

    constexpr int bits() const { return base + planes; }
    constexpr int offset() const { return minimum ? 0 : table ? 128 : 1 << (bits() - 1); }
    // Bytes of 32 columns' codes.
    constexpr int unit() const { return BLOCK * LANES * base / 8 + 64 * planes; }
};

// Matmuls of formats up to Q8_0 are compiled with the forward, the others in rare.cpp.
enum Format {
    BF16, U4, U8, Q4_0, Q8_0, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4
};
constexpr Layout LAYOUTS[] = {
    {16, 0, false, 32, false, 0},  // BF16
    {4, 0, true, 32, false, 0},    // U4: Q4_1, and what is made on loading
    {8, 0, true, 32, false, 0},    // U8: made on loading
    {4, 0, false, 32, false, 0},   // Q4_0
    {8, 0, false, 32, false, 0},   // Q8_0
    {4, 1, false, 32, false, 0},   // Q5_0
    {4, 1, true, 32, false, 0},    // Q5_1
    {2, 0, true, 16, true, 0},     // Q2_K
    {2, 1, false, 16, true, 0},    // Q3_K
    {4, 0, true, 32, true, 0},     // Q4_K
    {4, 1, true, 32, true, 0},     // Q5_K
    {4, 2, false, 16, true, 0},    // Q6_K
    {4, 0, false, 32, false, 1},   // IQ4_NL
    {4, 0, false, 32, true, 1},    // IQ4_XS
    {4, 0, false, 32, false, 2},   // MXFP4
};

// Values of codes, plus 128: of IQ4_NL and IQ4_XS; of MXFP4, twice those of its floats.
alignas(64) constexpr uint8_t TABLES[][16] = {
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116}};

struct Matrix {
    const uint8_t* data;
    const float* bias;  // (out,) or null
    int32_t out, in;    // padded to whole blocks of 16 and 32
    int32_t format;

    const Layout& layout() const { return LAYOUTS[format]; }
};

// Byte offsets within a block of 16 rows.
struct Offsets {
    // The first two are the size of one kind of factors, scales or minima.
    int64_t supers, factors, codes, end;

    constexpr Offsets(const Layout& l, int32_t in)
        : supers(l.bytes ? in / SUPER * LANES * 2 : 0),
          factors(in / BLOCK * (BLOCK / l.group) * LANES * (l.bytes ? 1 : 2)),
          codes((l.minimum ? 2 : 1) * (supers + factors)),
          end(codes + int64_t(in / BLOCK) * l.unit()) {
        if (l.base == 16) supers = factors = codes = 0, end = int64_t(in) * LANES * 2;
    }
};

int64_t column_bytes(const Matrix& m) { return Offsets(m.layout(), m.in).end; }

const uint8_t* column(const Matrix& m, int block) { return m.data + block * column_bytes(m); }

// ---- blocks of a GGUF file

inline bf16 float_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Codes of a row's next columns, and their factors as stored in the layout.
struct QuantBlock {
    uint8_t codes[SUPER];
    uint16_t scale, minimum;            // float16: of all columns, or the unit of the bytes
    int8_t scales[16], minima[16];
};

// GGML's numbers of types.
enum Type {
    F32, F16, T4_0, T4_1, T5_0 = 6, T5_1, T8_0,
    T2_K = 10, T3_K, T4_K, T5_K, T6_K, T4_NL = 20, T4_XS = 23, TBF16 = 30, TMXFP4 = 39,
};

inline uint16_t read_u16(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}

// 32 codes: the low halves of 16 bytes, then the high halves. A fifth bit is added to each.
inline void unpack_nibbles(const uint8_t* from, uint8_t* to, int count = 16) {
    for (int i = 0; i < count; ++i) {
        to[i] = from[i] & 15;
        to[count + i] = from[i] >> 4;
    }
}
inline void add_fifth_bits(const uint8_t* from, uint8_t* to) {
    uint32_t bits;
    std::memcpy(&bits, from, 4);
    for (int i = 0; i < 32; ++i) to[i] |= (bits >> i & 1) << 4;
}

// Eight scales and minima of 6 bits in 12 bytes (Q4_K, Q5_K): the low 6 bits of four scales, of four
// minima, then the low 4 bits of the other four of each, whose high 2 bits are in the first 8 bytes.
inline void unpack_six_bits(const uint8_t* p, int8_t* scales, int8_t* minima) {
    for (int i = 0; i < 4; ++i) {
        scales[i] = p[i] & 63;
        minima[i] = p[4 + i] & 63;
        scales[4 + i] = (p[8 + i] & 15) | (p[i] >> 6 << 4);
        minima[4 + i] = (p[8 + i] >> 4) | (p[4 + i] >> 6 << 4);
    }
}

// Unpacks a block of a GGML type.
void unpack_block(int type, const uint8_t* p, QuantBlock& d) {
    switch (type) {
        case T4_0: case T4_NL:
            d.scale = read_u16(p);
            return unpack_nibbles(p + 2, d.codes);
        case TMXFP4:  // the scale is 2^(byte - 127), here halved; below 2^-24 it is 0
            d.scale = float_to_half(std::ldexp(1.0f, p[0] - 128));
            return unpack_nibbles(p + 1, d.codes);
        case T4_1:
            d.scale = read_u16(p), d.minimum = read_u16(p + 2);
            return unpack_nibbles(p + 4, d.codes);
        case T5_0:
            d.scale = read_u16(p);
            unpack_nibbles(p + 6, d.codes);
            return add_fifth_bits(p + 2, d.codes);
        case T5_1:
            d.scale = read_u16(p), d.minimum = read_u16(p + 2);
            unpack_nibbles(p + 8, d.codes);
            return add_fifth_bits(p + 4, d.codes);
        case T8_0:
            d.scale = read_u16(p);
            for (int i = 0; i < 32; ++i) d.codes[i] = p[2 + i] ^ 128;
            return;
        case T2_K:
            d.scale = read_u16(p + 80), d.minimum = read_u16(p + 82);
            for (int i = 0; i < 16; ++i) d.scales[i] = p[i] & 15, d.minima[i] = p[i] >> 4;
            for (int i = 0; i < SUPER; ++i)
                d.codes[i] = p[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
            return;
        case T3_K:
            d.scale = read_u16(p + 108);
            for (int i = 0; i < 16; ++i) {
                const int low = p[96 + i % 8] >> (i / 8 * 4) & 15;
                const int high = p[104 + i % 4] >> (i / 4 * 2) & 3;
                d.scales[i] = int8_t((low | high << 4) - 32);
            }
            for (int i = 0; i < SUPER; ++i) {
                const int low = p[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
                d.codes[i] = low | (p[i % 32] >> (i / 32) & 1) << 2;
            }
            return;
        case T4_K: case T5_K: {
            d.scale = read_u16(p), d.minimum = read_u16(p + 2);
            unpack_six_bits(p + 4, d.scales, d.minima);
            const uint8_t* low = p + (type == T4_K ? 16 : 48);
            for (int i = 0; i < 4; ++i) unpack_nibbles(low + 32 * i, d.codes + 64 * i, 32);
            for (int i = 0; type == T5_K && i < SUPER; ++i)
                d.codes[i] |= (p[16 + i % 32] >> (i / 32) & 1) << 4;
            return;
        }
        case T6_K:
            d.scale = read_u16(p + 208);
            std::memcpy(d.scales, p + 192, 16);
            for (int i = 0; i < SUPER; ++i) {
                const int half = i / 128, part = i % 128 / 32, at = i % 32;
                const int low = p[64 * half + part % 2 * 32 + at] >> (part / 2 * 4) & 15;
                d.codes[i] = low | (p[128 + 32 * half + at] >> (2 * part) & 3) << 4;
            }
            return;
        case T4_XS:
            d.scale = read_u16(p);
            for (int i = 0; i < 8; ++i) {
                const int low = p[4 + i / 2] >> (i % 2 * 4) & 15;
                const int high = read_u16(p + 2) >> (2 * i) & 3;
                d.scales[i] = int8_t((low | high << 4) - 32);
                unpack_nibbles(p + 8 + 16 * i, d.codes + 32 * i);
            }
            return;
    }
}

// Quantizes 32 floats to `bits` over the range of their values, at the precision of the stored
// factors; the scale is never 0, so that codes are finite.
void quantize_block(const float* values, int bits, QuantBlock& d) {
    const float steps = float((1 << bits) - 1);
    float low = values[0], high = values[0], sum = 0.0f;
    for (int i = 0; i < BLOCK; ++i) {
        low = std::min(low, values[i]);
        high = std::max(high, values[i]);
        sum += values[i];
    }
    d.scale = float_to_half(std::max((high - low) / steps, 0x1p-24f));
    d.minimum = float_to_half(sum - sum == 0.0f ? low : NAN);  // NaN must not vanish
    const float scale = half_to_float(d.scale), minimum = half_to_float(d.minimum);
    for (int i = 0; i < BLOCK; ++i)
        d.codes[i] = uint8_t(
            std::min(std::max(0.0f, std::nearbyint((values[i] - minimum) / scale)), steps));
}

inline int block_columns(int type) {
    return (type >= T2_K && type <= T6_K) || type == T4_XS ? SUPER : BLOCK;
}

inline float read_float(int type, const uint8_t* p, int64_t i) {
    if (type == F32) {
        float value;
        std::memcpy(&value, p + 4 * i, 4);
        return value;
    }
    const uint16_t bits = read_u16(p + 2 * i);
    return type == F16 ? half_to_float(bits) : bf16_to_float(bits);
}

// Writes `count` columns of row `lane` of a block of rows, from column `k` on, into zeroed memory.
void pack_block(const Layout& l, const Offsets& offsets, const QuantBlock& d, int lane, int64_t k,
                int count, uint8_t* to) {
    const auto put_half = [&](int64_t at, uint16_t value) { std::memcpy(to + at, &value, 2); };
    const int64_t minima = offsets.supers + offsets.factors;  // as far behind the scales
    if (l.bytes) {
        put_half((k / SUPER * LANES + lane) * 2, d.scale);
        const int64_t from = (l.minimum ? 2 : 1) * offsets.supers;
        if (l.minimum) put_half(offsets.supers + (k / SUPER * LANES + lane) * 2, d.minimum);
        for (int i = 0; i < count / l.group; ++i) {
            const int64_t at = from + (k / l.group + i) * LANES + lane;
            to[at] = uint8_t(d.scales[i]);
            if (l.minimum) to[at + offsets.factors] = uint8_t(d.minima[i]);
        }
    } else {
        const int64_t at = (k / l.group * LANES + lane) * 2;
        put_half(at, d.scale);
        if (l.minimum) put_half(minima + at, d.minimum);
    }
    for (int i = 0; i < count; i += 4) {
        uint32_t four, packed;
        std::memcpy(&four, d.codes + i, 4);
        const int group = int((k + i) % BLOCK / 4), per_byte = 8 / l.base;
        uint8_t* unit = to + offsets.codes + (k + i) / BLOCK * l.unit();
        uint8_t* at = unit + group / per_byte * 64 + lane * 4;
        const uint32_t mask = l.base == 8 ? ~0u : l.base == 4 ? 0x0f0f0f0fu : 0x03030303u;
        std::memcpy(&packed, at, 4);
        packed |= (four & mask) << (group % per_byte * l.base);
        std::memcpy(at, &packed, 4);
        for (int p = 0; p < l.planes; ++p) {
            const uint32_t ones = four >> (l.base + p) & 0x01010101u;
            const uint32_t bits = ones * 0x01020408u >> 24 & 15;  // one after the other
            unit[BLOCK * LANES * l.base / 8 + p * 64 + group * 8 + lane / 2] |=
                uint8_t(bits << (lane % 2 * 4));
        }
    }
}

// Packs a block of rows, of a GGML type or floats, into `m`, whose memory is zero.
//
// `order`: the row of `from` for each row, or null. `columns`: of a row in `from`, at most m.in.
void pack_rows(const Matrix& m, int type, const uint8_t* from, int64_t row_bytes, int rows,
               int columns, const int64_t* order, int block) {
    const Layout& l = m.layout();
    const Offsets offsets(l, m.in);
    uint8_t* to = const_cast<uint8_t*>(column(m, block));
    const bool floats = type == F32 || type == F16 || type == TBF16;
    for (int lane = 0; lane < LANES && block * LANES + lane < rows; ++lane) {
        const int64_t row = block * LANES + lane;
        const uint8_t* p = from + (order ? order[row] : row) * row_bytes;
        if (m.format == BF16) {
            for (int k = 0; k < columns; ++k) {
                const bf16 value = float_to_bf16(read_float(type, p, k));
                std::memcpy(to + ((k / 2 * LANES + lane) * 2 + k % 2) * 2, &value, 2);
            }
            continue;
        }
        QuantBlock d;
        if (floats) {
            for (int k = 0; k < columns; k += BLOCK) {
                float values[BLOCK] = {};
                for (int i = 0; i < std::min(BLOCK, columns - k); ++i)
                    values[i] = read_float(type, p, k + i);
                quantize_block(values, l.bits(), d);
                pack_block(l, offsets, d, lane, k, BLOCK, to);
            }
            continue;
        }
        const int count = block_columns(type);
        const int64_t size = row_bytes / (columns / count);
        for (int k = 0; k < columns; k += count, p += size) {
            unpack_block(type, p, d);
            pack_block(l, offsets, d, lane, k, count, to);
        }
    }
}

// A row of a packed matrix, (in,), with exactly the values that matmuls use.
void unpack_row(const Matrix& m, int64_t row, float* to) {
    const Layout& l = m.layout();
    const Offsets offsets(l, m.in);
    const uint8_t* from = column(m, int(row / LANES));
    const int lane = int(row % LANES);
    if (m.format == BF16) {
        for (int k = 0; k < m.in; ++k)
            to[k] = bf16_to_float(read_u16(from + ((k / 2 * LANES + lane) * 2 + k % 2) * 2));
        return;
    }
    const int64_t factors = l.bytes ? (l.minimum ? 2 : 1) * offsets.supers : 0;
    const auto factor = [&](int64_t k, bool minimum) {
        const int64_t at = k / l.group * LANES + lane, more = minimum ? offsets.factors : 0;
        if (!l.bytes) return half_to_float(read_u16(from + more + 2 * at));
        const int64_t super = (minimum ? offsets.supers : 0) + (k / SUPER * LANES + lane) * 2;
        return half_to_float(read_u16(from + super)) * float(int8_t(from[factors + more + at]));
    };
    const int per_byte = 8 / l.base, mask = (1 << l.base) - 1;
    for (int k = 0; k < m.in; k += l.group) {
        const float scale = factor(k, false);
        const float minimum = !l.minimum ? 0.0f : l.bytes ? -factor(k, true) : factor(k, true);
        for (int i = k; i < k + l.group; ++i) {
            const uint8_t* unit = from + offsets.codes + i / BLOCK * l.unit();
            const int group = i % BLOCK / 4, byte = lane * 4 + i % 4;
            int code = unit[group / per_byte * 64 + byte] >> (group % per_byte * l.base) & mask;
            for (int p = 0; p < l.planes; ++p) {
                const uint8_t* plane = unit + BLOCK * LANES * l.base / 8 + p * 64 + group * 8;
                code |= (plane[byte / 8] >> (byte % 8) & 1) << (l.base + p);
            }
            if (l.table) code = TABLES[l.table - 1][code];
            to[i] = scale * float(code - l.offset()) + minimum;
        }
    }
}

}  // namespace
