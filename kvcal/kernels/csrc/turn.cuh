// RoPE of a tile (pages/transforms.py), by a table of the cosine and sine of every position. For a source that has
// Stored, WIDTH and THREADS.

#include "tile.cuh"

enum { NOT_TURNED, TO_POSITIONS, TURNED_BACK };  // TURN: what is turned, and where to

// Every pair of channels of `num_heads` heads, the first of which is at value `first_value` of a row, turned to the
// position of its token, or back from it. The tile's first token is at `position`.
KV_INLINE void turn(
    float* tile, int first_value, int num_heads, const double* rotary, const float2* turns, long long position) {
#if TURN != 0
    for (int i = threadIdx.x; i < TILE_TOKENS * ROTARY_PAIRS; i += THREADS) {
        const int row = i / ROTARY_PAIRS, pair = i % ROTARY_PAIRS;
        const float2 angle = turns[(position + row) * ROTARY_PAIRS + pair];
        const int a = (int)rotary[4 * pair], b = (int)rotary[4 * pair + 1];
        const float amplitude = (float)rotary[4 * pair + 3];
        for (int head = 0; head < num_heads; ++head) {
            const int value = first_value + head * Stored::dim;
            float* first = tile + row * tile_stride(WIDTH) + tile_place(value + a);
            float* second = tile + row * tile_stride(WIDTH) + tile_place(value + b);
            const float x_cos = __fmul_rn(*first, angle.x), x_sin = __fmul_rn(*first, angle.y);
            const float y_cos = __fmul_rn(*second, angle.x), y_sin = __fmul_rn(*second, angle.y);
            if constexpr (TURN == TO_POSITIONS) {
                *first = __fmul_rn(__fsub_rn(x_cos, y_sin), amplitude);
                *second = __fmul_rn(__fadd_rn(y_cos, x_sin), amplitude);
            } else {
                *first = __fdiv_rn(__fadd_rn(x_cos, y_sin), amplitude);
                *second = __fdiv_rn(__fsub_rn(y_cos, x_sin), amplitude);
            }
        }
    }
#endif
}
