// One forward of a decoder over n new rows: a target, a draft model, or a draft head that reads a
// hidden state beside each token. Sums are float32; weights are bfloat16, or quantized (formats.h)
// for activations in 8 bits.
//
// A row's result is the same, bit by bit, whether it is computed alone, in a tree or in a prompt. So
// a draft tree is verified with exactly the logits of plain decoding.

#pragma once

#include "attention.h"
#include "rows.h"

namespace {

MatmulFunction rare_matmul = nullptr;  // of formats behind Q8_0

template <Epilogue epilogue>
void matmul(const Matrix& m, Range blocks, Activations x, float* y, int64_t stride, int n,
             const uint8_t* then) {
    if (m.format > Q8_0) return rare_matmul(m, blocks, x, y, stride, n, then, epilogue);
    dispatch_matmul<epilogue, BF16, Q8_0>(m, blocks, x, y, stride, n, then);
}

struct Layer {
    Matrix qkv[3], out, gate_up[2], down;  // in arrays, data = null: absent
    // (hidden,) before and after attention, before and after the MLP; null = none
    const float *input_norm, *attention_norm, *mlp_norm, *output_norm;
    const float *query_norm, *key_norm;  // (head_dim,), or of all heads; null = none
    int32_t rotary;  // which table of rotary positions; -1 = none
    int32_t window;  // keys that a row sees at most, itself included; 0 = all
};

// Multipliers of a decoder's activations, and soft caps of scores and logits.
struct Factors {
    float embedding, query, residual, logits;
    float score_cap, logit_cap;  // cap * tanh(x / cap); 0 = none
};

// How a draft head joins a token's embedding with a hidden state, each normalised unless its norm is
// null: `fusion` maps both (2 hidden,) to the layers' input. Without `fusion` the first layer computes
// queries, keys and values from both, and its residual stream is the hidden state.
struct HeadInput {
    Matrix fusion;  // data = null: without
    const float *embedding_norm, *hidden_norm;
    int32_t normed_input;  // without `fusion`: whether the residual stream is the normalised state
};

struct Model {
    int32_t num_layers, hidden;
    Heads heads;
    int32_t intermediate, threads, vocab;
    int32_t activation, rotary_dim;  // rotary_dim: rotated part of head_dim
    int32_t all_head_norms;          // whether query and key norms span all heads
    float eps;
    Factors factors;
    const Layer* layers;
    const float* norm;        // (hidden,) or null
    const bf16* embedding;    // (vocab, hidden), or null:
    Matrix packed_embedding;
    Matrix lm_head;
    const HeadInput* head_input;  // null = an ordinary decoder
};

struct Call {
    NewRows rows;
    int32_t first_logit;     // logits of rows from here on
    int32_t num_taps;
    const int64_t* tokens;
    const bf16* states;      // (n, hidden) that a head reads, else null
    const float* rotary;     // (tables, …, head_dim): cosines of one half, then sines, for n rows
    int64_t rotary_stride;   // floats from table to table
    bf16* cache;             // (2 layers, kv_heads, capacity, head_dim)
    const int32_t* taps;     // layers whose input is wanted; num_layers = after the last
    bf16* tap_states;        // (n, num_taps * hidden)
    bf16* normed;            // (n, hidden): after the final norm
    float* logits;           // (n - first_logit, lm_head.out)
    float* logsumexp;        // (n - first_logit,)
    int64_t* best;           // (n - first_logit,): the first of the largest logits
    uint8_t* scratch;        // scratch_bytes(n, context + n), aligned to 64
};

// Settings and results of `draft_chain`.
struct Chain {
    int32_t levels, feeds_normed;
    float min_log_prob;
    const int64_t* ids;  // (lm_head.out,): the token of each row; null = its number
    int64_t* tokens;     // (levels,)
    float* log_probs;    // (levels,)
};

struct Scratch {
    float *x, *wide, *scores, *factors;
    SoftmaxStats* stats;
    bf16 *queries, *transposed;
    Activations inputs, gate;  // of the next matrix; of `down`
    int32_t* visible_list;
};

int64_t align_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Whole blocks of keys, and an odd number of cache lines, so that rows map to different sets.
int64_t score_stride(int64_t keys) { return (keys + KEYS - 1) / KEYS * KEYS + LANES; }

int64_t lay_out_scratch(const Model& m, int n, int64_t keys, uint8_t* at, Scratch* s) {
    const int64_t dim = m.heads.head_dim, inner = m.heads.heads * dim;
    const int64_t qkv = inner + 2 * m.heads.kv_heads * dim;
    const int64_t widest = std::max<int64_t>({qkv, 2 * int64_t(m.intermediate), m.hidden});
    const int64_t deepest = std::max<int64_t>((m.head_input ? 2 : 1) * int64_t(m.hidden), inner);
    uint8_t* p = at;
    auto allocate = [&](auto*& pointer, int64_t count) {
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(p);
        p += align_up(count * int64_t(sizeof(*pointer)));
    };
    auto allocate_rows = [&](Activations& rows, int64_t columns) {
        allocate(rows.plain, n * columns);
        allocate(rows.integers, n * columns);
        allocate(rows.blocks, n * columns / BLOCK);
    };
    allocate(s->x, n * int64_t(m.hidden));
    allocate(s->wide, n * widest);
    allocate(s->scores, int64_t(m.heads.heads) * BATCH * score_stride(keys));
    allocate(s->factors, int64_t(m.heads.heads) * BATCH);
    allocate(s->stats, int64_t(m.threads) * n);
    allocate(s->queries, n * inner);
    allocate(s->transposed, int64_t(m.threads) * KEYS * dim);
    allocate_rows(s->inputs, deepest);
    allocate_rows(s->gate, m.intermediate);
    allocate(s->visible_list, int64_t(m.threads) * keys);
    return p - at;
}

struct ForwardRun {
    const Model& m;
    const Call& call;
    Scratch s;
    Barrier barrier;
    std::atomic<int> threads{0};  // actual number; never more than m.threads

