// Matmuls of rows with packed matrices.
//
// A plain step reads every weight once, so it is bound by memory bandwidth. Here n rows share that
// one reading: while the weights of a few columns are in registers they are multiplied with all
// rows, and the computation of some rows is hidden by the reading.
//
// Every sum runs in an order that depends on its own row alone: a row's result is the same, bit by
// bit, whether it is computed alone, in a tree or in a prompt.
#pragma once

#include <type_traits>

#include "formats.h"

namespace {

constexpr int TILE_ROWS = 48;  // rows of x whose sums are in memory at once

// How many blocks of columns and how many rows are computed together: their sums, a row's values
// and the weights fill the registers, of which AVX2 has half as many, half as wide.
template <int FORMAT>
struct Tile {
#ifdef __AVX512F__
    static constexpr int panel = FORMAT == BF16 ? 4 : 2, rows = 6;
#else
    static constexpr int panel = 1, rows = FORMAT == BF16 ? 4 : 3;
#endif
    // Rows of the matrix per pass: so many, TILE_ROWS rows of x and their sums fit the L1 cache,
    // whatever the number of groups of rows that read them.
    static constexpr int chunk = FORMAT == BF16 ? 128 : 512;
};

// Scale and sums of 32 activations in 8 bits: x = scale * byte.
struct Block {
    float scale, sum;     // sum of the x
    int32_t total, half;  // sums of the bytes: all, the first 16
};

// Rows of activations, in the format that the matrix takes: bfloat16, or 8 bits.
struct Activations {
    bf16* plain;       // (n, in)
    int8_t* integers;  // (n, in)
    Block* blocks;     // (n, in / 32)

    Activations from(int64_t row, int64_t in) const {
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
    const float highest = reduce_max(max(abs(low), abs(high)));
    const float scale = highest / 127.0f;
    const F inverse = set1(highest > 1e-30f ? 127.0f / highest : 0.0f);  // 127 / 3e-37 is infinite
    low = round(mul(low, inverse));
    high = round(mul(high, inverse));
    store_int8(integers, low);
    store_int8(integers + LANES, high);
    const float half = reduce_add(low), sum = half + reduce_add(high);  // of integers: exact
    const bool finite = highest - highest == 0.0f && sum - sum == 0.0f;
    if (finite) *block = {scale, scale * sum, int32_t(sum), int32_t(half)};
    else *block = {NAN, NAN, 0, 0};  // NaN and infinity must not vanish in an integer
}

// Formats of activations that a matrix takes.
enum ActivationFormat { PLAIN = 1, INTEGERS = 2 };

inline int formats_of(const Matrix& m) { return m.format == BF16 ? PLAIN : INTEGERS; }

// 32 numbers into a row of `to`, in these formats.
inline void store_activation(F low, F high, int formats, int64_t at, const Activations& to) {
    if (formats & PLAIN) {
        store_bf16(to.plain + at, low);
        store_bf16(to.plain + at + LANES, high);
    }
    if (formats & INTEGERS) quantize(low, high, to.integers + at, to.blocks + at / BLOCK);
}

// Prefetches the next weights during a computation: `lines` of 64 bytes, spread evenly over its
// iterations.
struct Prefetch {
    const uint8_t* at;
    int lines, iterations;
    int due = 0;

