// Attention of one new token per sequence over the packed cache of one head range: dequantization, Q K^T, online
// softmax and P V in one pass, and the merge of the parts.
//
// The algebra is folded, so that a code costs no multiplication of its own: scales go to the operand that is not the
// cache, per-channel key scales into the query, once a page, value scales into the probabilities; zeros into one sum a
// head. Per-token key scales multiply the scores.
//
// Codes are bytes and that operand is in fixed point of two bytes, so that the tensor core's integer products are
// exact (limbs.cuh). The cache is the A operand of mma.m16n8k32 (16 tokens, or 16 channels, by 32); N are the high and low
// bytes of 4 query heads of a group, and a second tile of 4 where a group has more. The planes' bytes lie so that a lane's
// 16-byte load is its operand (kvcal/quantizers/packing.py), four codes a mask (codes.cuh). Lane = 4 g + quad.
//
// Work: a row's tokens are cut in units: a page of packed values each, and UNIT tokens each of what is not packed (sinks,
// buffer, 16-bit pages). All units of all rows and heads are dealt evenly to a fixed grid, from lengths on the device, so
// that ragged batches balance and a captured graph stays valid. The warps of a block take units in turn, each with its own
// softmax, and slots for one record of keys and one of values: while one is in work, the other is on its way. Parts of a
// head that several blocks share are merged in the order of the blocks by whichever comes last: bitwise repeatable.
//
// What runs once a head costs as much as many pages: its code comes from memory, and so does the query. Hence short code
// there, few divisions, and requests in the order in which they are waited for.

#include "dense.cuh"
#include "values.cuh"
#include "query.cuh"
#include "merge.cuh"
#include "stage.cuh"

namespace decode_ {

__device__ __forceinline__ int num_units(int tokens, int v_pages) {
    return (BASE < tokens ? (BASE + UNIT - 1) / UNIT : (tokens + UNIT - 1) / UNIT)
        + (V_PACKED ? v_pages : 0) + (max(0, tokens - BASE - (V_PACKED ? v_pages * PAGE : 0)) + UNIT - 1) / UNIT;
}

// The first unit of a block, of ``all`` that ``blocks`` blocks share evenly; and the block that has a unit.
__device__ __forceinline__ u32 first_unit(u32 all, u32 blocks, u32 block) {
    return all / blocks * block + all % blocks * block / blocks;
}
__device__ __forceinline__ u32 block_of(u32 all, u32 blocks, u32 unit) {
    u32 block = (u32)__fdividef((float)unit * (float)blocks, (float)all);  // or next to it
    block = min(block, blocks - 1);
#pragma unroll 1
    while (first_unit(all, blocks, block) > unit) block--;
#pragma unroll 1
    while (first_unit(all, blocks, block + 1) <= unit) block++;
    return block;
}

}  // namespace decode_

