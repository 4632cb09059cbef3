// A tile of rotated rows becomes codes of a lattice and their scales (pages/lattice.py, grids.py).
//
// The norm of a group is summed by halves: what is left of 32 and more values lies in as many lanes. A thread takes 4
// neighbouring vectors, whose codes share a byte of every plane, past all points of the grid.

#include "lattice.cuh"

constexpr int LANES = kv_min(Lattice::group, 32), GROUPS = Lattice::width / Lattice::group;
constexpr int POINTS = Lattice::points, HEADS_OF_TILE = Lattice::heads;
// The grid, half of its squared norms, and a step for every group.
constexpr int SCRATCH_FLOATS = GRID_FLOATS + POINTS + TILE_TOKENS * GROUPS;

// What is nearest to a vector has the largest x . p - |p|^2 / 2: the points, and half of their squared norms.
struct Grid {
    const float* points;
    const float* half_norms;
};

KV_INLINE Grid load_grid(float* points, const float* grid) {
    float* half_norms = points + GRID_FLOATS;
    for (int point = threadIdx.x; point < POINTS; point += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < POINT_DIM; ++k) {
            const float x = grid[point * POINT_DIM + k], square = __fmul_rn(x, x);
            points[point * POINT_DIM + k] = x;
            sum = k == 0 ? square : __fadd_rn(sum, square);
        }
        half_norms[point] = __fmul_rn(sum, 0.5f);
    }
    return Grid{points, half_norms};
}

// Sum of the squares of a group's values number FIRST, FIRST + STEP, ... from `at` on: halves are added to each other.
template <int STEP, int FIRST>
KV_INLINE double sum_of_squares(const float* at, float norm) {
    if constexpr (STEP >= Lattice::group) {
        const double x = (double)__fmul_rn(at[tile_place(FIRST)], norm);
        return __dmul_rn(x, x);
    } else {
        return __dadd_rn(sum_of_squares<2 * STEP, FIRST>(at, norm), sum_of_squares<2 * STEP, FIRST + STEP>(at, norm));
    }
}

// Scales of all groups, of tokens `first` and on, to the record, and what codes are divided by to `steps`.
template <int TOKENS>
KV_INLINE void store_scales(
    unsigned char* record, float* steps, const float* tile, int first, float norm, int* error) {
    constexpr int ITEMS = TOKENS * GROUPS * LANES;
    for (int i = threadIdx.x; i < kv_round_up(ITEMS, 32); i += THREADS) {  // whole warps
        const int place = kv_min(i / LANES, TOKENS * GROUPS - 1), lane = i % LANES;
        const int row = place / GROUPS, group = place % GROUPS;
        const float* at = tile + row * tile_stride(WIDTH) + tile_place(group * Lattice::group + lane);
        double sum = sum_of_squares<LANES, 0>(at, norm);
#pragma unroll
        for (int mask = LANES / 2; mask > 0; mask /= 2) {
            sum = __dadd_rn(sum, __shfl_xor_sync(~0u, sum, mask));
        }
        if (lane == 0 && i < ITEMS) {
            const double mean_square = __dmul_rn(sum, 1.0 / Lattice::group);
            const float scale = __double2float_rn(__dsqrt_rn(mean_square));
            const int of_page = group * KV_PAGE_TOKENS + first + row;
            const float stored = kv_store_param<Lattice::param>(record + Lattice::scale, of_page, scale);
            if (!kv_finite(stored)) {
                atomicOr(error, NON_FINITE);
            }
            steps[place] = kv_step_of(stored);
        }
    }
}

// The nearest point of each of 4 vectors, of equally near ones the first.
KV_INLINE void find_nearest(unsigned* code, const float x[4][POINT_DIM], const Grid& grid) {
    float best[4];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
        best[v] = __uint_as_float(0xff800000u), code[v] = 0;
    }
