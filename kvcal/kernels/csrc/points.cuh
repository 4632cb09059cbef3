// Points of a lattice of dimension 2 (kvcal/pages/rotated_lattice.py), by byte permutes: POINTS_X and POINTS_Y are 8 bytes
// each, of which an index of 4 bits has a coordinate by its lowest three bits, and one by its highest three.

#include "common.cuh"

#ifndef POINTS_X
#if K_POINTS || V_POINTS
#error "pages of points need their coordinates"
#endif
#define POINTS_X 0
#define POINTS_Y 0
#endif

constexpr int POINT_BITS = 7;  // of a coordinate, which takes a code's place; the index of two has 4 bits
constexpr float POINT_ZERO = -.5f * ((1 << POINT_BITS) - 1);  // in steps: records have no zeros

// The bytes of a table that nibbles below 8 name. (``__byte_perm`` clears the highest bit of each by itself.)
template <long long TABLE>
KV_INLINE unsigned kv_bytes_at(unsigned nibbles) {
    unsigned y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"((unsigned)TABLE), "r"((unsigned)(TABLE >> 32)), "r"(nibbles));
    return y;
}

// A word of 8 indices -> bytes of columns 4 j + e of its 16, in at[e].
KV_INLINE void kv_coordinates(unsigned word, unsigned (&at)[4]) {
    const unsigned x = word & 0x77777777u, y = word >> 1 & 0x77777777u;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        at[2 * half] = kv_bytes_at<POINTS_X>(x >> 16 * half);
        at[2 * half + 1] = kv_bytes_at<POINTS_Y>(y >> 16 * half);
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
        const long long of_x = POINTS_X, of_y = POINTS_Y;
        const float a = (float)(of_x >> number % 8 * 8 & 255), b = (float)(of_y >> number / 2 * 8 & 255);
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
