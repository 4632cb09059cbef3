// Scores of packed keys: scales fold into the query, zeros into the first accumulator, boosted channels are more columns.

#include "planes.cuh"

namespace decode_ {


// Pairs (16 w + e, + 8) of a lane's DIM / 4 consecutive numbers.
__device__ __forceinline__ u32 pair_of(const u32* words, int i) {
    int c = i / 8 * 16 + i % 8;
    return permute(words[c / 2], words[c / 2 + 4], c % 2 ? 0x7632 : 0x5410);
}

// Two numbers as a pair of halves, and what that leaves of them.
__device__ __forceinline__ void split(float lo, float hi, u32& pair, u32& rest) {
    pair = halves(lo, hi);
    rest = halves(lo - half_to_float((u16)(pair & 0xffffu)), hi - half_to_float((u16)(pair >> 16)));
}

// Scale (times 2^shift, below 1) and zero (times 2^-zero_shift) of a lane's channels, as pairs; rest: what fp16 does not
// hold of parameters of another dtype.
__device__ __forceinline__ void load_params(const u8* scale, const u8* zero, int quad, u32 (&s)[PAIRS], u32 (&z)[PAIRS],
                                            u32 (&s_rest)[PAIRS], u32 (&z_rest)[PAIRS], int& shift, int& zero_shift) {
#if K_PARAM == 0
    u32 raw[PAIRS];
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i += 4)
        *reinterpret_cast<uint4*>(raw + i) = *reinterpret_cast<const uint4*>(scale + quad * (DIM / 2) + i * 4);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) largest = max2(largest, raw[i]);
    largest = max2(largest, largest >> 16);
    largest = max2(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max2(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    shift = 14 - (int)(largest >> 10 & 31);
    u32 factor = halves(power2(shift), power2(shift));
#pragma unroll
    for (int i = 0; i < PAIRS; i++) s[i] = mul2(pair_of(raw, i), factor);
#pragma unroll
    for (int i = 0; i < PAIRS; i += 4)
        *reinterpret_cast<uint4*>(raw + i) = *reinterpret_cast<const uint4*>(zero + quad * (DIM / 2) + i * 4);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) z[i] = pair_of(raw, i);
    zero_shift = 0;
#else
    float largest_s = 0.f, largest_z = 0.f;
#pragma unroll
    for (int i = 0; i < DIM / 4; i++) {
        largest_s = fmaxf(largest_s, number_at<K_PARAM>(scale, quad * (DIM / 4) + i));
        largest_z = fmaxf(largest_z, fabsf(number_at<K_PARAM>(zero, quad * (DIM / 4) + i)));
    }
    for (int mask = 1; mask < 4; mask *= 2) {
        largest_s = fmaxf(largest_s, shuffle(largest_s, mask));
        largest_z = fmaxf(largest_z, shuffle(largest_z, mask));
    }
    shift = min(100, 126 - (__float_as_int(largest_s) >> 23));
    zero_shift = max(-100, (__float_as_int(largest_z) >> 23) - 126);
    float up = power2(shift), down = power2(-zero_shift);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        int c = quad * (DIM / 4) + i / 8 * 16 + i % 8;
        split(number_at<K_PARAM>(scale, c) * up, number_at<K_PARAM>(scale, c + 8) * up, s[i], s_rest[i]);
        split(number_at<K_PARAM>(zero, c) * down, number_at<K_PARAM>(zero, c + 8) * down, z[i], z_rest[i]);
    }
#endif
}

__device__ __forceinline__ void load_query(u32 (&op)[PAIRS], const u32 (*from)[32][4], int lane) {
#pragma unroll
    for (int i = 0; i < PAIRS; i += 4) *reinterpret_cast<uint4*>(op + i) = *reinterpret_cast<const uint4*>(from[i / 4][lane]);
}

