// Matrix products of few rows with weights in place, at the speed at which the weights are read.
//
// y[m, n] = sum over k of x[m, k] * w[n, k], for one or several weights [N, K] of the same input, whose results are adjacent.
// Weights are as nn.Linear stores them, so no copy exists. A block of up to 8 rows of x and NB rows of w is multiplied along k,
// with one vector of partial sums per pair; the block of w stays in the first-level cache while the rows of x pass. Every thread
// has a contiguous part of the rows of w. Sums are in float32.
//
// Built by sage/runtime/joint_linear.py for the processor at hand. Compiled passes call `aoti_torch_cpu_joint_linear`.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
constexpr int LANES = VECTOR_BYTES / 4;
constexpr int64_t STRIP = 24;              // rows of w that all rows of x pass before the next ones are read
constexpr int64_t AHEAD_BYTES = 8192;      // of w between what is multiplied and what is prefetched
constexpr int64_t UNIT = 24;               // a thread's part is a multiple; divisible by most block sizes
constexpr int64_t MIN_PARALLEL = 1 << 14;  // products; starting threads takes about a microsecond
constexpr int MAX_WEIGHTS = 16;

typedef float Vec __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));

struct BFloat16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
    const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
    float out;
    std::memcpy(&out, &word, sizeof out);
    return out;
}

inline void store(float* place, float value) { *place = value; }

