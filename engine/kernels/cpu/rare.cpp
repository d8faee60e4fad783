// Matmuls with matrices in rare formats, for `set_rare_matmul` of native.cpp: compiled when a model has
// one, so that other models load without waiting.
#include "products.h"

extern "C" void rare_matmul(const Matrix& m, Range blocks, Activations x, float* y, int64_t stride,
                            int n, const uint8_t* then, Epilogue epilogue) {
    if (epilogue == Epilogue::store)
        dispatch_matmul<Epilogue::store, Q5_0, MXFP4>(m, blocks, x, y, stride, n, then);
    else
        dispatch_matmul<Epilogue::add, Q5_0, MXFP4>(m, blocks, x, y, stride, n, then);
}
