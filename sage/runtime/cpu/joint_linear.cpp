// Linear layers of few rows with weights in place, at the speed at which the weights are read.
//
// One or several weights [N, K] of the same input, whose results are adjacent. Weights are as nn.Linear stores them, so no copy
// exists, and every thread has a contiguous part of their rows.
//
// Built by sage/runtime/cpu/kernels.py for the processor at hand. Compiled passes call `aoti_torch_cpu_joint_linear`.

#include <omp.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>  // the stable C interface of torch

#include <numeric>

#include "products.h"

namespace {

constexpr int64_t MAX_ROWS = 64;       // of x that are laid out at once
constexpr size_t OWN_BYTES = 1 << 16;  // of x as it is laid out: up to here, every thread has its own, and none waits
constexpr int MAX_WEIGHTS = 16;

template <typename T>
void multiply(const Job<T>& job, int64_t num_weights, const void* const* weights, const int64_t* sizes, int threads) {
    thread_local Scratch scratch;
    const int64_t lines = lines_of<T>(job.depth), unit = job.rows == 1 ? ONE_ROW : TILE;
    const bool is_in_pairs = fit_pairs(job), is_laid_out = job.rows > 1 && !is_in_pairs;
    const size_t bytes = is_laid_out ? vectors_of(job) * sizeof(Vec) : 0;
    Vec* shared = bytes > OWN_BYTES ? scratch.of(bytes) : nullptr;
    const int64_t units = (job.width + unit - 1) / unit;
    const int wanted = job.rows * job.width * job.depth < MIN_PARALLEL ? 1 : threads;
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
        const int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
        Vec* x = shared ? shared : scratch.of(bytes);
        if (is_laid_out)
            for_groups(job, lines, x, [&](auto& kind, int64_t row, int64_t count, Vec* of_x) {
                const int64_t first = shared ? lines * part / parts : 0, last = shared ? lines * (part + 1) / parts : lines;
                kind.lay_out(job, row, count, of_x, first, last);
            });
        if (shared) {
#pragma omp barrier
        }
        const int64_t begin = std::min(job.width, units * part / parts * unit);
        const int64_t end = std::min(job.width, units * (part + 1) / parts * unit);
        int64_t start = 0;  // of the weight's results in a row of y
        for (int64_t place = 0; place < num_weights; start += sizes[place++]) {
            const int64_t first = std::max<int64_t>(begin - start, 0), last = std::min(end - start, sizes[place]);
            const T* w = static_cast<const T*>(weights[place]);
            if (first >= last) continue;
            if (job.rows == 1 || sizes[place] < TILE)
                row_by_row(job, w, job.y + start, first, last);
            else if (is_in_pairs)
                in_pairs(job, w, job.y + start, first, last);
            else
                tiles(job, lines, x, w, job.y + start, sizes[place], first, last);
        }
    }
}

// Multiplies at most MAX_ROWS rows at a time.
template <typename T>
void multiply_all(const void* x, void* y, int64_t rows, int64_t depth, int64_t width, int64_t num_weights,
                  const void* const* weights, const int64_t* sizes, int threads) {
    for (int64_t row = 0; row < rows; row += MAX_ROWS)
        multiply<T>({(const T*)x + row * depth, (T*)y + row * width, std::min(MAX_ROWS, rows - row), depth, width}, num_weights,
                    weights, sizes, threads);
}

}  // namespace

extern "C" {

// x [rows, depth] and `num_weights` weights [sizes[i], depth] -> y [rows, sum of sizes], all contiguous.
void sage_joint_linear(const void* x, int64_t rows, int64_t depth, int64_t num_weights, const void* const* weights,
                       const int64_t* sizes, void* y, int32_t is_half, int64_t threads) {
    const int64_t width = std::accumulate(sizes, sizes + num_weights, int64_t(0));
    (is_half ? multiply_all<BFloat16> : multiply_all<float>)(x, y, rows, depth, width, num_weights, weights, sizes, threads);
}

// sage_draft::joint_linear(Tensor input, Tensor[] weights, int threads) -> Tensor
int32_t aoti_torch_cpu_joint_linear(AtenTensorHandle input, const AtenTensorHandle* weights, int64_t num_weights,
                                    int64_t threads, AtenTensorHandle* output) {
    int64_t dims, *shape, sizes[MAX_WEIGHTS], out_shape[4], out_strides[4], rows = 1, width = 0;
    const void* data[MAX_WEIGHTS];
    void *x, *y;
    int32_t dtype;
    bool is_contiguous;
    aoti_torch_get_dim(input, &dims);
    aoti_torch_get_sizes(input, &shape);
    aoti_torch_get_dtype(input, &dtype);
    aoti_torch_get_data_ptr(input, &x);
    aoti_torch_is_contiguous(input, &is_contiguous);
    const bool is_half = dtype == aoti_torch_dtype_bfloat16();
    if (!is_contiguous || dims > 4 || num_weights > MAX_WEIGHTS || !(is_half || dtype == aoti_torch_dtype_float32())) return 1;
    const int64_t depth = shape[dims - 1];
    for (int64_t place = 0; place < num_weights; ++place) {
        int64_t* of_weight;
        int32_t weight_dtype;
        void* pointer;
        aoti_torch_get_sizes(weights[place], &of_weight);
        aoti_torch_get_dtype(weights[place], &weight_dtype);
        aoti_torch_get_data_ptr(weights[place], &pointer);
        if (of_weight[1] != depth || weight_dtype != dtype) return 1;
        data[place] = pointer;
        width += sizes[place] = of_weight[0];
    }
    for (int64_t dim = 0; dim + 1 < dims; ++dim) rows *= out_shape[dim] = shape[dim];
    out_shape[dims - 1] = width;
    for (int64_t dim = dims - 1, stride = 1; dim >= 0; stride *= out_shape[dim--]) out_strides[dim] = stride;
    if (aoti_torch_empty_strided(dims, out_shape, out_strides, dtype, aoti_torch_device_type_cpu(), 0, output)) return 1;
    aoti_torch_get_data_ptr(*output, &y);
    sage_joint_linear(x, rows, depth, num_weights, data, sizes, y, is_half, threads);
    return 0;
}

}  // extern "C"
