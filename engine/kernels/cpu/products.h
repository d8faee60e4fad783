// Products of rows with packed matrices.
//
// A plain step reads every weight once, so it is as fast as memory. Here n rows share that one
// reading: while the weights of a few columns are in registers they meet all rows, and the products
// of some rows hide behind the reading.
//
// Every sum runs in an order that depends on its own row alone: a row's result is the same, bit by
// bit, whether it is computed alone, in a tree or in a prompt.
#pragma once

#include <type_traits>

#include "formats.h"

namespace {

constexpr int TILE_ROWS = 48;  // rows of x whose sums are held at once

// How many blocks of columns and how many rows are computed together: their sums, a row's parts and
// the weights fill the registers, of which AVX2 has half as many, half as wide.
template <int FORMAT>
struct Tile {
#ifdef __AVX512F__
    static constexpr int panel = FORMAT == BF16 ? 4 : 2, rows = 6;
#else
    static constexpr int panel = 1, rows = FORMAT == BF16 ? 4 : 3;
#endif
    // Rows of the matrix that are taken at once: with them, TILE_ROWS rows of x and their sums, a
    // panel fits the nearest cache, whatever the number of groups of rows that read it.
    static constexpr int chunk = FORMAT == BF16 ? 128 : 512;
};

// What belongs to 32 bytes of a row in 8 bits: x = scale * byte.
struct Block {
    float scale, sum;     // sum of the x
    int32_t total, half;  // sums of the bytes: all, the first 16
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
    const float half = reduce_add(low), sum = half + reduce_add(high);  // of integers: exact
    const bool finite = most - most == 0.0f && sum - sum == 0.0f;
    if (finite) *block = {scale, scale * sum, int32_t(sum), int32_t(half)};
    else *block = {NAN, NAN, 0, 0};  // NaN and infinity must not vanish in an integer
}

// How matrices want the rows that they meet.
enum Wanted { PLAIN = 1, INTEGERS = 2 };

inline int wanted(const Matrix& m) { return m.format == BF16 ? PLAIN : INTEGERS; }

// 32 numbers into a row of `to`, as wanted.
inline void store_activation(F low, F high, int wanted, int64_t at, const Rows& to) {
    if (wanted & PLAIN) {
        store_bf16(to.plain + at, low);
        store_bf16(to.plain + at + LANES, high);
    }
    if (wanted & INTEGERS) quantize(low, high, to.integers + at, to.blocks + at / BLOCK);
}

// Weights to fetch from memory while others are computed with: `lines` of 64 bytes, spread evenly
// over so many iterations.
struct Ahead {
    const uint8_t* at;
    int lines, iterations;
    int due = 0;

