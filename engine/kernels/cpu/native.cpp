// One forward of a Llama-like decoder over n new rows, in bfloat16 with float32 sums.
//
// A plain step reads every weight once, so it is as fast as memory. Here n rows share that one
// reading: while the weights of a few columns are in registers they meet all rows, and the products
// of up to about 16 rows hide behind the reading.
//
// Every sum runs in an order that depends on its own row alone: a row's result is the same, bit by
// bit, whether it is computed alone, in a tree or in a prompt. So a draft tree is verified with
// exactly the logits that plain decoding has.
//
// Matrices (out, in) are stored in blocks of 16 columns of the product, see operators.py:
//   bfloat16  [out / 16][in / 2][16][2]
//   4 bits    [out / 16][in / 32] of { 4 x 64 bytes of codes, 16 scales, 16 minima (float16) };
//             word 2 c + p of group g holds in nibble t the code of column c, row 8 g + 2 t + p
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

using bf16 = uint16_t;
constexpr int LANES = 16;   // columns of a block
constexpr int BLOCK = 32;   // rows of the matrix under one scale
constexpr int64_t BLOCK_BYTES = 320;
constexpr int PANEL = 4;    // blocks of columns that are computed together
constexpr int ROWS = 6;     // rows that are computed together: 4 x 6 sums + 4 weights fit 32 registers
constexpr int SPINS = 4096;

struct Matrix {
    const uint8_t* data;
    const float* bias;  // (out,) or null
    int32_t out, in;
    int32_t bits;       // 16 or 4
    int32_t unused;
};

struct Layer {
    Matrix qkv, out, gate_up, down;
    const bf16 *input_norm, *mlp_norm;     // (hidden,)
    const bf16 *query_norm, *key_norm;     // (head_dim,) or null
};

struct Model {
    int32_t num_layers, hidden, heads, kv_heads, head_dim, width, threads, vocab;
    float eps, scale;
    const Layer* layers;
    const bf16* norm;
    const bf16* embedding;  // (vocab, hidden)
    Matrix lm_head;
};

struct Call {
    int32_t n;            // new rows
    int32_t context;      // rows in the cache before them
    int32_t first_logit;  // logits of rows from here on
    int32_t num_taps;
    const int64_t* tokens;
    const float* rotary;     // (n, head_dim): cosines of one half, then sines
    const uint8_t* visible;  // (n, n), null = causal
    bf16* cache;             // (2 layers, kv_heads, capacity, head_dim)
    int64_t capacity;
    // Rows of many texts at once, each with its own stretch of the cache; null = one text.
    // Row r is kept in column columns[r] and sees begins[r] ... columns[r]; `visible` is ignored,
    // and context + n is what the longest text spans.
    const int64_t* begins;
    const int64_t* columns;
    const int32_t* taps;     // layers whose input is wanted; num_layers = after the last
    bf16* tapped;            // (n, num_taps * hidden)
    bf16* normed;            // (n, hidden): after the final norm
    float* logits;           // (n - first_logit, lm_head.out)
    float* log_totals;       // (n - first_logit,): log of the sum of e^logit; null = not wanted
    int64_t* best;           // (n - first_logit,): the first of the largest logits; null likewise
    uint8_t* scratch;        // scratch_bytes(n, context + n), aligned to 64
};

// ---- threads

// A barrier for threads that do nothing else; yields when the machine is shared.
struct Barrier {
    std::atomic<int> arrived{0};
    std::atomic<int> turn{0};

    void wait(int threads) {
        const int now = turn.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived.store(0, std::memory_order_relaxed);
            turn.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; turn.load(std::memory_order_acquire) == now; ++spins) {
            if (spins < SPINS) _mm_pause();
            else sched_yield();
        }
    }
};

struct Range {
    int begin, end;
};

Range share(int count, int thread, int threads) {
    return {int(int64_t(count) * thread / threads), int(int64_t(count) * (thread + 1) / threads)};
}

// ---- numbers

inline __m512 widen(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m512 load_bf16(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }

inline void store_bf16(bf16* p, __m512 x) {
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
}

// e^x for x <= 0, to about 2 units in the last place: 2^n times a polynomial of the rest.
inline __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// ---- products

// Weights to fetch from memory while others are computed with: `lines` of 64 bytes, spread evenly
// over so many iterations.
struct Ahead {
    const uint8_t* at;
    int lines, iterations;
    int due = 0;

    void fetch() {
        for (due += lines; due >= iterations; due -= iterations) {
            _mm_prefetch((const char*)at, _MM_HINT_T1);
            at += 64;
        }
    }
};

// f(count) with `count`, 1 ... Most, as a constant of the compiler's.
template <int Most, class F>
void with_constant(int count, F f) {
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
    __m512 acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = _mm512_load_ps(sums + r * stride + c * LANES);
    for (int k = 0; k < depth; ++k) {
        ahead.fetch();
        __m512bh weights[C];
        for (int c = 0; c < C; ++c) {
            weights[c] = (__m512bh)_mm512_loadu_si512(w + c * next + int64_t(k) * 64);
        }
        for (int r = 0; r < R; ++r) {
            int32_t pair;
            std::memcpy(&pair, x + r * width + 2 * k, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int c = 0; c < C; ++c) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], weights[c], both);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) _mm512_store_ps(sums + r * stride + c * LANES, acc[r][c]);
}

