// The page that a step's `append` moved out of the buffer becomes what a stored form keeps: points of a lattice,
// residuals of a prediction, keys before RoPE. See kvcal/kernels/encode_due.py; csrc/reconstruct.cu goes back.
//
//   tokens -> (- offset) / λ, or turned back to before RoPE -> - prediction
//          -> rotated, norm of every group, nearest points (quantizers/lattice.py), or
//          -> scale and zero of every group, codes (quantizers/uniform.py)
//
// A page is due in one step of 128, so that what costs is to look at the lengths; blocks take the tiles of all rows in
// turn, and pass those of rows where nothing is due. A tile is in fp32 in shared memory: on a lattice some tokens of a
// page, few enough for a thread to have one byte of codes (a page of 1,024 values a token keeps 64 blocks busy), else
// the page of one head. Every number is made by the single IEEE operations of the reference, in its order, so that the
// bytes are its bytes.

// A part is pasted once, where it is first asked for: what both kinds need comes before the choice.
#include "tile.cuh"

#ifdef POINT_DIM
#include "nearest.cuh"
#else
#include "tile_codes.cuh"
#endif

// TURN: nothing, or back to before RoPE.
#include "turn.cuh"

enum { BLOCKS = 3 };  // an SM: leaves a thread 80 registers

constexpr int STRIDE = tile_stride(WIDTH), TILES = KV_PAGE_TOKENS / TILE_TOKENS;
static_assert(Stored::dim % 8 == 0 && KV_PAGE_TOKENS % TILE_TOKENS == 0, "8 channels a thread, whole tiles");
static_assert((TILE_TOKENS * STRIDE + SCRATCH_FLOATS) * 4 <= SHARED_BYTES, "see kvcal/kernels/encoding.py");

// What a launch is about, of n heads out of N: see ``encode_due``.
struct Task {
    const unsigned short* tokens;
    const float* prediction;
    const float* rescale;
    const float* offset;
    long long first_head, heads, all_heads;
};

// Tokens `first` and on of page `page` of all rows' pages, of heads from `own_head` of the n on, 8 channels a thread, as
// codes stand for them.
KV_INLINE void load_tokens(float* tile, const Task& task, long long page, int own_head, int first) {
    constexpr int CHUNKS = Stored::dim / 8;
    for (int i = threadIdx.x; i < HEADS_OF_TILE * TILE_TOKENS * CHUNKS; i += THREADS) {
        const int head = i / (TILE_TOKENS * CHUNKS), row = i / CHUNKS % TILE_TOKENS, channel = i % CHUNKS * 8;
        const long long token = (page * task.heads + own_head + head) * KV_PAGE_TOKENS + first + row;
        const uint4 loaded = *(const uint4*)(task.tokens + token * Stored::dim + channel);
        const unsigned words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        const long long of_run = (task.first_head + own_head + head) * Stored::dim + channel;
        float x[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            x[k] = kv_float_of<DTYPE>((unsigned short)(words[k / 2] >> 16 * (k % 2)));
            if constexpr (Stored::has_offset) {
                x[k] = __fsub_rn(x[k], task.offset[of_run + k]);
            }
            if constexpr (Stored::has_rescale) {
                x[k] = __fdiv_rn(x[k], task.rescale[of_run + k]);
            }
        }
        store_floats<8>(tile + row * STRIDE + tile_place(head * Stored::dim + channel), x);
    }
}

// Less what is told of these tokens, of the same heads.
KV_INLINE void subtract(float* tile, const Task& task, long long row, int own_head, int first) {
    constexpr int CHUNKS = HEADS_OF_TILE * Stored::dim / 8;
    for (int i = threadIdx.x; i < TILE_TOKENS * CHUNKS; i += THREADS) {
        const int token = i / CHUNKS, value = i % CHUNKS * 8;
        const long long of_row = (row * KV_PAGE_TOKENS + first + token) * task.all_heads + task.first_head + own_head;
        float* at = tile + token * STRIDE + tile_place(value);
        float x[8], told[8];
        load_floats<8>(x, at);
        load_floats<8>(told, task.prediction + of_row * Stored::dim + value);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            x[k] = __fsub_rn(x[k], told[k]);
        }
        store_floats<8>(at, x);
    }
}

// Grid: any, 256 threads; dynamic shared memory: SHARED_BYTES. n neighbouring heads out of N in one format.
//   tokens      16 bits [rows, max_pages, n, 128, D]
//   records     uint8 [rows, max_pages, N, record]; on a lattice, where n is N, [rows, max_pages, record]
//   prediction  fp32 [rows, 128, N, D], of the page that is due in each row, or 0
//   lengths     int32 [rows]: tokens before this step; page_at int32 [page_at_length], or 0
//   grid        fp32 [points, POINT_DIM]; signs int8 [N D]; norm: 1 / sqrt(group). For lattices
//   rescale, offset  fp32 [N, D]
//   rotary      fp64 [ROTARY_PAIRS, 4]; turns fp32 [positions, ROTARY_PAIRS, 2], cosine and sine
//   error       int32, gets the bit NON_FINITE
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) encode_due(
    const unsigned short* tokens, unsigned char* records, const float* prediction, const int* lengths,
    const int* page_at, long long page_at_length, const float* grid, const signed char* signs, float norm,
    const float* rescale, const float* offset, const double* rotary, const float2* turns, long long first_head,
    long long heads, long long all_heads, long long rows, long long max_pages, int* error) {
    extern __shared__ float4 shared[];
    float* tile = (float*)shared;
    float* scratch = tile + TILE_TOKENS * STRIDE;
    const Task task{tokens, prediction, rescale, offset, first_head, heads, all_heads};
    const int tiles = TILES * (int)heads / HEADS_OF_TILE;  // of a page
    for (int i = blockIdx.x; i < (int)rows * tiles; i += gridDim.x) {
        const int row = i / tiles, own_head = i % tiles / TILES, first = i % TILES * TILE_TOKENS;
        const int length = lengths[row], page = kv_pages_of<Stored>(kv_max(0, length - 1), page_at, (int)page_at_length);
        if (page >= max_pages || page >= kv_pages_of<Stored>(length, page_at, (int)page_at_length)) {
            continue;
        }
        const long long number = row * max_pages + page;
        __syncthreads();  // the tile before is written out
        load_tokens(tile, task, number, own_head, first);
        __syncthreads();
        if constexpr (TURN == TURNED_BACK) {
            turn(tile, 0, HEADS_OF_TILE, rotary, turns, Stored::sinks + (long long)page * KV_PAGE_TOKENS + first);
            __syncthreads();
        }
        if (prediction != nullptr) {
            subtract(tile, task, row, own_head, first);
            __syncthreads();
        }
        const long long of_all = IS_LATTICE ? number : number * all_heads + first_head + own_head;
        encode_tile(tile, scratch, records + of_all * RECORD, first, grid, signs, norm, error);
    }
}