#if K_TIERS > 0
// High bits of the boosted channels of one tier: 4 slots of a byte are two pairs of halves, (0, 1) and (2, 3).
template <int COLUMNS, int FIRST_SLOT, int ROOM, int PLANES, int COUNT> __device__ __forceinline__
void mma_tier(float (&acc)[COUNT][4], const u8* high, const u8* scale, float up, const Shared& shared, int warp, int first,
              int base_top, int lane) {
    constexpr int ROW = COLUMNS / 4;                                   // bytes of a row of one plane
    constexpr int SEGMENT = COLUMNS % 16 == 0 ? COLUMNS / 16 : 0;      // bytes of a lane's quarter, if interleaved
    constexpr bool INTERLEAVED = SEGMENT == 1 || SEGMENT == 2 || SEGMENT == 4 || SEGMENT == 8;
    constexpr int R = INTERLEAVED ? 16 / (SEGMENT ? SEGMENT : 1) : 1;
    const int g = lane >> 2, quad = lane & 3;
    const u8* channel_of = shared.channel_of[warp];
#pragma unroll
    for (int step = 0; step < (ROW + 3) / 4; step++) {
        const int slot = INTERLEAVED ? quad * (COLUMNS / 4) + 4 * step : 16 * step + 4 * quad;
        float value[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int channel = slot + j < ROOM ? channel_of[FIRST_SLOT + slot + j] : 255;
            value[j] = channel == 255 ? 0.f
                : half_to_float(shared.query_rows[g][channel]) * (number_at<K_PARAM>(scale, channel) * up);
        }
        float weight = power2(K_LIFT + 2 * base_top);
#pragma unroll
        for (int p = 0; p < PLANES; p++, weight *= 4.f) {
            const u32 b0 = halves(value[0] * weight, value[1] * weight * .25f);
            const u32 b1 = halves(value[2] * weight * .0625f, value[3] * weight * .015625f);
            const u8* plane = high + p * (PAGE * ROW);
#pragma unroll
            for (int t = 0; t < COUNT; t++) {
                u32 word[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int octet = 2 * (first + t) + half;
                    int at = INTERLEAVED ? ((octet / R * 32 + lane) * R + octet % R) * SEGMENT + step
                                         : (octet * 8 + g) * ROW + 4 * step + quad;
                    u32 byte = INTERLEAVED || 4 * step + quad < ROW ? plane[at] : 0;
                    word[half] = byte | byte << 16;
                }
                mma(acc[t], word[0] & 0x000c0003u, word[1] & 0x000c0003u, word[0] & 0x00c00030u, word[1] & 0x00c00030u, b0, b1);
            }
        }
    }
}
#endif

// Scores of COUNT tiles of 16 tokens of a packed page, from tile ``first``, in log2 units: s[t] = {token g: heads 2 quad, + 1;
// token g + 8: the same}.
template <int COUNT> __device__ __forceinline__
void packed_scores(float (&s)[COUNT][4], const u8* record, int first, Shared& shared, int warp, int lane, float scale) {
    const int g = lane >> 2, quad = lane & 3;
    const float heads[2] = {shared.query_scale[2 * quad] * scale, shared.query_scale[2 * quad + 1] * scale};
#if K_AXIS == 0
    constexpr int GROUPS = COUNT * 16 > K_GROUP ? COUNT * 16 / K_GROUP : 1, PER = COUNT / GROUPS;
#if K_TIERS > 0
    u8* channel_of = shared.channel_of[warp];
    __syncwarp();
    for (int i = lane; i < K_SLOTS; i += 32) channel_of[i] = 255;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < DIM; i += 32) {
        u8 slot = record[K_INDEX + i + lane];
        if (slot != 255) channel_of[slot] = i + lane;
    }
    __syncwarp();
#endif
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int at = first * 16 / K_GROUP + group;
        u32 op[PAIRS], z[PAIRS], op_rest[PAIRS], z_rest[PAIRS];
        int shift, zero_shift;
        const u8* scales = record + K_SCALE + at * DIM * (K_PARAM == 2 ? 4 : 2);
        load_params(scales, record + K_ZERO + at * DIM * (K_PARAM == 2 ? 4 : 2), quad, op, z, op_rest, z_rest, shift, zero_shift);
        float zero[4] = {0.f, 0.f, 0.f, 0.f}, rest[4];
        {
            float odd[4] = {0.f, 0.f, 0.f, 0.f};
            u32 plain[PAIRS], lost[PAIRS];
            load_query(plain, shared.query_plain, lane);
#pragma unroll
            for (int i = 0; i < PAIRS; i += 4) {
                mma(zero, z[i], z[i], z[i + 1], z[i + 1], plain[i], plain[i + 1]);
                mma(odd, z[i + 2], z[i + 2], z[i + 3], z[i + 3], plain[i + 2], plain[i + 3]);
#if K_PARAM != 0
                mma(zero, z_rest[i], z_rest[i], z_rest[i + 1], z_rest[i + 1], plain[i], plain[i + 1]);
                mma(odd, z_rest[i + 2], z_rest[i + 2], z_rest[i + 3], z_rest[i + 3], plain[i + 2], plain[i + 3]);
#endif
            }
            load_query(plain, shared.query, lane);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const u32 rounded = mul2(op[i], plain[i]);
                lost[i] = fma2(op[i], plain[i], rounded ^ 0x80008000u);
#if K_PARAM != 0
                lost[i] = fma2(op_rest[i], plain[i], lost[i]);
#endif
                op[i] = rounded;
            }
            mma_ones(rest, lost);
            zero[0] += odd[0]; zero[1] += odd[1];
        }
        const float down = power2(24 - K_LIFT - shift), zero_up = power2(zero_shift);
        const float factor[2] = {heads[0] * down, heads[1] * down};
        float (&part)[PER][4] = *reinterpret_cast<float (*)[PER][4]>(&s[group * PER]);
#pragma unroll
        for (int t = 0; t < PER; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) part[t][i] = 0.f;
        mma_planes<K_BITS, DIM, PAGE, PER>(part, record, first + group * PER, op, lane);
