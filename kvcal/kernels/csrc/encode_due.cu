// The page that a step's `append` moved out of the buffer becomes what a stored form keeps: points of a lattice, of
// keys before RoPE or residuals of a prediction, too. See kvcal/kernels/encode_due.py; csrc/reconstruct.cu goes back.
//
//   tokens -> offset and λ, or turned back to before RoPE -> - prediction -> rotated (transforms/hadamard.py)
//          -> norm of every group -> nearest points (quantizers/lattice.py) -> record
//
// A page is due in one step of 128, so that what costs is to look at the lengths; blocks take the tiles of all rows in
// turn, and pass those of rows where nothing is due. A tile is some tokens of a page in fp32 in shared memory, few
// enough for a thread to have one byte of codes: a page of 1,024 values a token keeps 64 blocks busy. Every number is
// made by the single IEEE operations of the reference, in its order, so that the bytes are its bytes.

#include "nearest.cuh"
// TURN: nothing, or back to before RoPE.
#include "turn.cuh"

enum { BLOCKS = 3 };  // an SM: leaves a thread 80 registers

constexpr int STRIDE = tile_stride(WIDTH), TILES = KV_PAGE_TOKENS / TILE_TOKENS;
static_assert(Stored::dim % 8 == 0 && KV_PAGE_TOKENS % TILE_TOKENS == 0, "8 channels a thread, whole tiles");
static_assert(
    (GRID_FLOATS + POINTS + TILE_TOKENS * (STRIDE + GROUPS)) * 4 <= SHARED_BYTES, "see kvcal/kernels/encoding.py");

// What a launch is about: see ``encode_due``.
struct Task {
    const unsigned short* tokens;
    const float* prediction;
    const signed char* signs;
    const float* rescale;
    const float* offset;
};

// Tokens `first` and on of page `page` of all rows' pages, 8 channels a thread, as codes stand for them.
KV_INLINE void load_tokens(float* tile, const Task& task, long long page, int first) {
    constexpr int CHUNKS = Stored::dim / 8;
    for (int i = threadIdx.x; i < Stored::heads * TILE_TOKENS * CHUNKS; i += THREADS) {
        const int head = i / (TILE_TOKENS * CHUNKS), row = i / CHUNKS % TILE_TOKENS, channel = i % CHUNKS * 8;
        const long long token = (page * Stored::heads + head) * KV_PAGE_TOKENS + first + row;
        const uint4 loaded = *(const uint4*)(task.tokens + token * Stored::dim + channel);
        const unsigned words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        const int value = head * Stored::dim + channel;
        float x[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            x[k] = kv_float_of<DTYPE>((unsigned short)(words[k / 2] >> 16 * (k % 2)));
            if constexpr (Stored::has_offset) {
                x[k] = __fsub_rn(x[k], task.offset[value + k]);
            }
            if constexpr (Stored::has_rescale) {
                x[k] = __fdiv_rn(x[k], task.rescale[value + k]);
            }
        }
        store_floats<8>(tile + row * STRIDE + tile_place(value), x);
    }
}

// Less the prediction of these tokens, if there is one, with the signs of the transform, and its rounds within a run.
KV_INLINE void begin_rounds(float* tile, const float* prediction, const signed char* signs) {
    constexpr int RUN = Lattice::run, RUNS = WIDTH / RUN;
    for (int i = threadIdx.x; i < TILE_TOKENS * RUNS; i += THREADS) {
        const int row = i / RUNS, start = i % RUNS * RUN;
        float* at = tile + row * STRIDE + tile_place(start);
        float x[RUN];
        load_floats<RUN>(x, at);
        if (prediction != nullptr) {
#pragma unroll
            for (int k = 0; k < RUN; k += 4) {
                float told[4];
                load_floats<4>(told, prediction + (long long)row * WIDTH + start + k);
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    x[k + part] = __fsub_rn(x[k + part], told[part]);
                }
            }
        }
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

// Grid: any, 256 threads; dynamic shared memory: SHARED_BYTES. All N heads of a side are on one lattice.
//   tokens      16 bits [rows, max_pages, N, 128, D]
//   records     uint8 [rows, max_pages, record]
//   prediction  fp32 [rows, 128, N, D], of the page that is due in each row, or 0
//   lengths     int32 [rows]: tokens before this step; page_at int32 [page_at_length], or 0
//   grid        fp32 [points, POINT_DIM]; signs int8 [N D]; norm: 1 / sqrt(group)
//   rescale, offset  fp32 [N, D]
//   rotary      fp64 [ROTARY_PAIRS, 4]; turns fp32 [positions, ROTARY_PAIRS, 2], cosine and sine
//   error       int32, gets the bit NON_FINITE
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) encode_due(
    const unsigned short* tokens, unsigned char* records, const float* prediction, const int* lengths,
    const int* page_at, long long page_at_length, const float* grid, const signed char* signs, float norm,
    const float* rescale, const float* offset, const double* rotary, const float2* turns, long long rows,
    long long max_pages, int* error) {
    extern __shared__ float4 shared[];
    float* points = (float*)shared;
    float* tile = points + GRID_FLOATS + POINTS;
    float* steps = tile + TILE_TOKENS * STRIDE;
    const Task task{tokens, prediction, signs, rescale, offset};
    for (int i = blockIdx.x; i < (int)rows * TILES; i += gridDim.x) {
        const int row = i / TILES, first = i % TILES * TILE_TOKENS, length = lengths[row];
        const int page = kv_pages_of<Stored>(kv_max(0, length - 1), page_at, (int)page_at_length);
        if (page >= max_pages || page >= kv_pages_of<Stored>(length, page_at, (int)page_at_length)) {
            continue;
        }
        const long long number = row * max_pages + page, token = (long long)row * KV_PAGE_TOKENS + first;
        const float* told = prediction == nullptr ? nullptr : prediction + token * WIDTH;
        __syncthreads();  // the tile before is written out
        const Grid of_points = load_grid(points, grid);
        load_tokens(tile, task, number, first);
        __syncthreads();
        if constexpr (TURN == TURNED_BACK) {
            turn(tile, 0, Stored::heads, rotary, turns, Stored::sinks + (long long)page * KV_PAGE_TOKENS + first);
            __syncthreads();
        }
        begin_rounds(tile, told, signs);
        finish_rounds<TILE_TOKENS, Lattice::run>(tile);
        __syncthreads();
        unsigned char* record = records + number * RECORD;
        store_scales<TILE_TOKENS>(record, steps, tile, first, norm, error);
        __syncthreads();
        store_codes<TILE_TOKENS>(record, steps, tile, of_points, first, norm);
    }
}
