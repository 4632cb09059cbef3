// The query in fixed point where a tile's columns are 8 heads: their high limbs are one operand, their low limbs another.
//
// Lane = 4 g + quad holds column g, which is head g / 2 + 4 (g % 2), for a quarter of the channels. So it prepares
// both limbs of its numbers by itself: no lane exchanges any. The scores of a lane are of columns 2 quad and 2 quad + 1,
// heads quad and quad + 4.

#include "decode/limbs.cuh"

namespace decode_ {

#if WIDE
#if QUERY_IN_FLOATS
// The query of this lane's column and quarter; 0 beyond it.
template <int COUNT> __device__ __forceinline__ void load_quarter(float (&x)[COUNT], const Shared& shared, int lane) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4)
        *reinterpret_cast<float4*>(x + i) = i < QUARTER ? *reinterpret_cast<const float4*>(shared.query[i / 4][lane]) : make_float4(0.f, 0.f, 0.f, 0.f);
}
#endif

// Largest of x over the lanes of a column; more than 0.
template <int COUNT> __device__ __forceinline__ float largest_of_column(const float (&x)[COUNT]) {
    float top = 1e-30f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) top = fmaxf(top, fabsf(x[i]));
    top = fmaxf(top, shuffle(top, 1)); return fmaxf(top, shuffle(top, 2));
}
__device__ __forceinline__ float sum_of_column(float x) { x += shuffle(x, 1); return x + shuffle(x, 2); }

// What the lanes of a column hold, for the lanes that have its scores as head 4 n + quad.
__device__ __forceinline__ float to_wide_scores(float x, int n, int lane) { return __shfl_sync(0xffffffffu, x, (lane & 3) * 8 + n * 4); }

// Bytes of both limbs of four numbers, in units of 1 / up.
__device__ __forceinline__ void four_limbs(const float (&x)[4], float up, u32& high, u32& low) {
    const u32 a = permute(fixed<true>(x[0], up), fixed<true>(x[1], up), 0x5140), b = permute(fixed<true>(x[2], up), fixed<true>(x[3], up), 0x5140);
    high = permute(a, b, 0x7632);
    low = permute(a, b, 0x5410) ^ 0x80808080u;
}

// x: numbers of the quarter -> op[limb][4 w + e]: bytes of limb ``limb``, high first, of numbers 16 w + 4 j + e, in units of
// 1 / up.
__device__ __forceinline__ void wide_limbs(const float (&x)[4 * QUERY_WORDS], float up, u32 (&op)[2][QUERY_WORDS]) {
#pragma unroll
    for (int i = 0; i < QUERY_WORDS; i++) {
        const int first = i / 4 * 16 + i % 4;
        const float four[4] = {x[first], x[first + 4], x[first + 8], x[first + 12]};
        four_limbs(four, up, op[0][i], op[1][i]);
    }
}

#if K_AXIS
// Whether word ``word`` of a lane's quarter is of a channel group.
__device__ __forceinline__ bool is_of_group(int group, int word, int lane) {
    static_assert(K_GROUPS == 1 || (K_GROUP % 16 == 0 && QUARTER % 16 == 0), "whole words");
    return K_GROUPS == 1 || ((lane & 3) * QUARTER + 16 * word) / K_GROUP == group;
}
#endif
#endif

}  // namespace decode_
