// Products of rows with packed matrices.
//
// A plain step reads every weight once, so it is as fast as memory. Here n rows share that one
// reading: while the weights of a few columns are in registers they meet all rows, and the products
// of some rows hide behind the reading.
//
// Every sum runs in an order that depends on its own row alone: a row's result is the same, bit by
// bit, whether it is computed alone, in a tree or in a prompt.
//
// Matrices (out, in) are stored by 16 columns of the product, see operators.py:
//   bfloat16  [in / 2][16][2]
//   8 bits    scales [in / 32][16], minima [in / 32][16] (float16), integers [in / 4][16][4]:
//             value = scale * code + minimum
//   4 bits    the same with integers [in / 8][16][4]: low nibbles row 8 g + t, high 8 g + 4 + t
#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr int BLOCK = 32;  // rows of a matrix under one scale, and columns of a row of x
constexpr int TILE_ROWS = 48;  // rows of x whose sums are held at once

// How many blocks of columns and how many rows are computed together: their sums, a row's parts and
// the weights fill the registers, of which AVX2 has half as many, half as wide.
template <int BITS>
struct Tile {
#ifdef __AVX512F__
    static constexpr int panel = BITS == 16 ? 4 : 2, rows = 6;
#else
    static constexpr int panel = 1, rows = BITS == 16 ? 4 : 3;
#endif
    // Rows of the matrix that are taken at once: with them, TILE_ROWS rows of x and their sums, a
    // panel fits the nearest cache, whatever the number of groups of rows that read it.
    static constexpr int chunk = BITS == 16 ? 128 : 512;
};

struct Matrix {
    const uint8_t* data;
    const float* bias;  // (out,) or null
    int32_t out, in;
    int32_t bits;       // 16, 8 or 4
    int32_t unused;
};

// What belongs to 32 bytes of a row in 8 bits: x = scale * byte.
struct Block {
    float scale, sum;  // sum of the x
    int32_t middle;    // 128 times the sum of the bytes
    int32_t unused;
};

// Rows to multiply, as the matrix wants them: bfloat16, or in 8 bits.
struct Rows {
    bf16* plain;     // (n, in)
    int8_t* integers;   // (n, in)
    Block* blocks;   // (n, in / 32)

    Rows from(int64_t row, int64_t in) const {
        return {plain + row * in, integers + row * in, blocks + row * (in / BLOCK)};
    }
};

struct Range {
    int begin, end;
};

Range share(int count, int thread, int threads) {
    return {int(int64_t(count) * thread / threads), int(int64_t(count) * (thread + 1) / threads)};
}

// 32 numbers in 8 bits, rounded to the nearest of 255 steps.
inline void quantize(F low, F high, int8_t* integers, Block* block) {
    const float most = reduce_max(max(abs(low), abs(high)));
    const float scale = most / 127.0f;
    const F inverse = set1(most > 0.0f ? 127.0f / most : 0.0f);
    low = round(mul(low, inverse));
    high = round(mul(high, inverse));
    store_int8(integers, low);
    store_int8(integers + LANES, high);
    const float sum = reduce_add(add(low, high));  // of integers: exact
    // NaN and infinity must not vanish in an integer.
    *block = {scale, most - most == 0.0f ? scale * sum : NAN, int32_t(sum) * 128, 0};
}

// 32 numbers into a row of `to`, for a matrix of so many bits.
inline void store_activation(F low, F high, int bits, int64_t at, const Rows& to) {
    if (bits == 16) {
        store_bf16(to.plain + at, low);
        store_bf16(to.plain + at + LANES, high);
    } else {
        quantize(low, high, to.integers + at, to.blocks + at / BLOCK);
    }
}

// Weights to fetch from memory while others are computed with: `lines` of 64 bytes, spread evenly
// over so many iterations.
struct Ahead {
    const uint8_t* at;
    int lines, iterations;
    int due = 0;

    void fetch() {
        for (due += lines; due >= iterations; due -= iterations) {
            _mm_prefetch((const char*)at, _MM_HINT_T0);
            at += 64;
        }
    }
};