    void thread(int t) {
        const Range mine = share(call.rows.n, t, threads);
        if (m.head_input) fuse_input(t, mine);
        for (int r = mine.begin; !m.head_input && r < mine.end; ++r) embed(r, row(r));
        for (int i = 0; i < m.num_layers; ++i) {
            tap(i, mine);
            layer(i, t, mine);
        }
        tap(m.num_layers, mine);
        compute_logits(t, mine);
    }

    // Rows before this one are over once the layer has stored their keys and values: of a draft
    // head's text, only the last outputs are read.
    int first_output(int index) const {
        return m.head_input && index + 1 == m.num_layers ? call.first_logit : 0;
    }

    float* row(int r) const { return s.x + int64_t(r) * m.hidden; }

    void embed(int r, float* to) const {
        const F factor = set1(m.factors.embedding);
        if (m.embedding) {
            const bf16* from = m.embedding + call.tokens[r] * m.hidden;
            for (int i = 0; i < m.hidden; i += LANES) store(to + i, load_bf16(from + i));
        } else {
            unpack_row(m.packed_embedding, call.tokens[r], to);
        }
        for (int i = 0; i < m.hidden; i += LANES) store(to + i, mul(load(to + i), factor));
    }

    // A draft head's input: see `HeadInput`.
    void fuse_input(int t, Range mine) {
        const HeadInput& j = *m.head_input;
        const int formats = j.fusion.data ? formats_of(j.fusion) : formats_of(m.layers[0].qkv);
        for (int r = mine.begin; r < mine.end; ++r) {
            const int64_t at = int64_t(r) * 2 * m.hidden;
            float* to = row(r);
            embed(r, to);
            rms_norm(to, j.embedding_norm, m.hidden, m.eps, formats, at, s.inputs);
            const bf16* state = call.states + int64_t(r) * m.hidden;
            for (int i = 0; i < m.hidden; i += LANES) store(to + i, load_bf16(state + i));
            rms_norm(to, j.hidden_norm, m.hidden, m.eps, formats, at + m.hidden, s.inputs);
            if (j.normed_input) rms_norm_in_place(to, j.hidden_norm, m.hidden, m.eps);
        }
        if (!j.fusion.data) return;
        barrier.wait(threads);
        matmul<Epilogue::store>(j.fusion, blocks_of(j.fusion, t), s.inputs, s.x, m.hidden,
                                call.rows.n, first_weights(m.layers[0].qkv[0], t));
        barrier.wait(threads);
    }

