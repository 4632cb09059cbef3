// The query of a head, in the orders in which the operands want it.

#include "instructions.cuh"

namespace decode_ {

// The query of up to 8 heads, in the orders that the operands want.
__device__ void prepare_query(const Args& a, Shared& shared, int row, int head, int pass, int thread) {
    const int warp = thread / 32, lane = thread % 32;
    for (int h = warp; h < HEADS; h += WARPS) {
        const int member = pass * HEADS + h;
        const i64 from = row * a.q_row + (i64)(head * GROUP_HEADS + member) * a.q_head;
        float raw[DIM / 32], folded[DIM / 32], largest = 0.f, offset = 0.f;
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            const int c = i * 32 + lane;
            raw[i] = member < GROUP_HEADS ? number_at<Q_DTYPE>(a.q, from + c) : 0.f;
            folded[i] = raw[i];
#if K_OFFSET
            offset = fmaf(raw[i], a.k_offset[head * DIM + c], offset);
#endif
#if K_RESCALE
            folded[i] *= a.k_rescale[head * DIM + c];
#endif
            largest = fmaxf(largest, fabsf(folded[i]));
        }
#pragma unroll
        for (int mask = 1; mask < 32; mask *= 2) { largest = fmaxf(largest, shuffle(largest, mask)); offset += shuffle(offset, mask); }
        const int exponent = min(60, max(-60, (__float_as_int(largest) >> 23) - 126));
        const float down = power2(-exponent);
        if (lane == 0) { shared.query_scale[h] = power2(exponent); shared.query_offset[h] = offset; }
#if K_AXIS
        // Sums of a channel group: the groups are whole multiples of 32 channels.
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            float sum = 0.f, lost = 0.f;
#pragma unroll
            for (int i = 0; i < DIM / 32; i++)
                if (i * 32 / K_GROUP == group) {
                    sum += folded[i];
                    // A rescaled query has more bits than fp16, over channels of unlike size: its rest is an operand.
                    if (!K_RESCALE) lost += folded[i] * down - half_to_float((u16)(halves(folded[i] * down, 0.f) & 0xffffu));
                }
#pragma unroll
            for (int mask = 1; mask < 32; mask *= 2) { sum += shuffle(sum, mask); lost += shuffle(lost, mask); }
            if (lane == 0) { shared.query_sum[group][h] = sum; shared.query_lost[group][h] = lost; }
        }
#endif
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            const int c = i * 32 + lane;
            const u16 plain = (u16)(halves(folded[i] * down, 0.f) & 0xffffu);
#if K_TIERS > 0
            shared.query_rows[h][c] = plain;
#endif
            // Column c belongs to quad c / (DIM / 4), there to pair (16 w + e) % 8, half (c / 8) % 2.
            const int quad = c / (DIM / 4), rest = c % (DIM / 4), w = rest / 16, e = rest % 8, half = rest / 8 % 2, index = w * 8 + e;
            const int target = h * 4 + quad;
            const float lift = power2(K_LIFT - 2 * lift_of(e));
            reinterpret_cast<u16*>(&shared.query_plain[index / 4][target][index % 4])[half] =
                K_AXIS ? (u16)(halves((folded[i] * down - half_to_float(plain)) * lift, 0.f) & 0xffffu) : plain;
            reinterpret_cast<u16*>(&shared.query[index / 4][target][index % 4])[half] =
                (u16)(halves(folded[i] * down * lift, 0.f) & 0xffffu);
            const int j = c / 32, dense_quad = c % 32 / 8, word = c % 8 / 2;
            const u16 dense = (u16)(dense_pair(raw[i], 0.f) & 0xffffu);
            reinterpret_cast<u16*>(&shared.query_dense[j][h * 4 + dense_quad][word])[c % 2] = dense;
#if SPLIT_QUERY
            reinterpret_cast<u16*>(&shared.query_rest[j][h * 4 + dense_quad][word])[c % 2] =
                (u16)(dense_pair(raw[i] - dense_to_float(dense), 0.f) & 0xffffu);
#endif
        }
    }
}

}  // namespace decode_
