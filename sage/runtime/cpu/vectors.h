// Vectors of the processor that the kernels are compiled for: of float32, of bfloat16 and of words of 32 bits.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
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

// Makes the compiler load a value once, instead of anew for each of its uses.
template <typename V>
inline void keep_in_register(V& value) {
#if defined(__AVX__)
    asm("" : "+v"(value));
#endif
}

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

// Returns G words of w in all lanes: [word 0, .. word G - 1, word 0, ..].
template <int G>
Vec spread(const char* place);

typedef float AnyFloat __attribute__((may_alias, aligned(1)));
typedef double AnyDouble __attribute__((may_alias, aligned(1)));

#if defined(__AVX512F__)
template <>
inline Vec spread<1>(const char* place) {
    return (Vec)_mm512_set1_ps(*(const AnyFloat*)place);
}
template <>
inline Vec spread<2>(const char* place) {
    return (Vec)_mm512_set1_pd(*(const AnyDouble*)place);
}
template <>
inline Vec spread<4>(const char* place) {
    return (Vec)_mm512_broadcast_f32x4(_mm_loadu_ps((const float*)place));
}
template <>
inline Vec spread<8>(const char* place) {
    return (Vec)_mm512_broadcast_f64x4(_mm256_loadu_pd((const double*)place));
}
#elif defined(__AVX__)
template <>
inline Vec spread<1>(const char* place) {
    return (Vec)_mm256_set1_ps(*(const AnyFloat*)place);
}
template <>
inline Vec spread<2>(const char* place) {
    return (Vec)_mm256_set1_pd(*(const AnyDouble*)place);
}
template <>
inline Vec spread<4>(const char* place) {
    return (Vec)_mm256_set_m128(_mm_loadu_ps((const float*)place), _mm_loadu_ps((const float*)place));
}
#else
template <>
inline Vec spread<1>(const char* place) {
    uint32_t word;
    std::memcpy(&word, place, sizeof word);
    return (Vec)Words{word, word, word, word};
}
template <>
inline Vec spread<2>(const char* place) {
    uint32_t words[2];
    std::memcpy(words, place, sizeof words);
    return (Vec)Words{words[0], words[1], words[0], words[1]};
}
#endif

// A word of x as PARTS vectors, and the product of words of x and w added to partial sums.
struct FloatWord {
    static constexpr int PARTS = 1;
    static Vec add(Vec sums, const Vec* x, Vec w) { return sums + x[0] * w; }
};

#if defined(__AVX512BF16__)
struct HalfWord {
    static constexpr int PARTS = 1;
    static Vec add(Vec sums, const Vec* x, Vec w) { return (Vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x[0], (__m512bh)w); }
};
#else
struct HalfWord {  // its two halves, as float32
    static constexpr int PARTS = 2;
    static Vec add(Vec sums, const Vec* x, Vec w) {
        return sums + x[0] * (Vec)((Words)w << 16) + x[1] * (Vec)((Words)w & 0xffff0000u);
    }
};
#endif

template <typename T>
struct WordOf {
    typedef FloatWord Type;
};
template <>
struct WordOf<BFloat16> {
    typedef HalfWord Type;
};

#if defined(__AVX512F__)
inline void transpose(Vec rows[16]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#pragma GCC unroll 4
    for (int stage = 0; stage < 4; ++stage) {  // of 8 bits of row and column, the first becomes the last
        Vec zipped[16];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            zipped[2 * i] = (Vec)_mm512_permutex2var_ps((__m512)rows[i], low, (__m512)rows[i + 8]);
            zipped[2 * i + 1] = (Vec)_mm512_permutex2var_ps((__m512)rows[i], high, (__m512)rows[i + 8]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) rows[i] = zipped[i];
    }
}
#endif

inline Vec load(const float* place) {
    Vec out;
    std::memcpy(&out, place, sizeof out);
    return out;
}

inline Vec load(const BFloat16* place) {
    Halves bits;
    std::memcpy(&bits, place, sizeof bits);
    return (Vec)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float* place, Vec values) { std::memcpy(place, &values, sizeof values); }

inline void store(BFloat16* place, Vec values) {
    for (int lane = 0; lane < LANES; ++lane) store(place + lane, values[lane]);
}

// Returns exp(x) for x <= 0, with a relative error of about 1e-7; 0 below -87, NaN for NaN.
// The polynomial is that of Cephes (expf), on x - n * log(2) for the nearest integer n.
inline Vec exp_of(Vec x) {
    typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
    const Vec lowest = Vec{} - 87.0f, none = {};
    const Vec bounded = x < lowest ? lowest : x;
    const Ints whole = __builtin_convertvector(bounded * 1.44269504f - 0.5f, Ints);  // rounds towards zero
    const Vec n = __builtin_convertvector(whole, Vec);
    const Vec r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    Vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return x < lowest ? none : y * (Vec)((whole + 127) << 23);
}

}  // namespace
