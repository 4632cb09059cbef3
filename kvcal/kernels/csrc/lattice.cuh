// A tile of a lattice page (pages/lattice.py): codes become points of the grid, times the scale of their group,
// and the Hadamard transform is undone in place (pages/hadamard.py).
//
// A row is all KV heads of a token. The transform is rounds of additions and subtractions at distances 1, 2, 4, ...,
// each sum rounded by itself: whoever does them, in the order of the rounds, gets the same bits. A thread does five
// rounds on 32 values in its registers: first on neighbours, as it decodes them, then on values 32 apart, and so on.

#include "tile.cuh"

enum { THREADS = 256 };

struct Lattice {
    static constexpr int side = SIDE, dim = DIM, heads = HEADS, param = PARAM;
    static constexpr int scale = SCALE;
    static constexpr bool has_rescale = RESCALE, has_offset = OFFSET;
    static constexpr int width = HEADS * DIM, group = width & -width, points = 1 << CODE_BITS;
    static constexpr int vectors = width / POINT_DIM, columns = kv_round_up(vectors, 8);
    static constexpr int run = kv_min(group, 32);  // values of a thread
};

typedef Lattice Stored;

constexpr bool IS_LATTICE = true;
constexpr int WIDTH = Lattice::width, GRID_FLOATS = Lattice::points * POINT_DIM;

// Codes of 2 bits of a row of a plane, COUNT from `column` on, a multiple of COUNT: code i in bits 2 i and 2 i + 1.
template <int COUNT>
KV_INLINE unsigned load_plane(const unsigned char* plane, int row, int column) {
    constexpr int COLUMNS = Lattice::columns, BYTES = kv_max(1, COUNT / 4);
    constexpr bool IS_WHOLE =
        kv_rows_per_load(KV_PAGE_TOKENS, COLUMNS, 2) == 0 || kv_segment_bytes(COLUMNS, 2) % BYTES == 0;
    const unsigned char* at = plane + kv_plane_byte<KV_PAGE_TOKENS, COLUMNS, 2>(row, column);
    if constexpr (BYTES == 4 && IS_WHOLE) {
        return *(const unsigned*)at;
    } else if constexpr (BYTES == 2 && IS_WHOLE) {
        return *(const unsigned short*)at;
    } else if constexpr (BYTES == 1) {
        return *at >> 2 * (column % 4);
    } else {
        unsigned codes = 0;
#pragma unroll
        for (int i = 0; i < BYTES; ++i) {
            codes |= (unsigned)plane[kv_plane_byte<KV_PAGE_TOKENS, COLUMNS, 2>(row, column + 4 * i)] << 8 * i;
        }
        return codes;
    }
}

// Rounds of the transform at distances 1, 2, ... COUNT / 2.
template <int COUNT>
KV_INLINE void add_and_subtract(float* x) {
#pragma unroll
    for (int distance = 1; distance < COUNT; distance *= 2) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if ((i & distance) == 0) {
                const float low = x[i], high = x[i + distance];
                x[i] = __fadd_rn(low, high);
                x[i + distance] = __fsub_rn(low, high);
            }
        }
    }
}

// Tokens `first` to first + TOKENS - 1 of a record: points times scales, and the rounds within a run.
template <int TOKENS>
KV_INLINE void load_points(float* tile, const float* grid, const unsigned char* record, int first) {
    constexpr int RUN = Lattice::run, RUNS = WIDTH / RUN, CODES = RUN / POINT_DIM, PLANES = CODE_BITS / 2;
    for (int i = threadIdx.x; i < TOKENS * RUNS; i += THREADS) {
        const int row = i / RUNS, start = i % RUNS * RUN, token = first + row;
        unsigned words[PLANES];
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const unsigned char* codes = record + plane * kv_plane_bytes(KV_PAGE_TOKENS, Lattice::columns, 2);
            words[plane] = load_plane<CODES>(codes, token, start / POINT_DIM);
        }
        const int place = start / Lattice::group * KV_PAGE_TOKENS + token;
        const float scale = kv_load_param<Lattice::param>(record + Lattice::scale, place);
        float x[RUN];
#pragma unroll
        for (int k = 0; k < CODES; ++k) {
            unsigned code = 0;
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
                code |= (words[plane] >> 2 * k & 3) << 2 * plane;
            }
            if constexpr (POINT_DIM == 2) {
                const float2 point = ((const float2*)grid)[code];
                x[2 * k] = point.x, x[2 * k + 1] = point.y;
            } else {
                load_floats<POINT_DIM>(x + POINT_DIM * k, grid + POINT_DIM * code);
            }
        }
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            x[k] = __fmul_rn(x[k], scale);
        }
        add_and_subtract<RUN>(x);
        store_floats<RUN>(tile + row * tile_stride(WIDTH) + tile_place(start), x);
    }
}

// The rounds at distances FROM and beyond: of all values of a tile, behind a barrier.
template <int TOKENS, int FROM>
KV_INLINE void finish_rounds(float* tile) {
    if constexpr (FROM < Lattice::group) {
        constexpr int COUNT = kv_min(32, Lattice::group / FROM), ITEMS = WIDTH / COUNT;
        static_assert(FROM % 32 == 0, "values FROM apart are tile_place(FROM) apart");
        __syncthreads();
        for (int i = threadIdx.x; i < TOKENS * ITEMS; i += THREADS) {
            const int item = i % ITEMS, start = item / FROM * (FROM * COUNT) + item % FROM;
            float* at = tile + i / ITEMS * tile_stride(WIDTH) + tile_place(start);
            float x[COUNT];
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                x[k] = at[k * tile_place(FROM)];
            }
            add_and_subtract<COUNT>(x);
#pragma unroll
            for (int k = 0; k < COUNT; ++k) {
                at[k * tile_place(FROM)] = x[k];
            }
        }
        finish_rounds<TOKENS, FROM * COUNT>(tile);
    }
}

// Tokens `first` to first + TOKENS - 1 of a page, but for ``normalize``.
template <int TOKENS>
KV_INLINE void load_tile(float* tile, const float* grid, const unsigned char* page, int, int first) {
    load_points<TOKENS>(tile, grid, page, first);
    finish_rounds<TOKENS, Lattice::run>(tile);
}

// What is left: the product with 1 / sqrt(group), then the signs. 8 values from number `start` of a row on.
KV_INLINE void normalize(float* x, float norm, const signed char* signs, int start) {
    const uint2 words = *(const uint2*)(signs + start);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const unsigned sign = (i < 4 ? words.x : words.y) << (24 - 8 * (i % 4)) & 0x80000000u;
        x[i] = __uint_as_float(__float_as_uint(__fmul_rn(x[i], norm)) ^ sign);
    }
}