// Codes times rows are summed per block of 32 and scaled then: the codes 0 ... 15 are exact in bf16.
template <int R, int C>
void four_bit_tile(const Matrix& m, const uint8_t* w, int64_t next, const bf16* x,
                   const float* x_sums, int depth, float* sums, Ahead ahead) {
    alignas(64) static const uint16_t codes[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i table = _mm512_load_si512(codes);
    const int blocks = m.in / BLOCK;
    __m512 acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = _mm512_load_ps(sums + (r * C + c) * LANES);
    for (int b = 0; b < depth; ++b) {
        ahead.fetch();
        for (int c = 0; c < C; ++c) {
            const uint8_t* at = w + c * next + b * BLOCK_BYTES;
            __m512 part[R];
            for (int r = 0; r < R; ++r) part[r] = _mm512_setzero_ps();
            for (int g = 0; g < 4; ++g) {
                __m512i word = _mm512_loadu_si512(at + g * 64);
                for (int t = 0; t < 4; ++t) {
                    const __m512bh weights = (__m512bh)_mm512_permutexvar_epi16(word, table);
                    word = _mm512_srli_epi16(word, 4);
                    for (int r = 0; r < R; ++r) {
                        int32_t pair;
                        std::memcpy(&pair, x + int64_t(r) * m.in + b * BLOCK + 8 * g + 2 * t, 4);
                        part[r] = _mm512_dpbf16_ps(part[r], weights,
                                                   (__m512bh)_mm512_set1_epi32(pair));
                    }
                }
            }
            const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(at + 256)));
            const __m512 low = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(at + 288)));
            for (int r = 0; r < R; ++r) {
                acc[r][c] = _mm512_fmadd_ps(scale, part[r], acc[r][c]);
                acc[r][c] = _mm512_fmadd_ps(low, _mm512_set1_ps(x_sums[r * blocks + b]), acc[r][c]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) _mm512_store_ps(sums + (r * C + c) * LANES, acc[r][c]);
}

int64_t column_bytes(const Matrix& m) {
    return m.bits == 16 ? int64_t(m.in) * 32 : m.in / BLOCK * BLOCK_BYTES;
}

const uint8_t* column(const Matrix& m, int block) { return m.data + block * column_bytes(m); }

// What is done with finished sums.
enum class Into { store, add };

// Rows of a matrix that are taken at once: with them, `STRIP` rows of x and their sums a panel fits
// the nearest cache, whatever the number of groups of rows that read it.
constexpr int CHUNK = 128, STRIP = 48;

// C blocks of columns for up to STRIP rows; fetches what comes after them, from `then` on.
template <int C, Into into>
void strip(const Matrix& m, int block, const bf16* x, const float* x_sums, float* y, int64_t stride,
           int n, const uint8_t* then) {
    alignas(64) float sums[STRIP * C * LANES];
    std::memset(sums, 0, n * C * LANES * sizeof(float));
    const int groups = (n + ROWS - 1) / ROWS, unit = m.bits == 16 ? 2 : BLOCK;
    const int64_t next = column_bytes(m), unit_bytes = m.bits == 16 ? 64 : BLOCK_BYTES;
    const int chunk = groups == 1 ? m.in : CHUNK;
    for (int k = 0; k < m.in; k += chunk) {
        const int depth = std::min(chunk, m.in - k) / unit;
        const uint8_t* w = column(m, block) + k / unit * unit_bytes;
        const int lines = int(C * depth * unit_bytes / 64);
        for (int g = 0; g < groups; ++g) {
            const Range range = share(n, g, groups), fetched = share(lines, g, groups);
            const bf16* from = x + int64_t(range.begin) * m.in + k;
            const float* from_sums = x_sums + int64_t(range.begin) * (m.in / BLOCK) + k / BLOCK;
            float* to = sums + range.begin * C * LANES;
            const Ahead ahead{then + fetched.begin * 64, fetched.end - fetched.begin, depth};
            with_constant<ROWS>(range.end - range.begin, [&](auto count) {
                constexpr int R = decltype(count)::value;
                if (m.bits == 16)
                    bf16_tile<R, C>(w, next, from, m.in, depth, to, C * LANES, ahead);
                else
                    four_bit_tile<R, C>(m, w, next, from, from_sums, depth, to, ahead);
            });
        }
        then += lines * 64;
    }
    for (int r = 0; r < n; ++r) {
        for (int c = 0; c < C; ++c) {
            const int column = (block + c) * LANES;
            __m512 sum = _mm512_load_ps(sums + (r * C + c) * LANES);
            if (m.bias) sum = _mm512_add_ps(sum, _mm512_loadu_ps(m.bias + column));
            float* to = y + r * stride + column;
            if (into == Into::add) sum = _mm512_add_ps(sum, _mm512_loadu_ps(to));
            _mm512_storeu_ps(to, sum);
        }
    }
}

