// Attention of one new token per sequence over the packed cache of one layer, for every head size and every pair
// of formats: the same operator as decode.cu, without its tensor cores and without what they ask of sizes.
//
// A tile, the next 32 tokens of a row and head, is decoded to fp32 in shared memory, keys first; one product with all
// query heads of the group gives their scores, and the values, which take the keys' place, are multiplied by the
// softmax's weights. In scores, lanes are tokens and warps are shares of the channels; in P V, threads are 4 channels
// and shares of the tokens. Everything is an fp32 FMA in a fixed order, so results repeat bit for bit, and the rounding
// of scores and weights is far below that of the fast kernel, which can be held against this one.
//
// Work: all tiles of all rows and heads are dealt evenly to a fixed grid, from lengths on the device, so that ragged
// batches balance and a captured graph stays valid. Parts of a head that several blocks share are merged by whichever
// comes last, in the order of the blocks. Left out: asking for the next tile while one is in work (the SM's other
// blocks fill the time), and tiles in 16 bits.

#include "plain_parts.cuh"

namespace plain {

constexpr int WARPS = THREADS / 32, MAX_ROWS = 512;
constexpr int LEAST_TILES = 4;                      // of a block, if there are as many: parts cost something, too
constexpr int WEIGHTS = kv_round_up(HEADS, 4);      // of a token

struct __align__(16) Shared {
    float tile[kv_max(TOKENS * STRIDE, 4 * THREADS)];
    float query[HEADS * PADDED];                    // in the order of the keys' places
    float scores[WARPS][HEADS][TOKENS];             // of each warp's channels
    float weights[TOKENS * WEIGHTS];
    float tops[HEADS], sums[HEADS], down[WEIGHTS];  // the softmax so far, in log2, and what the last tile scaled it by
    int tiles[MAX_ROWS];                            // running sums over the rows
    int lengths[MAX_ROWS];                          // tokens before this one, as far as there is room for them
    int is_last;
};

KV_INLINE float warp_max(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    }
    return x;
}

KV_INLINE float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        x += __shfl_xor_sync(~0u, x, mask);
    }
    return x;
}

// Running sums of the rows' tiles, by the first warp. Beyond `room` tokens nothing was allocated, whatever the lengths
// say (`append` reports it).
KV_INLINE void count_tiles(Shared& shared, const int* lengths, int rows, int room) {
    const int lane = threadIdx.x;
    for (int from = 0, total = 0; from < rows; from += 32) {
        const int row = from + lane;
        int sum = 0;
        if (row < rows) {
            shared.lengths[row] = kv_min(lengths[row], room - 1);
            sum = kv_ceil_div(shared.lengths[row] + 1, TOKENS);
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, sum, step);
            sum += lane >= step ? before : 0;
        }
        if (row < rows) {
            shared.tiles[row] = total + sum;
        }
        total += __shfl_sync(~0u, sum, 31);
    }
}

// Queries [HEADS][PADDED] of a pass in fp32, zeros where there is no channel or no head. `first`: of the first
// head of the group, in numbers of dtype TYPE.
template <int TYPE>
KV_INLINE void load_queries(float* to, const void* q, long long first, long long head_stride, int pass) {
    for (int i = threadIdx.x; i < HEADS * PADDED; i += THREADS) {
        const int h = i / PADDED, channel = i % PADDED, member = pass * HEADS + h;
        float x = 0.0f;
        if (channel < DIM && member < GROUP_HEADS) {
            const long long at = first + member * head_stride + channel;
            if constexpr (TYPE == KV_FLOAT32) {
                x = ((const float*)q)[at];
            } else {
                x = kv_float_of<TYPE>(((const unsigned short*)q)[at]);
            }
        }
        to[h * PADDED + key_place(channel)] = x;
    }
}

// Products of all queries with the tile's keys, over this warp's share of the channels.
KV_INLINE void multiply_keys(Shared& shared, int warp, int lane) {
    float sum[HEADS] = {};
#pragma unroll 2
    for (int chunk = warp; chunk < PADDED / 4; chunk += WARPS) {
        const float4 key = ((const float4*)(shared.tile + lane * STRIDE))[chunk];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const float4 query = ((const float4*)(shared.query + h * PADDED))[chunk];
            sum[h] = fmaf(key.x, query.x, fmaf(key.y, query.y, fmaf(key.z, query.z, fmaf(key.w, query.w, sum[h]))));
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        shared.scores[warp][h][lane] = sum[h];
    }
}