#pragma unroll 4
    for (int number = 0; number < POINTS; ++number) {
        const float* point = grid.points + number * POINT_DIM;
        const float half_norm = grid.half_norms[number];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            float score = __fmul_rn(x[v][0], point[0]);
#pragma unroll
            for (int k = 1; k < POINT_DIM; ++k) {
                score = __fadd_rn(score, __fmul_rn(x[v][k], point[k]));
            }
            score = __fsub_rn(score, half_norm);
            if (score > best[v]) {
                best[v] = score, code[v] = number;
            }
        }
    }
}

// Codes of all vectors, of tokens `first` and on, to the planes of the record; those of padding are 0.
template <int TOKENS>
KV_INLINE void store_codes(
    unsigned char* record, const float* steps, const float* tile, const Grid& grid, int first, float norm) {
    constexpr int UNITS = Lattice::columns / 4;
    for (int i = threadIdx.x; i < TOKENS * UNITS; i += THREADS) {
        const int row = i / UNITS, column = i % UNITS * 4;
        float x[4][POINT_DIM];
#pragma unroll
        for (int part = 0; part < 4 * POINT_DIM; part += 8) {  // groups are multiples of 8
            const int value = column * POINT_DIM + part;
            float loaded[8] = {}, step = 1.0f;
            if (value < WIDTH) {
                load_floats<8>(loaded, tile + row * tile_stride(WIDTH) + tile_place(value));
                step = steps[row * GROUPS + value / Lattice::group];
            }
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                x[(part + k) / POINT_DIM][k % POINT_DIM] = __fdiv_rn(__fmul_rn(loaded[k], norm), step);
            }
        }
        unsigned code[4];
        find_nearest(code, x, grid);
        unsigned char* at = record + kv_plane_byte<KV_PAGE_TOKENS, Lattice::columns, 2>(first + row, column);
#pragma unroll
        for (int plane = 0; plane < CODE_BITS / 2; ++plane) {
            unsigned byte = 0;
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const unsigned own = column + v < Lattice::vectors ? code[v] : 0;
                byte |= (own >> 2 * plane & 3) << 2 * v;
            }
            at[plane * kv_plane_bytes(KV_PAGE_TOKENS, Lattice::columns, 2)] = (unsigned char)byte;
        }
    }
}

// The signs of the transform, and its rounds within a run.
KV_INLINE void begin_rounds(float* tile, const signed char* signs) {
    constexpr int RUN = Lattice::run, RUNS = WIDTH / RUN;
    for (int i = threadIdx.x; i < TILE_TOKENS * RUNS; i += THREADS) {
        const int start = i % RUNS * RUN;
        float* at = tile + i / RUNS * tile_stride(WIDTH) + tile_place(start);
        float x[RUN];
        load_floats<RUN>(x, at);
#pragma unroll
        for (int k = 0; k < RUN; k += 4) {
            const unsigned word = *(const unsigned*)(signs + start + k);
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const unsigned sign = word << (24 - 8 * part) & 0x80000000u;
                x[k + part] = __uint_as_float(__float_as_uint(x[k + part]) ^ sign);
            }
        }
        add_and_subtract<RUN>(x);
        store_floats<RUN>(at, x);
    }
}

// A tile, tokens `first` and on of a page, to its record. Begins and ends without a barrier.
KV_INLINE void encode_tile(
    float* tile, float* scratch, unsigned char* record, int first, const float* grid, const signed char* signs,
    float norm, int* error) {
    const Grid of_points = load_grid(scratch, grid);
    float* steps = scratch + GRID_FLOATS + POINTS;
    begin_rounds(tile, signs);
    finish_rounds<TILE_TOKENS, Lattice::run>(tile);
    __syncthreads();
    store_scales<TILE_TOKENS>(record, steps, tile, first, norm, error);
    __syncthreads();
    store_codes<TILE_TOKENS>(record, steps, tile, of_points, first, norm);
}