// C blocks of columns for all rows.
template <int C, Into into>
void rows(const Matrix& m, int block, const bf16* x, const float* x_sums, float* y, int64_t stride,
          int n, const uint8_t* then) {
    const int strips = (n + STRIP - 1) / STRIP;
    for (int i = 0; i < strips; ++i) {
        const Range range = share(n, i, strips);
        strip<C, into>(m, block, x + int64_t(range.begin) * m.in,
                       x_sums + int64_t(range.begin) * (m.in / BLOCK), y + range.begin * stride,
                       stride, range.end - range.begin, i + 1 < strips ? column(m, block) : then);
    }
}

// y (n, stride) = or += x W^T for these blocks of columns; `then` is what is read after them.
template <Into into>
void product(const Matrix& m, Range blocks, const bf16* x, const float* x_sums, float* y,
             int64_t stride, int n, const uint8_t* then) {
    int block = blocks.begin;
    const auto next = [&](int end) { return end < blocks.end ? column(m, end) : then; };
    for (; block + PANEL <= blocks.end; block += PANEL)
        rows<PANEL, into>(m, block, x, x_sums, y, stride, n, next(block + PANEL));
    if (block + 2 <= blocks.end) {
        rows<2, into>(m, block, x, x_sums, y, stride, n, next(block + 2));
        block += 2;
    }
    if (block < blocks.end) rows<1, into>(m, block, x, x_sums, y, stride, n, then);
}

// ---- what is between the products

// Sums of x over every 32 columns, which the minima of 4-bit blocks are multiplied by.
void block_sums(const bf16* x, int columns, float* out) {
    for (int b = 0; b < columns / BLOCK; ++b) {
        const __m512 both = _mm512_add_ps(load_bf16(x + b * BLOCK), load_bf16(x + b * BLOCK + 16));
        out[b] = _mm512_reduce_add_ps(both);
    }
}

void norm(const float* x, const bf16* weight, int columns, float eps, bf16* out) {
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < columns; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const float root = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / columns + eps);
    for (int i = 0; i < columns; i += 16) {
        const __m512 v = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(root));
        store_bf16(out + i, _mm512_mul_ps(v, load_bf16(weight + i)));
    }
}

// Norm (Qwen3) and rotary position of one head; rotary holds cosines and sines of one half.
void turn(float* head, const bf16* weight, const float* rotary, int dim, float eps) {
    if (weight) {
        float squares = 0.0f;
        for (int i = 0; i < dim; ++i) squares += head[i] * head[i];
        const float root = 1.0f / std::sqrt(squares / dim + eps);
        for (int i = 0; i < dim; ++i) {
            uint32_t bits = uint32_t(weight[i]) << 16;
            float w;
            std::memcpy(&w, &bits, 4);
            head[i] *= root * w;
        }
    }
    const int half = dim / 2;
    for (int i = 0; i < half; i += 16) {
        const __m512 a = _mm512_loadu_ps(head + i), b = _mm512_loadu_ps(head + half + i);
        const __m512 cos = _mm512_loadu_ps(rotary + i), sin = _mm512_loadu_ps(rotary + half + i);
        _mm512_storeu_ps(head + i, _mm512_fmsub_ps(a, cos, _mm512_mul_ps(b, sin)));
        _mm512_storeu_ps(head + half + i, _mm512_fmadd_ps(b, cos, _mm512_mul_ps(a, sin)));
    }
}

void to_bf16(const float* x, int columns, float factor, bf16* out) {
    for (int i = 0; i < columns; i += 16)
        store_bf16(out + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor)));
}

// The largest of some numbers and its place, and the sum of e^(number - largest).
struct Total {
    float most = -INFINITY, sum = 0.0f;
    int64_t place = 0;

    // `first` is the place of x[0].
    static Total of(const float* x, int count, int64_t first) {
        __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
        for (int i = 0; i < count; i += 16) {
            const __mmask16 here = lanes(count - i);
            most = _mm512_mask_max_ps(most, here, most, _mm512_maskz_loadu_ps(here, x + i));
        }
        const float highest = _mm512_reduce_max_ps(most);
        if (highest == -INFINITY) return {highest, 0.0f, first};
        const __m512 same = _mm512_set1_ps(highest);
        int64_t place = -1;
        for (int i = 0; i < count; i += 16) {
            const __mmask16 here = lanes(count - i);
            const __m512 v = _mm512_maskz_loadu_ps(here, x + i);
            const __mmask16 found = _mm512_mask_cmp_ps_mask(here, v, same, _CMP_EQ_OQ);
            if (found && place < 0) place = first + i + __builtin_ctz(found);
            sum = _mm512_mask_add_ps(sum, here, sum, exp_ps(_mm512_sub_ps(v, same)));
        }
        return {highest, _mm512_reduce_add_ps(sum), place};
    }

    static __mmask16 lanes(int count) { return count >= 16 ? 0xffff : (1u << count) - 1; }

