// Scores of packed keys: scales fold into the query, zeros into one sum a head, boosted channels are more columns.

#include "decode/tiers.cuh"

namespace decode_ {

#if K_BITS != 16 && !WIDE
// Scores of COUNT tiles of 16 tokens of a packed page, from tile ``first``, in log2 units: s[n][2 t + half] is of token
// 16 (first + t) + 8 half + g and head 4 n + quad.
template <int COUNT> __device__ __forceinline__
void packed_scores(float (&s)[QUERY_TILES][2 * COUNT], const u8* record, int first, Shared& shared, int warp, int lane, float scale) {
    constexpr int LIFT = K_LIFT;
    const int quad = lane & 3;
#if K_AXIS == 0
    constexpr int GROUPS = COUNT * 16 > K_GROUP ? COUNT * 16 / K_GROUP : 1, PER = COUNT / GROUPS;
#if K_TIERS > 0
    list_channels(shared.channels[warp], record, lane);
#endif
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int at = (first * 16 / K_GROUP + group) * DIM * (K_PARAM == KV_FLOAT32 ? 4 : 2), column = ((lane & 3) * 2 + (lane >> 2 & 1)) * (DIM / 8);
        float up[QUERY_TILES], zero[QUERY_TILES], step[QUERY_TILES];
        u32 op[QUERY_TILES][DIM / 16];
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            float x[DIM / 8], param[DIM / 8];
            load_query(x, shared, n, lane);
            load_numbers<K_PARAM>(param, record + K_ZERO + at, column);
            zero[n] = 0.f;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) zero[n] = fmaf(x[i], param[i], zero[n]);
            load_numbers<K_PARAM>(param, record + K_SCALE + at, column);
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) x[i] *= param[i];
            up[n] = __fdividef(LARGEST<true>, largest_of(x));
            limbs<true>(x, up[n], op[n], lane);
            step[n] = to_scores(__fdividef(1.f, up[n]), lane) * (scale / (1 << LIFT));
            zero[n] = fmaf(lost(x, up[n]), __fdividef(MEAN_CODE(K_BITS), up[n]), zero[n]);
        }
        int acc[QUERY_TILES][PER][4];
        multiply<true, K_BITS, LIFT, DIM, PAGE>(acc, record, first + group * PER, op, lane);
#if K_TIERS > 0
        multiply_tiers<LIFT>(acc, zero, record, record + K_SCALE + at, up, shared, warp, first + group * PER, lane);
#endif
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            const float from = (to_scores(sum_of_lanes(zero[n]), lane) + shared.query_offset[4 * n + quad]) * scale - Magic<true>::number * step[n];
#pragma unroll
            for (int t = 0; t < PER; t++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    s[n][2 * (group * PER + t) + half] = fmaf(__int_as_float(acc[n][t][2 * half + 1]), step[n],
                        fmaf(__int_as_float(acc[n][t][2 * half]) - Magic<true>::number, 256.f * step[n], from));
        }
    }
#if K_TIERS > 0 && K_RAW_SLOTS > 0
    add_raw_slots<COUNT>(s, record, shared, warp, first, lane, scale);
#endif
#else
    const int g = lane >> 2;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2 * COUNT; i++) s[n][i] = shared.query_offset[4 * n + quad] * scale;
#pragma unroll
    for (int group = 0; group < K_GROUPS; group++) {
        // A lane's channels are all in one group: the others contribute nothing to it.
        const bool mine = K_GROUPS == 1 || quad * (DIM / 4) / K_GROUP == group;
        const int at = group * PAGE * kv_param_bytes(K_PARAM);
#pragma unroll 1
        for (int part = 0; part < QUERY_PARTS; part++) {
            if (QUERY_PARTS > 1) __syncwarp();  // codes are read again: there are no registers for them
            u32 op[QUERY_TILES][DIM / 16];
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                for (int i = 0; i < DIM / 16; i += 4) {
                    const uint4 v = *reinterpret_cast<const uint4*>(shared.query_limbs[part][n * (QUERY_WORDS / 4) + i / 4][lane]);
                    op[n][i] = mine ? v.x : 0u; op[n][i + 1] = mine ? v.y : 0u; op[n][i + 2] = mine ? v.z : 0u; op[n][i + 3] = mine ? v.w : 0u;
                }
            int acc[QUERY_TILES][COUNT][4];
            multiply<true, K_BITS, LIFT, DIM, PAGE>(acc, record, first, op, lane);
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) {
                const int token = first * 16 + i * 8 + g;
                const float token_scale = number_at<K_PARAM>(record + K_SCALE + at, token);
                const float token_zero = K_ROTATED ? 0.f : number_at<K_PARAM>(record + K_ZERO + at, token);
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++) {
                    const float unit = shared.query_unit[part][4 * n + quad] * (scale / (1 << LIFT));
                    const float sum = part == 0 ? shared.query_sum[group][4 * n + quad] * scale : 0.f;
                    const float lost = part == 0 ? shared.query_lost[group][4 * n + quad] * (MEAN_CODE(K_BITS) * scale) : 0.f;
                    const float centre = K_ROTATED ? fmaf(sum, -MEAN_CODE(K_BITS), lost) : lost;
                    const float dot = sum_of_limbs<true>(acc[n][i / 2][i % 2 * 2], acc[n][i / 2][i % 2 * 2 + 1], unit, centre);
                    s[n][i] = fmaf(dot, token_scale, K_ROTATED ? s[n][i] : fmaf(token_zero, sum, s[n][i]));
                }
            }
        }
    }
#endif
}
#endif

}  // namespace decode_
