// Products with matrices in the formats that few models have, for `use_rare` of native.cpp: compiled
// when a model has one, so that the others need not wait.
#include "products.h"

extern "C" void rare_product(const Matrix& m, Range blocks, Rows x, float* y, int64_t stride, int n,
                             const uint8_t* then, Into into) {
    if (into == Into::store)
        product_among<Into::store, Q5_0, IQ4_XS>(m, blocks, x, y, stride, n, then);
    else
        product_among<Into::add, Q5_0, IQ4_XS>(m, blocks, x, y, stride, n, then);
}
