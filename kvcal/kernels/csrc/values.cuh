// Probabilities times packed values: scales fold into the probabilities, zeros into one sum a head.

#include "softmax.cuh"
#include "planes.cuh"

namespace decode_ {

#if V_BITS != 16
// Probabilities of a page times its values, added to ``held``. s: scores of all 128 tokens; held is scaled by down if raised.
__device__ __forceinline__ void packed_values(State& state, float (&s)[PAGE / 16][4], bool raised, const float (&down)[2], float* held,
                                              const u8* record, u32* swap, int lane) {
    const int g = lane >> 2, quad = lane & 3;
    constexpr int PER = TILES / V_GROUPS;
    // Row g of a tile is pair e = g of a word: its 4^-e, and the lift, are part of the exponent.
    const int lift = V_LIFT - 2 * lift_of(g);
    const float m0 = state.max_[0] - lift, m1 = state.max_[1] - lift, unlift = power2(-lift);
#pragma unroll
    for (int t = 0; t < PAGE / 16; t++) {
        s[t][0] = exp2_(s[t][0] - m0); s[t][1] = exp2_(s[t][1] - m1); s[t][2] = exp2_(s[t][2] - m0); s[t][3] = exp2_(s[t][3] - m1);
        state.sum[0] = fmaf(s[t][0] + s[t][2], unlift, state.sum[0]);
        state.sum[1] = fmaf(s[t][1] + s[t][3], unlift, state.sum[1]);
    }
    float out[TILES][4];
#pragma unroll
    for (int group = 0; group < V_GROUPS; group++) {
        float lowered = 1.f;
        const u8* scales = record + V_SCALE + group * PAGE * (V_PARAM == 2 ? 4 : 2);
        const u8* zeros = record + V_ZERO + group * PAGE * (V_PARAM == 2 ? 4 : 2);
        float scale[PAGE / 8], largest = 0.f;
#pragma unroll
        for (int i = 0; i < PAGE / 8; i++) {
            scale[i] = number_at<V_PARAM>(scales, i * 8 + g);
            largest = fmaxf(largest, scale[i]);
            const float z = fmaf(scale[i], MEAN_CODE(V_BITS), number_at<V_PARAM>(zeros, i * 8 + g)) * unlift;
            state.zero[group][0] = fmaf(s[i / 2][i % 2 * 2], z, state.zero[group][0]);
            state.zero[group][1] = fmaf(s[i / 2][i % 2 * 2 + 1], z, state.zero[group][1]);
        }
        const int needed = (__float_as_int(largest) >> 23) - 126;      // largest < 2^needed
        if (__any_sync(0xffffffffu, needed > state.exponent)) {
            const int top = __reduce_max_sync(0xffffffffu, needed);
            lowered *= power2(max(-126, state.exponent - top));
            state.exponent = top;
        }
        const float lower = power2(-state.exponent);
#pragma unroll
        for (int i = 0; i < PAGE / 8; i++) scale[i] *= lower;
        if (group > 0) __syncwarp();
#pragma unroll
        for (int t = 0; t < PAGE / 16; t++) {  // pair (16 t + g, + 8), once for each head
            u32* to = swap + t * 8 + g + t / 4 * 8;
            to[(2 * quad) * SWAP_STRIDE] = halves(s[t][0] * scale[2 * t], s[t][2] * scale[2 * t + 1]);
            to[(2 * quad + 1) * SWAP_STRIDE] = halves(s[t][1] * scale[2 * t], s[t][3] * scale[2 * t + 1]);
        }
        __syncwarp();
        u32 op[PAIRS_V];
        const u32* from = swap + g * SWAP_STRIDE + 16 * quad + quad / 2 * 8;
#pragma unroll
        for (int i = 0; i < PAIRS_V; i += 4) *reinterpret_cast<uint4*>(op + i) = *reinterpret_cast<const uint4*>(from + i);
        float ones[4];
        mma_ones(ones, op);
        const float centre = power2(24 - V_LIFT + state.exponent) * (-.125f * MEAN_CODE(V_BITS));  // in each of 8 lanes
        state.zero[group][0] = fmaf(ones[0], centre, state.zero[group][0]);
        state.zero[group][1] = fmaf(ones[1], centre, state.zero[group][1]);
        if (group == 0) {
            load_out(out, held, lane);
            if (raised) rescale(out, down[0], down[1]);
        }
        if (lowered != 1.f) rescale(out, lowered, lowered);
        mma_planes<V_BITS, PAGE, DIM, PER>(*reinterpret_cast<float (*)[PER][4]>(&out[group * PER]), record, group * PER, op, lane);
    }
    store_out(out, held, lane);
}
#endif

}  // namespace decode_