    void fetch() {
        for (due += lines; due >= iterations; due -= iterations) {
            __builtin_prefetch(at, 0, 2);  // to the second cache
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

// Codes 4 g ... 4 g + 3 of 32 columns, of each lane.
template <int FORMAT>
inline I codes_of(const uint8_t* unit, int g) {
    constexpr Layout L = LAYOUTS[FORMAT];
    constexpr int PER_BYTE = 8 / L.base;
    I codes = load_bytes(unit + g / PER_BYTE * 64);
    if constexpr (L.base < 8) codes = bits_of<L.base>(codes, g % PER_BYTE);
    for (int p = 0; p < L.planes; ++p)
        codes = set_bits(codes, unit + BLOCK * LANES * L.base / 8 + p * 64 + g * 8,
                         1 << (L.base + p));
    if constexpr (L.table) codes = look_up(codes, TABLE);
    return codes;
}

// Scales or minima of a block of columns: 16 float16, or bytes in units of a float16.
template <int FORMAT>
inline F factors_of(const uint8_t* halves, const uint8_t* bytes, int group) {
    constexpr Layout L = LAYOUTS[FORMAT];
    if constexpr (!L.bytes) return load_half(halves + int64_t(group) * LANES * 2);
    else
        return mul(load_half(halves + int64_t(group) * L.group / SUPER * LANES * 2),
                   load_int8(bytes + int64_t(group) * LANES));
}

// sums (R, C) += R rows of x times C blocks of columns from block `first` of the rows on, `depth`
// blocks. Products of integers are summed exactly, and scaled per group. Not inlined: compiled once,
// not for every caller.
template <int FORMAT, int R, int C>
__attribute__((noinline)) void integer_tile(const Matrix& m, const uint8_t* w, Rows x, int first, int depth, float* sums,
                  Ahead ahead) {
    constexpr Layout L = LAYOUTS[FORMAT];
    constexpr int PARTS = BLOCK / L.group;
    constexpr Width WIDTH = L.table || L.bits() == 8 ? Width::wide
                            : (L.bits() > 4)         ? Width::middle
                                                     : Width::narrow;
    using Sum = SumOf<WIDTH>;
    const Parts parts(L, m.in);
    const int64_t next = parts.end, blocks = m.in / BLOCK;
    const uint8_t* units = w + parts.codes + int64_t(first) * L.unit();
    const uint8_t* bytes = w + (L.minimum ? 2 : 1) * parts.supers;
    F acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = load(sums + (r * C + c) * LANES);
    for (int b = first; b < first + depth; ++b) {
        ahead.fetch();
#pragma GCC unroll 2
        for (int h = 0; h < PARTS; ++h) {
            Sum sum[R][C];
            int32_t total[R];
            for (int r = 0; r < R; ++r) {
                const Block& block = x.blocks[r * blocks + b];
                total[r] = PARTS == 1 ? block.total : h == 0 ? block.half : block.total - block.half;
                for (int c = 0; c < C; ++c) sum[r][c] = Sum::begin(total[r], L.offset());
            }
#pragma GCC unroll 8  // as a loop it spills, and takes a third longer
            for (int g = h * 8 / PARTS; g < (h + 1) * 8 / PARTS; ++g) {
                I codes[C];
                for (int c = 0; c < C; ++c) codes[c] = codes_of<FORMAT>(units + c * next, g);
                for (int r = 0; r < R; ++r) {
                    const Four four = same_four(x.integers + int64_t(r) * m.in + b * BLOCK + 4 * g);
                    for (int c = 0; c < C; ++c) sum[r][c].add(codes[c], four);
                }
            }
            const int group = b * PARTS + h;
            for (int c = 0; c < C; ++c) {
                const uint8_t* at = w + c * next;
                const F scale = factors_of<FORMAT>(at, bytes + c * next, group);
                for (int r = 0; r < R; ++r) {
                    const F both = mul(scale, set1(x.blocks[r * blocks + b].scale));
                    const F products = to_float(sum[r][c].end(total[r], L.offset()));
                    acc[r][c] = fma(both, products, acc[r][c]);
                }
                if constexpr (!L.minimum) continue;
                const F minimum =
                    factors_of<FORMAT>(at + (L.bytes ? parts.supers : parts.factors),
                                       bytes + c * next + parts.factors, group);
                for (int r = 0; r < R; ++r) {
                    const Block& block = x.blocks[r * blocks + b];
                    const float of_x = PARTS == 1 ? block.sum : block.scale * float(total[r]);
                    acc[r][c] = fma(minimum, set1(L.bytes ? -of_x : of_x), acc[r][c]);
                }
            }
        }
        units += L.unit();
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(sums + (r * C + c) * LANES, acc[r][c]);
}

// What is done with finished sums.
enum class Into { store, add };

// As `column`; the format is known, so that nothing is divided.
template <int FORMAT>
const uint8_t* column_of(const Matrix& m, int block) {
    constexpr Layout L = LAYOUTS[FORMAT];
    return m.data + block * Parts(L, m.in).end;
}

// C blocks of columns for up to TILE_ROWS rows; fetches what comes after them, from `then` on.
template <int FORMAT, int C, Into into>
void tile(const Matrix& m, int block, Rows x, float* y, int64_t stride, int n,
          const uint8_t* then) {
    constexpr int ROWS = Tile<FORMAT>::rows, CHUNK = Tile<FORMAT>::chunk;
    alignas(64) float sums[TILE_ROWS * C * LANES];
    std::memset(sums, 0, n * C * LANES * sizeof(float));
    const int groups = (n + ROWS - 1) / ROWS, unit = FORMAT == BF16 ? 2 : BLOCK;
    constexpr Layout L = LAYOUTS[FORMAT];
    const int64_t next = Parts(L, m.in).end;
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
                if constexpr (FORMAT == BF16)
                    bf16_tile<R, C>(column_of<FORMAT>(m, block) + int64_t(k) / 2 * 64, next, from.plain + k,
                                    m.in, depth, to, C * LANES, ahead);
                else
                    integer_tile<FORMAT, R, C>(m, column_of<FORMAT>(m, block), from, k / BLOCK, depth, to, ahead);
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
template <int FORMAT, int C, Into into>
void all_rows(const Matrix& m, int block, Rows x, float* y, int64_t stride, int n,
              const uint8_t* then) {
    const int tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
    for (int i = 0; i < tiles; ++i) {
        const Range range = share(n, i, tiles);
        tile<FORMAT, C, into>(m, block, x.from(range.begin, m.in), y + range.begin * stride, stride,
                            range.end - range.begin, i + 1 < tiles ? column_of<FORMAT>(m, block) : then);
    }
}

template <int FORMAT, Into into>
void product_of(const Matrix& m, Range blocks, Rows x, float* y, int64_t stride, int n,
                const uint8_t* then) {
    constexpr int PANEL = Tile<FORMAT>::panel;
    for (int block = blocks.begin; block < blocks.end;) {
        // Few rows wait for memory, which is fastest in one stream.
        const int count = std::min(n <= 4 ? 1 : PANEL, blocks.end - block);
        const uint8_t* after = block + count < blocks.end ? column_of<FORMAT>(m, block + count) : then;
        with_constant<PANEL>(count, [&](auto constant) {
            all_rows<FORMAT, decltype(constant)::value, into>(m, block, x, y, stride, n, after);
        });
        block += count;
    }
}

// y (n, stride) = or += x W^T for these blocks of columns, of a matrix in one of the formats;
// `then` is what is read after them.
template <Into into, int FORMAT, int LAST>
void product_among(const Matrix& m, Range blocks, Rows x, float* y, int64_t stride, int n,
                   const uint8_t* then) {
    if (m.format == FORMAT) return product_of<FORMAT, into>(m, blocks, x, y, stride, n, then);
    if constexpr (FORMAT < LAST)
        product_among<into, FORMAT + 1, LAST>(m, blocks, x, y, stride, n, then);
}

// The same from another library.
using Product = void (*)(const Matrix& m, Range blocks, Rows x, float* y, int64_t stride, int n,
                         const uint8_t* then, Into into);

}  // namespace
