// The experts of a layer's mixture: each is read once, for all the rows that chose it, and those that
// no row chose are not read.
//
// A row adds its experts up in their order, so that its result has the same bits alone, in a tree and
// in a prompt.
#pragma once

#include <memory>
#include <vector>

#include "decoder.h"

namespace {

struct Experts {
    int32_t count, hidden, intermediate;
    int32_t activation;
    float limit, slope, shift;       // of CLAMPED
    const Matrix *gate, *up, *down;  // (count,) each
};

struct ExpertsCall {
    int32_t n, k, threads;
    const bf16* x;          // (n, hidden)
    const int64_t* chosen;  // (n, k): experts; from `count` on: none
    const float* weights;   // (n, k)
    float* out;             // (n, hidden), zero
};

enum { CLAMPED = 2 };  // besides `Activation`: see `gated`

struct ExpertsRun {
    const Experts& e;
    const ExpertsCall& call;
    std::vector<int> starts, pairs;  // by expert: where its pairs begin; row * k + place
    std::vector<int> active;         // experts that any row chose
    std::unique_ptr<uint8_t[]> memory;
    Activations inputs, gates;  // (pairs, hidden), (pairs, intermediate)
    float *wide, *outputs;      // of the rows of one expert: (n, 2 intermediate), (n, hidden)
    Barrier barrier;

    ExpertsRun(const Experts& experts, const ExpertsCall& experts_call)
        : e(experts), call(experts_call), starts(e.count + 1) {
        const int count = call.n * call.k;
        for (int i = 0; i < count; ++i)
            if (call.chosen[i] < e.count) ++starts[call.chosen[i] + 1];
        for (int i = 0; i < e.count; ++i) {
            if (starts[i + 1]) active.push_back(i);
            starts[i + 1] += starts[i];
        }
        pairs.resize(starts.back());
        std::vector<int> next(starts);
        for (int i = 0; i < count; ++i)
            if (call.chosen[i] < e.count) pairs[next[call.chosen[i]]++] = i;
        memory.reset(new uint8_t[lay_out(0)]);
        lay_out(reinterpret_cast<uintptr_t>(memory.get()));
    }

    // Bytes of the memory that begins at `at`.
    int64_t lay_out(uintptr_t at) {
        const int64_t count = pairs.size(), columns[] = {e.hidden, e.intermediate};
        uintptr_t p = at;
        auto allocate = [&](auto*& pointer, int64_t items) {
            pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(p);
            p += align_up(items * int64_t(sizeof(*pointer)));
        };
        for (int i = 0; i < 2; ++i) {
            Activations& rows = i ? gates : inputs;
            allocate(rows.plain, count * columns[i]);
            allocate(rows.integers, count * columns[i]);
            allocate(rows.blocks, count * columns[i] / BLOCK);
        }
        allocate(wide, 2 * int64_t(call.n) * e.intermediate);
        allocate(outputs, int64_t(call.n) * e.hidden);
        return int64_t(p - at);
    }

    void thread(int t, int threads) {
        const Range mine = share(int(pairs.size()), t, threads);
        for (int i = mine.begin; i < mine.end; ++i) gather(i);
        barrier.wait(threads);
        // Shares of whole blocks of what `down` reads.
        Range blocks = share(e.intermediate / BLOCK, t, threads);
        blocks = {blocks.begin * BLOCK / LANES, blocks.end * BLOCK / LANES};
        const Range outs = share(e.hidden / LANES, t, threads);
        const auto first_down = column(e.down[active.empty() ? 0 : active[0]], outs.begin);
        for (size_t i = 0; i < active.size(); ++i) {
            const bool is_last = i + 1 == active.size();
            gate_and_up(active[i], blocks,
                        is_last ? first_down : column(e.gate[active[i + 1]], blocks.begin));
        }
        barrier.wait(threads);
        for (size_t i = 0; i < active.size(); ++i) {
            const int next = active[i + 1 == active.size() ? 0 : i + 1];
            down(active[i], outs, column(e.down[next], outs.begin));
        }
    }

    // The activations of a pair, beside those of its expert's other pairs.
    void gather(int i) {
        const int64_t from = pairs[i] / call.k * int64_t(e.hidden);
        const int formats = formats_of(e.gate[0]) | formats_of(e.up[0]);
        for (int c = 0; c < e.hidden; c += BLOCK)
            store_activation(load_bf16(call.x + from + c), load_bf16(call.x + from + c + LANES),
                             formats, i * int64_t(e.hidden) + c, inputs);
    }

    void gate_and_up(int expert, Range blocks, const uint8_t* then) {
        const int first = starts[expert], n = starts[expert + 1] - first;
        const int64_t width = e.intermediate;
        const Activations from = inputs.from(first, e.hidden);
        const Matrix& up = e.up[expert];
        matmul<Epilogue::store>(e.gate[expert], blocks, from, wide, 2 * width, n,
                                column(up, blocks.begin));
        matmul<Epilogue::store>(up, blocks, from, wide + width, 2 * width, n, then);
        for (int r = 0; r < n; ++r) {
            for (int i = blocks.begin * LANES; i < blocks.end * LANES; i += BLOCK) {
                const float* at = wide + r * 2 * width + i;
                store_activation(gated(at), gated(at + LANES), formats_of(e.down[0]),
                                 (first + r) * width + i, gates);
            }
        }
    }

    // Of CLAMPED, silu is x / (1 + e^-(slope x)); neither gate nor up exceed the limit, nor is up
    // below its negative, and `shift` is added to up.
    F gated(const float* gate) const {
        const float* up = gate + e.intermediate;
        if (e.activation != CLAMPED) return gated_activation(gate, up, e.activation);
        const F least = set1(-e.limit), none = zero();
        const auto clamp = [&](const float* x) { return sub(none, max(least, sub(none, load(x)))); };
        const F g = clamp(gate), u = max(least, clamp(up));
        return mul(mul(g, sigmoid(mul(g, set1(e.slope)))), add(u, set1(e.shift)));
    }

    void down(int expert, Range blocks, const uint8_t* then) {
        const int first = starts[expert], n = starts[expert + 1] - first;
        matmul<Epilogue::store>(e.down[expert], blocks, gates.from(first, e.intermediate), outputs,
                                e.hidden, n, then);
        for (int r = 0; r < n; ++r) {
            const int pair = pairs[first + r];
            float* to = call.out + pair / call.k * int64_t(e.hidden);
            const float* from = outputs + r * int64_t(e.hidden);
            const F weight = set1(call.weights[pair]);
            for (int i = blocks.begin * LANES; i < blocks.end * LANES; i += LANES)
                store(to + i, fma(load(from + i), weight, load(to + i)));
        }
    }
};

}  // namespace