    // Those of the numbers behind these.
    void add(const Total& other) {
        const float highest = std::max(most, other.most);
        if (highest == -INFINITY) return;
        sum = sum * std::exp(most - highest) + other.sum * std::exp(other.most - highest);
        if (other.most > most) place = other.place;
        most = highest;
    }
};

// The k largest of some numbers, largest first; of equal ones the first comes first.
void largest(const float* x, int count, int k, float* values, int64_t* places) {
    int held = 0;
    float least = -INFINITY;
    for (int i = 0; i < count; i += 16) {
        const __mmask16 here = Total::lanes(count - i);
        const __m512 v = _mm512_maskz_loadu_ps(here, x + i);
        __mmask16 more = held < k ? here
                                  : _mm512_mask_cmp_ps_mask(here, v, _mm512_set1_ps(least),
                                                            _CMP_GT_OQ);
        for (; more; more &= more - 1) {
            const int at = i + __builtin_ctz(more);
            if (held == k && !(x[at] > least)) continue;
            int to = held < k ? held++ : k - 1;
            for (; to > 0 && values[to - 1] < x[at]; --to) {
                values[to] = values[to - 1];
                places[to] = places[to - 1];
            }
            values[to] = x[at];
            places[to] = at;
            if (held == k) least = values[k - 1];
        }
    }
}

// silu(gate) * up
void gated(const float* gate, const float* up, int columns, bf16* out) {
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    for (int i = 0; i < columns; i += 16) {
        const __m512 g = _mm512_loadu_ps(gate + i);
        const __m512 e = exp_ps(_mm512_sub_ps(zero, _mm512_abs_ps(g)));  // e^-|g|
        const __mmask16 negative = _mm512_cmp_ps_mask(g, zero, _CMP_LT_OQ);
        const __m512 top = _mm512_mask_blend_ps(negative, one, e);
        const __m512 silu = _mm512_mul_ps(g, _mm512_div_ps(top, _mm512_add_ps(one, e)));
        store_bf16(out + i, _mm512_mul_ps(silu, _mm512_loadu_ps(up + i)));
    }
}

// ---- attention
//
// Rows of one text are taken together, and with each head of keys all heads of queries that use it:
// keys are transposed into the layout of a matrix once for all of them, values are read once for MIXED.

constexpr int KEYS = 2 * LANES;  // keys whose scores are computed together
constexpr int BATCH = 16;        // rows whose scores are held at once
constexpr int SLICE = 32;        // columns of values that are mixed together
constexpr int FETCHED = 32;      // values that are on their way from memory
constexpr int MIXED = 8;         // queries that share one reading of values

// to [width / 2][16][2] = 16 rows of (width,), of which the first `count` are there.
void transpose_keys(const bf16* keys, int count, int width, bf16* to) {
    for (int column = 0; column < width; column += KEYS) {
        __m512i a[16], b[16];
        for (int i = 0; i < 16; ++i) {
            a[i] = i < count ? _mm512_loadu_si512(keys + int64_t(i) * width + column)
                             : _mm512_setzero_si512();
        }
        for (int i = 0; i < 16; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        // a[4 i + k] holds of rows 4 i ... 4 i + 3 the pairs k, 4 + k, 8 + k, 12 + k.
        bf16* at = to + column * LANES;
        for (int k = 0; k < 4; ++k) {
            for (int odd = 0; odd < 2; ++odd) {
                const auto pick = [&](__m512i x, __m512i y, int which) {
                    return which ? _mm512_shuffle_i32x4(x, y, 0xdd)
                                 : _mm512_shuffle_i32x4(x, y, 0x88);
                };
                const __m512i low = pick(a[k], a[4 + k], odd);
                const __m512i high = pick(a[8 + k], a[12 + k], odd);
                const int pair = k + 4 * odd;
                _mm512_storeu_si512(at + pair * 2 * LANES, pick(low, high, 0));
                _mm512_storeu_si512(at + (pair + 8) * 2 * LANES, pick(low, high, 1));
            }
        }
    }
}

// Softmax in place; returns 1 / sum.
float soften(float* scores, int count) {
    float highest = -INFINITY;
    __m512 most = _mm512_set1_ps(-INFINITY);
    int i = 0;
    for (; i + 16 <= count; i += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + i));
    const __mmask16 rest = (1u << (count - i)) - 1;
    most = _mm512_mask_max_ps(most, rest, most, _mm512_maskz_loadu_ps(rest, scores + i));
    highest = _mm512_reduce_max_ps(most);
    __m512 total = _mm512_setzero_ps();
    for (i = 0; i < count; i += 16) {
        const __mmask16 here = count - i >= 16 ? 0xffff : (1u << (count - i)) - 1;
        const __m512 e = exp_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(here, scores + i),
                                              _mm512_set1_ps(highest)));
        _mm512_mask_storeu_ps(scores + i, here, e);
        total = _mm512_mask_add_ps(total, here, total, e);
    }
    return 1.0f / _mm512_reduce_add_ps(total);
}