#if K_TIERS > 0
#if K_TIER0_BITS != 16
        mma_tier<K_TIER0_COLUMNS, K_TIER0_SLOT, K_TIER0_ROOM, (K_TIER0_BITS - K_BITS) / 2, PER>(
            part, record + K_TIER0_HIGH, scales, power2(shift), shared, warp, first + group * PER, K_BITS / 2, lane);
#endif
#if K_TIERS > 1
        mma_tier<K_TIER1_COLUMNS, K_TIER1_SLOT, K_TIER1_ROOM, (K_TIER1_BITS - K_BITS) / 2, PER>(
            part, record + K_TIER1_HIGH, scales, power2(shift), shared, warp, first + group * PER, K_BITS / 2, lane);
#endif
#if K_TIERS > 2
        mma_tier<K_TIER2_COLUMNS, K_TIER2_SLOT, K_TIER2_ROOM, (K_TIER2_BITS - K_BITS) / 2, PER>(
            part, record + K_TIER2_HIGH, scales, power2(shift), shared, warp, first + group * PER, K_BITS / 2, lane);
#endif
#endif
        float constant[2];
#pragma unroll
        for (int h = 0; h < 2; h++) constant[h] = zero[h] * zero_up * heads[h] + MEAN_CODE(K_BITS) * rest[h] * factor[h] + shared.query_offset[2 * quad + h] * scale;
#pragma unroll
        for (int t = 0; t < PER; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) part[t][i] = fmaf(part[t][i], factor[i & 1], constant[i & 1]);
    }
#if K_TIERS > 0 && K_RAW_SLOTS > 0
#pragma unroll
    for (int slot = 0; slot < K_RAW_SLOTS; slot++) {
        const int channel = channel_of[slot];
        if (channel == 255) continue;
        const float q0 = half_to_float(shared.query_rows[2 * quad][channel]) * heads[0];
        const float q1 = half_to_float(shared.query_rows[2 * quad + 1][channel]) * heads[1];
        const u16* values = reinterpret_cast<const u16*>(record + K_RAW) + slot * PAGE + first * 16 + g;
#pragma unroll
        for (int t = 0; t < COUNT; t++) {
            const float low = dense_to_float(values[t * 16]), high = dense_to_float(values[t * 16 + 8]);
            s[t][0] = fmaf(q0, low, s[t][0]); s[t][1] = fmaf(q1, low, s[t][1]);
            s[t][2] = fmaf(q0, high, s[t][2]); s[t][3] = fmaf(q1, high, s[t][3]);
        }
    }
#endif
#else
    const float factor[2] = {heads[0] * power2(24 - K_LIFT), heads[1] * power2(24 - K_LIFT)};
#pragma unroll
    for (int t = 0; t < COUNT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[t][i] = shared.query_offset[2 * quad + (i & 1)] * scale;
#pragma unroll
    for (int group = 0; group < K_GROUPS; group++) {
        // A lane's channels are all in one group: the others contribute nothing to it.
        const bool mine = K_GROUPS == 1 || quad * (DIM / 4) / K_GROUP == group;
        const u8* params = record + K_SCALE + group * PAGE * (K_PARAM == 2 ? 4 : 2);
        const u8* zeros = record + K_ZERO + group * PAGE * (K_PARAM == 2 ? 4 : 2);
        float acc[COUNT][4];
#pragma unroll
        for (int t = 0; t < COUNT; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[t][i] = 0.f;
        u32 op[PAIRS];
        load_query(op, shared.query, lane);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) op[i] = mine ? op[i] : 0u;
        mma_planes<K_BITS, DIM, PAGE, COUNT>(acc, record, first, op, lane);
#if K_RESCALE
        load_query(op, shared.query_plain, lane);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) op[i] = mine ? op[i] : 0u;
        mma_planes<K_BITS, DIM, PAGE, COUNT>(acc, record, first, op, lane);
#endif
        const float sums[2] = {shared.query_sum[group][2 * quad] * scale, shared.query_sum[group][2 * quad + 1] * scale};
        // As in mma_ones: the error of the query times (code - mean) alone.
        const float centre[2] = {shared.query_lost[group][2 * quad] * heads[0] * MEAN_CODE(K_BITS),
                                 shared.query_lost[group][2 * quad + 1] * heads[1] * MEAN_CODE(K_BITS)};
#pragma unroll
        for (int t = 0; t < COUNT; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int token = (first + t) * 16 + half * 8 + g;
                const float token_scale = number_at<K_PARAM>(params, token), token_zero = number_at<K_PARAM>(zeros, token);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float& to = s[t][half * 2 + h];
                    to = fmaf(fmaf(acc[t][half * 2 + h], factor[h], centre[h]), token_scale, fmaf(token_zero, sums[h], to));
                }
            }
    }
#endif
}

}  // namespace decode_
