// A tile of a page of one head: codes times scale, plus zero, each rounded by itself (pages/uniform.py).

#include "stored.cuh"
#include "tile.cuh"

#if SIDE == 0
typedef Keys Stored;
#else
typedef Values Stored;
#endif

constexpr bool IS_LATTICE = false;
constexpr int WIDTH = Stored::dim, GRID_FLOATS = 0;

// Tokens `first` to first + TOKENS - 1 of a head, whose record is behind those of the heads before it. Codes come 16
// neighbours at a time: channels of a token (keys), or tokens of a channel (values); values with tiers, one at a time.
template <int TOKENS>
KV_INLINE void load_tile(float* tile, const float*, const unsigned char* page, int head, int first) {
    typedef Stored S;
    const unsigned char* record = page + head * S::record;
    if constexpr (Page<S>::is_raw || S::tiers > 0) {
        for (int i = threadIdx.x; i < TOKENS * S::dim; i += THREADS) {
            const int row = i / S::dim, channel = i % S::dim;
            tile[row * tile_stride(WIDTH) + tile_place(channel)] = stored_value<S>(record, first + row, channel);
        }
    } else {
        static_assert(TOKENS % 16 == 0, "16 tokens of a channel");
        constexpr int UNITS = S::side == 0 ? Page<S>::padded / 16 : S::dim;
        constexpr int ITEMS = S::side == 0 ? TOKENS * UNITS : TOKENS / 16 * UNITS;
        for (int i = threadIdx.x; i < ITEMS; i += THREADS) {
            const int row = S::side == 0 ? i / UNITS : i / UNITS * 16, token = first + row;
            const int channel = S::side == 0 ? i % UNITS * 16 : i % UNITS;
            const int plane_row = S::side == 0 ? token : channel, column = S::side == 0 ? channel : token;
            unsigned code[16];
            float x[16];
            kv_load_codes<Page<S>::rows, Page<S>::columns, S::bits>(record, plane_row, column, code);
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                const int t = S::side == 0 ? token : token + k, c = S::side == 0 ? channel + k : channel;
                const int place =
                    S::axis == 0 ? t / S::group * Page<S>::others + c : c / S::group * Page<S>::others + t;
                const float scale = kv_load_param<S::param>(record + S::scale, place);
                const float zero = kv_load_param<S::param>(record + S::zero, place);
                x[k] = __fadd_rn(__fmul_rn((float)code[k], scale), zero);
            }
            float* at = tile + row * tile_stride(WIDTH) + tile_place(channel);
            if constexpr (S::side == 0) {
                store_floats<8>(at, x);
                if (channel + 8 < S::dim) {
                    store_floats<8>(at + 8, x + 8);
                }
            } else {
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    at[k * tile_stride(WIDTH)] = x[k];
                }
            }
        }
    }
}