// sums (Q, SLICE) += scores (Q, stride) times values, key by key, for SLICE of their columns.
template <int Q>
void mix(const float* scores, int64_t stride, const bf16* values, int64_t width, int count,
         float* sums) {
    __m512 acc[Q][2];
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < 2; ++c) acc[q][c] = _mm512_load_ps(sums + q * SLICE + c * LANES);
    for (int j = 0; j < count; ++j) {
        _mm_prefetch((const char*)(values + (j + FETCHED) * width), _MM_HINT_T0);
        const __m512 low = load_bf16(values + j * width);
        const __m512 high = load_bf16(values + j * width + LANES);
        for (int q = 0; q < Q; ++q) {
            const __m512 weight = _mm512_set1_ps(scores[q * stride + j]);
            acc[q][0] = _mm512_fmadd_ps(weight, low, acc[q][0]);
            acc[q][1] = _mm512_fmadd_ps(weight, high, acc[q][1]);
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < 2; ++c) _mm512_store_ps(sums + q * SLICE + c * LANES, acc[q][c]);
}

// Neighbouring rows of one text.
struct Strip {
    int first, count;  // rows
    int64_t begin;     // column of the text's first key
    int keys;          // that any of the rows sees lie before this one, counted from there
};

// One layer's attention, by all threads at once. A row sees the first keys of its text (`prefix`)
// and, in a tree, of the new ones those in its list: their order is the order of the text.
struct Attention {
    const Model& m;
    const Call& call;
    const bf16 *keys, *values;  // (kv_heads, capacity, head_dim)
    const bf16* queries;        // (kv_heads, n, heads / kv_heads, head_dim)
    bf16* out;                  // (n, heads, head_dim)
    float* scores;              // (kv_heads, BATCH, heads / kv_heads, stride)
    float* factors;             // (kv_heads, BATCH, heads / kv_heads): 1 / sum of the scores
    int64_t stride;
    bf16* transposed;               // (KEYS, head_dim), this thread's
    int32_t* list;              // (n,), this thread's
    Barrier& barrier;
    int thread, threads;

    void run() {
        for (int first = 0; first < call.n; first += BATCH) {
            const int end = std::min(call.n, first + BATCH);
            if (first) barrier.wait(threads);
            each_strip(first, end, [&](const Strip& s, int index) { score(s, first, index); });
            barrier.wait(threads);
            each_strip(first, end, [&](const Strip& s, int index) { softmax(s, first, index); });
            barrier.wait(threads);
            each_strip(first, end, [&](const Strip& s, int index) { blend(s, first, index); });
        }
    }

    template <class F>
    void each_strip(int first, int end, F f) const {
        for (int index = 0; first < end; ++index) {
            Strip strip{first, end - first, 0, 0};
            if (call.columns) {
                strip.begin = call.begins[first];
                int last = first + 1;
                while (last < end && call.begins[last] == strip.begin) ++last;
                strip.count = last - first;
            }
            for (int r = strip.first; r < strip.first + strip.count; ++r)
                strip.keys = std::max(strip.keys, prefix(r) + (call.visible ? call.n : 0));
            f(strip, index);
            first += strip.count;
        }
    }

    int prefix(int row) const {
        if (call.columns) return int(call.columns[row] - call.begins[row]) + 1;
        return call.visible ? call.context : call.context + row + 1;
    }

    // Those of the new keys that a row of a tree sees, as places in its text.
    int seen(int row) const {
        if (call.columns || !call.visible) return 0;
        const uint8_t* visible = call.visible + int64_t(row) * call.n;
        int count = 0;
        for (int j = 0; j < call.n; j += 64) {
            const __mmask64 there = call.n - j >= 64 ? ~0ull : (1ull << (call.n - j)) - 1;
            const __m512i some = _mm512_maskz_loadu_epi8(there, visible + j);
            for (uint64_t sees = _mm512_test_epi8_mask(some, some); sees; sees &= sees - 1)
                list[count++] = call.context + j + __builtin_ctzll(sees);
        }
        return count;
    }

    // This thread's share; of neighbouring strips not always the same end.
    Range mine(int items, int index) const {
        return share(items, (thread + index) % threads, threads);
    }

    int group() const { return m.heads / m.kv_heads; }

    // Place of a strip's first query among those of the batch.
    int64_t place(const Strip& strip, int batch, int head) const {
        return (int64_t(head) * BATCH + strip.first - batch) * group();
    }