// grid: any number of blocks, 32 WARPS threads; dynamic shared memory: SHARED_BYTES. parts: (grid + rows heads PASSES)
// x HEADS (DIM + 2) floats; counters: rows heads PASSES ints, 0 before and after. q [rows, heads GROUP_HEADS, DIM] in Q_DTYPE (as
// DTYPE), with strides in elements; out the same, contiguous. lengths: tokens of every row before this one.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) decode(
    const void* q, i64 q_row, i64 q_head, const u16* k_sinks, const u16* k_buffer, const u8* k_pages, const u16* v_sinks,
    const u16* v_buffer, const u8* v_pages, const int* lengths, i64 rows, i64 heads, i64 max_k_pages, i64 max_v_pages,
    const int* k_page_at, i64 k_events, const int* v_page_at, i64 v_events, const float* k_rescale, const float* k_offset,
    const float* s_aux, float* parts, int* counters, void* out, float scale, float softcap STAGE_PARAMETERS) {
    using namespace decode_;
    kv_let_next_start();
#ifdef STAGED
    if (k_region->bits != K_BITS || v_region->bits != V_BITS) return kv_wait_for_previous();
    k_pages += k_region->base; max_k_pages = k_region->pages;
    v_pages += v_region->base; max_v_pages = v_region->pages;
#endif
    static_assert(sizeof(Shared) <= SHARED_BYTES, "kvcal.kernels.decode asks for less shared memory than the kernel takes");
    extern __shared__ unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const Args a = {q, q_row, q_head, k_sinks, k_buffer, k_pages, v_sinks, v_buffer, v_pages, lengths, rows, heads,
                    max_k_pages, max_v_pages, k_page_at, k_events, v_page_at, v_events, k_rescale, k_offset, s_aux, parts,
                    counters, out, scale, softcap};
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int per_row = (int)(heads * PASSES);
    if (warp == 0) {
        // Beyond what was allocated nothing is read, whatever the lengths say (`append` reports it).
        const int room = (int)min(K_SINKS + max_k_pages * PAGE + K_BUFFER, V_SINKS + max_v_pages * PAGE + V_BUFFER);
        int total = 0, of_first = 0;
        for (int from = 0; from < rows; from += 32) {
            int row = from + lane, count = 0, tokens = row < rows ? min(lengths[row], room - 1) : 0;
            if (row < rows) count = num_units(tokens + 1, min((int)max_v_pages, kv_pages(tokens, V_SINKS, V_WINDOW, V_BUFFER, HAS_WINDOW_RULE ? v_page_at : nullptr, (int)v_events)));
#pragma unroll
            for (int step = 1; step < 32; step *= 2) { int other = __shfl_up_sync(0xffffffffu, count, step); if (lane >= step) count += other; }
            if (row < rows) { shared.units[row] = total + count; shared.lengths[row] = tokens; }
            total += __shfl_sync(0xffffffffu, count, 31);
            if (from == 0) of_first = __shfl_sync(0xffffffffu, count, 0);
        }
        // Equal rows: so many blocks that none has parts of two heads, if that leaves few of them idle.
        const u32 all = total * per_row, heads_in_all = (u32)rows * per_row, grid = gridDim.x;
        u32 blocks = min(grid, all);
        if (total == (int)rows * of_first) {
            const u32 each = (heads_in_all + grid - 1) / grid;
            const u32 even = heads_in_all <= grid ? grid / heads_in_all * heads_in_all : heads_in_all % each ? grid : heads_in_all / each;
            if (even * 10 >= grid * 9) blocks = min(even, all);
        }
        const u32 unit = first_unit(all, blocks, min(blockIdx.x + lane, blocks));  // in lane 1 the next block's
        if (lane == 0) { shared.all = all; shared.blocks = blocks; shared.position = unit; }
        if (lane == 1) shared.end = unit;
    }
    __syncthreads();
    const float log2_scale = scale * LOG2E;
    // What a block is at lies in shared memory: the loop over pages needs the registers.
    while (*(volatile int*)&shared.position < *(volatile int*)&shared.end) {
        const int position = shared.position;
        int row = 0;
        for (int high = (int)rows - 1; row < high;) { int middle = (row + high) / 2; if ((i64)shared.units[middle] * per_row <= position) row = middle + 1; else high = middle; }
        const int row_start = row ? shared.units[row - 1] * per_row : 0;
        const int units = shared.units[row] - (row ? shared.units[row - 1] : 0);
        const int in_row = (u32)(position - row_start) / (u32)units, first = position - row_start - in_row * units;
        const int last = min(units, first + (shared.end - position));
        const int head_index = in_row / PASSES, pass = in_row % PASSES;
        const int before = shared.lengths[row];
        const i64 flat = (i64)row * heads + head_index;
        const Head head = {k_sinks + flat * K_SINKS * DIM, k_buffer + flat * K_BUFFER * DIM, v_sinks + flat * V_SINKS * DIM, v_buffer + flat * V_BUFFER * DIM,
                           k_pages + ((i64)row * max_k_pages * heads + head_index) * K_RECORD, v_pages + ((i64)row * max_v_pages * heads + head_index) * V_RECORD,
                           heads * K_RECORD, heads * V_RECORD,
                           min((int)max_k_pages, kv_pages(before, K_SINKS, K_WINDOW, K_BUFFER, HAS_WINDOW_RULE ? k_page_at : nullptr, (int)k_events)),
                           min((int)max_v_pages, kv_pages(before, V_SINKS, V_WINDOW, V_BUFFER, HAS_WINDOW_RULE ? v_page_at : nullptr, (int)v_events)), before + 1};
        const int packed_units = V_PACKED ? head.num_v_pages : 0;
        u8 *k_slot = shared.slots[warp], *v_slot = k_slot + K_SLOT;

        // Units first + warp, + WARPS, ...: pages, then what is not packed. The next record is on its way while one is in work.
        const int first_page = first + warp, stop_page = min(last, packed_units);
        const int first_dense = first_page + (max(0, packed_units - first_page) + WARPS - 1) / WARPS * WARPS;
        auto fetch_keys = [&](int page) {
            if (K_PACKED && V_PACKED && page < min(stop_page, head.num_k_pages)) load_record<K_RECORD>(k_slot, head.k_pages + page * head.k_stride, lane);
            commit();
        };
        auto fetch_values = [&](int page) {
            if (V_PACKED && page < stop_page) load_record<V_RECORD>(v_slot, head.v_pages + page * head.v_stride, lane);
            commit();
        };
        // Tokens of a unit that is not packed: from, to.
        auto dense_tokens = [&](int unit, int& stop) {
            const int number = unit - packed_units, sink_units = BASE < head.num_tokens ? (BASE + UNIT - 1) / UNIT : units;
            const bool is_sink = number < sink_units;
            stop = is_sink ? min(BASE, head.num_tokens) : head.num_tokens;
            return is_sink ? number * UNIT : BASE + packed_units * PAGE + (number - sink_units) * UNIT;
        };
        kv_wait_for_previous();
        // What is waited for first is asked for first: behind the records of all warps, memory takes microseconds.
        float query[DIM / 32];
        fetch_query(query, a, row, head_index, pass, warp, lane);
        if (DENSE_IS_RARE && first_dense < last) {
            int stop;
            const int token = dense_tokens(first_dense, stop);
            prefetch_dense(head, token, stop, lane);
        }
        fetch_keys(first_page);
        fetch_values(first_page);
        prepare_query(query, a, shared, row, head_index, pass, thread);
        if (thread == WARPS * 32 - 1) {
            const int start = row_start + in_row * units;
            shared.virtual_head = row * per_row + in_row;
            shared.head_start = start; shared.head_units = units;
            shared.first_block = block_of(shared.all, shared.blocks, start);
            shared.num_blocks = block_of(shared.all, shared.blocks, start + units - 1) - shared.first_block + 1;
        }
        __syncthreads();
        State state;
        state.start();
#if V_BITS != 16
        for (int page = first_page; page < stop_page; page += WARPS) {
            float s[QUERY_TILES][PAGE / 8];
            wait_all_but<1>();
            __syncwarp();
#if K_BITS != 16
            if (!K_LAGS || page < head.num_k_pages) packed_scores<PAGE / 16>(s, k_slot, 0, shared, warp, lane, log2_scale);
            else
#endif
                dense_scores<PAGE / 16>(s, head, BASE + page * PAGE, head.num_tokens, shared, lane, log2_scale);
            __syncwarp();
            fetch_keys(page + WARPS);
            cap(s, softcap);
            float down[QUERY_TILES];
            state.raise(s, down, lane);
            wait_all_but<1>();
            packed_values(state, s, v_slot, shared.swap[warp], lane);
            __syncwarp();
            fetch_values(page + WARPS);
        }
        wait_all_but<0>();
        __syncwarp();
#endif
        if (first_dense < last) {  // last, for what they ask for to be there
            float out[TILES][4];
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[t][i] = 0.f;
#pragma unroll 1
            for (int unit = first_dense; unit < last; unit += WARPS) {
                int stop;
                const int token = dense_tokens(unit, stop);
                dense_unit(state, out, head, token, stop, shared, warp, lane, log2_scale, softcap);
            }
            reorder(state, out, shared.swap[warp], lane);
        }

        // This warp's part, head by head, where its records were.
        {
            const int g = lane >> 2, quad = lane & 3;
            float* part = reinterpret_cast<float*>(shared.slots[warp]);
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) {
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) state.sum[n] += shuffle(state.sum[n], mask);
                float zero[V_GROUPS];
#pragma unroll
                for (int i = 0; i < V_GROUPS; i++) zero[i] = to_scores(sum_of_lanes(state.zero[i][n]), lane);
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        part[(4 * n + quad) * DIM + 16 * t + 8 * half + g] = state.out[n][t][half] + (V_PACKED ? zero[16 * t / V_GROUP] : 0.f);
                if (g == 0) { shared.max_[warp][4 * n + quad] = state.max_[n]; shared.sum[warp][4 * n + quad] = state.sum[n]; }
            }
        }
        __syncthreads();
        finish(a, shared, thread);
        __syncthreads();
        if (thread == 0) shared.position = min(shared.end, shared.head_start + shared.head_units);
        __syncthreads();
    }
    kv_wait_for_previous();  // blocks without work, too
}
