// Records that the attention kernels cannot read become pages of 16 bits, which they can, and what predictors read:
// lattices, residuals of a prediction, keys before RoPE. See kvcal/kernels/reconstruct.py.
//
//   stored   what the record holds: points of a lattice, rotated back, or code * scale + zero, or 16 bits; + prediction
//   tokens   in the cache's dtype: stored, with λ and offset undone (keys), or turned to positions (keys before RoPE)
//   kept     fp32, before RoPE: stored; keys after RoPE are turned back
//
// One pass over memory. A block decodes a tile, some tokens of a page, to fp32 in shared memory, corrects it in place
// and writes it out, 8 channels a thread. On a lattice a token's row is all KV heads, and a tile has as many tokens as
// make 8,192 values (32 a thread); otherwise it is 32 tokens of one head. Angles are not computed here: a table has the
// cosine and sine of every position. Every number is made by the single IEEE operations of the reference, in its order,
// so that the bits are its bits: later records are encoded against predictions from what is kept here.
//
// Tiles are taken in turn by a grid of fixed size; those of pages that a row does not hold cost a look at its length.
// So the time is that of the tokens held, and a captured launch stays valid as they grow. Left out: asking for the next
// tile while one is in work (the SM's other blocks fill the time).

// A part is pasted once, where it is first asked for: what both kinds need comes before the choice.
#include "tile.cuh"

#ifdef POINT_DIM
#include "lattice.cuh"
#else
#include "uniform.cuh"
#endif

// TURN: nothing, the tokens, or what is kept.
#include "turn.cuh"

enum { BLOCKS = 4 };  // an SM: leaves a thread 64 registers

constexpr int STRIDE = tile_stride(WIDTH), CHUNKS = Stored::dim / 8;
static_assert(Stored::dim % 8 == 0 && KV_PAGE_TOKENS % TILE_TOKENS == 0, "8 channels a thread, whole tiles");
static_assert((GRID_FLOATS + TILE_TOKENS * STRIDE) * 4 <= SHARED_BYTES, "see kvcal/kernels/page_codec.py");

KV_INLINE void store_tokens(unsigned short* to, const float* x) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = kv_bits_of<DTYPE>(x[2 * i]) | (unsigned)kv_bits_of<DTYPE>(x[2 * i + 1]) << 16;
    }
    *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
}

// What a launch is about, of neighbouring heads out of N: see ``reconstruct``.
struct Task {
    unsigned short* tokens;
    long long token_stride;  // from slot to slot
    float* kept;
    const float* prediction;
    const signed char* signs;
    float norm;
    const float* rescale;
    const float* offset;
    long long first_head, all_heads;
};

// Tokens `first_token` and on of page number `number` of all rows' pages, `told` of those of the launch; values of
// `num_heads` heads, the first of which is number `own_head` of the n, from value `first_value` of a row on.
struct Tile {
    float* values;
    int first_value, num_heads, own_head, first_token;
    long long slot, number, told;
};

KV_INLINE void add(float* x, const float* more) {
    float y[8];
    load_floats<8>(y, more);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        x[k] = __fadd_rn(x[k], y[k]);
    }
}

// What the tile lacks of 8 values: from `value` of its row on, and from `of_run` on among those of all N heads.
KV_INLINE void correct(float* x, const Task& task, const Tile& tile, int token, int value, long long of_run) {
#ifdef POINT_DIM
    normalize(x, task.norm, task.signs, value);
#endif
    if (task.prediction != nullptr) {
        const long long of_token = tile.told * KV_PAGE_TOKENS + token;
        add(x, task.prediction + of_token * task.all_heads * Stored::dim + of_run);
    }
    if constexpr (Stored::has_rescale) {
        float by[8];
        load_floats<8>(by, task.rescale + of_run);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            x[k] = __fmul_rn(x[k], by[k]);
        }
    }
    if constexpr (Stored::has_offset) {
        add(x, task.offset + of_run);
    }
}

