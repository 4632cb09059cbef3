// The query of a head, in the orders in which the operands want it.

#include "decode/wide_limbs.cuh"
#include "hadamard.cuh"

namespace decode_ {

// Channels 32 i + lane of query head h of a pass; 0 beyond the group.
__device__ __forceinline__ void fetch_query(float (&raw)[DIM / 32], const Args& a, int row, int head, int pass, u32 h, u32 lane) {
    const int member = pass * HEADS + (int)h;
    const int token = token_of(member);
    const i64 from = row * a.q_row + token * a.q_token + (i64)((head - token) * TOKEN_HEADS + member) * a.q_head + lane;
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) raw[i] = h < HEADS && member < GROUP_HEADS ? number_at<Q_DTYPE>(a.q, from + i * 32) : 0.f;
}

// The signs of rotated pages: of keys, for this lane's channels, and of values, for channels ``thread``, + 32 WARPS, ...
struct Signs {
    int of_keys[DIM / 32], of_values[(DIM + WARPS * 32 - 1) / (WARPS * 32)];

    __device__ __forceinline__ void fetch(const signed char* k_signs, const signed char* v_signs, u32 thread) {
#pragma unroll
        for (int i = 0; i < (K_ROTATED ? DIM / 32 : 0); i++) of_keys[i] = k_signs[i * 32 + thread % 32];
#pragma unroll
        for (u32 i = 0; i * WARPS * 32 < (V_ROTATED ? DIM : 0); i++) of_values[i] = v_signs[min(i * WARPS * 32 + thread, DIM - 1)];
    }
};

// Largest of x over the warp; more than 0.
__device__ __forceinline__ float largest_of_head(const float (&x)[DIM / 32]) {
    float top = 1e-30f;
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) top = fmaxf(top, fabsf(x[i]));
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) top = fmaxf(top, shuffle(top, mask));
    return top;
}

#if QUERY_IN_LIMBS
// Sum over a channel group, for all lanes. Groups are whole multiples of 32 channels.
__device__ __forceinline__ float sum_of_group(const float (&x)[DIM / 32], int group) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < DIM / 32; i++)
        if (i * 32 / K_GROUP == group) sum += x[i];
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) sum += shuffle(sum, mask);
    return sum;
}

// Head h in fixed point, for all pages: the limbs that its columns hold (keys.cuh, wide_keys.cuh).
__device__ __forceinline__ void prepare_limbs(float (&x)[DIM / 32], Shared& shared, u32 h, u32 lane) {
    constexpr u32 PADDED = 4 * QUERY_WORDS;  // numbers of a quarter
#pragma unroll
    for (int part = 0; part < QUERY_PARTS; part++) {
        const float top = largest_of_head(x), up = __fdividef(LARGEST<true>, top), unit = top * (1.f / LARGEST<true>);
        if (lane == 0) shared.query_unit[part][h] = unit;
        // Byte ``at`` of a quarter's row: columns 16 w + 4 j + e lie in byte j of word 4 w + e.
        auto store = [&](u32 quarter, u32 at, u32 limbs) {
            const u32 word = at / 16, byte = at % 4 * 4 + at % 16 / 4;
#pragma unroll
            for (u32 limb = 0; limb < 2; limb++) {  // high, low
                const u32 from = (WIDE ? h / 8 * 2 + limb : h / 4) * (QUERY_WORDS / 4), column = 2 * (h % 4) + (WIDE ? h / 4 % 2 : limb);
                reinterpret_cast<u8*>(shared.query_limbs[part][from + word][4 * column + quarter])[byte] = (u8)(limbs >> (limb ? 0 : 8));
            }
        };
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            const u32 c = i * 32 + lane;
            store(c / QUARTER, c % QUARTER, fixed<true>(x[i], up) ^ 0x80u);
            x[i] = fmaf(-rounded(x[i], up), unit, x[i]);
        }
        if (PADDED > QUARTER && lane < 4 * (PADDED - QUARTER)) store(lane % 4, QUARTER + lane / 4, 0);
    }
    // What is left of the sum over a channel group.
#pragma unroll
    for (int group = 0; group < K_GROUPS; group++) {
        const float rest = sum_of_group(x, group);
        if (lane == 0) shared.query_lost[group][h] = rest;
    }
}
#endif

