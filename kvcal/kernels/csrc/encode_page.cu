// The page that a step's `append` has completed becomes what a stored form keeps: points of a lattice, residuals of a
// prediction, keys before RoPE. See kvcal/kernels/encode.py; csrc/reconstruct.cu goes back.
//
//   tokens -> (- offset) / λ, or turned back to before RoPE -> - prediction
//          -> rotated, norm of every group, nearest points (pages/lattice.py), or
//          -> scale and zero of every group, codes (pages/uniform.py)
//
// A page is complete in one step of 128, so that what costs is to look at the lengths; blocks take the tiles of all rows
// in turn, and pass those of rows where nothing is complete. A tile is in fp32 in shared memory: on a lattice some tokens of a
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
static_assert((TILE_TOKENS * STRIDE + SCRATCH_FLOATS) * 4 <= SHARED_BYTES, "see kvcal/kernels/page_codec.py");

// What a launch is about, of neighbouring heads out of N: see ``encode_page``.
struct Task {
    const unsigned short* tokens;
    long long token_stride;  // from slot to slot
    const float* prediction;
    const float* rescale;
    const float* offset;
    long long first_head, all_heads;
};

// Tokens `first` and on of the page in a slot, of heads from number `own_head` of the launch on, 8 channels a thread, as codes stand
// for them.
KV_INLINE void load_tokens(float* tile, const Task& task, long long slot, int own_head, int first) {
    constexpr int CHUNKS = Stored::dim / 8;
    for (int i = threadIdx.x; i < HEADS_OF_TILE * TILE_TOKENS * CHUNKS; i += THREADS) {
        const int head = i / (TILE_TOKENS * CHUNKS), row = i / CHUNKS % TILE_TOKENS, channel = i % CHUNKS * 8;
        const long long token = (long long)(own_head + head) * KV_PAGE_TOKENS + first + row;
        const unsigned short* page = task.tokens + slot * task.token_stride;
        const uint4 loaded = *(const uint4*)(page + token * Stored::dim + channel);
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
//   tokens      16 bits [slots, n, 128, D]; token_stride: elements from slot to slot
//   records     uint8 [slots, N, record]; on a lattice, where n is N, [slots, record]; record_stride: bytes alike
//   prediction  fp32 [rows, 128, N, D], of the page that each row completes, or 0
//   lengths     int32 [rows]: tokens before this step; table int32 [rows, max_pages], slots
//   grid        fp32 [points, POINT_DIM]; signs int8 [N D]; norm: 1 / sqrt(group). For lattices
//   rescale, offset  fp32 [N, D]
//   rotary      fp64 [ROTARY_PAIRS, 4]; turns fp32 [positions, ROTARY_PAIRS, 2], cosine and sine
//   error       int32, gets the bit NON_FINITE
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) encode_page(
    const unsigned short* tokens, long long token_stride, unsigned char* records, long long record_stride,
    const float* prediction, const int* lengths, const int* table, long long table_stride, long long max_pages,
    const float* grid, const signed char* signs, float norm, const float* rescale, const float* offset,
    const double* rotary, const float2* turns, long long first_head, long long heads, long long all_heads,
    long long rows, int* error) {
    extern __shared__ float4 shared[];
    float* tile = (float*)shared;
    float* scratch = tile + TILE_TOKENS * STRIDE;
    const Task task{tokens, token_stride, prediction, rescale, offset, first_head, all_heads};
    const int tiles = TILES * (int)heads / HEADS_OF_TILE;  // of a page
    for (int i = blockIdx.x; i < (int)rows * tiles; i += gridDim.x) {
        const int row = i / tiles, own_head = i % tiles / TILES, first = i % TILES * TILE_TOKENS;
        const int length = lengths[row], page = length / KV_PAGE_TOKENS;
        if (length % KV_PAGE_TOKENS != KV_PAGE_TOKENS - 1 || page >= max_pages) {
            continue;
        }
        const long long slot = table[row * table_stride + page];
        __syncthreads();  // the tile before is written out
        load_tokens(tile, task, slot, own_head, first);
        __syncthreads();
        if constexpr (TURN == TURNED_BACK) {
            turn(tile, 0, HEADS_OF_TILE, rotary, turns, (long long)page * KV_PAGE_TOKENS + first);
            __syncthreads();
        }
        if (prediction != nullptr) {
            subtract(tile, task, row, own_head, first);
            __syncthreads();
        }
        const long long in_slot = IS_LATTICE ? 0 : (first_head + own_head) * RECORD;
        encode_tile(
            tile, scratch, records + slot * record_stride + in_slot, first, grid, signs, norm, error);
    }
}
