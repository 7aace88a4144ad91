// Attention of few queries to the keys of a cache, with an additive mask: softmax(scale * q k^T + mask) v.
//
// The query heads that share a KV head are rows of one matrix, so each key is read once for all of them. Scores are products
// with keys in place (products.h); the weighted sum of the values has the head's elements in its lanes. Keys and values are
// views of a cache's buffers, and nothing is copied. Every thread has its own heads, or its own rows of a head. Scores, weights
// and sums are float32 for every dtype.
//
// Built by sage/runtime/cpu/kernels.py for the processor at hand. Compiled passes call `aoti_torch_cpu_folded_attention`.

#include <omp.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>  // the stable C interface of torch

#include <cmath>
#include <limits>

#include "products.h"

namespace {

constexpr int64_t MAX_ROWS = 64;  // of a head that one thread takes at once
constexpr int MAX_BLOCK = 4;      // rows, and vectors of a value, in a block of the weighted sum

// One head, or some rows of it. `mask` may be null.
template <typename T>
struct Part {
    const T *query, *key, *value, *mask;
    T* out;
    int64_t rows, keys, size, mask_stride;
    float scale;
};

// Loads `count` of LANES elements; the others are `fill`.
template <typename T>
inline Vec load_some(const T* place, int64_t count, float fill) {
    Vec out = Vec{} + fill;
    for (int64_t lane = 0; lane < count; ++lane) out[lane] = to_float(place[lane]);
    return out;
}

// Turns a row of scores into weights; returns their sum. `padded`: keys, up to full vectors.
template <typename T>
float soften(float* scores, const T* mask, int64_t keys, int64_t padded, float scale) {
    const float least = -std::numeric_limits<float>::infinity();
    Vec highest = Vec{} + least;
    for (int64_t s = 0; s < padded; s += LANES) {
        const int64_t count = std::min<int64_t>(keys - s, LANES);
        Vec row = count == LANES ? load(scores + s) : load_some(scores + s, count, least);
        row *= scale;
        if (mask) row += count == LANES ? load(mask + s) : load_some(mask + s, count, 0.0f);
        store(scores + s, row);
        highest = row > highest ? row : highest;
    }
    float top = highest[0];
    for (int lane = 1; lane < LANES; ++lane) top = std::max(top, highest[lane]);
    Vec sums = {};
    for (int64_t s = 0; s < padded; s += LANES) {
        const Vec weights = exp_of(load(scores + s) - top);
        store(scores + s, weights);
        sums += weights;
    }
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += sums[lane];
    return total;
}

// Stores R rows of V vectors of the result: the weighted sum of the values, divided by the sum of the weights.
template <typename T, int R, int V>
void weigh(const float* weights, int64_t stride, const float* totals, const T* value, T* out, int64_t keys, int64_t size) {
    Vec sums[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v] = Vec{};
    for (int64_t s = 0; s < keys; ++s, value += size) {
        Vec of_value[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) of_value[v] = load(value + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] += weights[r * stride + s] * of_value[v];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(out + r * size + v * LANES, sums[r][v] / totals[r]);
}

template <typename T>
using Weigh = decltype(&weigh<T, 1, 1>);

template <typename T, int V>
Weigh<T> weigh_rows(int64_t rows) {
    static constexpr Weigh<T> KINDS[] = {weigh<T, 1, V>, weigh<T, 2, V>, weigh<T, 3, V>, weigh<T, 4, V>};
    return KINDS[rows - 1];
}

// Attends with all rows of a part. scores: memory for rows x padded numbers; x: for the laid-out queries.
template <typename T>
void attend(const Part<T>& part, int64_t padded, float* scores, Vec* x) {
    const Job<T, float> job{part.query, scores, part.rows, part.size, padded};
    const int64_t lines = lines_of<T>(part.size);
    if (part.rows == 1 || part.keys < TILE) {
        row_by_row(job, part.key, scores, 0, part.keys);
    } else {
        for_groups(job, lines, x, [&](auto& kind, int64_t row, int64_t count, Vec* of_x) {
            kind.lay_out(job, row, count, of_x, 0, lines);
        });
        tiles(job, lines, x, part.key, scores, part.keys, 0, part.keys);
    }
    float totals[MAX_ROWS];
    for (int64_t row = 0; row < part.rows; ++row)
        totals[row] = soften(scores + row * padded, part.mask ? part.mask + row * part.mask_stride : nullptr, part.keys, padded,
                             part.scale);
    for (int64_t row = 0; row < part.rows; row += MAX_BLOCK) {
        const int64_t count = std::min<int64_t>(part.rows - row, MAX_BLOCK);
        for (int64_t start = 0, vectors; start < part.size; start += vectors * LANES) {
            const int64_t left = (part.size - start) / LANES;
            vectors = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            const Weigh<T> run = vectors == 4   ? weigh_rows<T, 4>(count)
                                 : vectors == 2 ? weigh_rows<T, 2>(count)
                                                : weigh_rows<T, 1>(count);
            run(scores + row * padded, padded, totals + row, part.value + start, part.out + row * part.size + start, part.keys,
                part.size);
        }
    }
}

struct Sizes {
    int64_t batch, heads, rows, keys, size;
    int64_t query[2], key[2], value[2], mask[2];  // strides: of batch and head; of the mask, of batch and row
};

template <typename T>
void attend_all(const void* query, const void* key, const void* value, const void* mask, void* out, const Sizes& of, float scale,
                int64_t threads) {
    const int64_t heads = of.batch * of.heads, padded = (of.keys + LANES - 1) / LANES * LANES;
    if (heads * of.rows * of.keys * of.size < MIN_PARALLEL) threads = 1;
    const int64_t wanted = std::max((of.rows + MAX_ROWS - 1) / MAX_ROWS, std::min(of.rows, (threads + heads - 1) / heads));
    const int64_t rows = (of.rows + wanted - 1) / wanted, parts = (of.rows + rows - 1) / rows, tasks = heads * parts;
    const int64_t score_bytes = (rows * padded * sizeof(float) + 4095) / 4096 * 4096;
    const int64_t num_vectors = vectors_of(Job<T, float>{nullptr, nullptr, rows, of.size, padded});
    threads = std::min(threads, tasks);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        thread_local Scratch scratch;
        Vec* x = scratch.of(score_bytes + num_vectors * sizeof(Vec)) + score_bytes / sizeof(Vec);
        const int64_t team = omp_get_num_threads(), own = omp_get_thread_num();
        for (int64_t task = tasks * own / team; task < tasks * (own + 1) / team; ++task) {
            const int64_t batch = task / parts / of.heads, head = task / parts % of.heads, row = task % parts * rows;
            const T* of_mask = mask ? (const T*)mask + batch * of.mask[0] + row * of.mask[1] : nullptr;
            const int64_t place = ((batch * of.heads + head) * of.rows + row) * of.size;
            attend<T>({(const T*)query + batch * of.query[0] + head * of.query[1] + row * of.size,
                       (const T*)key + batch * of.key[0] + head * of.key[1],
                       (const T*)value + batch * of.value[0] + head * of.value[1], of_mask, (T*)out + place,
                       std::min(rows, of.rows - row), of.keys, of.size, of.mask[1], scale},
                      padded, (float*)scratch.vectors, x);
        }
    }
}

}  // namespace

