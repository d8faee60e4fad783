// Attention of new rows to the keys and values in a cache, by all threads at once.
//
// Rows of one text are processed together, and with each key head all query heads that use it: keys
// are transposed into the layout of a matrix once for all of them, and values are read once per
// QUERIES_PER_SUM queries.
#pragma once

#include <sched.h>

#include <atomic>

#include "products.h"

namespace {

constexpr int SPINS = 4096;

// Attention heads of a decoder's layers.
struct Heads {
    int32_t heads, kv_heads, head_dim;

    int group() const { return heads / kv_heads; }
};

// New rows, where their keys and values are stored, and which keys each of them sees.
struct NewRows {
    int32_t n;               // new rows
    int32_t context;         // rows in the cache before them
    int32_t num_masked;      // the last of those, seen as `visible` says; the others are seen by all
    const uint8_t* visible;  // (n, num_masked + n), null = causal
    int64_t capacity;        // rows of the cache
    // Rows of many texts at once, each with its own segment of the cache; null = one text.
    // Row r is stored in column columns[r] and sees text_starts[r] ... columns[r]; `visible` is
    // ignored, and context + n is the length of the longest text.
    const int64_t* text_starts;
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
constexpr int QUERIES_PER_SUM = 8;  // queries that share one reading of values
#else
constexpr int KEYS = LANES;
constexpr int QUERIES_PER_SUM = 2;
#endif
constexpr int QUERIES_PER_TILE = Tile<16>::rows;  // queries whose scores are computed together
constexpr int BATCH = 16;              // rows whose scores are in memory at once
constexpr int SLICE = BLOCK;           // columns of values that are summed together
constexpr int PREFETCH_DISTANCE = 32;  // values prefetched from memory

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

// Softmax in place, without the division by the sum, of scores soft-capped at `cap`; returns 1 / sum.
float softmax_(float* scores, int count, float cap) {
    F most = set1(-INFINITY), total = zero();
    for (int i = 0; cap != 0.0f && i < count; i += LANES)
        store_partial(scores + i, count - i,
                      softcap(load_partial(scores + i, count - i, 0.0f), cap));
    for (int i = 0; i < count; i += LANES)
        most = max(most, load_partial(scores + i, count - i, -INFINITY));
    const F highest = set1(reduce_max(most));
    for (int i = 0; i < count; i += LANES) {
        const F e = exp(sub(load_partial(scores + i, count - i, -INFINITY), highest));
        store_partial(scores + i, count - i, e);
        total = add(total, load_partial(scores + i, count - i, 0.0f));
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
        __builtin_prefetch(values + (j + PREFETCH_DISTANCE) * width);
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
    int end_key;       // all keys seen by any of the rows are before this one, counted from `begin`
    int first_key;     // and none of them before this one, a multiple of KEYS
};

// One layer's attention, by all threads at once. A row sees a prefix of its text's keys and, in a
// tree, those of the new keys that are in its list, in the order of the text.
struct Attention {
    const Heads& shape;
    const NewRows& new_rows;
    const bf16 *keys, *values;  // (kv_heads, capacity, head_dim)
    const bf16* queries;        // (kv_heads, n, heads / kv_heads, head_dim)
    Activations out;            // (n, heads * head_dim)
    int formats;                // of `out`
    int window;                 // keys that a row sees at most, the last ones; 0 = all
    float cap;                  // of scores; 0 = none
    float* scores;              // (kv_heads, BATCH, heads / kv_heads, stride)
    float* factors;             // (kv_heads, BATCH, heads / kv_heads): 1 / sum of the scores
    int64_t stride;
    bf16* transposed;           // (KEYS, head_dim), this thread's
    int32_t* visible_list;      // (num_masked + n,), this thread's
    Barrier& barrier;
    int thread, threads;

    void run() {
        for (int first = 0; first < new_rows.n; first += BATCH) {
            const int end = std::min(new_rows.n, first + BATCH);
            if (first) barrier.wait(threads);
            for_each_group(first, end, [&](auto& group, int i) { score(group, first, i); });
            barrier.wait(threads);
            for_each_group(first, end, [&](auto& group, int i) { softmax(group, first, i); });
            barrier.wait(threads);
            for_each_group(first, end, [&](auto& group, int i) { sum_values(group, first, i); });
        }
    }

    template <class Function>
    void for_each_group(int first, int end, Function f) const {
        for (int index = 0; first < end; ++index) {
            RowGroup group{first, end - first, 0, 0, 0};
            if (new_rows.columns) {
                group.begin = new_rows.text_starts[first];
                int last = first + 1;
                while (last < end && new_rows.text_starts[last] == group.begin) ++last;
                group.count = last - first;
            }
            int shortest = prefix_len(group.first);
            for (int r = group.first; r < group.first + group.count; ++r) {
                const int num_keys = prefix_len(r) + (new_rows.visible ? width() : 0);
                group.end_key = std::max(group.end_key, num_keys);
                shortest = std::min(shortest, prefix_len(r));
            }
            if (window) group.first_key = std::max(0, shortest - window) / KEYS * KEYS;
            f(group, index);
            first += group.count;
        }
    }

    int prefix_len(int row) const {
        if (new_rows.columns) return int(new_rows.columns[row] - new_rows.text_starts[row]) + 1;
        return new_rows.context + (new_rows.visible ? -new_rows.num_masked : row + 1);
    }

    // Keys that `visible` covers.
    int width() const { return new_rows.num_masked + new_rows.n; }

    // Lists the new keys that a row of a tree sees, as positions in its text; returns their number.
    int visible_keys(int row) const {
        if (new_rows.columns || !new_rows.visible) return 0;
        const uint8_t* visible = new_rows.visible + int64_t(row) * width();
        int count = 0;
        for (int j = 0; j < width(); j += 8) {
            uint64_t sees = 0;  // a byte a key
            std::memcpy(&sees, visible + j, std::min(8, width() - j));
            for (; sees; sees &= sees - 1)
                visible_list[count++] = prefix_len(row) + j + __builtin_ctzll(sees) / 8;
        }
        return count;
    }

    // This thread's share, rotated by the group's index to balance the remainders.
    Range thread_share(int items, int index) const {
        return share(items, (thread + index) % threads, threads);
    }

    // Row of `scores` of a group's first query.
    int64_t score_row(const RowGroup& group, int batch, int head) const {
        return (int64_t(head) * BATCH + group.first - batch) * shape.group();
    }

    // Queries times keys.
    void score(const RowGroup& group, int batch, int index) {
        const int dim = shape.head_dim, span = group.end_key - group.first_key;
        const int chunks = (span + KEYS - 1) / KEYS;
        const int num_queries = group.count * shape.group();
        const int groups = (num_queries + QUERIES_PER_TILE - 1) / QUERIES_PER_TILE;
        const Range items = thread_share(shape.kv_heads * chunks, index);
        for (int item = items.begin; item < items.end; ++item) {
            const int head = item / chunks, first = group.first_key + item % chunks * KEYS;
            const bf16* from = keys + (head * new_rows.capacity + group.begin + first) * dim;
            for (int i = 0; i < KEYS; i += LANES) {
                const int count = std::min(LANES, group.end_key - first - i);
                transpose_keys(from + int64_t(i) * dim, count, dim, transposed + i * dim);
            }
            const bf16* query =
                queries + (int64_t(head) * new_rows.n + group.first) * shape.group() * dim;
            float* to = scores + score_row(group, batch, head) * stride + first;
            for (int g = 0; g < groups; ++g) {
                const Range range = share(num_queries, g, groups);
                for (int q = range.begin; q < range.end; ++q)
                    std::memset(to + q * stride, 0, KEYS * sizeof(float));
                with_constant<QUERIES_PER_TILE>(range.end - range.begin, [&](auto count) {
                    const Prefetch next{(const uint8_t*)(from + KEYS * dim), g ? 0 : dim, dim / 2};
                    bf16_tile<decltype(count)::value, KEYS / LANES>(
                        (const uint8_t*)transposed, int64_t(dim) * 2 * LANES,
                        query + int64_t(range.begin) * dim, dim, dim / 2,
                        to + range.begin * stride, stride, next);
                });
            }
        }
    }

    // Softmax over the keys that each row sees.
    void softmax(const RowGroup& group, int batch, int index) {
        const Range rows = thread_share(group.count * shape.kv_heads, index);
        for (int item = rows.begin; item < rows.end; ++item) {
            const int row = item / shape.kv_heads, prefix = prefix_len(group.first + row);
            const int count = visible_keys(group.first + row);
            const int64_t at = score_row(group, batch, item % shape.kv_heads) + row * shape.group();
            for (int64_t q = at; q < at + shape.group(); ++q) {
                float* row_scores = scores + q * stride;
                for (int i = 0; i < count; ++i) row_scores[prefix + i] = row_scores[visible_list[i]];
                const int begin = window ? std::max(0, prefix + count - window) : 0;
                for (int i = group.first_key; i < begin; ++i) row_scores[i] = 0.0f;
                factors[q] = softmax_(row_scores + begin, prefix + count - begin, cap);
            }
        }
    }

    // Weights times values.
    void sum_values(const RowGroup& group, int batch, int index) {
        const int slices = shape.head_dim / SLICE;
        const int num_queries = group.count * shape.group();
        const int groups = (num_queries + QUERIES_PER_SUM - 1) / QUERIES_PER_SUM;
        const Range items = thread_share(shape.kv_heads * slices * groups, index);
        for (int item = items.begin; item < items.end; ++item) {
            const int head = item / (slices * groups), slice = item / groups % slices;
            const Range range = share(num_queries, item % groups, groups);
            sum_values(group, head, slice * SLICE, range, score_row(group, batch, head));
        }
    }

    void sum_values(const RowGroup& group, int head, int column, Range queries, int64_t place) {
        const int64_t dim = shape.head_dim;
        const bf16* from = values + (head * new_rows.capacity + group.begin) * dim + column;
        alignas(64) float sums[QUERIES_PER_SUM * SLICE] = {};
        const float* weights = scores + (place + queries.begin) * stride;
        int shared = group.end_key;
        for (int q = queries.begin; q < queries.end; ++q)
            shared = std::min(shared, prefix_len(group.first + q / shape.group()));
        with_constant<QUERIES_PER_SUM>(queries.end - queries.begin, [&](auto count) {
            accumulate_values<decltype(count)::value>(weights + group.first_key, stride,
                                                      from + group.first_key * dim, dim,
                                                      shared - group.first_key, sums);
        });
        for (int q = queries.begin; q < queries.end; ++q, weights += stride) {
            const int row = group.first + q / shape.group();
            const int prefix = prefix_len(row), count = visible_keys(row);
            float* sum = sums + (q - queries.begin) * SLICE;
            accumulate_values<1>(weights + shared, stride, from + shared * dim, dim,
                                 prefix - shared, sum);
            for (int i = 0; i < count; ++i)
                accumulate_values<1>(weights + prefix + i, stride, from + visible_list[i] * dim,
                                     dim, 1, sum);
            const int64_t at =
                (int64_t(row) * shape.kv_heads + head) * shape.group() + q % shape.group();
            const F factor = set1(factors[place + q]);
            store_activation(mul(load(sum), factor), mul(load(sum + LANES), factor), formats,
                             at * dim + column, out);
        }
    }
};

}  // namespace
