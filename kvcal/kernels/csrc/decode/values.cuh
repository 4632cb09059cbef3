// Probabilities times packed values: scales fold into the probabilities, zeros into one sum a head.

#include "decode/softmax.cuh"
#include "decode/keys.cuh"
#include "decode/wide_values.cuh"

namespace decode_ {

// The zeros that packed values add to all channels of a group, of heads 4 n + quad.
__device__ __forceinline__ float zeros_of(const State& state, int group, int n, int lane) {
    return WIDE ? state.zero[group][n] : to_scores(sum_of_lanes(state.zero[group][n]), lane);
}

#if V_BITS != 16
#if !WIDE
// Probabilities of a page times its values, taken into ``state``. s: scores of all 128 tokens.
__device__ __forceinline__ void packed_values(State& state, const float (&s)[QUERY_TILES][PAGE / 8], const u8* record, float* swap, int lane) {
    constexpr int LIFT = V_LIFT, PER = TILES / V_GROUPS;
    const int g = lane >> 2, quad = lane & 3;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < PAGE / 8; i++) {  // token 8 i + g
            const float p = exp2_(s[n][i] - state.max_[n]);
            state.sum[n] += p;
            const int part = i % 2 * 2 + g / 4;
            swap[n * SWAP_WORDS + part * SWAP_PART + quad * SWAP_HEAD + i / 2 % 2 * 16 + i / 4 * 4 + g % 4] = p;
        }
    __syncwarp();
    float p[QUERY_TILES][PAGE / 8];  // tokens 32 quad + 16 (g % 2) + i of head 4 n + g / 2
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < PAGE / 32; i++)
            *reinterpret_cast<float4*>(p[n] + 4 * i) =
                *reinterpret_cast<const float4*>(swap + n * SWAP_WORDS + i * SWAP_PART + g / 2 * SWAP_HEAD + g % 2 * 16 + quad * 4);
#pragma unroll
    for (int group = 0; group < V_GROUPS; group++) {
        const int at = group * PAGE * kv_param_bytes(V_PARAM), column = quad * 32 + g % 2 * 16;
        float param[PAGE / 8], unit[QUERY_TILES];
        u32 op[QUERY_TILES][PAGE / 16];
#if !V_ROTATED
        load_numbers<V_PARAM>(param, record + V_ZERO + at, column);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
            for (int i = 0; i < PAGE / 8; i++) state.zero[group][n] = fmaf(p[n][i], param[i], state.zero[group][n]);
#endif
        load_numbers<V_PARAM>(param, record + V_SCALE + at, column);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            float x[PAGE / 8];
#pragma unroll
            for (int i = 0; i < PAGE / 8; i++) x[i] = p[n][i] * param[i];
#if V_ROTATED  // the zero of a token is in steps of its scale
#pragma unroll
            for (int i = 0; i < PAGE / 8; i++) state.zero[group][n] = fmaf(x[i], -MEAN_CODE(V_BITS), state.zero[group][n]);
#endif
            const float top = largest_of(x);
            limbs<false>(x, __fdividef(LARGEST<false>, top), op[n], lane);
            unit[n] = to_scores(top, lane) * (1.f / (LARGEST<false> * (1 << LIFT)));
        }
        int acc[QUERY_TILES][PER][4];
        multiply<false, V_BITS, LIFT, PAGE, DIM>(acc, record, group * PER, op, lane);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
            for (int t = 0; t < PER; t++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float& to = state.out[n][group * PER + t][half];
                    to = sum_of_limbs<false>(acc[n][t][2 * half], acc[n][t][2 * half + 1], unit[n], to);
                }
    }
}

#endif
#endif

}  // namespace decode_
