// Products of few rows x [M, K] with many rows w [N, K] in place: y[m, n] = sum over k of x[m, k] * w[n, k], sums in float32.
//
// One row of x is multiplied along k, with vectors of partial sums per row of w; a few short rows too, with two rows of w at a
// time. Of more rows, the lanes of a vector are rows of x: G consecutive words of w are loaded into all lanes at once and
// multiplied with the same words of LANES / G rows of x, which are laid out for that once. So every lane works, and few sums are
// left to add. A word is one float32 or two bfloat16. A tile of TILE rows of w, which stays in a cache, is multiplied with all
// rows of x.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "vectors.h"

namespace {

constexpr int TILE = LANES < 8 ? 8 : LANES;  // rows of w
constexpr int ONE_ROW = 8;                   // rows of w that one row of x is multiplied with side by side
constexpr int LINE = 16;                     // words of a cache line
constexpr int64_t AHEAD_BYTES = 8192;        // of w between what is multiplied and what is prefetched
constexpr int64_t IN_ORDER_AHEAD_BYTES = 2048;
constexpr int64_t SHORT_ROW_BYTES = 512, LONG_ROW_BYTES = 8192;
constexpr int MOST_IN_PAIRS = 6;             // rows of x, whose sums with two rows of w are kept in registers
constexpr int64_t MOST_BYTES_IN_PAIRS = 24576;  // of these rows, which stay in the first-level cache
constexpr int64_t PAIR_AHEAD_BYTES = 4096;   // and four rows of w
constexpr int64_t MIN_PARALLEL = 1 << 14;    // products; starting threads takes about a microsecond

// Rows of x, and where their results go: y is of type Y, and `width` is the distance of its rows.
template <typename T, typename Y = T>
struct Job {
    const T* x;
    Y* y;
    int64_t rows, depth, width;  // depth: K
};

// Prefetches, for a block of NB rows of w, what follows AHEAD_BYTES later: in the present block or in one of the next ones. It goes
// to the second-level cache (locality 2), because the first has fewer lines in flight.
template <typename T, int NB>
struct Ahead {
    static constexpr int64_t distance = AHEAD_BYTES / (NB * sizeof(T));  // along k
    const int64_t depth, near, far, wraps;                               // from k = wraps on, it is in the block after

    explicit Ahead(int64_t of_depth)
        : depth(of_depth),
          near(distance / depth * NB * depth + distance % depth),
          far(near + (NB - 1) * depth),
          wraps(depth - distance % depth) {}