// Weights of the tile's tokens, and the softmax so far; whether the maximum of a head rose. Lanes are tokens.
KV_INLINE bool weigh(Shared& shared, bool is_token, float scale, float softcap, int warp, int lane) {
    bool raised = false;
    for (int h = warp; h < HEADS; h += WARPS) {
        float score = 0.0f;
#pragma unroll
        for (int part = 0; part < WARPS; ++part) {
            score += shared.scores[part][h][lane];
        }
        score *= scale;
        if constexpr (HAS_SOFTCAP) {
            score = softcap * tanhf(score / softcap);
        }
        score = is_token ? score * LOG2E : LOWEST;
        const float before = shared.tops[h], top = warp_max(fmaxf(before, score));
        const float weight = exp2f(score - top), down = exp2f(before - top), sum = warp_sum(weight);
        shared.weights[lane * WEIGHTS + h] = weight;
        __syncwarp();
        if (lane == 0) {
            shared.tops[h] = top;
            shared.sums[h] = fmaf(shared.sums[h], down, sum);
            shared.down[h] = down;
        }
        raised |= down != 1.0f;
    }
    return raised;
}

// shares += weights x values, of this thread's channels and tokens.
KV_INLINE void multiply_values(float4 (&shares)[HEADS], const Shared& shared) {
    const int quad = threadIdx.x % QUADS;
#pragma unroll 4
    for (int token = threadIdx.x / QUADS; token < TOKENS; token += SPLITS) {
        const float4 value = ((const float4*)(shared.tile + token * STRIDE))[quad];
#pragma unroll
        for (int h = 0; h < HEADS; h += 4) {
            const float4 four = *(const float4*)(shared.weights + token * WEIGHTS + h);
            const float weights[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int k = 0; k < kv_min(4, HEADS - h); ++k) {
                shares[h + k] = added(shares[h + k], value, weights[k]);
            }
        }
    }
}

}  // namespace plain