// f(count) with `count`, 1 ... Most, as a constant of the compiler's.
template <int Most, class Function>
void with_constant(int count, Function f) {
    if constexpr (Most > 1) {
        if (count < Most) return with_constant<Most - 1>(count, f);
    }
    f(std::integral_constant<int, Most>());
}

// sums (R, stride) += R rows of x times C blocks of columns, over `depth` pairs of the matrix's
// rows; blocks are `next` bytes apart, rows of x `width` numbers.
template <int R, int C>
void bf16_tile(const uint8_t* w, int64_t next, const bf16* x, int64_t width, int depth, float* sums,
               int64_t stride, Ahead ahead) {
    F acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = load(sums + r * stride + c * LANES);
    for (int k = 0; k < depth; ++k) {
        ahead.fetch();
        Pairs weights[C];
        for (int c = 0; c < C; ++c) weights[c] = load_pairs(w + c * next + int64_t(k) * 64);
        for (int r = 0; r < R; ++r) {
            const Pair both = same_pair(x + r * width + 2 * k);
            for (int c = 0; c < C; ++c) acc[r][c] = dot(acc[r][c], weights[c], both);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(sums + r * stride + c * LANES, acc[r][c]);
}

// Scales or minima of a block of columns.
int64_t factor_bytes(const Matrix& m) { return m.bits == 16 ? 0 : m.in / BLOCK * LANES * 2; }

int64_t column_bytes(const Matrix& m) {
    return 2 * factor_bytes(m) + int64_t(m.in) * LANES * m.bits / 8;
}

const uint8_t* column(const Matrix& m, int block) { return m.data + block * column_bytes(m); }

// sums (R, C) += R rows of x times C blocks of columns from block `first` of the rows on, `depth`
// blocks. Products of integers are summed exactly, and scaled per block.
template <int BITS, int R, int C>
void integer_tile(const Matrix& m, const uint8_t* w, Rows x, int first, int depth, float* sums,
                  Ahead ahead) {
    constexpr int UNIT = BLOCK * LANES * BITS / 8;
    const int64_t next = column_bytes(m), minima = factor_bytes(m), blocks = m.in / BLOCK;
    const uint8_t* integers_at = w + 2 * minima + int64_t(first) * UNIT;
    const uint8_t* scale_at = w + int64_t(first) * LANES * 2;
    F acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = load(sums + (r * C + c) * LANES);
    for (int b = first; b < first + depth; ++b) {
        ahead.fetch();
        Sum<BITS> part[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                part[r][c] = Sum<BITS>::begin(x.blocks[r * blocks + b].middle);
#pragma GCC unroll 8  // as a loop it spills, and takes a third longer
        for (int g = 0; g < 8; ++g) {
            I weights[C];
            for (int c = 0; c < C; ++c) {
                weights[c] = load_bytes(integers_at + c * next + (BITS == 8 ? g : g / 2) * 64);
                if constexpr (BITS == 4)
                    weights[c] = g % 2 ? high_nibbles(weights[c]) : low_nibbles(weights[c]);
            }
            for (int r = 0; r < R; ++r) {
                const Four four = same_four(x.integers + int64_t(r) * m.in + b * BLOCK + 4 * g);
                for (int c = 0; c < C; ++c) part[r][c].add(weights[c], four);
            }
        }
        for (int c = 0; c < C; ++c) {
            const F scale = load_half(scale_at + c * next);
            const F minimum = load_half(scale_at + c * next + minima);
            for (int r = 0; r < R; ++r) {
                const Block& block = x.blocks[r * blocks + b];
                const F both = mul(scale, set1(block.scale));
                acc[r][c] = fma(both, to_float(part[r][c].end()), acc[r][c]);
                acc[r][c] = fma(minimum, set1(block.sum), acc[r][c]);
            }
        }
        integers_at += UNIT;
        scale_at += LANES * 2;
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(sums + (r * C + c) * LANES, acc[r][c]);
}

// What is done with finished sums.
enum class Into { store, add };

// C blocks of columns for up to TILE_ROWS rows; fetches what comes after them, from `then` on.
template <int BITS, int C, Into into>
void tile(const Matrix& m, int block, Rows x, float* y, int64_t stride, int n,
          const uint8_t* then) {
    constexpr int ROWS = Tile<BITS>::rows, CHUNK = Tile<BITS>::chunk;
    alignas(64) float sums[TILE_ROWS * C * LANES];
    std::memset(sums, 0, n * C * LANES * sizeof(float));
    const int groups = (n + ROWS - 1) / ROWS, unit = BITS == 16 ? 2 : BLOCK;
    const int64_t next = column_bytes(m);
    const int chunk = groups == 1 ? m.in : CHUNK;
    int64_t fetched = 0;
    for (int k = 0; k < m.in; k += chunk) {
        const int end = std::min(k + chunk, m.in), depth = (end - k) / unit;
        const int64_t until = C * next / 64 * end / m.in;  // lines
        for (int g = 0; g < groups; ++g) {
            const Range range = share(n, g, groups), lines = share(int(until - fetched), g, groups);
            float* to = sums + range.begin * C * LANES;
            const Ahead ahead{then + (fetched + lines.begin) * 64, lines.end - lines.begin, depth};
            with_constant<ROWS>(range.end - range.begin, [&](auto count) {
                constexpr int R = decltype(count)::value;
                const Rows from = x.from(range.begin, m.in);
                if constexpr (BITS == 16)
                    bf16_tile<R, C>(column(m, block) + int64_t(k) / 2 * 64, next, from.plain + k,
                                    m.in, depth, to, C * LANES, ahead);
                else
                    integer_tile<BITS, R, C>(m, column(m, block), from, k / BLOCK, depth, to, ahead);
            });
        }
        fetched = until;
    }
    for (int r = 0; r < n; ++r) {
        for (int c = 0; c < C; ++c) {
            const int column = (block + c) * LANES;
            F sum = load(sums + (r * C + c) * LANES);
            if (m.bias) sum = add(sum, load(m.bias + column));
            float* to = y + r * stride + column;
            store(to, into == Into::add ? add(sum, load(to)) : sum);
        }
    }
}

// C blocks of columns for all rows.
template <int BITS, int C, Into into>
void all_rows(const Matrix& m, int block, Rows x, float* y, int64_t stride, int n,
              const uint8_t* then) {
    const int tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
    for (int i = 0; i < tiles; ++i) {
        const Range range = share(n, i, tiles);
        tile<BITS, C, into>(m, block, x.from(range.begin, m.in), y + range.begin * stride, stride,
                            range.end - range.begin, i + 1 < tiles ? column(m, block) : then);
    }
}

template <int BITS, Into into>
void product_of(const Matrix& m, Range blocks, Rows x, float* y, int64_t stride, int n,
                const uint8_t* then) {
    constexpr int PANEL = Tile<BITS>::panel;
    for (int block = blocks.begin; block < blocks.end;) {
        // Few rows wait for memory, which is fastest in one stream.
        const int count = std::min(n <= 4 ? 1 : PANEL, blocks.end - block);
        const uint8_t* after = block + count < blocks.end ? column(m, block + count) : then;
        with_constant<PANEL>(count, [&](auto constant) {
            all_rows<BITS, decltype(constant)::value, into>(m, block, x, y, stride, n, after);
        });
        block += count;
    }
}

// y (n, stride) = or += x W^T for these blocks of columns; `then` is what is read after them.
template <Into into>
void product(const Matrix& m, Range blocks, Rows x, float* y, int64_t stride, int n,
             const uint8_t* then) {
    if (m.bits == 16) return product_of<16, into>(m, blocks, x, y, stride, n, then);
    if (m.bits == 8) return product_of<8, into>(m, blocks, x, y, stride, n, then);
    product_of<4, into>(m, blocks, x, y, stride, n, then);
}

}  // namespace