    // Queries times keys.
    void score(const Strip& strip, int batch, int index) {
        const int dim = m.head_dim, chunks = (strip.keys + KEYS - 1) / KEYS;
        const int num_queries = strip.count * group(), groups = (num_queries + ROWS - 1) / ROWS;
        const Range items = mine(m.kv_heads * chunks, index);
        for (int item = items.begin; item < items.end; ++item) {
            const int head = item / chunks, first = item % chunks * KEYS;
            const bf16* from = keys + (head * call.capacity + strip.begin + first) * dim;
            for (int i = 0; i < KEYS; i += LANES) {
                transpose_keys(from + int64_t(i) * dim, std::min(LANES, strip.keys - first - i), dim,
                          transposed + i * dim);
            }
            const bf16* query = queries + (int64_t(head) * call.n + strip.first) * group() * dim;
            float* to = scores + place(strip, batch, head) * stride + first;
            for (int g = 0; g < groups; ++g) {
                const Range range = share(num_queries, g, groups);
                for (int q = range.begin; q < range.end; ++q)
                    std::memset(to + q * stride, 0, KEYS * sizeof(float));
                with_constant<ROWS>(range.end - range.begin, [&](auto count) {
                    const Ahead next{(const uint8_t*)(from + KEYS * dim), g ? 0 : dim, dim / 2};
                    bf16_tile<decltype(count)::value, KEYS / LANES>(
                        (const uint8_t*)transposed, int64_t(dim) * 32,
                        query + int64_t(range.begin) * dim, dim, dim / 2,
                        to + range.begin * stride, stride, next);
                });
            }
        }
    }

    // Softmax of what each row sees.
    void softmax(const Strip& strip, int batch, int index) {
        const Range rows = mine(strip.count * m.kv_heads, index);
        for (int item = rows.begin; item < rows.end; ++item) {
            const int row = item / m.kv_heads, known = prefix(strip.first + row);
            const int count = seen(strip.first + row);
            const int64_t at = place(strip, batch, item % m.kv_heads) + row * group();
            for (int64_t q = at; q < at + group(); ++q) {
                float* of = scores + q * stride;
                for (int i = 0; i < count; ++i) of[known + i] = of[list[i]];
                factors[q] = soften(of, known + count);
            }
        }
    }

    // Weights times values.
    void blend(const Strip& strip, int batch, int index) {
        const int slices = m.head_dim / SLICE;
        const int num_queries = strip.count * group(), groups = (num_queries + MIXED - 1) / MIXED;
        const Range items = mine(m.kv_heads * slices * groups, index);
        for (int item = items.begin; item < items.end; ++item) {
            const int head = item / (slices * groups), slice = item / groups % slices;
            const Range range = share(num_queries, item % groups, groups);
            blend(strip, head, slice * SLICE, range, place(strip, batch, head));
        }
    }

    void blend(const Strip& strip, int head, int column, Range queries, int64_t place) {
        const int64_t dim = m.head_dim;
        const bf16* from = values + (head * call.capacity + strip.begin) * dim + column;
        alignas(64) float sums[MIXED * SLICE] = {};
        const float* weights = scores + (place + queries.begin) * stride;
        int shared = strip.keys;
        for (int q = queries.begin; q < queries.end; ++q)
            shared = std::min(shared, prefix(strip.first + q / group()));
        with_constant<MIXED>(queries.end - queries.begin, [&](auto count) {
            mix<decltype(count)::value>(weights, stride, from, dim, shared, sums);
        });
        for (int q = queries.begin; q < queries.end; ++q, weights += stride) {
            const int row = strip.first + q / group(), known = prefix(row), count = seen(row);
            float* sum = sums + (q - queries.begin) * SLICE;
            mix<1>(weights + shared, stride, from + shared * dim, dim, known - shared, sum);
            for (int i = 0; i < count; ++i)
                mix<1>(weights + known + i, stride, from + list[i] * dim, dim, 1, sum);
            const int64_t at = (int64_t(row) * m.kv_heads + head) * group() + q % group();
            to_bf16(sum, SLICE, factors[place + q], out + at * dim + column);
        }
    }
};

// ---- the decoder

struct Scratch {
    float *x, *wide, *sums, *scores, *factors;
    Total* totals;
    bf16 *normed, *queries, *seen, *gate, *transposed;
    int32_t* list;
};

int64_t up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Whole blocks of keys, and an odd number of lines: rows do not fall on each other in the cache.
int64_t score_stride(int64_t keys) { return (keys + KEYS - 1) / KEYS * KEYS + LANES; }

int64_t lay_out(const Model& m, int n, int64_t keys, uint8_t* at, Scratch* s) {
    const int64_t qkv = int64_t(m.heads + 2 * m.kv_heads) * m.head_dim;
    const int64_t widest = std::max<int64_t>(qkv, 2 * int64_t(m.width));
    const int64_t deepest = std::max<int64_t>(m.width, std::max(m.hidden, m.heads * m.head_dim));
    uint8_t* p = at;
    auto take = [&](auto*& pointer, int64_t count) {
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(p);
        p += up(count * int64_t(sizeof(*pointer)));
    };
    take(s->x, n * int64_t(m.hidden));
    take(s->wide, n * widest);
    take(s->sums, n * (deepest / BLOCK + 1));
    take(s->scores, int64_t(m.heads) * BATCH * score_stride(keys));
    take(s->factors, int64_t(m.heads) * BATCH);
    take(s->totals, int64_t(m.threads) * n);
    take(s->normed, n * deepest);
    take(s->queries, n * int64_t(m.heads) * m.head_dim);
    take(s->seen, n * int64_t(m.heads) * m.head_dim);
    take(s->gate, n * int64_t(m.width));
    take(s->transposed, int64_t(m.threads) * KEYS * m.head_dim);
    take(s->list, int64_t(m.threads) * n);
    return p - at;
}

