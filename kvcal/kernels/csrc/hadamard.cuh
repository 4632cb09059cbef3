// The Hadamard transform of kvcal/pages/hadamard.py, of rows in registers: the same single IEEE operations, in its order.

#include "common.cuh"

// The largest power of two that divides `width`, and 1 / sqrt of a power of two.
KV_INLINE constexpr int kv_hadamard_block(int width) { return width & -width; }
KV_INLINE constexpr float kv_hadamard_norm(int block) {
    return block >= 4 ? 0.5f * kv_hadamard_norm(block / 4) : block == 2 ? 0.70710678f : 1.0f;
}

// H x / sqrt(block) of every block of a row, of which each of LANES neighbouring lanes has the channels LANES i + lane. All
// lanes of the warp take part.
template <int LANES, int OWN>
KV_INLINE void hadamard(float (&x)[OWN], int lane) {
    constexpr int BLOCK = kv_hadamard_block(LANES * OWN);
    static_assert(BLOCK >= LANES, "a block is no less than the lanes");
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, x[i], distance);
            x[i] = lane & distance ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
        }
    }
#pragma unroll
    for (int distance = 1; distance < BLOCK / LANES; distance *= 2) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            if ((i & distance) == 0) {
                const float low = x[i], high = x[i + distance];
                x[i] = __fadd_rn(low, high);
                x[i + distance] = __fsub_rn(low, high);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        x[i] = __fmul_rn(x[i], kv_hadamard_norm(BLOCK));
    }
}