extern "C" {

// query [batch, heads, rows, size], key and value [batch, heads, keys, size], the rows of a head contiguous; mask, which may be
// null, [batch, 1, rows, keys] with contiguous rows -> out, contiguous. sizes: the fields of `Sizes` in their order. `size` is a
// multiple of LANES.
void sage_folded_attention(const void* query, const void* key, const void* value, const void* mask, void* out,
                           const int64_t* sizes, double scale, int32_t is_half, int64_t threads) {
    Sizes of;
    std::memcpy(&of, sizes, sizeof of);
    (is_half ? attend_all<BFloat16> : attend_all<float>)(query, key, value, mask, out, of, (float)scale, threads);
}

// sage_draft::folded_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, int threads) -> Tensor
int32_t aoti_torch_cpu_folded_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                                        AtenTensorHandle* mask, double scale, int64_t threads, AtenTensorHandle* output) {
    const AtenTensorHandle given[] = {query, key, value, mask ? *mask : nullptr};
    int64_t *shape[4], *strides[4];
    int32_t dtype[4];
    void* data[4] = {};
    const int count = mask ? 4 : 3;
    for (int place = 0; place < count; ++place) {
        int64_t dims;
        aoti_torch_get_dim(given[place], &dims);
        aoti_torch_get_sizes(given[place], &shape[place]);
        aoti_torch_get_strides(given[place], &strides[place]);
        aoti_torch_get_dtype(given[place], &dtype[place]);
        aoti_torch_get_data_ptr(given[place], &data[place]);
        if (dims != 4 || dtype[place] != dtype[0] || (shape[place][3] > 1 && strides[place][3] != 1)) return 1;
    }
    const int64_t rows = shape[0][2], size = shape[0][3], keys = shape[1][2];
    const bool is_half = dtype[0] == aoti_torch_dtype_bfloat16();
    if (size % LANES || !(is_half || dtype[0] == aoti_torch_dtype_float32())) return 1;
    for (int place = 0; place < 3; ++place)
        if (shape[place][2] > 1 && strides[place][2] != size) return 1;
    if (mask && (shape[3][1] != 1 || shape[3][2] != rows || shape[3][3] != keys)) return 1;
    const int64_t of_mask[2] = {mask && shape[3][0] > 1 ? strides[3][0] : 0, mask ? strides[3][2] : 0};
    const int64_t sizes[] = {shape[0][0],   shape[0][1],   rows,          keys,          size,       strides[0][0], strides[0][1],
                             strides[1][0], strides[1][1], strides[2][0], strides[2][1], of_mask[0], of_mask[1]};
    const int64_t out_strides[] = {shape[0][1] * rows * size, rows * size, size, 1};
    if (aoti_torch_empty_strided(4, shape[0], out_strides, dtype[0], aoti_torch_device_type_cpu(), 0, output)) return 1;
    void* out;
    aoti_torch_get_data_ptr(*output, &out);
    sage_folded_attention(data[0], data[1], data[2], data[3], out, sizes, scale, is_half, threads);
    return 0;
}

}  // extern "C"
