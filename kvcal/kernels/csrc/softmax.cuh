// The softmax of one warp, taken in part by part, and P V where it waits.

#include "instructions.cuh"

namespace decode_ {

// One warp's softmax so far. zero: sums of p z for each channel group, this lane's tokens. P V itself, out[t] = channels
// 16 t + g and 16 t + 8 + g of heads 2 quad and 2 quad + 1, in units of 2^(24 - V_LIFT + exponent) for packed values, is
// in registers only while values are multiplied: scores need the room, or their products wait for each other.
struct State {
    float max_[2], sum[2], zero[V_GROUPS][2];
    int exponent;

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            max_[h] = -INFINITY; sum[h] = 0.f;
#pragma unroll
            for (int i = 0; i < V_GROUPS; i++) zero[i][h] = 0.f;
        }
        exponent = -4;
    }

    // The new maximum over the scores; sums are scaled down to it. Whether P V must be, by ``down`` for each head.
    template <int COUNT> __device__ __forceinline__ bool raise(const float (&s)[COUNT][4], float (&down)[2]) {
        float top[2] = {max_[0], max_[1]};
#pragma unroll
        for (int t = 0; t < COUNT; t++) {
            top[0] = fmaxf(top[0], fmaxf(s[t][0], s[t][2]));
            top[1] = fmaxf(top[1], fmaxf(s[t][1], s[t][3]));
        }
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) { top[0] = fmaxf(top[0], shuffle(top[0], mask)); top[1] = fmaxf(top[1], shuffle(top[1], mask)); }
        const bool raised = __any_sync(0xffffffffu, top[0] != max_[0] || top[1] != max_[1]);
        if (raised)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                down[h] = exp2_(max_[h] - top[h]);
                sum[h] *= down[h];
#pragma unroll
                for (int i = 0; i < V_GROUPS; i++) zero[i][h] *= down[h];
                max_[h] = top[h];
            }
        return raised;
    }
};

__device__ __forceinline__ void rescale(float (&out)[TILES][4], float a, float b) {
#pragma unroll
    for (int t = 0; t < TILES; t++) { out[t][0] *= a; out[t][1] *= b; out[t][2] *= a; out[t][3] *= b; }
}

__device__ __forceinline__ void load_out(float (&out)[TILES][4], const float* from, int lane) {
#pragma unroll
    for (int t = 0; t < TILES; t++) *reinterpret_cast<float4*>(out[t]) = *reinterpret_cast<const float4*>(from + (t * 32 + lane) * 4);
}

__device__ __forceinline__ void store_out(const float (&out)[TILES][4], float* to, int lane) {
#pragma unroll
    for (int t = 0; t < TILES; t++) *reinterpret_cast<float4*>(to + (t * 32 + lane) * 4) = *reinterpret_cast<const float4*>(out[t]);
}

// softcap tanh(score / softcap), in log2 units; what is left out stays so.
template <int COUNT> __device__ __forceinline__ void cap(float (&s)[COUNT][4], float softcap) {
#if HAS_SOFTCAP
    const float twice = 2.f / softcap, limit = softcap * LOG2E;
#pragma unroll
    for (int t = 0; t < COUNT; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = exp2_(fminf(s[t][i] * twice, 60.f));  // e^(2 score / softcap)
            s[t][i] = s[t][i] == -INFINITY ? s[t][i] : limit * (1.f - __fdividef(2.f, x + 1.f));
        }
#endif
}

}  // namespace decode_