    void fetch() {
        for (due += lines; due >= iterations; due -= iterations) {
            __builtin_prefetch(at, 0, 2);  // to the L2 cache
            at += 64;
        }
    }
};

// f(count) with `count`, 1 ... Most, as a compile-time constant.
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
               int64_t stride, Prefetch prefetch) {
    F acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = load(sums + r * stride + c * LANES);
    for (int k = 0; k < depth; ++k) {
        prefetch.fetch();
        Pairs weights[C];
        for (int c = 0; c < C; ++c) weights[c] = load_pairs(w + c * next + int64_t(k) * 64);
        for (int r = 0; r < R; ++r) {
            const Pair both = broadcast_pair(x + r * width + 2 * k);
            for (int c = 0; c < C; ++c) acc[r][c] = dot(acc[r][c], weights[c], both);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(sums + r * stride + c * LANES, acc[r][c]);
}

// Codes 4 g ... 4 g + 3 of 32 columns, per lane.
template <int FORMAT>
inline I load_codes(const uint8_t* unit, int g) {
    constexpr Layout L = LAYOUTS[FORMAT];
    constexpr int PER_BYTE = 8 / L.base;
    I codes = load_bytes(unit + g / PER_BYTE * 64);
    if constexpr (L.base < 8) codes = bits_of<L.base>(codes, g % PER_BYTE);
    for (int p = 0; p < L.planes; ++p)
        codes = set_bits(codes, unit + BLOCK * LANES * L.base / 8 + p * 64 + g * 8,
                         1 << (L.base + p));
    if constexpr (L.table) codes = table_lookup(codes, TABLES[L.table - 1]);
    return codes;
}

// Scales or minima of a block of columns: 16 float16, or bytes in units of a float16.
template <int FORMAT>
inline F load_factors(const uint8_t* halves, const uint8_t* bytes, int group) {
    constexpr Layout L = LAYOUTS[FORMAT];
    if constexpr (!L.bytes) return load_half(halves + int64_t(group) * LANES * 2);
    else
        return mul(load_half(halves + int64_t(group) * L.group / SUPER * LANES * 2),
                   load_int8(bytes + int64_t(group) * LANES));
}

// sums (R, C) += R rows of x times C blocks of columns, over `depth` blocks of the rows from block
// `first` on. Products of integers are summed exactly, and scaled per group. Not inlined, so that it
// is compiled once, not for every caller.
template <int FORMAT, int R, int C>
__attribute__((noinline)) void integer_tile(const Matrix& m, const uint8_t* w, Activations x,
                                            int first, int depth, float* sums,
                                            Prefetch prefetch) {
    constexpr Layout L = LAYOUTS[FORMAT];
    constexpr int PARTS = BLOCK / L.group;
    constexpr Width WIDTH = L.table || L.bits() == 8 ? Width::wide
                            : (L.bits() > 4)         ? Width::middle
                                                     : Width::narrow;
    using Sum = SumOf<WIDTH>;
    const Offsets offsets(L, m.in);
    const int64_t next = offsets.end, blocks = m.in / BLOCK;
    const uint8_t* units = w + offsets.codes + int64_t(first) * L.unit();
    const uint8_t* bytes = w + (L.minimum ? 2 : 1) * offsets.supers;
    F acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = load(sums + (r * C + c) * LANES);
    for (int b = first; b < first + depth; ++b) {
        prefetch.fetch();
#pragma GCC unroll 2
        for (int h = 0; h < PARTS; ++h) {
            Sum sum[R][C];
            int32_t total[R];
            for (int r = 0; r < R; ++r) {
                const Block& block = x.blocks[r * blocks + b];
                total[r] = PARTS > 1 && h == 0 ? block.half : block.total - (h ? block.half : 0);
                for (int c = 0; c < C; ++c) sum[r][c] = Sum::begin(total[r], L.offset());
            }
#pragma GCC unroll 8  // as a loop it spills, and takes a third longer
            for (int g = h * 8 / PARTS; g < (h + 1) * 8 / PARTS; ++g) {
                I codes[C];
                for (int c = 0; c < C; ++c) codes[c] = load_codes<FORMAT>(units + c * next, g);
                for (int r = 0; r < R; ++r) {
                    const int64_t at = int64_t(r) * m.in + b * BLOCK + 4 * g;
                    const Four four = broadcast_four(x.integers + at);
                    for (int c = 0; c < C; ++c) sum[r][c].add(codes[c], four);
                }
            }
            const int group = b * PARTS + h;
            for (int c = 0; c < C; ++c) {
                const uint8_t* at = w + c * next;
                const F scale = load_factors<FORMAT>(at, bytes + c * next, group);
                for (int r = 0; r < R; ++r) {
                    const F both = mul(scale, set1(x.blocks[r * blocks + b].scale));
                    const F products = to_float(sum[r][c].end(total[r], L.offset()));
                    acc[r][c] = fma(both, products, acc[r][c]);
                }
                if constexpr (!L.minimum) continue;
                const F minimum =
                    load_factors<FORMAT>(at + (L.bytes ? offsets.supers : offsets.factors),
                                         bytes + c * next + offsets.factors, group);
                for (int r = 0; r < R; ++r) {
                    const Block& block = x.blocks[r * blocks + b];
                    const float sum_x = PARTS == 1 ? block.sum : block.scale * float(total[r]);
                    acc[r][c] = fma(minimum, set1(L.bytes ? -sum_x : sum_x), acc[r][c]);
                }
            }
        }
        units += L.unit();
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(sums + (r * C + c) * LANES, acc[r][c]);
}

// What is done with finished sums.
enum class Epilogue { store, add };

// As `column`; with a constant format, nothing is divided at run time.
template <int FORMAT>
const uint8_t* column_of(const Matrix& m, int block) {
    constexpr Layout L = LAYOUTS[FORMAT];
    return m.data + block * Offsets(L, m.in).end;
}

// C blocks of columns for up to TILE_ROWS rows; prefetches the weights at `then`.
template <int FORMAT, int C, Epilogue epilogue>
void tile(const Matrix& m, int block, Activations x, float* y, int64_t stride, int n,
          const uint8_t* then) {
    constexpr int ROWS = Tile<FORMAT>::rows, CHUNK = Tile<FORMAT>::chunk;
    alignas(64) float sums[TILE_ROWS * C * LANES];
    std::memset(sums, 0, n * C * LANES * sizeof(float));
    const int groups = (n + ROWS - 1) / ROWS, unit = FORMAT == BF16 ? 2 : BLOCK;
    constexpr Layout L = LAYOUTS[FORMAT];
    const int64_t next = Offsets(L, m.in).end;
    const int chunk = groups == 1 ? m.in : CHUNK;
    int64_t fetched = 0;
    for (int k = 0; k < m.in; k += chunk) {
        const int end = std::min(k + chunk, m.in), depth = (end - k) / unit;
        const int64_t until = C * next / 64 * end / m.in;  // lines
        for (int g = 0; g < groups; ++g) {
            const Range range = share(n, g, groups), lines = share(int(until - fetched), g, groups);
            float* to = sums + range.begin * C * LANES;
            const int num_lines = lines.end - lines.begin;
            const Prefetch prefetch{then + (fetched + lines.begin) * 64, num_lines, depth};
            with_constant<ROWS>(range.end - range.begin, [&](auto count) {
                constexpr int R = decltype(count)::value;
                const Activations from = x.from(range.begin, m.in);
                const uint8_t* w = column_of<FORMAT>(m, block);
                if constexpr (FORMAT == BF16)
                    bf16_tile<R, C>(w + int64_t(k) / 2 * 64, next, from.plain + k, m.in, depth, to,
                                    C * LANES, prefetch);
                else
                    integer_tile<FORMAT, R, C>(m, w, from, k / BLOCK, depth, to, prefetch);
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
            store(to, epilogue == Epilogue::add ? add(sum, load(to)) : sum);
        }
    }
}

// C blocks of columns for all rows.
template <int FORMAT, int C, Epilogue epilogue>
void all_rows(const Matrix& m, int block, Activations x, float* y, int64_t stride, int n,
              const uint8_t* then) {
    const int tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
    for (int i = 0; i < tiles; ++i) {
        const Range range = share(n, i, tiles);
        tile<FORMAT, C, epilogue>(m, block, x.from(range.begin, m.in), y + range.begin * stride,
                                  stride, range.end - range.begin,
                                  i + 1 < tiles ? column_of<FORMAT>(m, block) : then);
    }
}

template <int FORMAT, Epilogue epilogue>
void matmul_format(const Matrix& m, Range blocks, Activations x, float* y, int64_t stride, int n,
                const uint8_t* then) {
    constexpr int PANEL = Tile<FORMAT>::panel;
    for (int block = blocks.begin; block < blocks.end;) {
        // Few rows are bound by memory, which is fastest in one stream.
        const int count = std::min(n <= 4 ? 1 : PANEL, blocks.end - block), end = block + count;
        const uint8_t* after = end < blocks.end ? column_of<FORMAT>(m, end) : then;
        with_constant<PANEL>(count, [&](auto constant) {
            all_rows<FORMAT, decltype(constant)::value, epilogue>(m, block, x, y, stride, n, after);
        });
        block = end;
    }
}

// y (n, stride) = or += x W^T for these blocks of columns, of a matrix in one of the formats from
// FORMAT to LAST; `then`: the weights that are read next.
template <Epilogue epilogue, int FORMAT, int LAST>
void dispatch_matmul(const Matrix& m, Range blocks, Activations x, float* y, int64_t stride, int n,
                   const uint8_t* then) {
    if (m.format == FORMAT)
        return matmul_format<FORMAT, epilogue>(m, blocks, x, y, stride, n, then);
    if constexpr (FORMAT < LAST)
        dispatch_matmul<epilogue, FORMAT + 1, LAST>(m, blocks, x, y, stride, n, then);
}

// The same from another library.
using MatmulFunction = void (*)(const Matrix& m, Range blocks, Activations x, float* y,
                                int64_t stride, int n, const uint8_t* then, Epilogue epilogue);

}  // namespace