struct Run {
    const Model& m;
    const Call& call;
    Scratch s;
    Barrier barrier;
    int threads;  // as many as there are; never more than m.threads

    void thread(int t) {
        const int n = call.n, hidden = m.hidden;
        const Range mine = share(n, t, threads);
        for (int r = mine.begin; r < mine.end; ++r) {
            const bf16* from = m.embedding + call.tokens[r] * hidden;
            for (int i = 0; i < hidden; i += 16)
                _mm512_storeu_ps(s.x + int64_t(r) * hidden + i, load_bf16(from + i));
        }
        for (int i = 0; i < m.num_layers; ++i) {
            tap(i, mine);
            layer(i, t, mine);
        }
        tap(m.num_layers, mine);
        finish(t, mine);
    }

    void layer(int index, int t, Range mine) {
        const Layer& l = m.layers[index];
        const int n = call.n, dim = m.head_dim;
        const int64_t qkv = int64_t(m.heads + 2 * m.kv_heads) * dim;
        normalise(l.input_norm, mine, l.qkv);
        barrier.wait(threads);
        product<Into::store>(l.qkv, part(l.qkv, t), s.normed, s.sums, s.wide, qkv, n,
                             first(l.out, t));
        barrier.wait(threads);
        bf16* keys = call.cache + int64_t(2 * index) * m.kv_heads * call.capacity * dim;
        bf16* values = keys + int64_t(m.kv_heads) * call.capacity * dim;
        place(l, keys, values, mine);
        barrier.wait(threads);
        attend(keys, values, t);
        barrier.wait(threads);
        const int64_t inner = int64_t(m.heads) * dim;
        if (l.out.bits == 4) {
            for (int r = mine.begin; r < mine.end; ++r)
                block_sums(s.seen + r * inner, inner, s.sums + r * (inner / BLOCK));
            barrier.wait(threads);
        }
        product<Into::add>(l.out, part(l.out, t), s.seen, s.sums, s.x, m.hidden, n,
                           first(l.gate_up, t));
        barrier.wait(threads);
        normalise(l.mlp_norm, mine, l.gate_up);
        barrier.wait(threads);
        const int wide = m.width / LANES;
        const Range columns = share(wide, t, threads);
        const Range ups{columns.begin + wide, columns.end + wide};
        product<Into::store>(l.gate_up, columns, s.normed, s.sums, s.wide, 2 * m.width, n,
                             column(l.gate_up, ups.begin));
        product<Into::store>(l.gate_up, ups, s.normed, s.sums, s.wide, 2 * m.width, n,
                             first(l.down, t));
        const int from = columns.begin * LANES, count = (columns.end - columns.begin) * LANES;
        for (int r = 0; r < n; ++r) {
            const float* row = s.wide + int64_t(r) * 2 * m.width;
            gated(row + from, row + m.width + from, count, s.gate + int64_t(r) * m.width + from);
        }
        barrier.wait(threads);
        if (l.down.bits == 4) {
            for (int r = mine.begin; r < mine.end; ++r)
                block_sums(s.gate + int64_t(r) * m.width, m.width,
                           s.sums + r * int64_t(m.width / BLOCK));
            barrier.wait(threads);
        }
        const Matrix& after = index + 1 < m.num_layers ? m.layers[index + 1].qkv : m.lm_head;
        product<Into::add>(l.down, part(l.down, t), s.gate, s.sums, s.x, m.hidden, n,
                           first(after, t));
        barrier.wait(threads);
    }

    void normalise(const bf16* weight, Range mine, const Matrix& next) {
        for (int r = mine.begin; r < mine.end; ++r) {
            bf16* to = s.normed + int64_t(r) * m.hidden;
            norm(s.x + int64_t(r) * m.hidden, weight, m.hidden, m.eps, to);
            if (next.bits == 4) block_sums(to, m.hidden, s.sums + r * int64_t(m.hidden / BLOCK));
        }
    }

    // Turns queries and keys; keys and values go into the cache.
    void place(const Layer& l, bf16* keys, bf16* values, Range mine) {
        const int dim = m.head_dim, all = m.heads + 2 * m.kv_heads, group = m.heads / m.kv_heads;
        for (int r = mine.begin; r < mine.end; ++r) {
            const float* rotary = call.rotary + int64_t(r) * dim;
            for (int h = 0; h < all; ++h) {
                float* head = s.wide + (int64_t(r) * all + h) * dim;
                if (h < m.heads) {
                    turn(head, l.query_norm, rotary, dim, m.eps);
                    const int64_t at = (int64_t(h / group) * call.n + r) * group + h % group;
                    to_bf16(head, dim, m.scale, s.queries + at * dim);
                    continue;
                }
                const int kv = h - m.heads;
                const bool key = kv < m.kv_heads;
                if (key) turn(head, l.key_norm, rotary, dim, m.eps);
                bf16* to = key ? keys + int64_t(kv) * call.capacity * dim
                               : values + int64_t(kv - m.kv_heads) * call.capacity * dim;
                to_bf16(head, dim, 1.0f, to + column_of(r) * dim);
            }
        }
    }

