// The query of a head, in the orders in which the operands want it.

#include "wide_limbs.cuh"
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

// A group's query heads of one pass, of which this warp fetched number ``warp`` already. The rescaling of keys, their
// offset and their rotation are folded in.
__device__ __forceinline__ void prepare_query(float (&raw)[DIM / 32], const Args& a, Shared& shared, int row, int head, int pass, u32 thread) {
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
        for (int i = 0; i < DIM / 32; i++) folded[i] *= a.k_signs[i * 32 + lane];
        hadamard<32>(folded, lane);
#endif
#if K_OFFSET
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) offset += shuffle(offset, mask);
#endif
        if (lane == 0) shared.query_offset[h] = offset;
#if K_AXIS
        // Sums of a channel group: the groups are whole multiples of 32 channels.
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < DIM / 32; i++)
                if (i * 32 / K_GROUP == group) sum += folded[i];
#pragma unroll
            for (int mask = 1; mask < 32; mask *= 2) sum += shuffle(sum, mask);
            if (lane == 0) shared.query_sum[group][h] = sum;
        }
#endif
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            const u32 c = i * 32 + lane;
            // Keys that are not packed: two columns are heads h and h + 4.
            const u32 j = c / 32, quad = c % 32 / 8, word = c % 8 / 2, column = 2 * (h % 4) + h / 4;
#if WIDE
            const u32 rest = c % QUARTER;
            shared.query[rest / 4][column * 4 + c / QUARTER][rest % 4] = folded[i];
#else
            // Column c belongs to one of the two lanes of its head and quarter.
            const u32 part = c / (DIM / 8), rest = c % (DIM / 8);
            shared.query[h / 4 * (DIM / 32) + rest / 4][(2 * (h % 4) + part % 2) * 4 + part / 2][rest % 4] = folded[i];
#endif
            const u16 dense = (u16)(dense_pair(raw[i], 0.f) & 0xffffu);
            reinterpret_cast<u16*>(&shared.query_dense[j][column * 4 + quad][word])[c % 2] = dense;
#if SPLIT_QUERY
            reinterpret_cast<u16*>(&shared.query_rest[j][column * 4 + quad][word])[c % 2] =
                (u16)(dense_pair(raw[i] - dense_to_float(dense), 0.f) & 0xffffu);
#endif
        }
    }
#if QUERY_TILES == 1  // columns of no head
    for (u32 i = thread; i < DIM / 32 * 64; i += WARPS * 32) {
        const u32 j = i / 64, at = i % 64, empty = (at / 16 * 2 + 1) * 4 + at % 16 / 4;
        shared.query_dense[j][empty][at % 4] = 0;
#if SPLIT_QUERY
        shared.query_rest[j][empty][at % 4] = 0;
#endif
    }
#endif
#if WIDE
    if (thread < 16) shared.ones[thread] = 0x3c003c00u;
#endif
#if WIDE && K_AXIS
    __syncthreads();
    if (warp == 0) prepare_wide_limbs(shared, lane);
#elif K_ZEROS_BY_HALVES
    __syncthreads();
    if (warp == 0) prepare_halves(shared, lane);
#elif K_AXIS && K_PACKED
    __syncthreads();
    for (u32 n = warp; n < QUERY_TILES; n += WARPS) {
        float x[DIM / 8];
        load_query(x, shared, n, lane);
#pragma unroll
        for (int part = 0; part < QUERY_PARTS; part++) {
            const float top = largest_of(x), up = __fdividef(LARGEST<true>, top), unit = top * (1.f / LARGEST<true>);
            u32 op[DIM / 16];
            limbs<true>(x, up, op, lane);
#pragma unroll
            for (int i = 0; i < DIM / 16; i++) shared.query_limbs[part][n * (QUERY_WORDS / 4) + i / 4][lane][i % 4] = op[i];
            if ((lane & 7) == 0) shared.query_unit[part][n * 4 + lane / 8] = unit;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) x[i] = fmaf(-rounded(x[i], up), unit, x[i]);
        }
        // What is left of the sum over a channel group, all of them this lane's or none.
        float rest = 0.f;
#pragma unroll
        for (int i = 0; i < DIM / 8; i++) rest += x[i];
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            const float sum = sum_of_lanes((lane & 3) * (DIM / 4) / K_GROUP == group ? rest : 0.f);
            if ((lane & 7) == 0) shared.query_lost[group][n * 4 + lane / 8] = sum;
        }
    }
#endif
}

}  // namespace decode_
