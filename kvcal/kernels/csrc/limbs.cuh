// The operand that is not the cache, in fixed point: every number has 16 bits in two signed limbs of 8, the limbs of one
// head in neighbouring columns of the tile. Sums of products of limbs and codes are then exact, and what is lost is half
// a unit of 1 / 32512 of the largest number alone. (Floats of 11 bits would need a second product for as much.)
//
// Lane = 4 g + quad holds column g of the operand: limb g % 2, high first, of head g / 2, for a quarter of the columns that
// are summed over. The two lanes of a head prepare half of them each, in real numbers, and exchange limbs.

#include "instructions.cuh"

namespace decode_ {

#define LARGEST 32512.f  // + 128, its high limb is 127

// Largest of x over the lanes of a head; more than 0.
template <int PER> __device__ __forceinline__ float largest_of(const float (&x)[PER]) {
    float top = 1e-30f;
#pragma unroll
    for (int i = 0; i < PER; i++) top = fmaxf(top, fabsf(x[i]));
    top = fmaxf(top, shuffle(top, 1)); top = fmaxf(top, shuffle(top, 2)); return fmaxf(top, shuffle(top, 4));
}

// Sum over the lanes of a head.
__device__ __forceinline__ float sum_of_lanes(float x) { x += shuffle(x, 1); x += shuffle(x, 2); return x + shuffle(x, 4); }

// What the lanes of head h = g / 2 hold, for the lanes that have its scores: those with quad = h.
__device__ __forceinline__ float to_scores(float x, int lane) { return __shfl_sync(0xffffffffu, x, (lane & 3) * 8); }
// And back.
__device__ __forceinline__ float from_scores(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane >> 3); }

// The query of the heads of tile n, this lane's columns.
__device__ __forceinline__ void load_query(float (&x)[DIM / 8], const Shared& shared, int n, int lane) {
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) *reinterpret_cast<float4*>(x + 4 * i) = *reinterpret_cast<const float4*>(shared.query[n][i][lane]);
}

// Numbers first, first + 1, ... of dtype TYPE, which lie at multiples of 16 bytes.
template <int TYPE, int COUNT> __device__ __forceinline__ void load_numbers(float (&x)[COUNT], const u8* from, int first) {
    if constexpr (TYPE == KV_FLOAT32) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(from + (first + i) * 4);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 8) {
            const uint4 v = *reinterpret_cast<const uint4*>(from + (first + i) * 2);
#pragma unroll
            for (int k = 0; k < 8; k++) x[i + k] = kv_float_of<TYPE>((u16)((&v.x)[k / 2] >> k % 2 * 16));
        }
    }
}

// Bits of round(x up) + 128 in the low half: its low byte with the top bit turned, and the next, are the limbs.
__device__ __forceinline__ u32 fixed(float x, float up) { return __float_as_uint(fmaf(x, up, MAGIC_FLOAT + 128.f)); }

// x: numbers 2 PER quad + PER (g % 2) + i of the lane's row -> op[4 w + e]: bytes of its limb of numbers 16 w + 4 j + e of
// the quarter, in units of 1 / up. Odd ones in units of 4 / up for codes of 2 bits (codes.cuh).
template <int BITS, int PER> __device__ __forceinline__ void limbs(const float (&x)[PER], float up, u32 (&op)[PER / 2], int lane) {
    static_assert(PER == 16 || PER == 8, "rows of 128 or 64 columns");
    const float up_odd = BITS == 2 ? .25f * up : up;
    const bool is_high = (lane & 4) == 0;
    const u32 own = is_high ? 0x7632 : 0x5410, others = is_high ? 0x5410 : 0x7632;
    u32 pair[PER / 2];  // limbs of numbers i and i + 4: low, low, high, high
#pragma unroll
    for (int i = 0; i < PER / 2; i++) {
        const int at = i / 4 * 8 + i % 4;
        pair[i] = permute(fixed(x[at], i % 2 ? up_odd : up), fixed(x[at + 4], i % 2 ? up_odd : up), 0x5140) ^ 0x00008080u;
    }
    if constexpr (PER == 16) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 mine = permute(pair[e], pair[e + 4], own);
            const u32 received = __shfl_xor_sync(0xffffffffu, permute(pair[e], pair[e + 4], others), 4);
            op[e] = is_high ? mine : received;
            op[4 + e] = is_high ? received : mine;
        }
    } else {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const u32 mine = permute(pair[e], pair[e + 1], own);
            const u32 received = __shfl_xor_sync(0xffffffffu, permute(pair[e], pair[e + 1], others), 4);
            op[e] = permute(mine, received, is_high ? 0x5410 : 0x1054);
            op[e + 1] = permute(mine, received, is_high ? 0x7632 : 0x3276);
        }
    }
}

// Number i of a row as ``limbs`` has it.
template <int BITS> __device__ __forceinline__ float rounded(float x, int i, float up) {
    const float unit = BITS == 2 && i % 2 ? .25f * up : up;
    return (fmaf(x, unit, MAGIC_FLOAT + 128.f) - (MAGIC_FLOAT + 128.f)) / unit;
}

// The limb of this lane of four numbers that it has all of.
__device__ __forceinline__ u32 own_limb(const float (&x)[4], float up, int lane) {
    const u32 a = permute(fixed(x[0], up), fixed(x[1], up), 0x5140), b = permute(fixed(x[2], up), fixed(x[3], up), 0x5140);
    return lane & 4 ? permute(a, b, 0x5410) ^ 0x80808080u : permute(a, b, 0x7632);
}

// A sum of products with both limbs, in units of 1 / (up 2^LIFT), times unit, plus from.
__device__ __forceinline__ float sum_of_limbs(int high, int low, float unit, float from) {
    return fmaf(__int_as_float(low) - MAGIC_FLOAT, unit, fmaf(__int_as_float(high) - MAGIC_FLOAT, 256.f * unit, from));
}

}  // namespace decode_
