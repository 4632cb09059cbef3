// Points of a lattice of dimension 2 (kvcal/pages/rotated_lattice.py), by byte permutes: POINTS_* are the coordinates of
// points 0 to 7, and of 8 to 15, as bytes of an integer.

#include "common.cuh"

#ifndef POINTS_X_LOW
#if K_POINTS || V_POINTS
#error "pages of points need their coordinates"
#endif
#define POINTS_X_LOW 0
#define POINTS_X_HIGH 0
#define POINTS_Y_LOW 0
#define POINTS_Y_HIGH 0
#endif

constexpr int POINT_BITS = 7;  // of a coordinate, which takes a code's place; the index of two has 4 bits
constexpr float POINT_ZERO = -.5f * ((1 << POINT_BITS) - 1);  // in steps: records have no zeros

// Bytes LOW[nibble], or 0 where a nibble is 8 or more: what it replicates then is the sign of one.
template <long long LOW>
KV_INLINE unsigned kv_low_coordinates(unsigned nibbles) {
    unsigned y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"((unsigned)LOW), "r"((unsigned)(LOW >> 32)), "r"(nibbles));
    return y;
}

// A word of 8 indices -> bytes of columns 4 j + e of its 16, in at[e].
KV_INLINE void kv_coordinates(unsigned word, unsigned (&at)[4]) {
    const unsigned others = word ^ 0x88888888u;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned low = word >> 16 * half, high = others >> 16 * half;
        at[2 * half] = kv_low_coordinates<POINTS_X_LOW>(low) + kv_low_coordinates<POINTS_X_HIGH>(high);
        at[2 * half + 1] = kv_low_coordinates<POINTS_Y_LOW>(low) + kv_low_coordinates<POINTS_Y_HIGH>(high);
    }
}

// The word of the points nearest to 8 pairs of numbers, of equally near ones the first.
KV_INLINE unsigned kv_nearest_points(const float (&x)[16]) {
    float best[8];
    unsigned index[8] = {}, word = 0;
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
        best[pair] = __uint_as_float(0x7f800000u);
    }
#pragma unroll 1
    for (int number = 0; number < 16; ++number) {
        const long long of_x = number < 8 ? POINTS_X_LOW : POINTS_X_HIGH, of_y = number < 8 ? POINTS_Y_LOW : POINTS_Y_HIGH;
        const float a = (float)(of_x >> 8 * (number % 8) & 255), b = (float)(of_y >> 8 * (number % 8) & 255);
#pragma unroll
        for (int pair = 0; pair < 8; ++pair) {
            const float from_a = __fsub_rn(x[2 * pair], a), from_b = __fsub_rn(x[2 * pair + 1], b);
            const float distance = __fadd_rn(__fmul_rn(from_a, from_a), __fmul_rn(from_b, from_b));
            index[pair] = distance < best[pair] ? number : index[pair];
            best[pair] = distance < best[pair] ? distance : best[pair];
        }
    }
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
        word |= index[pair] << 4 * (pair % 2 * 4 + pair / 2);
    }
    return word;
}
