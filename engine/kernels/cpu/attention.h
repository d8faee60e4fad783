// Attention of new rows to the keys and values in a cache, by all threads at once.
//
// Rows of one text are taken together, and with each head of keys all heads of queries that use it:
// keys are transposed into the layout of a matrix once for all of them, values are read once for
// SUMMED.
#pragma once

#include <sched.h>

#include <atomic>

#include "products.h"

namespace {

constexpr int SPINS = 4096;

// What the layers of a decoder are like.
struct Heads {
    int32_t heads, kv_heads, head_dim;

    int group() const { return heads / kv_heads; }
};

// New rows, where their keys and values are kept, and what each of them sees.
struct NewRows {
    int32_t n;               // new rows
    int32_t context;         // rows in the cache before them
    int32_t num_masked;      // the last of those, seen as `visible` says; the others are seen by all
    int32_t unused;
    const uint8_t* visible;  // (n, num_masked + n), null = causal
    int64_t capacity;        // rows of the cache
    // Rows of many texts at once, each with its own stretch of the cache; null = one text.
    // Row r is kept in column columns[r] and sees begins[r] ... columns[r]; `visible` is ignored,
    // and context + n is what the longest text spans.
    const int64_t* begins;
    const int64_t* columns;
};

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
            if (spins < SPINS) spin_pause();
            else sched_yield();
        }
    }
};

#ifdef __AVX512F__
constexpr int KEYS = 2 * LANES;  // keys whose scores are computed together
constexpr int SUMMED = 8;        // queries that share one reading of values
#else
constexpr int KEYS = LANES;
constexpr int SUMMED = 2;
#endif
constexpr int SCORED = Tile<16>::rows;  // queries whose scores are computed together
constexpr int BATCH = 16;        // rows whose scores are held at once
constexpr int SLICE = BLOCK;     // columns of values that are summed together
constexpr int FETCHED = 32;      // values that are on their way from memory

