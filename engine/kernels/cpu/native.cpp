// One forward of a decoder over n new rows: a target, a draft model, or the head of one that reads a
// hidden state beside each token. Sums are float32; weights are bfloat16, or quantized (formats.h),
// for rows in 8 bits.
//
// A row's result is the same, bit by bit, whether it is computed alone, in a tree or in a prompt. So
// a draft tree is verified with exactly the logits that plain decoding has.

#include <vector>

#include "attention.h"

namespace {

Product rare_product = nullptr;  // of formats behind Q8_0

template <Into into>
void product(const Matrix& m, Range blocks, Rows x, float* y, int64_t stride, int n,
             const uint8_t* then) {
    if (m.format > Q8_0) return rare_product(m, blocks, x, y, stride, n, then, into);
    product_among<into, BF16, Q8_0>(m, blocks, x, y, stride, n, then);
}

struct Layer {
    Matrix qkv[3], out, gate_up[2], down;  // of several, those with data = null are not there
    // (hidden,) before and after attention, before and after the MLP; null = none
    const float *input_norm, *attention_norm, *mlp_norm, *output_norm;
    const float *query_norm, *key_norm;  // (head_dim,), or of all heads; null = none
    int32_t rotary;  // which table of rotary positions; -1 = none
    int32_t window;  // keys that a row sees at most, itself included; 0 = all
};

enum Activation { SILU, GELU_TANH };

// What a layer's parts are multiplied by, and where scores and logits end.
struct Factors {
    float embedding, query, residual, logits;
    float score_cap, logit_cap;  // cap * tanh(x / cap); 0 = none
};

// How a head joins the embedding of a token with a hidden state, each normalised unless its norm is
// null: `joint` turns both (2 hidden,) into the layers' input. Without `joint` they are what the first
// layer's queries, keys and values are made of, and the hidden state is the layers' input.
struct HeadInput {
    Matrix joint;  // data = null: without
    const float *embedding_norm, *hidden_norm;
    int32_t normed_input;  // without `joint`: whether the layers' input is the state after its norm
    int32_t unused;
};

struct Model {
    int32_t num_layers, hidden;
    Heads heads;
    int32_t width, threads, vocab;
    int32_t activation, rotated, whole_norms;  // rotated: of head_dim; norms of all heads at once
    float eps;
    Factors factors;
    int32_t unused;
    const Layer* layers;
    const float* norm;        // (hidden,) or null
    const bf16* embedding;    // (vocab, hidden), or null:
    Matrix packed_embedding;
    Matrix lm_head;         // data = null: no logits
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
    bf16* tapped;            // (n, num_taps * hidden)
    bf16* normed;            // (n, hidden): after the final norm
    float* logits;           // (n - first_logit, lm_head.out)
    float* logsumexp;       // (n - first_logit,): log of the sum of e^logit
    int64_t* best;           // (n - first_logit,): the first of the largest logits
    uint8_t* scratch;        // scratch_bytes(n, context + n), aligned to 64
};

// What `draft_chain` drafts, and where it writes it.
struct Chain {
    int32_t levels, feeds_normed;
    float min_log_prob;
    int32_t unused;
    const int64_t* ids;  // (lm_head.out,): the token of each row; null = its number
    int64_t* tokens;     // (levels,)
    float* log_probs;    // (levels,)
};

// ---- what is between the products

// 1 / root of the mean square.
float root_of(const float* x, int columns, float eps) {
    F squares = zero();
    for (int i = 0; i < columns; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    return 1.0f / std::sqrt(reduce_add(squares) / columns + eps);
}

// Norm (none if weight is null) of x, as the next matrices want it.
void norm(const float* x, const float* weight, int columns, float eps, int wanted, int64_t at,
          const Rows& to) {
    const F root = set1(weight ? root_of(x, columns, eps) : 1.0f);
    const auto part = [&](int i) {
        const F v = mul(load(x + i), root);
        return weight ? mul(v, load(weight + i)) : v;
    };
    for (int i = 0; i < columns; i += BLOCK)
        store_activation(part(i), part(i + LANES), wanted, at + i, to);
}

// Norm of x in place.
void norm_in_place(float* x, const float* weight, int columns, float eps) {
    const F root = set1(root_of(x, columns, eps));
    for (int i = 0; i < columns; i += LANES)
        store(x + i, mul(mul(load(x + i), root), load(weight + i)));
}

// Rotary position of one head; rotary holds cosines and sines of one half.
void apply_rope(float* head, const float* rotary, int dim) {
    const int half = dim / 2;
    for (int i = 0; i < half; i += LANES) {
        const F a = load(head + i), b = load(head + half + i);
        const F cos = load(rotary + i), sin = load(rotary + half + i);
        store(head + i, sub(mul(a, cos), mul(b, sin)));
        store(head + half + i, fma(b, cos, mul(a, sin)));
    }
}

void to_bf16(const float* x, int columns, float factor, bf16* out) {
    for (int i = 0; i < columns; i += LANES) store_bf16(out + i, mul(load(x + i), set1(factor)));
}

// The largest of some numbers and its place, and the sum of e^(number - largest).
struct Total {
    float most = -INFINITY, sum = 0.0f;
    int64_t place = 0;

    // `first` is the place of x[0].
    static Total of(const float* x, int count, int64_t first) {
        F most = set1(-INFINITY), sum = zero();
        for (int i = 0; i < count; i += LANES)
            most = max(most, load_some(x + i, count - i, -INFINITY));
        const float highest = reduce_max(most);
        if (highest == -INFINITY) return {highest, 0.0f, first};
        const F same = set1(highest);
        int64_t place = -1;
        for (int i = 0; i < count; i += LANES) {
            const F v = load_some(x + i, count - i, -INFINITY);
            const uint32_t found = equal(v, same);
            if (found && place < 0) place = first + i + __builtin_ctz(found);
            float each[LANES];
            store(each, exp(sub(v, same)));
            sum = add(sum, load_some(each, count - i, 0.0f));
        }
        return {highest, reduce_add(sum), place < 0 ? first : place};  // NaN equals nothing
    }

    // Those of the numbers behind these.
    void add_behind(const Total& other) {
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
    for (int i = 0; i < count; i += LANES) {
        const F v = load_some(x + i, count - i, -INFINITY);
        uint32_t more = held < k ? (1u << std::min(LANES, count - i)) - 1 : greater(v, set1(least));
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

// activation(gate) * up, where gelu(x) is x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
F gated(const float* gate, const float* up, int activation) {
    const F g = load(gate);
    F at = g;
    if (activation == GELU_TANH)
        at = mul(mul(g, set1(1.5957691216f)), fma(mul(g, g), set1(0.044715f), set1(1.0f)));
    return mul(mul(g, sigmoid(at)), load(up));
}

// ---- the decoder

struct Scratch {
    float *x, *wide, *scores, *factors;
    Total* totals;
    bf16 *queries, *transposed;
    Rows inputs, gate;  // what the next matrix meets; what `down` meets
    int32_t* list;
};

int64_t up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Whole blocks of keys, and an odd number of lines: rows do not fall on each other in the cache.
int64_t score_stride(int64_t keys) { return (keys + KEYS - 1) / KEYS * KEYS + LANES; }

int64_t lay_out(const Model& m, int n, int64_t keys, uint8_t* at, Scratch* s) {
    const int64_t dim = m.heads.head_dim, inner = m.heads.heads * dim;
    const int64_t qkv = inner + 2 * m.heads.kv_heads * dim;
    const int64_t widest = std::max<int64_t>({qkv, 2 * int64_t(m.width), m.hidden});
    const int64_t deepest = std::max<int64_t>((m.head_input ? 2 : 1) * int64_t(m.hidden), inner);
    uint8_t* p = at;
    auto take = [&](auto*& pointer, int64_t count) {
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(p);
        p += up(count * int64_t(sizeof(*pointer)));
    };
    auto take_rows = [&](Rows& rows, int64_t columns) {
        take(rows.plain, n * columns);
        take(rows.integers, n * columns);
        take(rows.blocks, n * columns / BLOCK);
    };
    take(s->x, n * int64_t(m.hidden));
    take(s->wide, n * widest);
    take(s->scores, int64_t(m.heads.heads) * BATCH * score_stride(keys));
    take(s->factors, int64_t(m.heads.heads) * BATCH);
    take(s->totals, int64_t(m.threads) * n);
    take(s->queries, n * inner);
    take(s->transposed, int64_t(m.threads) * KEYS * dim);
    take_rows(s->inputs, deepest);
    take_rows(s->gate, m.width);
    take(s->list, int64_t(m.threads) * keys);
    return p - at;
}

struct Run {
    const Model& m;
    const Call& call;
    Scratch s;
    Barrier barrier;
    std::atomic<int> threads{0};  // as many as there are; never more than m.threads

    void thread(int t) {
        const Range mine = share(call.rows.n, t, threads);
        if (m.head_input) join(t, mine);
        for (int r = mine.begin; !m.head_input && r < mine.end; ++r) embed(r, row(r));
        for (int i = 0; i < m.num_layers; ++i) {
            tap(i, mine);
            layer(i, t, mine);
        }
        tap(m.num_layers, mine);
        finish(t, mine);
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

    // A head's input: see `HeadInput`.
    void join(int t, Range mine) {
        const HeadInput& j = *m.head_input;
        const int wants = j.joint.data ? wanted(j.joint) : wanted(m.layers[0].qkv);
        for (int r = mine.begin; r < mine.end; ++r) {
            const int64_t at = int64_t(r) * 2 * m.hidden;
            float* to = row(r);
            embed(r, to);
            norm(to, j.embedding_norm, m.hidden, m.eps, wants, at, s.inputs);
            const bf16* state = call.states + int64_t(r) * m.hidden;
            for (int i = 0; i < m.hidden; i += LANES) store(to + i, load_bf16(state + i));
            norm(to, j.hidden_norm, m.hidden, m.eps, wants, at + m.hidden, s.inputs);
            if (!j.normed_input) continue;
            const F root = set1(root_of(to, m.hidden, m.eps));
            for (int i = 0; i < m.hidden; i += LANES)
                store(to + i, mul(mul(load(to + i), root), load(j.hidden_norm + i)));
        }
        if (!j.joint.data) return;
        barrier.wait(threads);
        product<Into::store>(j.joint, part(j.joint, t), s.inputs, s.x, m.hidden, call.rows.n,
                             first(m.layers[0].qkv[0], t));
        barrier.wait(threads);
    }

    void layer(int index, int t, Range mine) {
        const Layer& l = m.layers[index];
        const int n = call.rows.n, dim = m.heads.head_dim;
        const int64_t qkv = int64_t(m.heads.heads + 2 * m.heads.kv_heads) * dim;
        const bool joined = index == 0 && m.head_input && !m.head_input->joint.data;
        for (int r = mine.begin; !joined && r < mine.end; ++r)
            normalise(l.input_norm, r, wanted(l.qkv));
        barrier.wait(threads);
        each_part(l.qkv, [&](const Matrix& matrix, int64_t at, const Matrix* next) {
            product<Into::store>(matrix, part(matrix, t), s.inputs, s.wide + at, qkv, n,
                                 first(next ? *next : l.out, t));
        });
        barrier.wait(threads);
        bf16* keys = call.cache + int64_t(2 * index) * m.heads.kv_heads * call.rows.capacity * dim;
        bf16* values = keys + int64_t(m.heads.kv_heads) * call.rows.capacity * dim;
        store_kv(l, keys, values, mine);
        barrier.wait(threads);
        attend(l, keys, values, t);
        barrier.wait(threads);
        add_product(l.out, l.attention_norm, s.inputs, t, mine,
                    column(l.gate_up[0], gates(t).begin));
        for (int r = mine.begin; r < mine.end; ++r) normalise(l.mlp_norm, r, wanted(l.gate_up));
        barrier.wait(threads);
        feed_forward(l, t);
        barrier.wait(threads);
        const Matrix& after = index + 1 < m.num_layers ? m.layers[index + 1].qkv[0] : m.lm_head;
        add_product(l.down, l.output_norm, s.gate, t, mine, first(after, t));
    }

    // f(matrix, the place of its first column in what all make, the matrix after it or null)
    template <int MOST, class Function>
    static void each_part(const Matrix (&parts)[MOST], Function f) {
        int64_t at = 0;
        for (int i = 0; i < MOST && parts[i].data; ++i) {
            const bool is_last = i + 1 == MOST || !parts[i + 1].data;
            f(parts[i], at, is_last ? nullptr : &parts[i + 1]);
            at += parts[i].out;
        }
    }

    // How all parts that are there want their rows.
    template <int MOST>
    static int wanted(const Matrix (&parts)[MOST]) {
        int all = 0;
        each_part(parts, [&](const Matrix& m, int64_t, const Matrix*) { all |= ::wanted(m); });
        return all;
    }
    static int wanted(const Matrix& matrix) { return ::wanted(matrix); }

    // The residual stream plus what a matrix makes of the rows, after its norm if it has one.
    void add_product(const Matrix& matrix, const float* weight, const Rows& rows, int t, Range mine,
                     const uint8_t* then) {
        const int n = call.rows.n;
        const Range blocks = part(matrix, t);
        if (!weight && m.factors.residual == 1.0f) {
            product<Into::add>(matrix, blocks, rows, s.x, m.hidden, n, then);
            return barrier.wait(threads);
        }
        product<Into::store>(matrix, blocks, rows, s.wide, m.hidden, n, then);
        barrier.wait(threads);
        const F factor = set1(m.factors.residual);
        for (int r = mine.begin; r < mine.end; ++r) {
            float *out = s.wide + int64_t(r) * m.hidden, *to = row(r);
            if (weight) norm_in_place(out, weight, m.hidden, m.eps);
            for (int i = 0; i < m.hidden; i += LANES)
                store(to + i, fma(load(out + i), factor, load(to + i)));
        }
        barrier.wait(threads);
    }

    void normalise(const float* weight, int r, int wants) {
        norm(row(r), weight, m.hidden, m.eps, wants, int64_t(r) * m.hidden, s.inputs);
    }

    // A thread's columns of gate.
    Range gates(int t) const {
        const Range blocks = share(m.width / BLOCK, t, threads);
        return {blocks.begin * BLOCK / LANES, blocks.end * BLOCK / LANES};
    }

    // Gate and up, in one matrix or two, are shared out alike, by whole blocks of what comes out.
    void feed_forward(const Layer& l, int t) {
        const int n = call.rows.n, wide = m.width / LANES, wants = wanted(l.down);
        const bool is_one = !l.gate_up[1].data;
        const Range gates = this->gates(t);
        const Matrix& up = l.gate_up[is_one ? 0 : 1];
        const Range ups = is_one ? Range{gates.begin + wide, gates.end + wide} : gates;
        float* to = s.wide + (is_one ? 0 : m.width);
        product<Into::store>(l.gate_up[0], gates, s.inputs, s.wide, 2 * m.width, n,
                             column(up, ups.begin));
        product<Into::store>(up, ups, s.inputs, to, 2 * m.width, n, first(l.down, t));
        for (int r = 0; r < n; ++r) {
            const float* gate = s.wide + int64_t(r) * 2 * m.width;
            for (int i = gates.begin * LANES; i < gates.end * LANES; i += BLOCK) {
                const float* at = gate + i;
                store_activation(gated(at, at + m.width, m.activation),
                                 gated(at + LANES, at + m.width + LANES, m.activation), wants,
                                 int64_t(r) * m.width + i, s.gate);
            }
        }
    }

    // Gives queries and keys their positions; keys and values go into the cache.
    void store_kv(const Layer& l, bf16* keys, bf16* values, Range mine) {
        const int dim = m.heads.head_dim, heads = m.heads.heads, kv_heads = m.heads.kv_heads;
        const int all = heads + 2 * kv_heads, group = m.heads.group();
        for (int r = mine.begin; r < mine.end; ++r) {
            const float* rotary = l.rotary < 0 ? nullptr
                                               : call.rotary + l.rotary * call.rotary_stride +
                                                     int64_t(r) * dim;
            float* of_row = s.wide + int64_t(r) * all * dim;
            if (m.whole_norms) {
                norm_in_place(of_row, l.query_norm, heads * dim, m.eps);
                norm_in_place(of_row + int64_t(heads) * dim, l.key_norm, kv_heads * dim, m.eps);
            }
            const auto turn = [&](float* head, const float* weight) {
                if (weight && !m.whole_norms) norm_in_place(head, weight, dim, m.eps);
                if (rotary) apply_rope(head, rotary, m.rotated);
            };
            const int64_t column = call.rows.columns ? call.rows.columns[r]
                                                     : int64_t(call.rows.context) + r;
            for (int h = 0; h < all; ++h) {
                float* head = of_row + int64_t(h) * dim;
                if (h < heads) {
                    turn(head, l.query_norm);
                    const int64_t at = (int64_t(h / group) * call.rows.n + r) * group + h % group;
                    to_bf16(head, dim, m.factors.query, s.queries + at * dim);
                    continue;
                }
                const int kv = h - heads;
                const bool key = kv < kv_heads;
                if (key) turn(head, l.key_norm);
                bf16* to = key ? keys + int64_t(kv) * call.rows.capacity * dim
                               : values + int64_t(kv - kv_heads) * call.rows.capacity * dim;
                to_bf16(head, dim, 1.0f, to + column * dim);
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
                            wanted(l.out),
                            l.window,
                            m.factors.score_cap,
                            s.scores,
                            s.factors,
                            score_stride(call.rows.context + call.rows.n),
                            s.transposed + int64_t(t) * KEYS * m.heads.head_dim,
                            s.list + int64_t(t) * (call.rows.context + call.rows.n),
                            barrier,
                            t,
                            threads};
        attention.run();
    }

    void tap(int index, Range mine) {
        for (int i = 0; i < call.num_taps; ++i) {
            if (call.taps[i] != index) continue;
            for (int r = mine.begin; r < mine.end; ++r)
                to_bf16(row(r), m.hidden, 1.0f,
                        call.tapped + (int64_t(r) * call.num_taps + i) * m.hidden);
        }
    }

    void finish(int t, Range mine) {
        // The hidden state that others see, in bfloat16, is what the logits are made of.
        for (int r = mine.begin; r < mine.end; ++r) {
            const int64_t at = int64_t(r) * m.hidden;
            norm(row(r), m.norm, m.hidden, m.eps, PLAIN, at, {call.normed, nullptr, nullptr});
            const bf16* normed = call.normed + at;
            for (int i = 0; m.lm_head.data && i < m.hidden; i += BLOCK)
                store_activation(load_bf16(normed + i), load_bf16(normed + i + LANES),
                                 wanted(m.lm_head), at + i, s.inputs);
        }
        if (!m.lm_head.data) return;
        barrier.wait(threads);
        const int from = call.first_logit, count = call.rows.n - from;
        product<Into::store>(m.lm_head, part(m.lm_head, t), s.inputs.from(from, m.hidden),
                             call.logits, m.lm_head.out, count, m.lm_head.data);
        total(t, count);
    }

    void finish_logits(float* logits, int begin, int end) const {
        const F factor = set1(m.factors.logits);
        if (m.factors.logits == 1.0f && m.factors.logit_cap == 0.0f) return;
        for (int i = begin; i < end; i += LANES)
            store(logits + i, capped(mul(load(logits + i), factor), m.factors.logit_cap));
    }

    // Every thread sums up its own columns, which it has just written; the first adds them up.
    void total(int t, int n) {
        const Range mine = part(m.lm_head, t);
        const int begin = mine.begin * LANES, end = std::min(mine.end * LANES, m.vocab);
        for (int r = 0; r < n; ++r) {
            float* logits = call.logits + int64_t(r) * m.lm_head.out;
            finish_logits(logits, mine.begin * LANES, mine.end * LANES);
            s.totals[t * n + r] =
                begin < end ? Total::of(logits + begin, end - begin, begin) : Total();
        }
        barrier.wait(threads);
        for (int r = 0; t == 0 && r < n; ++r) {
            Total all;
            for (int i = 0; i < threads; ++i) all.add_behind(s.totals[i * n + r]);
            call.logsumexp[r] = all.most + std::log(all.sum);
            call.best[r] = all.place;
        }
    }

    // A thread's columns of a matrix, and where they begin.
    Range part(const Matrix& matrix, int t) const { return share(matrix.out / LANES, t, threads); }

    const uint8_t* first(const Matrix& matrix, int t) const {
        if (!matrix.data) return nullptr;
        return column(matrix, part(matrix, t).begin);
    }
};

}  // namespace

extern "C" {

// Of the OpenMP library that torch has loaded, GNU's: its threads serve here too. Called by name, so
// that a compiler with another library of its own will do.
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace {

// Calls work(number, how many) in so many threads, or fewer.
template <typename Work>
void in_parallel(int threads, Work work) {
    GOMP_parallel(
        [](void* data) {
            (*static_cast<Work*>(data))(omp_get_thread_num(), omp_get_num_threads());
        },
        &work, unsigned(threads), 0);
}

}  // namespace

extern "C" {

int64_t scratch_bytes(const Model* m, int n, int64_t keys) {
    Scratch s;
    return lay_out(*m, n, keys, nullptr, &s);
}

void forward(const Model* m, const Call* call) {
    Run run{*m, *call, {}, {}};
    lay_out(*m, call->rows.n, call->rows.context + call->rows.n, call->scratch, &run.s);
    in_parallel(m->threads, [&](int t, int threads) {
        run.threads = threads;  // the same of all of them
        run.thread(t);
    });
}

// A greedy chain of drafts: what comes after the last row of `first`, which wants the logits of that
// row only, then after each token drafted; its rotary positions go on over the chain. Ends at
// `levels` tokens, or behind the first path whose log-probability is below `min_log_prob`; returns
// how many.
int draft_chain(const Model* m, const Call* first, const Chain* chain) {
    std::vector<bf16> state(m->hidden);
    Call call = *first;
    float score = 0.0f;
    for (int level = 0;; ++level) {
        forward(m, &call);
        const int64_t best = call.best[0];
        chain->tokens[level] = chain->ids ? chain->ids[best] : best;
        chain->log_probs[level] = call.logits[best] - call.logsumexp[0];
        score += chain->log_probs[level];
        if (level + 1 == chain->levels || score < chain->min_log_prob) return level + 1;
        const int last = call.rows.n - 1;
        if (call.states) {
            const bf16* from = chain->feeds_normed
                                   ? call.normed + int64_t(last) * m->hidden
                                   : call.tapped + int64_t(last) * call.num_taps * m->hidden;
            std::copy(from, from + m->hidden, state.begin());
            call.states = state.data();
        }
        call.rotary += int64_t(call.rows.n) * m->heads.head_dim;
        call.rows.context += call.rows.n;
        call.rows.n = 1;
        call.first_logit = 0;
        call.tokens = chain->tokens + level;
    }
}

// Into m, whose memory is zero: rows of a matrix as a file has them (a type of GGML's), or floats.
// See `pack_rows`.
void pack(const Matrix* m, int type, const uint8_t* from, int64_t row_bytes, int rows, int columns,
          const int64_t* order, int threads) {
    in_parallel(threads, [&](int t, int count) {
        const Range mine = share(m->out / LANES, t, count);
        for (int block = mine.begin; block < mine.end; ++block)
            pack_rows(*m, type, from, row_bytes, rows, columns, order, block);
    });
}

// Rows of m, (count, columns), in bfloat16 or, if `floats` is not null, in float32; `rows`: their
// numbers, null = the first.
void unpack(const Matrix* m, const int64_t* rows, int64_t count, int columns, bf16* to,
            float* floats, int threads) {
    in_parallel(count > 16 ? threads : 1, [&](int t, int team) {
        const Range mine = share(int(count), t, team);
        std::vector<float> row(m->in);
        for (int64_t i = mine.begin; i < mine.end; ++i) {
            unpack_row(*m, rows ? rows[i] : i, row.data());
            for (int k = 0; k < columns; ++k) {
                if (floats) floats[i * columns + k] = row[k];
                else to[i * columns + k] = float_to_bf16(row[k]);
            }
        }
    });
}

// Lets products with rare formats be computed by another library's `rare_product`.
void use_rare(void* function) { rare_product = reinterpret_cast<Product>(function); }

// Bytes of a packed matrix.
int64_t packed_bytes(const Matrix* m) { return column_bytes(*m) * (m->out / LANES); }

// y (n, out) = x (n, in) W^T + bias; integers and blocks are room for x in 8 bits.
void linear(const Matrix* m, bf16* x, int8_t* integers, void* blocks, float* y, int n,
            int threads) {
    const Rows rows{x, integers, static_cast<Block*>(blocks)};
    for (int64_t i = 0; m->format != BF16 && i < int64_t(n) * m->in; i += BLOCK)
        store_activation(load_bf16(x + i), load_bf16(x + i + LANES), INTEGERS, i, rows);
    in_parallel(threads, [&](int t, int count) {
        const Range mine = share(m->out / LANES, t, count);
        product<Into::store>(*m, mine, rows, y, m->out, n, m->data);
    });
}

// Of each row of logits `stride` apart: its k largest numbers (n, k), their places, and, unless
// logsumexp is null, the log of the sum of e^number.
void topk(const float* logits, int64_t stride, int n, int count, int k, float* values,
          int64_t* places, float* logsumexp, int threads) {
    in_parallel(n > 1 ? threads : 1, [&](int t, int team) {
        const Range mine = share(n, t, team);
        for (int r = mine.begin; r < mine.end; ++r) {
            const float* row = logits + r * stride;
            largest(row, count, k, values + int64_t(r) * k, places + int64_t(r) * k);
            if (!logsumexp) continue;
            const Total total = Total::of(row, count, 0);
            logsumexp[r] = total.most + std::log(total.sum);
        }
    });
}
}