    inline void operator()(const T* w, int64_t k) const {
        const T* ahead = w + k + (k < wraps ? near : far);
#pragma GCC unroll 16
        for (int n = 0; n < NB; ++n) __builtin_prefetch(ahead + n * depth, 0, 2);
    }
};

// Adds the products of the elements from k on, which fill no vector.
template <typename T>
inline float add_rest(float total, const T* x, const T* w, int64_t k, int64_t depth) {
    for (; k < depth; ++k) total += to_float(x[k]) * to_float(w[k]);
    return total;
}

// Stores the results of at most four rows of w: the sums of their vectors, and the products of the elements from k on.
template <typename T, typename Y>
inline void finish_rows(const Job<T, Y>& job, const T* w, const Vec* sums, int64_t k, int rows, Y* y) {
    const Sums totals = sums_of(sums[0], sums[1], sums[2], sums[3]);
#pragma GCC unroll 4
    for (int n = 0; n < 4 && n < rows; ++n)
        store(y + n, add_rest(totals.values[n], job.x, w + n * job.depth, k, job.depth));
}

// Multiplies one row of x with ONE_ROW rows of w side by side.
template <typename T, typename Y>
inline void side_by_side(const Job<T, Y>& job, const T* w, Y* y) {
    using Step = typename StepOf<T>::Type;
    const Ahead<T, ONE_ROW> prefetch(job.depth);
    Vec sums[ONE_ROW];
#pragma GCC unroll 8
    for (int n = 0; n < ONE_ROW; ++n) sums[n] = Vec{};
    int64_t k = 0;
    for (; k + Step::SIZE <= job.depth; k += Step::SIZE) {
        prefetch(w, k);
        const typename Step::Loaded of_x = Step::load(job.x + k);
#pragma GCC unroll 8
        for (int n = 0; n < ONE_ROW; ++n) sums[n] = Step::add(sums[n], of_x, Step::load(w + n * job.depth + k));
    }
#pragma GCC unroll 2
    for (int n = 0; n < ONE_ROW; n += 4) finish_rows(job, w + n * job.depth, sums + n, k, 4, y + n);
}

// Multiplies one row of x with at most four rows of w, one after the other.
template <typename T, typename Y>
inline void in_order(const Job<T, Y>& job, const T* w, int rows, Y* y) {
    using Step = typename StepOf<T>::Type;
    constexpr int SUMS = 4, SIZE = Step::SIZE;  // partial sums: a single one would wait for each of its additions
    Vec totals[4] = {};
    int64_t k = 0;
    for (int n = 0; n < rows; ++n) {
        const T* row = w + n * job.depth;
        Vec sums[SUMS] = {};
        const auto add = [&](int i) __attribute__((always_inline)) {
            __builtin_prefetch((const char*)(row + k) + IN_ORDER_AHEAD_BYTES, 0, 2);
            sums[i] = Step::add(sums[i], Step::load(job.x + k), Step::load(row + k));
            k += SIZE;
        };
        for (k = 0; k + SUMS * SIZE <= job.depth;)
#pragma GCC unroll 4
            for (int i = 0; i < SUMS; ++i) add(i);
        while (k + SIZE <= job.depth) add(0);
        totals[n] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    finish_rows(job, w, totals, k, rows, y);
}

// Multiplies the rows of x, one after the other, with rows begin .. end of w. From memory, what is read in order is read fastest, if
// x stays in the first-level cache; short rows, such as keys, are fewer additions side by side.
template <typename T, typename Y>
void row_by_row(Job<T, Y> job, const T* w, Y* y, int64_t begin, int64_t end) {
    const int64_t bytes = job.depth * sizeof(T);
    const bool is_in_order = bytes > SHORT_ROW_BYTES && bytes <= LONG_ROW_BYTES;
    for (int64_t row = 0; row < job.rows; ++row, job.x += job.depth, y += job.width) {
        int64_t n = begin;
        for (; !is_in_order && n + ONE_ROW <= end; n += ONE_ROW) side_by_side(job, w + n * job.depth, y + n);
        for (; n < end; n += 4) in_order(job, w + n * job.depth, (int)std::min<int64_t>(4, end - n), y + n);
    }
}

// Multiplies M rows of x with NB rows of w, read in order.
template <typename T, typename Y, int M, int NB>
void few_by_few(const Job<T, Y>& job, const T* w, Y* y) {
    using Step = typename StepOf<T>::Type;
    const int64_t depth = job.depth;
    constexpr int COUNT = (M * NB + 3) / 4 * 4;
    const char* ahead = (const char*)(w + 4 * depth) + PAIR_AHEAD_BYTES;
    Vec sums[COUNT];  // of rows m and n: m * NB + n
#pragma GCC unroll 12
    for (int i = 0; i < COUNT; ++i) sums[i] = Vec{};
    int64_t k = 0;
    for (; k + Step::SIZE <= depth; k += Step::SIZE) {
        typename Step::Loaded of_w[NB];
#pragma GCC unroll 2
        for (int n = 0; n < NB; ++n, ahead += Step::SIZE * sizeof(T)) {
            __builtin_prefetch(ahead, 0, 2);
            of_w[n] = Step::load(w + n * depth + k);
        }
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m) {
            typename Step::Loaded of_x = Step::load(job.x + m * depth + k);
            keep_in_register(of_x);
#pragma GCC unroll 2
            for (int n = 0; n < NB; ++n) sums[m * NB + n] = Step::add(sums[m * NB + n], of_x, of_w[n]);
        }
    }
#pragma GCC unroll 3
    for (int i = 0; i < COUNT; i += 4) {
        const Sums totals = sums_of(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
#pragma GCC unroll 4
        for (int place = i; place < i + 4 && place < M * NB; ++place) {
            const int m = place / NB, n = place % NB;
            store(y + m * job.width + n, add_rest(totals.values[place - i], job.x + m * depth, w + n * depth, k, depth));
        }
    }
}

// Whether rows of x are multiplied with pairs of rows of w: that takes fewer operations than tiles for most of these numbers of
// rows, and reads w in order. Not where bfloat16 has to be converted for every product.
template <typename T, typename Y>
bool fit_pairs(const Job<T, Y>& job) {
    return StepOf<T>::Type::SIZE * sizeof(T) == VECTOR_BYTES && job.rows > 1 && job.rows <= MOST_IN_PAIRS &&
           job.rows * job.depth * sizeof(T) <= MOST_BYTES_IN_PAIRS;
}

// Multiplies the rows of x with rows begin .. end of w, two at a time; two rows of x with one, which is read faster.
template <typename T, typename Y>
void in_pairs(const Job<T, Y>& job, const T* w, Y* y, int64_t begin, int64_t end) {
    static constexpr decltype(&few_by_few<T, Y, 2, 1>) KINDS[] = {few_by_few<T, Y, 2, 1>, few_by_few<T, Y, 3, 2>,
                                                                  few_by_few<T, Y, 4, 2>, few_by_few<T, Y, 5, 2>,
                                                                  few_by_few<T, Y, 6, 2>};
    const int64_t step = job.rows == 2 ? 1 : 2;
    for (; begin + step <= end; begin += step) KINDS[job.rows - 2](job, w + begin * job.depth, y + begin);
    row_by_row(job, w, y, begin, end);
}

// Rows of x whose words fill VX vectors, G words of each row: how they are laid out and multiplied.
template <typename T, typename Y, int G, int VX>
struct Group {
    using Word = typename WordOf<T>::Type;
    static constexpr int PARTS = Word::PARTS;
    static constexpr int ROWS = LANES / G;                 // of a vector
    static constexpr int DEPTH = LINE * 4 / sizeof(T);     // elements of a line of w
    static constexpr int VECTORS = LINE / G * VX * PARTS;  // of a line
    static constexpr int NB = TILE / VX;                   // rows of w in a block, whose sums are in registers

    // Lays out lines first .. last of `count` rows of x; what is missing is zero. Vector (s, v, part) of a line has word
    // s * G + g of row v * ROWS + m in lane m * G + g.
    static void lay_out(const Job<T, Y>& job, int64_t row, int64_t count, Vec* out, int64_t first, int64_t last) {
        for (int64_t line = first; line < last; ++line) {
            const int64_t rest = std::min<int64_t>(job.depth - line * DEPTH, DEPTH);
            for (int v = 0; v < VX; ++v) {
                alignas(VECTOR_BYTES) uint32_t words[ROWS][LINE] = {};
                const int64_t used = std::min<int64_t>(count - v * ROWS, ROWS);
                for (int64_t m = 0; m < used; ++m)
                    std::memcpy(words[m], job.x + (row + v * ROWS + m) * job.depth + line * DEPTH, rest * sizeof(T));
                lay_out_line(words, out + line * VECTORS + v * PARTS);
            }
        }
    }

    static void lay_out_line(const uint32_t (&words)[ROWS][LINE], Vec* out) {
#if defined(__AVX512F__)
        if (G == 1 && PARTS == 1) {
            Vec rows[16];
            std::memcpy(rows, words, sizeof rows);
            transpose(rows);
#pragma GCC unroll 16
            for (int s = 0; s < 16; ++s) out[s * VX] = rows[s];
            return;
        }
#endif
        for (int s = 0; s < LINE / G; ++s) {
            uint32_t* place = (uint32_t*)(out + s * VX * PARTS);
            for (int m = 0; m < ROWS; ++m) {
                if (PARTS == 1) {
                    std::memcpy(place + m * G, words[m] + s * G, 4 * G);
                } else {
                    for (int g = 0; g < G; ++g) {
                        place[m * G + g] = words[m][s * G + g] << 16;
                        place[LANES + m * G + g] = words[m][s * G + g] & 0xffff0000u;
                    }
                }
            }
        }
    }

    // Adds the products of a line of NB rows of w, `stride` bytes apart.
    static inline void add_line(Vec (&sums)[NB][VX], const Vec* x, const char* w, int64_t stride) {
        const char* rows[(NB + 3) / 4];
#pragma GCC unroll 4
        for (int n = 0; n < NB; n += 4) rows[n / 4] = w + n * stride;
#pragma GCC unroll 4
        for (int s = 0; s < LINE / G; ++s) {
#pragma GCC unroll 16
            for (int n = 0; n < NB; ++n) {
                const Vec words = spread<G>(rows[n / 4] + n % 4 * stride + s * G * 4);
#pragma GCC unroll 2
                for (int v = 0; v < VX; ++v) sums[n][v] = Word::add(sums[n][v], x + (s * VX + v) * PARTS, words);
            }
        }
    }

    // Multiplies all of x with a tile of w; vector (n, v) of the result has the partial sums of row n of w.
    static void multiply(const Job<T, Y>& job, const Vec* x, const T* w, Vec* out) {
        const Ahead<T, NB> prefetch(job.depth);
        for (int first = 0; first < TILE; first += NB, w += NB * job.depth, out += NB * VX) {
            Vec sums[NB][VX];
#pragma GCC unroll 16
            for (int n = 0; n < NB; ++n)
#pragma GCC unroll 2
                for (int v = 0; v < VX; ++v) sums[n][v] = Vec{};
            const Vec* of_x = x;
            int64_t k = 0;
            for (; k + DEPTH <= job.depth; k += DEPTH, of_x += VECTORS) {
                prefetch(w, k);
                add_line(sums, of_x, (const char*)(w + k), job.depth * sizeof(T));
            }
            if (k < job.depth) {
                T rest[NB][DEPTH] = {};
                for (int n = 0; n < NB; ++n) std::memcpy(rest[n], w + n * job.depth + k, (job.depth - k) * sizeof(T));
                add_line(sums, of_x, (const char*)rest, sizeof rest[0]);
            }
#pragma GCC unroll 16
            for (int n = 0; n < NB; ++n)
#pragma GCC unroll 2
                for (int v = 0; v < VX; ++v) out[n * VX + v] = sums[n][v];
        }
    }

    // Stores columns first .. first + columns of a tile's result [TILE][VX] in `count` rows of y.
    static void finish(const Vec* sums, Y* y, int64_t width, int64_t count, int64_t first, int64_t columns) {
        for (int v = 0; v < VX; ++v) {
            alignas(VECTOR_BYTES) float totals[ROWS][TILE];
#if defined(__AVX512F__)
            Vec lanes[16];
#pragma GCC unroll 16
            for (int n = 0; n < 16; ++n) lanes[n] = sums[n * VX + v];
            transpose(lanes);
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; ++m) {
                Vec total = lanes[m * G];
                for (int g = 1; g < G; ++g) total += lanes[m * G + g];
                std::memcpy(totals[m], &total, sizeof total);
            }
#else
            for (int m = 0; m < ROWS; ++m)
                for (int n = 0; n < TILE; ++n) {
                    totals[m][n] = sums[n * VX + v][m * G];
                    for (int g = 1; g < G; ++g) totals[m][n] += sums[n * VX + v][m * G + g];
                }
#endif
            for (int m = 0; m < std::min<int64_t>(count - v * ROWS, ROWS); ++m, y += width) {
                if (columns == TILE)
                    for (int n = 0; n < TILE; ++n) store(y + n, totals[m][n]);
                else
                    for (int64_t n = 0; n < columns; ++n) store(y + n, totals[m][first + n]);
            }
        }
    }
};

template <typename T, typename Y>
struct AnyGroup {
    int rows, vectors;
    decltype(&Group<T, Y, 1, 1>::lay_out) lay_out;
    decltype(&Group<T, Y, 1, 1>::multiply) multiply;
    decltype(&Group<T, Y, 1, 1>::finish) finish;
};

template <typename T, typename Y, int G, int VX>
constexpr AnyGroup<T, Y> group_of() {
    using Kind = Group<T, Y, G, VX>;
    return {Kind::ROWS * VX, Kind::VECTORS, Kind::lay_out, Kind::multiply, Kind::finish};
}

// Returns how to multiply the next rows of x when so many are left.
template <typename T, typename Y>
const AnyGroup<T, Y>& next_group(int64_t left) {
    static constexpr AnyGroup<T, Y> KINDS[] = {
#if defined(__AVX512F__)
        group_of<T, Y, 8, 1>(), group_of<T, Y, 8, 2>(), group_of<T, Y, 4, 2>(),
#elif defined(__AVX__)
        group_of<T, Y, 4, 1>(), group_of<T, Y, 4, 2>(),
#endif
        group_of<T, Y, 2, 2>(), group_of<T, Y, 1, 2>()};
    constexpr int LAST = sizeof KINDS / sizeof KINDS[0] - 1;
    if (left > LANES) return KINDS[left > LANES + LANES / 2 ? LAST : LAST - 1];
    if (LANES == 16 && (left == 9 || left == 10)) left = 8;  // and the others next: 16 take 1.3 times as long
    int kind = 0;
    while (KINDS[kind].rows < left) ++kind;
    return KINDS[kind];
}

// Memory for x as it is laid out, kept for the next call.
struct Scratch {
    Vec* vectors = nullptr;
    size_t bytes = 0;
    Vec* of(size_t needed) {
        if (needed > bytes) {
            std::free(vectors);
            bytes = (needed + 4095) / 4096 * 4096;
            vectors = static_cast<Vec*>(std::aligned_alloc(4096, bytes));
        }
        return vectors;
    }
    ~Scratch() { std::free(vectors); }
};

// Returns the number of cache lines of a row of K elements.
template <typename T>
int64_t lines_of(int64_t depth) {
    return (depth * sizeof(T) + LINE * 4 - 1) / (LINE * 4);
}

// Calls `run` with every group of rows: its kind, first row, number of rows and place in the memory for x.
template <typename T, typename Y, typename F>
void for_groups(const Job<T, Y>& job, int64_t lines, Vec* x, F run) {
    for (int64_t row = 0; row < job.rows;) {
        const AnyGroup<T, Y>& kind = next_group<T, Y>(job.rows - row);
        run(kind, row, std::min<int64_t>(kind.rows, job.rows - row), x);
        row += kind.rows;
        x += lines * kind.vectors;
    }
}

// Multiplies all rows of x with rows begin .. end of a weight of at least TILE rows, `size`.
template <typename T, typename Y>
void tiles(const Job<T, Y>& job, int64_t lines, Vec* x, const T* w, Y* y, int64_t size, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += TILE) {
        const int64_t start = std::min(n, size - TILE);  // the last tile begins earlier
        for_groups(job, lines, x, [&](const AnyGroup<T, Y>& kind, int64_t row, int64_t count, const Vec* of_x) {
            Vec sums[TILE * 2];
            kind.multiply(job, of_x, w + start * job.depth, sums);
            kind.finish(sums, y + row * job.width + n, job.width, count, n - start, std::min<int64_t>(TILE, end - n));
        });
    }
}

// Returns the number of vectors that the rows of x take as they are laid out.
template <typename T, typename Y>
int64_t vectors_of(const Job<T, Y>& job) {
    const int64_t lines = lines_of<T>(job.depth);
    int64_t vectors = 0;
    for_groups(job, lines, nullptr, [&](auto& kind, auto...) { vectors += lines * kind.vectors; });
    return vectors;
}

}  // namespace