    void layer(int index, int t, Range mine) {
        const Layer& l = m.layers[index];
        const int n = call.rows.n, dim = m.heads.head_dim;
        const int64_t qkv = int64_t(m.heads.heads + 2 * m.heads.kv_heads) * dim;
        const bool joined = index == 0 && m.head_input && !m.head_input->fusion.data;
        for (int r = mine.begin; !joined && r < mine.end; ++r)
            normalise(l.input_norm, r, formats_of(l.qkv));
        barrier.wait(threads);
        for_each_matrix(l.qkv, [&](const Matrix& matrix, int64_t at, const Matrix* next) {
            matmul<Epilogue::store>(matrix, blocks_of(matrix, t), s.inputs, s.wide + at, qkv, n,
                                    first_weights(next ? *next : l.out, t));
        });
        barrier.wait(threads);
        bf16* keys = call.cache + int64_t(2 * index) * m.heads.kv_heads * call.rows.capacity * dim;
        bf16* values = keys + int64_t(m.heads.kv_heads) * call.rows.capacity * dim;
        store_kv(l, keys, values, mine);
        barrier.wait(threads);
        attend(l, keys, values, t);
        barrier.wait(threads);
        const int first = first_output(index);
        const Range rest = {std::max(mine.begin, first), std::max(mine.end, first)};
        add_product(l.out, l.attention_norm, s.inputs, first, t, rest,
                    column(l.gate_up[0], gate_blocks(t).begin));
        for (int r = rest.begin; r < rest.end; ++r) normalise(l.mlp_norm, r, formats_of(l.gate_up));
        barrier.wait(threads);
        feed_forward(l, first, t);
        barrier.wait(threads);
        const Matrix& after = index + 1 < m.num_layers ? m.layers[index + 1].qkv[0] : m.lm_head;
        add_product(l.down, l.output_norm, s.gate, first, t, rest, first_weights(after, t));
    }

    // f(matrix, index of its first column in the joint output, the matrix after it or null)
    template <int MOST, class Function>
    static void for_each_matrix(const Matrix (&parts)[MOST], Function f) {
        int64_t at = 0;
        for (int i = 0; i < MOST && parts[i].data; ++i) {
            const bool is_last = i + 1 == MOST || !parts[i + 1].data;
            f(parts[i], at, is_last ? nullptr : &parts[i + 1]);
            at += parts[i].out;
        }
    }

    // The formats that all of these matrices take.
    template <int MOST>
    static int formats_of(const Matrix (&parts)[MOST]) {
        int all = 0;
        for_each_matrix(parts, [&](const Matrix& m, int64_t, auto) { all |= ::formats_of(m); });
        return all;
    }
    static int formats_of(const Matrix& matrix) { return ::formats_of(matrix); }

    // Adds a matrix's product with the rows from the first on to the residual stream, normalised if
    // there is a norm.
    void add_product(const Matrix& matrix, const float* weight, const Activations& rows, int first,
                     int t, Range mine, const uint8_t* then) {
        const int n = call.rows.n - first;
        const Range blocks = blocks_of(matrix, t);
        const Activations from = rows.from(first, matrix.in);
        if (!weight && m.factors.residual == 1.0f) {
            matmul<Epilogue::add>(matrix, blocks, from, row(first), m.hidden, n, then);
            return barrier.wait(threads);
        }
        matmul<Epilogue::store>(matrix, blocks, from, s.wide + int64_t(first) * m.hidden, m.hidden,
                                n, then);
        barrier.wait(threads);
        const F factor = set1(m.factors.residual);
        for (int r = mine.begin; r < mine.end; ++r) {
            float *out = s.wide + int64_t(r) * m.hidden, *to = row(r);
            if (weight) rms_norm_in_place(out, weight, m.hidden, m.eps);
            for (int i = 0; i < m.hidden; i += LANES)
                store(to + i, fma(load(out + i), factor, load(to + i)));
        }
        barrier.wait(threads);
    }

