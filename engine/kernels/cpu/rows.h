// Operations on rows between matmuls: norms, rotary positions, gated activations, and reductions of
// logits.
#pragma once

#include "products.h"

namespace {

// 1 / root mean square.
float inverse_rms(const float* x, int columns, float eps) {
    F squares = zero();
    for (int i = 0; i < columns; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    return 1.0f / std::sqrt(reduce_add(squares) / columns + eps);
}

// RMS norm of x (none if weight is null), in the formats of the next matrices.
void rms_norm(const float* x, const float* weight, int columns, float eps, int formats, int64_t at,
              const Activations& to) {
    const F root = set1(weight ? inverse_rms(x, columns, eps) : 1.0f);
    const auto part = [&](int i) {
        const F v = mul(load(x + i), root);
        return weight ? mul(v, load(weight + i)) : v;
    };
    for (int i = 0; i < columns; i += BLOCK)
        store_activation(part(i), part(i + LANES), formats, at + i, to);
}

// RMS norm of x in place.
void rms_norm_in_place(float* x, const float* weight, int columns, float eps) {
    const F root = set1(inverse_rms(x, columns, eps));
    for (int i = 0; i < columns; i += LANES)
        store(x + i, mul(mul(load(x + i), root), load(weight + i)));
}

// Rotates one head to its position; `rotary`: cosines, then sines, of half the dimensions.
void apply_rope(float* head, const float* rotary, int dim) {
    const int half = dim / 2;
    for (int i = 0; i < half; i += LANES) {
        const F a = load(head + i), b = load(head + half + i);
        const F cos = load(rotary + i), sin = load(rotary + half + i);
        store(head + i, sub(mul(a, cos), mul(b, sin)));
        store(head + half + i, fma(b, cos, mul(a, sin)));
    }
}

void store_scaled_bf16(const float* x, int columns, float factor, bf16* out) {
    for (int i = 0; i < columns; i += LANES) store_bf16(out + i, mul(load(x + i), set1(factor)));
}

// The largest of some logits, its index, and the sum of e^(logit - largest).
struct SoftmaxStats {
    float highest = -INFINITY, sum = 0.0f;
    int64_t argmax = 0;

    // `first`: the index of x[0].
    static SoftmaxStats of(const float* x, int count, int64_t first) {
        F most = set1(-INFINITY), sum = zero();
        for (int i = 0; i < count; i += LANES)
            most = max(most, load_partial(x + i, count - i, -INFINITY));
        const float highest = reduce_max(most);
        if (highest == -INFINITY) return {highest, 0.0f, first};
        const F same = set1(highest);
        int64_t argmax = -1;
        for (int i = 0; i < count; i += LANES) {
            const F v = load_partial(x + i, count - i, -INFINITY);
            const uint32_t matches = equal(v, same);
            if (matches && argmax < 0) argmax = first + i + __builtin_ctz(matches);
            float each[LANES];
            store(each, exp(sub(v, same)));
            sum = add(sum, load_partial(each, count - i, 0.0f));
        }
        return {highest, reduce_add(sum), argmax < 0 ? first : argmax};  // NaN equals nothing
    }

    // Add those of the logits after these.
    void merge(const SoftmaxStats& other) {
        const float both = std::max(highest, other.highest);
        if (both == -INFINITY) return;
        sum = sum * std::exp(highest - both) + other.sum * std::exp(other.highest - both);
        if (other.highest > highest) argmax = other.argmax;
        highest = both;
    }
};

// The k largest of some logits in descending order; ties in ascending order of index.
void topk_row(const float* x, int count, int k, float* values, int64_t* indices) {
    int size = 0;
    float low = -INFINITY;
    for (int i = 0; i < count; i += LANES) {
        const F v = load_partial(x + i, count - i, -INFINITY);
        uint32_t more = size < k ? (1u << std::min(LANES, count - i)) - 1 : greater(v, set1(low));
        for (; more; more &= more - 1) {
            const int at = i + __builtin_ctz(more);
            if (size == k && !(x[at] > low)) continue;
            int to = size < k ? size++ : k - 1;
            for (; to > 0 && values[to - 1] < x[at]; --to) {
                values[to] = values[to - 1];
                indices[to] = indices[to - 1];
            }
            values[to] = x[at];
            indices[to] = at;
            if (size == k) low = values[k - 1];
        }
    }
}

enum Activation { SILU, GELU_TANH };

// activation(gate) * up, where gelu(x) is x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
F gated_activation(const float* gate, const float* up, int activation) {
    const F g = load(gate);
    F at = g;
    if (activation == GELU_TANH)
        at = mul(mul(g, set1(1.5957691216f)), fma(mul(g, g), set1(0.044715f), set1(1.0f)));
    return mul(mul(g, sigmoid(at)), load(up));
}

}  // namespace
