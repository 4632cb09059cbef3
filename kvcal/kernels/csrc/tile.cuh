// Tokens of a page as fp32 in shared memory, a row of values for each.
//
// Behind every 32 values of a row there is room for 4 more. So neighbouring threads meet different banks, whether they
// take 32 neighbours each, every 32nd value, or 8 neighbours each.

#include "common.cuh"

KV_INLINE constexpr int tile_place(int value) { return value + value / 32 * 4; }

// Floats from row to row.
KV_INLINE constexpr int tile_stride(int width) { return kv_round_up(tile_place(width - 1) + 1, 4); }

// COUNT neighbours, 4 or a multiple of it, at a multiple of 16 bytes.
template <int COUNT>
KV_INLINE void load_floats(float* x, const float* from) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const float4 words = *(const float4*)(from + i);
        x[i] = words.x, x[i + 1] = words.y, x[i + 2] = words.z, x[i + 3] = words.w;
    }
}

template <int COUNT>
KV_INLINE void store_floats(float* to, const float* x) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        *(float4*)(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
}