    void normalise(const float* weight, int r, int formats) {
        rms_norm(row(r), weight, m.hidden, m.eps, formats, int64_t(r) * m.hidden, s.inputs);
    }

    // A thread's columns of gate.
    Range gate_blocks(int t) const {
        const Range blocks = share(m.intermediate / BLOCK, t, threads);
        return {blocks.begin * BLOCK / LANES, blocks.end * BLOCK / LANES};
    }

    // Gate and up, in one matrix or two, are divided among threads by the same blocks of output.
    void feed_forward(const Layer& l, int first, int t) {
        const int n = call.rows.n - first, wide = m.intermediate / LANES, formats = formats_of(l.down);
        const bool is_one = !l.gate_up[1].data;
        const Range gates = this->gate_blocks(t);
        const Matrix& up = l.gate_up[is_one ? 0 : 1];
        const Range ups = is_one ? Range{gates.begin + wide, gates.end + wide} : gates;
        float* both = s.wide + int64_t(first) * 2 * m.intermediate;
        const Activations from = s.inputs.from(first, m.hidden);
        matmul<Epilogue::store>(l.gate_up[0], gates, from, both, 2 * m.intermediate, n,
                                column(up, ups.begin));
        matmul<Epilogue::store>(up, ups, from, both + (is_one ? 0 : m.intermediate),
                                2 * m.intermediate, n, first_weights(l.down, t));
        for (int r = first; r < call.rows.n; ++r) {
            const float* gate = s.wide + int64_t(r) * 2 * m.intermediate;
            for (int i = gates.begin * LANES; i < gates.end * LANES; i += BLOCK) {
                const float *at = gate + i, *up_at = at + m.intermediate;
                store_activation(gated_activation(at, up_at, m.activation),
                                 gated_activation(at + LANES, up_at + LANES, m.activation), formats,
                                 int64_t(r) * m.intermediate + i, s.gate);
            }
        }
    }

    // Applies rotary positions to queries and keys; stores keys and values in the cache.
    void store_kv(const Layer& l, bf16* keys, bf16* values, Range mine) {
        const int dim = m.heads.head_dim, heads = m.heads.heads, kv_heads = m.heads.kv_heads;
        const int all = heads + 2 * kv_heads, group = m.heads.group();
        for (int r = mine.begin; r < mine.end; ++r) {
            const float* rotary = l.rotary < 0 ? nullptr
                                               : call.rotary + l.rotary * call.rotary_stride +
                                                     int64_t(r) * dim;
            float* of_row = s.wide + int64_t(r) * all * dim;
            if (m.all_head_norms) {
                rms_norm_in_place(of_row, l.query_norm, heads * dim, m.eps);
                rms_norm_in_place(of_row + int64_t(heads) * dim, l.key_norm, kv_heads * dim, m.eps);
            }
            const auto rotate = [&](float* head, const float* weight) {
                if (weight && !m.all_head_norms) rms_norm_in_place(head, weight, dim, m.eps);
                if (rotary) apply_rope(head, rotary, m.rotary_dim);
            };
            const int64_t column = call.rows.columns ? call.rows.columns[r]
                                                     : int64_t(call.rows.context) + r;
            for (int h = 0; h < all; ++h) {
                float* head = of_row + int64_t(h) * dim;
                if (h < heads) {
                    rotate(head, l.query_norm);
                    const int64_t at = (int64_t(h / group) * call.rows.n + r) * group + h % group;
                    store_scaled_bf16(head, dim, m.factors.query, s.queries + at * dim);
                    continue;
                }
                const int kv = h - heads;
                const bool key = kv < kv_heads;
                if (key) rotate(head, l.key_norm);
                bf16* to = key ? keys + int64_t(kv) * call.rows.capacity * dim
                               : values + int64_t(kv - kv_heads) * call.rows.capacity * dim;
                store_scaled_bf16(head, dim, 1.0f, to + column * dim);
            }
        }
    }

