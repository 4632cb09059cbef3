// The operand that is not the cache, in fixed point: every number has 16 bits in two limbs of 8, the limbs of one head in
// neighbouring columns of the tile. Sums of products of limbs and codes are then exact, and what is lost is half a unit of
// 1 / 32512 of the largest number alone; 1 / 65280 of probabilities, which have no sign. (Floats of 11 bits would need a
// second product for as much.)
//
// Lane = 4 g + quad holds column g of the operand: limb g % 2, high first, of head g / 2, for a quarter of the columns that
// are summed over. The two lanes of a head prepare half of them each, in real numbers, and exchange limbs.

#include "decode/instructions.cuh"

namespace decode_ {

// Of a number in units: with what rounding adds, its high limb is 127, or 255.
template <bool IS_SIGNED> constexpr float LARGEST = IS_SIGNED ? 32512.f : 65280.f;

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

#if QUERY_IN_FLOATS
// The query of the heads of tile n, this lane's columns.
__device__ __forceinline__ void load_query(float (&x)[DIM / 8], const Shared& shared, int n, int lane) {
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) *reinterpret_cast<float4*>(x + 4 * i) = *reinterpret_cast<const float4*>(shared.query[n * (DIM / 32) + i][lane]);
}
#endif

// Numbers first, first + 1, ... of dtype TYPE, which lie at multiples of 16 bytes (of 8, if each has one byte).
template <int TYPE, int COUNT> __device__ __forceinline__ void load_numbers(float (&x)[COUNT], const u8* from, int first) {
    if constexpr (TYPE == KV_FLOAT32) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(from + (first + i) * 4);
    } else if constexpr (TYPE == KV_E5M2) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 8) {
            const uint2 v = *reinterpret_cast<const uint2*>(from + first + i);
#pragma unroll
            for (int k = 0; k < 8; k++) x[i + k] = kv_float_of_e5m2((&v.x)[k / 4] >> k % 4 * 8 & 255u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 8) {
            const uint4 v = *reinterpret_cast<const uint4*>(from + (first + i) * 2);
#pragma unroll
            for (int k = 0; k < 8; k++) x[i + k] = kv_float_of<TYPE>((u16)((&v.x)[k / 2] >> k % 2 * 16));
        }
    }
}

// Limbs of round(x up): the two low bytes, of which the lower one has its top bit turned if limbs are signed.
template <bool IS_SIGNED> __device__ __forceinline__ u32 fixed(float x, float up) {
    return __float_as_uint(fmaf(x, up, Magic<IS_SIGNED>::number + (IS_SIGNED ? 128.f : 0.f)));
}

// x: numbers 2 PER quad + PER (g % 2) + i of the lane's row -> op[4 w + e]: bytes of its limb of numbers 16 w + 4 j + e of
// the quarter, in units of 1 / up.
template <bool IS_SIGNED, int PER> __device__ __forceinline__ void limbs(const float (&x)[PER], float up, u32 (&op)[PER / 2], int lane) {
    static_assert(PER == 16 || PER == 8, "rows of 128 or 64 columns");
    const bool is_high = (lane & 4) == 0;
    const u32 own = is_high ? 0x7632 : 0x5410, others = is_high ? 0x5410 : 0x7632;
    u32 pair[PER / 2];  // limbs of numbers i and i + 4: low, low, high, high
#pragma unroll
    for (int i = 0; i < PER / 2; i++) {
        const int at = i / 4 * 8 + i % 4;
        pair[i] = permute(fixed<IS_SIGNED>(x[at], up), fixed<IS_SIGNED>(x[at + 4], up), 0x5140) ^ (IS_SIGNED ? 0x00008080u : 0u);
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

// round(x up).
__device__ __forceinline__ float rounded(float x, float up) {
    constexpr float from = Magic<true>::number + 128.f;
    return fmaf(x, up, from) - from;
}

// A rounding error of the query is to meet code - mean, not the code: those of channels alike do not add up.
#define MEAN_CODE(bits) (.5f * ((1 << (bits)) - 1))

// What rounding to signed ``limbs`` takes from the sum of x, in units of 1 / up.
template <int COUNT> __device__ __forceinline__ float lost(const float (&x)[COUNT], float up) {
    float sum = 0.f;
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) { sum += x[i]; bits += fixed<true>(x[i], up); }
    return fmaf(sum, up, -(float)(int)(bits - COUNT * __float_as_uint(Magic<true>::number + 128.f)));
}

// The signed limb of this lane of four numbers that it has all of.
__device__ __forceinline__ u32 own_limb(const float (&x)[4], float up, int lane) {
    const u32 a = permute(fixed<true>(x[0], up), fixed<true>(x[1], up), 0x5140), b = permute(fixed<true>(x[2], up), fixed<true>(x[3], up), 0x5140);
    return lane & 4 ? permute(a, b, 0x5410) ^ 0x80808080u : permute(a, b, 0x7632);
}

// A sum of products with both limbs, in units of 1 / (up 2^LIFT), times unit, plus from.
template <bool IS_SIGNED> __device__ __forceinline__ float sum_of_limbs(int high, int low, float unit, float from) {
    constexpr float zero = Magic<IS_SIGNED>::number;
    return fmaf(__int_as_float(low) - zero, unit, fmaf(__int_as_float(high) - zero, 256.f * unit, from));
}

}  // namespace decode_