// to [width / 2][16][2] = 16 rows of (width,), of which the first `count` are there.
#ifdef __AVX512F__
void transpose_keys(const bf16* keys, int count, int width, bf16* to) {
    for (int column = 0; column < width; column += BLOCK) {
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
#else
void transpose_keys(const bf16* keys, int count, int width, bf16* to) {
    std::memset(to, 0, int64_t(width) * LANES * sizeof(bf16));
    for (int i = 0; i < count; ++i)
        for (int pair = 0; pair < width / 2; ++pair)
            std::memcpy(to + (pair * LANES + i) * 2, keys + int64_t(i) * width + 2 * pair, 4);
}
#endif

// Softmax in place, of scores that end at `cap`; returns 1 / sum.
float softmax_(float* scores, int count, float cap) {
    F most = set1(-INFINITY), total = zero();
    for (int i = 0; cap != 0.0f && i < count; i += LANES)
        store_some(scores + i, count - i, capped(load_some(scores + i, count - i, 0.0f), cap));
    for (int i = 0; i < count; i += LANES)
        most = max(most, load_some(scores + i, count - i, -INFINITY));
    const F highest = set1(reduce_max(most));
    for (int i = 0; i < count; i += LANES) {
        const F e = exp(sub(load_some(scores + i, count - i, -INFINITY), highest));
        store_some(scores + i, count - i, e);
        total = add(total, load_some(scores + i, count - i, 0.0f));
    }
    return 1.0f / reduce_add(total);
}

// sums (Q, SLICE) += scores (Q, stride) times values, key by key, for SLICE of their columns.
template <int Q>
void accumulate_values(const float* scores, int64_t stride, const bf16* values, int64_t width,
                       int count, float* sums) {
    F acc[Q][2];
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < 2; ++c) acc[q][c] = load(sums + q * SLICE + c * LANES);
    for (int j = 0; j < count; ++j) {
        __builtin_prefetch(values + (j + FETCHED) * width);
        const F low = load_bf16(values + j * width), high = load_bf16(values + j * width + LANES);
        for (int q = 0; q < Q; ++q) {
            const F weight = set1(scores[q * stride + j]);
            acc[q][0] = fma(weight, low, acc[q][0]);
            acc[q][1] = fma(weight, high, acc[q][1]);
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int c = 0; c < 2; ++c) store(sums + q * SLICE + c * LANES, acc[q][c]);
}

// Neighbouring rows of one text.
struct RowGroup {
    int first, count;  // rows
    int64_t begin;     // column of the text's first key
    int keys;          // that any of the rows sees lie before this one, counted from there
    int low;           // and not before this one, a multiple of KEYS
};

// One layer's attention, by all threads at once. A row sees the first keys of its text (`prefix`)
// and, in a tree, of the new ones those in its list: their order is the order of the text.
struct Attention {
    const Heads& shape;
    const NewRows& fresh;
    const bf16 *keys, *values;  // (kv_heads, capacity, head_dim)
    const bf16* queries;        // (kv_heads, n, heads / kv_heads, head_dim)
    Rows out;                   // (n, heads * head_dim)
    int wants;                  // as the matrix wants them that they meet
    int window;                 // keys that a row sees at most, the last ones; 0 = all
    float cap;                  // of scores; 0 = none
    float* scores;              // (kv_heads, BATCH, heads / kv_heads, stride)
    float* factors;             // (kv_heads, BATCH, heads / kv_heads): 1 / sum of the scores
    int64_t stride;
    bf16* transposed;           // (KEYS, head_dim), this thread's
    int32_t* list;              // (num_masked + n,), this thread's
    Barrier& barrier;
    int thread, threads;

    void run() {
        for (int first = 0; first < fresh.n; first += BATCH) {
            const int end = std::min(fresh.n, first + BATCH);
            if (first) barrier.wait(threads);
            each_group(first, end, [&](const RowGroup& g, int index) { score(g, first, index); });
            barrier.wait(threads);
            each_group(first, end, [&](const RowGroup& g, int index) { softmax(g, first, index); });
            barrier.wait(threads);
            each_group(first, end,
                       [&](const RowGroup& g, int index) { sum_values(g, first, index); });
        }
    }

    template <class Function>
    void each_group(int first, int end, Function f) const {
        for (int index = 0; first < end; ++index) {
            RowGroup group{first, end - first, 0, 0, 0};
            if (fresh.columns) {
                group.begin = fresh.begins[first];
                int last = first + 1;
                while (last < end && fresh.begins[last] == group.begin) ++last;
                group.count = last - first;
            }
            int shortest = prefix(group.first);
            for (int r = group.first; r < group.first + group.count; ++r) {
                group.keys = std::max(group.keys, prefix(r) + (fresh.visible ? width() : 0));
                shortest = std::min(shortest, prefix(r));
            }
            if (window) group.low = std::max(0, shortest - window) / KEYS * KEYS;
            f(group, index);
            first += group.count;
        }
    }

    int prefix(int row) const {
        if (fresh.columns) return int(fresh.columns[row] - fresh.begins[row]) + 1;
        return fresh.visible ? fresh.context - fresh.num_masked : fresh.context + row + 1;
    }

    // Keys that `visible` speaks of.
    int width() const { return fresh.num_masked + fresh.n; }

    // Those of the new keys that a row of a tree sees, as places in its text.
    int seen(int row) const {
        if (fresh.columns || !fresh.visible) return 0;
        const uint8_t* visible = fresh.visible + int64_t(row) * width();
        int count = 0;
        for (int j = 0; j < width(); j += 8) {
            uint64_t sees = 0;  // a byte a key
            std::memcpy(&sees, visible + j, std::min(8, width() - j));
            for (; sees; sees &= sees - 1)
                list[count++] = prefix(row) + j + __builtin_ctzll(sees) / 8;
        }
        return count;
    }

    // This thread's share; of neighbouring groups not always the same end.
    Range mine(int items, int index) const {
        return share(items, (thread + index) % threads, threads);
    }

    // Place of a group's first query in the batch.
    int64_t place(const RowGroup& group, int batch, int head) const {
        return (int64_t(head) * BATCH + group.first - batch) * shape.group();
    }

    // Queries times keys.
    void score(const RowGroup& group, int batch, int index) {
        const int dim = shape.head_dim, chunks = (group.keys - group.low + KEYS - 1) / KEYS;
        const int num_queries = group.count * shape.group();
        const int groups = (num_queries + SCORED - 1) / SCORED;
        const Range items = mine(shape.kv_heads * chunks, index);
        for (int item = items.begin; item < items.end; ++item) {
            const int head = item / chunks, first = group.low + item % chunks * KEYS;
            const bf16* from = keys + (head * fresh.capacity + group.begin + first) * dim;
            for (int i = 0; i < KEYS; i += LANES) {
                transpose_keys(from + int64_t(i) * dim, std::min(LANES, group.keys - first - i), dim,
                          transposed + i * dim);
            }
            const bf16* query =
                queries + (int64_t(head) * fresh.n + group.first) * shape.group() * dim;
            float* to = scores + place(group, batch, head) * stride + first;
            for (int g = 0; g < groups; ++g) {
                const Range range = share(num_queries, g, groups);
                for (int q = range.begin; q < range.end; ++q)
                    std::memset(to + q * stride, 0, KEYS * sizeof(float));
                with_constant<SCORED>(range.end - range.begin, [&](auto count) {
                    const Ahead next{(const uint8_t*)(from + KEYS * dim), g ? 0 : dim, dim / 2};
                    bf16_tile<decltype(count)::value, KEYS / LANES>(
                        (const uint8_t*)transposed, int64_t(dim) * 2 * LANES,
                        query + int64_t(range.begin) * dim, dim, dim / 2,
                        to + range.begin * stride, stride, next);
                });
            }
        }
    }

    // Softmax of what each row sees.
    void softmax(const RowGroup& group, int batch, int index) {
        const Range rows = mine(group.count * shape.kv_heads, index);
        for (int item = rows.begin; item < rows.end; ++item) {
            const int row = item / shape.kv_heads, known = prefix(group.first + row);
            const int count = seen(group.first + row);
            const int64_t at = place(group, batch, item % shape.kv_heads) + row * shape.group();
            for (int64_t q = at; q < at + shape.group(); ++q) {
                float* of = scores + q * stride;
                for (int i = 0; i < count; ++i) of[known + i] = of[list[i]];
                const int begin = window ? std::max(0, known + count - window) : 0;
                std::fill(of + group.low, of + std::max(group.low, begin), 0.0f);
                factors[q] = softmax_(of + begin, known + count - begin, cap);
            }
        }
    }

    // Weights times values.
    void sum_values(const RowGroup& group, int batch, int index) {
        const int slices = shape.head_dim / SLICE;
        const int num_queries = group.count * shape.group();
        const int groups = (num_queries + SUMMED - 1) / SUMMED;
        const Range items = mine(shape.kv_heads * slices * groups, index);
        for (int item = items.begin; item < items.end; ++item) {
            const int head = item / (slices * groups), slice = item / groups % slices;
            const Range range = share(num_queries, item % groups, groups);
            sum_values(group, head, slice * SLICE, range, place(group, batch, head));
        }
    }

    void sum_values(const RowGroup& group, int head, int column, Range queries, int64_t place) {
        const int64_t dim = shape.head_dim;
        const bf16* from = values + (head * fresh.capacity + group.begin) * dim + column;
        alignas(64) float sums[SUMMED * SLICE] = {};
        const float* weights = scores + (place + queries.begin) * stride;
        int shared = group.keys;
        for (int q = queries.begin; q < queries.end; ++q)
            shared = std::min(shared, prefix(group.first + q / shape.group()));
        with_constant<SUMMED>(queries.end - queries.begin, [&](auto count) {
            accumulate_values<decltype(count)::value>(weights + group.low, stride,
                                                      from + group.low * dim, dim,
                                                      shared - group.low, sums);
        });
        for (int q = queries.begin; q < queries.end; ++q, weights += stride) {
            const int row = group.first + q / shape.group(), known = prefix(row), count = seen(row);
            float* sum = sums + (q - queries.begin) * SLICE;
            accumulate_values<1>(weights + shared, stride, from + shared * dim, dim,
                                 known - shared, sum);
            for (int i = 0; i < count; ++i)
                accumulate_values<1>(weights + known + i, stride, from + list[i] * dim, dim, 1,
                                     sum);
            const int64_t at =
                (int64_t(row) * shape.kv_heads + head) * shape.group() + q % shape.group();
            const F factor = set1(factors[place + q]);
            store_activation(mul(load(sum), factor), mul(load(sum + LANES), factor), wants,
                             at * dim + column, out);
        }
    }
};


}  // namespace