    void attend(const Layer& l, const bf16* keys, const bf16* values, int t) {
        Attention attention{m.heads,
                            call.rows,
                            keys,
                            values,
                            s.queries,
                            s.inputs,
                            formats_of(l.out),
                            l.window,
                            m.factors.score_cap,
                            s.scores,
                            s.factors,
                            score_stride(call.rows.context + call.rows.n),
                            s.transposed + int64_t(t) * KEYS * m.heads.head_dim,
                            s.visible_list + int64_t(t) * (call.rows.context + call.rows.n),
                            barrier,
                            t,
                            threads};
        attention.run();
    }

    void tap(int index, Range mine) {
        for (int i = 0; i < call.num_taps; ++i) {
            if (call.taps[i] != index) continue;
            for (int r = mine.begin; r < mine.end; ++r)
                store_scaled_bf16(row(r), m.hidden, 1.0f,
                                  call.tap_states + (int64_t(r) * call.num_taps + i) * m.hidden);
        }
    }

    void compute_logits(int t, Range mine) {
        // Logits are computed from the hidden state rounded to bfloat16, as callers receive it.
        for (int r = mine.begin; r < mine.end; ++r) {
            const int64_t at = int64_t(r) * m.hidden;
            rms_norm(row(r), m.norm, m.hidden, m.eps, PLAIN, at, {call.normed, nullptr, nullptr});
            const bf16* normed = call.normed + at;
            for (int i = 0; i < m.hidden; i += BLOCK)
                store_activation(load_bf16(normed + i), load_bf16(normed + i + LANES),
                                 formats_of(m.lm_head), at + i, s.inputs);
        }
        barrier.wait(threads);
        const int from = call.first_logit, count = call.rows.n - from;
        matmul<Epilogue::store>(m.lm_head, blocks_of(m.lm_head, t), s.inputs.from(from, m.hidden),
                                call.logits, m.lm_head.out, count, m.lm_head.data);
        reduce_stats(t, count);
    }

    void scale_logits(float* logits, int begin, int end) const {
        const F factor = set1(m.factors.logits);
        if (m.factors.logits == 1.0f && m.factors.logit_cap == 0.0f) return;
        for (int i = begin; i < end; i += LANES)
            store(logits + i, softcap(mul(load(logits + i), factor), m.factors.logit_cap));
    }

    // Every thread reduces the columns that it has just written; the first merges the results.
    void reduce_stats(int t, int n) {
        const Range mine = blocks_of(m.lm_head, t);
        const int begin = mine.begin * LANES, end = std::min(mine.end * LANES, m.vocab);
        for (int r = 0; r < n; ++r) {
            float* logits = call.logits + int64_t(r) * m.lm_head.out;
            scale_logits(logits, mine.begin * LANES, mine.end * LANES);
            s.stats[t * n + r] =
                begin < end ? SoftmaxStats::of(logits + begin, end - begin, begin) : SoftmaxStats();
        }
        barrier.wait(threads);
        for (int r = 0; t == 0 && r < n; ++r) {
            SoftmaxStats all;
            for (int i = 0; i < threads; ++i) all.merge(s.stats[i * n + r]);
            call.logsumexp[r] = all.highest + std::log(all.sum);
            call.best[r] = all.argmax;
        }
    }

    // A thread's blocks of a matrix's columns, and where they begin.
    Range blocks_of(const Matrix& matrix, int t) const {
        return share(matrix.out / LANES, t, threads);
    }

    const uint8_t* first_weights(const Matrix& matrix, int t) const {
        return column(matrix, blocks_of(matrix, t).begin);
    }
};

}  // namespace
