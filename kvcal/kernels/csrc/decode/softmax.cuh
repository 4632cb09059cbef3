// The softmax of one warp, taken in part by part.

#include "decode/limbs.cuh"

namespace decode_ {

// One warp's softmax so far, of heads 4 n + quad. zero: sums of p z for each channel group, of the heads 4 n + g / 2 and
// of this lane's tokens (limbs.cuh). P V so far, in ``out[n][t][half]``, is of channel 16 t + 8 half + g.
struct State {
    float max_[QUERY_TILES], sum[QUERY_TILES], zero[V_GROUPS][QUERY_TILES], out[QUERY_TILES][TILES][2];
#if WIDE
    float rows[QUERY_TILES];
#endif

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            max_[n] = -INFINITY; sum[n] = 0.f;
#if WIDE
            rows[n] = 0.f;
#endif
#pragma unroll
            for (int i = 0; i < V_GROUPS; i++) zero[i][n] = 0.f;
#pragma unroll
            for (int t = 0; t < TILES; t++) out[n][t][0] = out[n][t][1] = 0.f;
        }
    }

    // What scores of a page are relative to: the maximum, once there is one.
    __device__ __forceinline__ float base(int n) const { return max_[n] == -INFINITY ? 0.f : max_[n]; }

    // The new maximum over the scores; what was summed is scaled down to it. Whether it was, by ``down`` for each head.
    template <int COUNT> __device__ __forceinline__ bool raise(const float (&s)[QUERY_TILES][COUNT], float (&down)[QUERY_TILES], int lane) {
        float top[QUERY_TILES];
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            top[n] = s[n][0];
#pragma unroll
            for (int i = 1; i < COUNT; i++) top[n] = fmaxf(top[n], s[n][i]);
        }
        return raise_to(top, down, lane);
    }

    // The same; ``top``: the largest score of each lane.
    __device__ __forceinline__ bool raise_to(float (&top)[QUERY_TILES], float (&down)[QUERY_TILES], int lane) {
        bool is_higher = false;
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            top[n] = fmaxf(top[n], max_[n]);
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) top[n] = fmaxf(top[n], shuffle(top[n], mask));
            is_higher |= top[n] != max_[n];
        }
        if (!__any_sync(0xffffffffu, is_higher)) return false;
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            down[n] = WIDE && QUERY_TOKENS > 1 && max_[n] == top[n] ? 1.f : exp2_(max_[n] - top[n]);  // none seen yet
            max_[n] = top[n];
            sum[n] *= down[n];
#if WIDE
            const float zero_down = down[n];
            rows[n] *= zero_down;
#else
            const float zero_down = from_scores(down[n], lane);
#endif
#pragma unroll
            for (int i = 0; i < V_GROUPS; i++) zero[i][n] *= zero_down;
#pragma unroll
            for (int t = 0; t < TILES; t++) { out[n][t][0] *= down[n]; out[n][t][1] *= down[n]; }
        }
        return true;
    }
};

// softcap tanh(score / softcap), in log2 units; what is left out stays so.
template <int COUNT> __device__ __forceinline__ void cap(float (&s)[QUERY_TILES][COUNT], float softcap) {
#if HAS_SOFTCAP
    const float twice = 2.f / softcap, limit = softcap * LOG2E;
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float x = exp2_(fminf(s[n][i] * twice, 60.f));  // e^(2 score / softcap)
            s[n][i] = s[n][i] == -INFINITY ? s[n][i] : limit * (1.f - __fdividef(2.f, x + 1.f));
        }
#endif
}

}  // namespace decode_