// All values of a tile, 8 channels at a time: behind IS_TURNED, out; before, corrected, and out, or back into the tile
// where they are still to be turned.
template <bool IS_TURNED>
KV_INLINE void pass_over(const Task& task, const Tile& tile, bool will_turn) {
    for (int item = threadIdx.x; item < tile.num_heads * TILE_TOKENS * CHUNKS; item += THREADS) {
        const int in_tile = item / (TILE_TOKENS * CHUNKS), row = item / CHUNKS % TILE_TOKENS;
        const int channel = item % CHUNKS * 8, token = tile.first_token + row, head = tile.own_head + in_tile;
        const int value = tile.first_value + in_tile * Stored::dim + channel;
        const long long of_run = (task.first_head + head) * Stored::dim + channel;
        float* at = tile.values + row * STRIDE + tile_place(value);
        float x[8];
        load_floats<8>(x, at);
        if constexpr (!IS_TURNED) {
            correct(x, task, tile, token, value, of_run);
            if (will_turn) {
                store_floats<8>(at, x);
            }
        }
        if (task.tokens != nullptr && IS_TURNED == (TURN == TO_POSITIONS)) {
            const long long of_head = (long long)head * KV_PAGE_TOKENS + token;
            store_tokens(task.tokens + tile.slot * task.token_stride + of_head * Stored::dim + channel, x);
        }
        if (task.kept != nullptr && IS_TURNED == (TURN == TURNED_BACK)) {
            const long long of_token = tile.number * KV_PAGE_TOKENS + token;
            store_floats<8>(task.kept + of_token * task.all_heads * Stored::dim + of_run, x);
        }
    }
}

// Grid: any, 256 threads; dynamic shared memory: SHARED_BYTES. n neighbouring heads out of N in one format, and a table
// of num_pages pages a row.
//   records     uint8 [slots, ...]: on a lattice a page of all N heads, else of n heads side by side; record_stride:
//               bytes from slot to slot
//   tokens      16 bits [slots, n, 128, D], or 0; token_stride: elements from slot to slot
//   kept        fp32 [rows, num_pages, 128, N, D], or 0
//   prediction  fp32 [stop - start, 128, N, D], or 0
//   lengths     int32 [rows]: tokens before this step; table int32 [rows, num_pages], slots
//   grid        fp32 [points, POINT_DIM]; signs int8 [N D]; norm: 1 / sqrt(group). For lattices
//   rescale, offset  fp32 [N, D]
//   rotary      fp64 [ROTARY_PAIRS, 4]; turns fp32 [positions, ROTARY_PAIRS, 2], cosine and sine
// Pages: numbers start to stop - 1 of all rows', as far as they are complete behind this step's token.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) reconstruct(
    const unsigned char* records, long long record_stride, unsigned short* tokens, long long token_stride, float* kept,
    const float* prediction, const int* lengths, const int* table, long long table_stride, long long num_pages,
    const float* grid, const signed char* signs, float norm, const float* rescale, const float* offset,
    const double* rotary, const float2* turns, long long first_head, long long heads, long long all_heads,
    long long start, long long stop) {
    extern __shared__ float4 shared[];
    float* points = (float*)shared;
    const Task task{tokens, token_stride, kept, prediction, signs, norm, rescale, offset, first_head, all_heads};
    Tile tile{points + GRID_FLOATS, 0, 1, 0, 0, 0, 0, 0};
    if constexpr (IS_LATTICE) {
        tile.first_value = (int)first_head * Stored::dim, tile.num_heads = (int)heads;
        for (int i = threadIdx.x; i < GRID_FLOATS; i += THREADS) {
            points[i] = grid[i];
        }
    }
    const bool will_turn = TURN == TO_POSITIONS ? tokens != nullptr : TURN == TURNED_BACK && kept != nullptr;
    const int parts = KV_PAGE_TOKENS / TILE_TOKENS, tiles = parts * (IS_LATTICE ? 1 : (int)heads);  // of a page
    for (int i = blockIdx.x; i < (int)(stop - start) * tiles; i += gridDim.x) {
        const int number = (int)start + i / tiles, row = number / (int)num_pages, page = number % (int)num_pages;
        if (page >= (lengths[row] + 1) / KV_PAGE_TOKENS) {
            continue;
        }
        tile.slot = table[row * table_stride + page], tile.number = number, tile.told = i / tiles;
        tile.own_head = i % tiles / parts, tile.first_token = i % parts * TILE_TOKENS;
        const unsigned char* record = records + tile.slot * record_stride;
        __syncthreads();  // the tile before is written out
        load_tile<TILE_TOKENS>(tile.values, points, record, tile.own_head, tile.first_token);
        __syncthreads();
        pass_over<false>(task, tile, will_turn);
        if (will_turn) {
            __syncthreads();
            turn(
                tile.values, tile.first_value, tile.num_heads, rotary, turns,
                (long long)page * KV_PAGE_TOKENS + tile.first_token);
            __syncthreads();
            pass_over<true>(task, tile, false);
        }
    }
}