// grid: any number of blocks of THREADS; dynamic shared memory: SHARED_BYTES. parts: (grid + rows heads PASSES) x HEADS
// x PART floats; counters: rows heads PASSES ints, 0 before and after. All else as for decode.cu.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode(
    const void* q, long long q_row, long long q_head, const unsigned short* k_sinks, long long k_sink_row,
    const unsigned short* k_ring, long long k_ring_row, const unsigned char* k_pages, long long k_page_stride,
    const unsigned short* v_sinks, long long v_sink_row, const unsigned short* v_ring, long long v_ring_row,
    const unsigned char* v_pages, long long v_page_stride, const int* lengths, const int* ring_rows, long long rows,
    long long heads, const int* table, long long table_row, long long table_width, const int* k_read_at, long long k_events,
    const int* v_read_at, long long v_events, const float* k_rescale, const float* k_offset, const signed char* k_signs,
    const signed char* v_signs, const float* s_aux, float* parts, int* counters, void* out, float scale,
    float softcap) {
    using namespace plain;
    static_assert(sizeof(Shared) <= SHARED_BYTES, "kvcal.kernels.decode asks for less than the kernel takes");
    extern __shared__ unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const Results results = {s_aux, parts, counters, out, (int)heads};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, per_row = (int)heads * PASSES;
    if (warp == 0) {
        const int in_pages = WHOLE_RING ? 1 : (int)table_width * KV_PAGE_TOKENS;
        count_tiles(shared, lengths, (int)rows, in_pages + kv_min(Keys::ring, Values::ring));
    }
    __syncthreads();
    // Block b of `blocks` has tiles all b / blocks to all (b + 1) / blocks - 1.
    const long long all = (long long)shared.tiles[rows - 1] * per_row;
    const long long blocks = max(1ll, min((long long)gridDim.x, all / LEAST_TILES));
    if (blockIdx.x >= blocks) {
        return;
    }
    const long long end = all * (blockIdx.x + 1) / blocks;
    for (long long position = all * blockIdx.x / blocks; position < end;) {
        int row = 0;
        for (int high = (int)rows - 1; row < high;) {
            const int middle = (row + high) / 2;
            if ((long long)shared.tiles[middle] * per_row <= position) {
                row = middle + 1;
            } else {
                high = middle;
            }
        }
        const int before_row = row ? shared.tiles[row - 1] : 0, tiles = shared.tiles[row] - before_row;
        const long long row_start = (long long)before_row * per_row;
        const int in_row = (int)((position - row_start) / tiles), first = (int)((position - row_start) % tiles);
        const int last = (int)min((long long)tiles, first + end - position), head = in_row / PASSES;
        const int tokens = shared.lengths[row], num_tokens = tokens + 1;
        const long long virtual_head = (long long)row * per_row + in_row;
        const int width = WHOLE_RING ? 0 : (int)table_width * KV_PAGE_TOKENS, stored = kv_row_of(ring_rows, row);
        const Head keys = {
            k_sinks + kv_row_start(stored, k_sink_row) + (long long)head * (Keys::sinks * DIM),
            k_ring + kv_row_start(stored, k_ring_row) + (long long)head * (Keys::ring * DIM),
            min(width, kv_tokens_read(tokens, Keys::window, Keys::ring, Keys::stripe, k_read_at, (int)k_events))};
        const Head values = {
            v_sinks + kv_row_start(stored, v_sink_row) + (long long)head * (Values::sinks * DIM),
            v_ring + kv_row_start(stored, v_ring_row) + (long long)head * (Values::ring * DIM),
            min(width, kv_tokens_read(tokens, Values::window, Values::ring, Values::stripe, v_read_at, (int)v_events))};
        // Of the page that a tile lies in, if one is read.
        auto slot_of = [&](int tile) {
            const int page = tile * TOKENS / KV_PAGE_TOKENS;
            const bool is_read = tile < last && tile * TOKENS < max(keys.read, values.read);
            return is_read ? table[row * table_row + page] : 0;
        };

        const long long first_query = row * q_row + (long long)head * GROUP_HEADS * q_head;
        load_queries<Q_DTYPE>(shared.query, q, first_query, q_head, in_row % PASSES);
        if (threadIdx.x < HEADS) {
            shared.tops[threadIdx.x] = LOWEST;
            shared.sums[threadIdx.x] = 0.0f;
        }
        float4 shares[HEADS] = {};
        for (int tile = first, slot = slot_of(first); tile < last; ++tile) {
            const int token = tile * TOKENS;
            load_key_tile<Keys>(
                shared.tile, keys, k_pages + slot * k_page_stride + head * Keys::record, token, num_tokens,
                k_rescale + head * DIM, k_offset + head * DIM);
            __syncthreads();
            if constexpr (Keys::is_rotated) {
                unrotate_tile<Keys>(
                    shared.tile, keys, token, k_signs, k_rescale + head * DIM, k_offset + head * DIM,
                    [](int channel) { return key_place(channel); });
            }
            multiply_keys(shared, warp, lane);
            __syncthreads();
            const bool is_token = token + lane < num_tokens;
            const bool raised = weigh(shared, is_token, scale, softcap, warp, lane);
            load_value_tile<Values>(
                shared.tile, values, v_pages + slot * v_page_stride + head * Values::record, token, num_tokens);
            slot = slot_of(tile + 1);  // asked for before its turn
            if (__syncthreads_or(raised)) {
#pragma unroll
                for (int h = 0; h < HEADS; ++h) {
                    shares[h] = scaled(shares[h], shared.down[h]);
                }
            }
            if constexpr (Values::is_rotated) {
                unrotate_tile<Values>(
                    shared.tile, values, token, v_signs, nullptr, nullptr, [](int channel) { return channel; });
            }
            if (threadIdx.x < QUADS * SPLITS) {
                multiply_values(shares, shared);
            }
            __syncthreads();
        }

        const long long start = row_start + (long long)in_row * tiles;  // of the head
        const bool is_whole = last - first == tiles;
        float* part = is_whole ? nullptr : parts + (blockIdx.x + virtual_head) * HEADS * PART;
        finish_block(results, virtual_head, shares, shared.tops, shared.sums, (float4*)shared.tile, part);
        if (!is_whole) {
            const long long first_block = ((start + 1) * blocks - 1) / all;
            const int count = (int)(((start + tiles) * blocks - 1) / all - first_block) + 1;
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                shared.is_last = atomicAdd(counters + virtual_head, 1) == count - 1;
                if (shared.is_last) {
                    counters[virtual_head] = 0;
                }
            }
            __syncthreads();
            if (shared.is_last) {
                __threadfence();
                merge_parts(results, virtual_head, parts + (first_block + virtual_head) * HEADS * PART, count);
            }
        }
        __syncthreads();
        position += last - first;
    }
}