inline void store(BFloat16* place, float value) {  // rounds to nearest, ties to even
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    const bool is_nan = (word & 0x7fffffff) > 0x7f800000;
    place->bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// Returns the sums of the lanes of up to four vectors.
struct Sums {
    float values[4];
};

#if defined(__AVX512F__)
inline Sums sums_of(Vec a, Vec b, Vec c, Vec d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
    const __m512 low = _mm512_shuffle_ps(ab, cd, 0x44), high = _mm512_shuffle_ps(ab, cd, 0xee);
    const __m512 four = _mm512_add_ps(low, high);  // in every quarter, a part of the sums of a, b, c, d
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_castps512_ps256(_mm512_shuffle_f32x4(four, four, 0x0e)));
    Sums out;
    _mm_storeu_ps(out.values, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
    return out;
}
#else
inline Sums sums_of(Vec a, Vec b, Vec c, Vec d) {
    Sums out = {};
    for (int lane = 0; lane < LANES; ++lane) {
        out.values[0] += a[lane];
        out.values[1] += b[lane];
        out.values[2] += c[lane];
        out.values[3] += d[lane];
    }
    return out;
}
#endif

// A step along k: what is loaded at once, and its product added to partial sums.
struct FloatStep {
    typedef Vec Loaded;
    static constexpr int SIZE = LANES;
    static Loaded load(const float* place) {
        Loaded out;
        std::memcpy(&out, place, sizeof out);
        return out;
    }
    static Vec add(Vec sums, Loaded x, Loaded w) { return sums + x * w; }
};

#if defined(__AVX512BF16__)
struct HalfStep {
    typedef __m512bh Loaded;
    static constexpr int SIZE = 2 * LANES;
    static Loaded load(const BFloat16* place) { return (__m512bh)_mm512_loadu_si512(place); }
    static Vec add(Vec sums, Loaded x, Loaded w) { return (Vec)_mm512_dpbf16_ps((__m512)sums, x, w); }
};
#else
struct HalfStep {
    typedef Vec Loaded;
    static constexpr int SIZE = LANES;
    static Loaded load(const BFloat16* place) {
        Halves bits;
        std::memcpy(&bits, place, sizeof bits);
        return (Vec)(__builtin_convertvector(bits, Words) << 16);
    }
    static Vec add(Vec sums, Loaded x, Loaded w) { return sums + x * w; }
};
#endif

template <typename T>
struct StepOf {
    typedef FloatStep Type;
};
template <>
struct StepOf<BFloat16> {
    typedef HalfStep Type;
};

template <typename T>
struct Job {
    const T* x;
    T* y;
    int64_t rows, depth, width;  // depth: K; width: of a row of y
};

// Multiplies MB rows of x, from `row` on, with NB rows of w.
template <typename T, int MB, int NB>
inline void block(const Job<T>& job, int64_t row, const T* w, T* y) {
    using Step = typename StepOf<T>::Type;
    const T* x = job.x + row * job.depth;
    Vec sums[MB][NB];
#pragma GCC unroll 8
    for (int m = 0; m < MB; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < NB; ++n) sums[m][n] = Vec{};
    // Prefetched is what follows `distance` steps along k later, in the present block of NB rows or in one of the next blocks.
    constexpr int64_t distance = AHEAD_BYTES / (NB * sizeof(T));
    const int64_t near = distance / job.depth * NB * job.depth + distance % job.depth;
    const int64_t far = near + (NB - 1) * job.depth;         // in the block after
    const int64_t wraps = job.depth - distance % job.depth;  // from this k on
    int64_t k = 0;
    for (; k + Step::SIZE <= job.depth; k += Step::SIZE) {
        const T* ahead = w + k + (k < wraps ? near : far);
        typename Step::Loaded of_w[NB];
#pragma GCC unroll 8
        for (int n = 0; n < NB; ++n) {
            of_w[n] = Step::load(w + n * job.depth + k);
            __builtin_prefetch(ahead + n * job.depth);
        }
#pragma GCC unroll 8
        for (int m = 0; m < MB; ++m) {
            const typename Step::Loaded of_x = Step::load(x + m * job.depth + k);
#pragma GCC unroll 8
            for (int n = 0; n < NB; ++n) sums[m][n] = Step::add(sums[m][n], of_x, of_w[n]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MB; ++m) {
        T* out = y + m * job.width;
#pragma GCC unroll 8
        for (int n = 0; n < NB; n += 4) {
            const Vec none = {};
            Sums totals = sums_of(sums[m][n], n + 1 < NB ? sums[m][n + 1] : none, n + 2 < NB ? sums[m][n + 2] : none,
                                  n + 3 < NB ? sums[m][n + 3] : none);
#pragma GCC unroll 4
            for (int i = n; i < n + 4 && i < NB; ++i) {
                float total = totals.values[i - n];
                for (int64_t rest = k; rest < job.depth; ++rest)
                    total += to_float(x[m * job.depth + rest]) * to_float(w[i * job.depth + rest]);
                store(out + i, total);
            }
        }
    }
}

template <typename T, int MB, int NB>
void blocks(const Job<T>& job, int64_t row, const T* w, T* y, int64_t begin, int64_t end) {
    int64_t n = begin;
    for (; n + NB <= end; n += NB) block<T, MB, NB>(job, row, w + n * job.depth, y + n);
    for (; n < end; ++n) block<T, MB, 1>(job, row, w + n * job.depth, y + n);
}

// Multiplies `count` rows of x, from `row` on, with rows begin .. end of w. Block sizes fill 32 vector registers.
template <typename T>
void some_rows(const Job<T>& job, int64_t row, int64_t count, const T* w, T* y, int64_t begin, int64_t end) {
    y += row * job.width;
    switch (count) {
        case 1: return blocks<T, 1, 8>(job, row, w, y, begin, end);
        case 2: return blocks<T, 2, 8>(job, row, w, y, begin, end);
        case 3: return blocks<T, 3, 6>(job, row, w, y, begin, end);
        case 4: return blocks<T, 4, 6>(job, row, w, y, begin, end);
        case 5: return blocks<T, 5, 4>(job, row, w, y, begin, end);
        case 6: return blocks<T, 6, 4>(job, row, w, y, begin, end);
        case 7: return blocks<T, 7, 3>(job, row, w, y, begin, end);
        default: return blocks<T, 8, 3>(job, row, w, y, begin, end);
    }
}

// Multiplies all rows of x with rows begin .. end of w: at most 8 rows of x at a time with a strip of w, which stays in a cache.
template <typename T>
void all_rows(const Job<T>& job, const T* w, T* y, int64_t begin, int64_t end) {
    if (job.rows <= 8) return some_rows(job, 0, job.rows, w, y, begin, end);
    for (int64_t first = begin; first < end; first += STRIP) {
        const int64_t last = std::min(first + STRIP, end);
        for (int64_t row = 0; row < job.rows;) {
            const int64_t left = job.rows - row;
            const int64_t count = left >= 16 || left == 8 ? 8 : left > 8 ? (left + 1) / 2 : left;
            some_rows(job, row, count, w, y, first, last);
            row += count;
        }
    }
}

template <typename T>
void multiply(const Job<T>& job, int64_t num_weights, const void* const* weights, const int64_t* sizes, int threads) {
    const int64_t units = (job.width + UNIT - 1) / UNIT;
    const int wanted = job.rows * job.width * job.depth < MIN_PARALLEL ? 1 : threads;
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
        const int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
        const int64_t begin = std::min(job.width, units * part / parts * UNIT);
        const int64_t end = std::min(job.width, units * (part + 1) / parts * UNIT);
        int64_t start = 0;  // of the weight's results in a row of y
        for (int64_t place = 0; place < num_weights; start += sizes[place++]) {
            const int64_t first = std::max<int64_t>(begin - start, 0), last = std::min(end - start, sizes[place]);
            if (first < last) all_rows(job, static_cast<const T*>(weights[place]), job.y + start, first, last);
        }
    }
}

}  // namespace

extern "C" {

// x [rows, depth] and `num_weights` weights [sizes[i], depth] -> y [rows, sum of sizes], all contiguous.
void sage_joint_linear(const void* x, int64_t rows, int64_t depth, int64_t num_weights, const void* const* weights,
                       const int64_t* sizes, void* y, int32_t is_half, int64_t threads) {
    int64_t width = 0;
    for (int64_t place = 0; place < num_weights; ++place) width += sizes[place];
    if (is_half)
        multiply<BFloat16>({(const BFloat16*)x, (BFloat16*)y, rows, depth, width}, num_weights, weights, sizes, threads);
    else
        multiply<float>({(const float*)x, (float*)y, rows, depth, width}, num_weights, weights, sizes, threads);
}

// The stable C interface of torch (torch/csrc/inductor/aoti_torch/c/shim.h), as far as it is used here.
typedef struct AtenTensorOpaque* AtenTensorHandle;
int32_t aoti_torch_get_data_ptr(AtenTensorHandle, void**);
int32_t aoti_torch_get_dim(AtenTensorHandle, int64_t*);
int32_t aoti_torch_get_sizes(AtenTensorHandle, int64_t**);
int32_t aoti_torch_get_dtype(AtenTensorHandle, int32_t*);
int32_t aoti_torch_is_contiguous(AtenTensorHandle, bool*);
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, AtenTensorHandle*);

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
