// The functions that Python calls: a decoder's forward, drafting a chain, and single operators.

#include <vector>

#include "experts.h"

extern "C" {

// Entry points of the OpenMP library that torch has loaded (GNU's), whose threads are shared. They are
// declared by name, so that a compiler with another OpenMP library works, too.
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace {

// Calls work(thread, number of threads) in at most `threads` threads.
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
    return lay_out_scratch(*m, n, keys, nullptr, &s);
}

void forward(const Model* m, const Call* call) {
    ForwardRun run{*m, *call, {}, {}};
    lay_out_scratch(*m, call->rows.n, call->rows.context + call->rows.n, call->scratch, &run.s);
    in_parallel(m->threads, [&](int t, int threads) {
        run.threads = threads;  // all threads write the same number
        run.thread(t);
    });
}

// Drafts a greedy chain after the last row of `first`, which needs the logits of that row only; its
// rotary positions cover the chain, too. Ends at `levels` tokens, or after the first token at which
// the path's log-probability is below `min_log_prob`; returns the number of tokens.
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
                                   : call.tap_states + int64_t(last) * call.num_taps * m->hidden;
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

// Packs rows of a GGML type, or floats, into m, whose memory is zero. See `pack_rows`.
void pack(const Matrix* m, int type, const uint8_t* from, int64_t row_bytes, int rows, int columns,
          const int64_t* order, int threads) {
    in_parallel(threads, [&](int t, int count) {
        const Range mine = share(m->out / LANES, t, count);
        for (int block = mine.begin; block < mine.end; ++block)
            pack_rows(*m, type, from, row_bytes, rows, columns, order, block);
    });
}

// Rows of m, (count, columns), in bfloat16; `rows`: their indices, null = 0, 1, ...
void unpack(const Matrix* m, const int64_t* rows, int64_t count, int columns, bf16* to,
            int threads) {
    in_parallel(count > 16 ? threads : 1, [&](int t, int team) {
        const Range mine = share(int(count), t, team);
        std::vector<float> row(m->in);
        for (int64_t i = mine.begin; i < mine.end; ++i) {
            unpack_row(*m, rows ? rows[i] : i, row.data());
            for (int k = 0; k < columns; ++k) to[i * columns + k] = float_to_bf16(row[k]);
        }
    });
}

// Sets the function for matmuls with rare formats: `rare_matmul` of another library.
void set_rare_matmul(void* function) { rare_matmul = reinterpret_cast<MatmulFunction>(function); }

// Bytes of a packed matrix.
int64_t packed_bytes(const Matrix* m) { return column_bytes(*m) * (m->out / LANES); }

// y (n, out) = x (n, in) W^T + bias; integers and blocks are scratch memory for x in 8 bits.
void linear(const Matrix* m, bf16* x, int8_t* integers, void* blocks, float* y, int n,
            int threads) {
    const Activations rows{x, integers, static_cast<Block*>(blocks)};
    for (int64_t i = 0; m->format != BF16 && i < int64_t(n) * m->in; i += BLOCK)
        store_activation(load_bf16(x + i), load_bf16(x + i + LANES), INTEGERS, i, rows);
    in_parallel(threads, [&](int t, int count) {
        const Range mine = share(m->out / LANES, t, count);
        matmul<Epilogue::store>(*m, mine, rows, y, m->out, n, m->data);
    });
}

// The weighted sum of the experts that each row chose.
void run_experts(const Experts* experts, const ExpertsCall* call) {
    ExpertsRun run(*experts, *call);
    in_parallel(call->threads, [&](int t, int threads) { run.thread(t, threads); });
}

// Per row of logits, `stride` apart: the k largest (n, k), their indices, and, unless it is null, the
// logsumexp.
void topk(const float* logits, int64_t stride, int n, int count, int k, float* values,
          int64_t* indices, float* logsumexp, int threads) {
    in_parallel(n > 1 ? threads : 1, [&](int t, int team) {
        const Range mine = share(n, t, team);
        for (int r = mine.begin; r < mine.end; ++r) {
            const float* row = logits + r * stride;
            topk_row(row, count, k, values + int64_t(r) * k, indices + int64_t(r) * k);
            if (!logsumexp) continue;
            const SoftmaxStats stats = SoftmaxStats::of(row, count, 0);
            logsumexp[r] = stats.highest + std::log(stats.sum);
        }
    });
}
}