#if K_ZEROS_BY_HALVES
// Head h in half precision, twice, for the sums with zeros and scales of keys, which are halves themselves.
__device__ __forceinline__ void prepare_halves(const float (&x)[DIM / 32], Shared& shared, u32 h, u32 lane) {
    const u32 exponent = __float_as_uint(largest_of_head(x)) >> 23;  // the largest becomes 2^8 or more, below 2^9
    const float down = __uint_as_float((127 + 8 + 127 - exponent) << 23);
    if (lane == 0) shared.query_power[h] = __uint_as_float((exponent - 8) << 23);
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
        const u32 c = i * 32 + lane, at = c % QUARTER, column = 4 * (2 * (h % 4) + h / 4) + c / QUARTER;
        const u32 half_at = at / 2 % 2 * 4 + at / 4 % 2 * 2 + at % 2;  // words 0 and 2, 1 and 3 are operands of a product
        const u16 half = (u16)halves(x[i] * down, 0.f);
        reinterpret_cast<u16*>(shared.query_halves[0][at / 8][column])[half_at] = half;
        reinterpret_cast<u16*>(shared.query_halves[1][at / 8][column])[half_at] = (u16)halves(fmaf(x[i], down, -kv_float_of<KV_FLOAT16>(half)), 0.f);
    }
}
#endif

// A group's query heads of one pass, of which this warp fetched number ``warp`` already. The rescaling of keys, their
// offset and their rotation are folded in. A head is its warp's alone: no other waits for it before all of them do.
__device__ __forceinline__ void prepare_query(float (&raw)[DIM / 32], const Signs& signs, const Args& a, Shared& shared, int row, int head, int pass, u32 thread) {
    const u32 warp = thread / 32, lane = thread % 32;
#pragma unroll 1
    for (u32 h = warp; h < HEADS; h += WARPS) {
        if (h != warp) fetch_query(raw, a, row, head, pass, h, lane);
        float folded[DIM / 32], offset = 0.f;
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            const int c = i * 32 + lane;
            folded[i] = raw[i];
#if K_OFFSET
            offset = fmaf(raw[i], a.k_offset[head * DIM + c], offset);
#endif
#if K_RESCALE
            folded[i] *= a.k_rescale[head * DIM + c];
#endif
        }
#if K_ROTATED  // pages hold rotated keys
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) folded[i] *= signs.of_keys[i];
        hadamard<32>(folded, lane);
#endif
#if K_OFFSET
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) offset += shuffle(offset, mask);
#endif
        if (lane == 0) shared.query_offset[h] = offset;
#if QUERY_IN_LIMBS
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            const float sum = sum_of_group(folded, group);
            if (lane == 0) shared.query_sum[group][h] = sum;
        }
#endif
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            const u32 c = i * 32 + lane;
            // Keys that are not packed: two columns are heads h and h + 4.
            const u32 j = c / 32, quad = c % 32 / 8, word = c % 8 / 2, column = 2 * (h % 4) + h / 4 % 2;
#if QUERY_IN_FLOATS && WIDE
            const u32 rest = c % QUARTER;
            shared.query[rest / 4][column * 4 + c / QUARTER][rest % 4] = folded[i];
#elif QUERY_IN_FLOATS
            // Column c belongs to one of the two lanes of its head and quarter.
            const u32 part = c / (DIM / 8), rest = c % (DIM / 8);
            shared.query[h / 4 * (DIM / 32) + rest / 4][(2 * (h % 4) + part % 2) * 4 + part / 2][rest % 4] = folded[i];
#endif
            const u16 dense = (u16)(dense_pair(raw[i], 0.f) & 0xffffu);
            reinterpret_cast<u16*>(&shared.query_dense[h / 8][j][column * 4 + quad][word])[c % 2] = dense;
#if SPLIT_QUERY
            reinterpret_cast<u16*>(&shared.query_rest[h / 8][j][column * 4 + quad][word])[c % 2] =
                (u16)(dense_pair(raw[i] - dense_to_float(dense), 0.f) & 0xffffu);
#endif
        }
#if QUERY_IN_LIMBS
        prepare_limbs(folded, shared, h, lane);
#elif K_ZEROS_BY_HALVES
        prepare_halves(folded, shared, h, lane);
#endif
    }
#if QUERY_TILES == 1  // columns of no head
    for (u32 i = thread; i < DIM / 32 * 64; i += WARPS * 32) {
        const u32 j = i / 64, at = i % 64, empty = (at / 16 * 2 + 1) * 4 + at % 16 / 4;
        shared.query_dense[0][j][empty][at % 4] = 0;
#if SPLIT_QUERY
        shared.query_rest[0][j][empty][at % 4] = 0;
#endif
    }
#endif
#if WIDE
    if (thread < 16) shared.ones[thread] = 0x3c003c00u;
#endif
#if V_ROTATED
#pragma unroll
    for (u32 i = 0; i * WARPS * 32 < DIM; i++)
        if (i * WARPS * 32 + thread < DIM) shared.v_signs[i * WARPS * 32 + thread] = (signed char)signs.of_values[i];
#endif
}

}  // namespace decode_