    int64_t column_of(int row) const {
        return call.columns ? call.columns[row] : int64_t(call.context) + row;
    }

    void attend(const bf16* keys, const bf16* values, int t) {
        Attention attention{m,         call,      keys,
                            values,    s.queries, s.seen,
                            s.scores,  s.factors, score_stride(call.context + call.n),
                            s.transposed + int64_t(t) * KEYS * m.head_dim,
                            s.list + int64_t(t) * call.n,
                            barrier,   t,         threads};
        attention.run();
    }

    void tap(int index, Range mine) {
        for (int i = 0; i < call.num_taps; ++i) {
            if (call.taps[i] != index) continue;
            for (int r = mine.begin; r < mine.end; ++r)
                to_bf16(s.x + int64_t(r) * m.hidden, m.hidden, 1.0f,
                        call.tapped + (int64_t(r) * call.num_taps + i) * m.hidden);
        }
    }

    void finish(int t, Range mine) {
        for (int r = mine.begin; r < mine.end; ++r) {
            bf16* to = call.normed + int64_t(r) * m.hidden;
            norm(s.x + int64_t(r) * m.hidden, m.norm, m.hidden, m.eps, to);
            if (m.lm_head.bits == 4)
                block_sums(to, m.hidden, s.sums + r * int64_t(m.hidden / BLOCK));
        }
        barrier.wait(threads);
        const int from = call.first_logit;
        product<Into::store>(m.lm_head, part(m.lm_head, t), call.normed + int64_t(from) * m.hidden,
                             s.sums + from * int64_t(m.hidden / BLOCK), call.logits,
                             m.lm_head.out, call.n - from, m.lm_head.data);
        if (call.log_totals) total(t, call.n - from);
    }

    // Every thread sums up its own columns, which it has just written; the first adds them up.
    void total(int t, int n) {
        const Range mine = part(m.lm_head, t);
        const int begin = mine.begin * LANES, end = std::min(mine.end * LANES, m.vocab);
        for (int r = 0; r < n; ++r) {
            const float* row = call.logits + int64_t(r) * m.lm_head.out;
            s.totals[t * n + r] =
                begin < end ? Total::of(row + begin, end - begin, begin) : Total();
        }
        barrier.wait(threads);
        for (int r = 0; t == 0 && r < n; ++r) {
            Total all;
            for (int i = 0; i < threads; ++i) all.add(s.totals[i * n + r]);
            call.log_totals[r] = all.most + std::log(all.sum);
            call.best[r] = all.place;
        }
    }

    // A thread's columns of a matrix, and where they begin. Gate and up are shared out alike.
    Range part(const Matrix& matrix, int t) const { return share(matrix.out / LANES, t, threads); }

    const uint8_t* first(const Matrix& matrix, int t) const {
        const bool gate_up = matrix.out == 2 * m.width;
        return column(matrix, share(matrix.out / LANES / (gate_up ? 2 : 1), t, threads).begin);
    }
};

}  // namespace

extern "C" {

int64_t scratch_bytes(const Model* m, int n, int64_t keys) {
    Scratch s;
    return lay_out(*m, n, keys, nullptr, &s);
}

void forward(const Model* m, const Call* call) {
    Run run{*m, *call, {}, {}, 0};
    lay_out(*m, call->n, call->context + call->n, call->scratch, &run.s);
#pragma omp parallel num_threads(m->threads)
    {
#pragma omp single
        run.threads = omp_get_num_threads();
        run.thread(omp_get_thread_num());
    }
}

// y (n, out) = x (n, in) W^T + bias; sums is room for n * in / 32 floats, used by 4-bit matrices.
void linear(const Matrix* m, const bf16* x, float* y, float* sums, int n, int threads) {
    if (m->bits == 4)
        for (int r = 0; r < n; ++r)
            block_sums(x + int64_t(r) * m->in, m->in, sums + r * int64_t(m->in / BLOCK));
#pragma omp parallel num_threads(threads)
    {
        const Range mine = share(m->out / LANES, omp_get_thread_num(), omp_get_num_threads());
        product<Into::store>(*m, mine, x, sums, y, m->out, n, m->data);
    }
}

// Of each row of logits `stride` apart: its k largest numbers (n, k), their places, and, unless
// log_totals is null, the log of the sum of e^number.
void likeliest(const float* logits, int64_t stride, int n, int count, int k, float* values,
               int64_t* places, float* log_totals, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > 1)
    for (int r = 0; r < n; ++r) {
        const float* row = logits + r * stride;
        largest(row, count, k, values + int64_t(r) * k, places + int64_t(r) * k);
        if (!log_totals) continue;
        const Total total = Total::of(row, count, 0);
        log_totals[r] = total.most + std::log(total.sum);
    }
}
}
