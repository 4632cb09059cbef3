// Attention of one new token per sequence over the packed cache of one head range: dequantization, Q K^T, online
// softmax and P V in one pass, and the merge of the parts.
//
// The algebra is folded, so that a code costs one AND and no multiplication. A 2-bit code under a mask is an fp16
// subnormal, code 4^e 2^-24; the tensor core multiplies it exactly. Everything else goes to the operand that is not the
// cache: per-channel key scales and the 4^-e into the query, once a page; value scales into the probabilities; zeros
// into the initial accumulator (keys) or one fp32 sum per head (values). Per-token key scales multiply the scores.
//
// The cache is the A operand of mma.m16n8k16 (16 tokens, or 16 channels, by 16), up to 8 query heads of a group are N.
// The planes' bytes lie so that a lane's 16-byte load is its operand (kvcal/quantizers/packing.py). Lane = 4 g + quad.
// A pair (e, e + 8) of 16 columns sits in the halves of a register; so does a pair of the other operand.
//
// Work: a row's tokens are cut in units: a page of packed values each, and 32 tokens each of what is not packed (sinks,
// buffer, 16-bit pages). All units of all rows and heads are dealt evenly to a fixed grid, from lengths on the device, so
// that ragged batches balance and a captured graph stays valid. The warps of a block, as many as its SM has room for, take units in turn, each with
// its own softmax, and slots for one record of keys and one of values: while one is in work, the other is on its way. Parts of
// a head that several blocks share are merged in the order of the blocks by whichever comes last: bitwise repeatable.

#include "dense.cuh"
#include "values.cuh"
#include "query.cuh"
#include "merge.cuh"

namespace decode_ {

__device__ __forceinline__ int num_units(int tokens, int v_pages) {
    return (BASE < tokens ? (BASE + UNIT - 1) / UNIT : (tokens + UNIT - 1) / UNIT)
        + (V_PACKED ? v_pages : 0) + (max(0, tokens - BASE - (V_PACKED ? v_pages * PAGE : 0)) + UNIT - 1) / UNIT;
}

}  // namespace decode_

// grid: any number of blocks, 32 WARPS threads; dynamic shared memory: SHARED_BYTES. parts: (grid + rows heads PASSES)
// x 8 (DIM + 2) floats; counters: rows heads PASSES ints, 0 before and after. q [rows, heads GROUP_HEADS, DIM] in Q_DTYPE (as
// DTYPE), with strides in elements; out the same, contiguous. lengths: tokens of every row before this one.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) decode(
    const void* q, i64 q_row, i64 q_head, const u16* k_sinks, const u16* k_buffer, const u8* k_pages, const u16* v_sinks,
    const u16* v_buffer, const u8* v_pages, const int* lengths, i64 rows, i64 heads, i64 max_k_pages, i64 max_v_pages,
    const int* k_page_at, i64 k_events, const int* v_page_at, i64 v_events, const float* k_rescale, const float* k_offset,
    const float* s_aux, float* parts, int* counters, void* out, float scale, float softcap) {
    using namespace decode_;
    static_assert(sizeof(Shared) <= SHARED_BYTES, "kvcal.kernels.decode asks for less shared memory than the kernel takes");
    extern __shared__ unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const Args a = {q, q_row, q_head, k_sinks, k_buffer, k_pages, v_sinks, v_buffer, v_pages, lengths, rows, heads,
                    max_k_pages, max_v_pages, k_page_at, k_events, v_page_at, v_events, k_rescale, k_offset, s_aux, parts,
                    counters, out, scale, softcap};
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int per_row = (int)(heads * PASSES);
    if (warp == 0) {
        // Beyond what was allocated nothing is read, whatever the lengths say (`append` reports it).
        const int room = (int)min(K_SINKS + max_k_pages * PAGE + K_BUFFER, V_SINKS + max_v_pages * PAGE + V_BUFFER);
        int total = 0;
        for (int from = 0; from < rows; from += 32) {
            int row = from + lane, count = 0, tokens = row < rows ? min(lengths[row], room - 1) : 0;
            if (row < rows) count = num_units(tokens + 1, min((int)max_v_pages, kv_pages(tokens, V_SINKS, V_WINDOW, V_BUFFER, v_page_at, (int)v_events)));
#pragma unroll
            for (int step = 1; step < 32; step *= 2) { int other = __shfl_up_sync(0xffffffffu, count, step); if (lane >= step) count += other; }
            if (row < rows) { shared.units[row] = total + count; shared.lengths[row] = tokens; }
            total += __shfl_sync(0xffffffffu, count, 31);
        }
    }
    __syncthreads();
    // Equal rows: so many blocks that none has parts of two heads, if that leaves few of them idle.
    if (thread == 0) {
        const i64 all = (i64)shared.units[rows - 1] * per_row, heads_in_all = rows * per_row, grid = gridDim.x;
        i64 blocks = grid;
        if (all == heads_in_all * shared.units[0]) {
            const i64 each = (heads_in_all + grid - 1) / grid;
            const i64 even = heads_in_all <= grid ? grid / heads_in_all * heads_in_all : heads_in_all % each ? grid : heads_in_all / each;
            if (even * 10 >= grid * 9) blocks = even;
        }
        blocks = min(blocks, all);
        const i64 block = min((i64)blockIdx.x, blocks);
        shared.all = (int)all; shared.blocks = (int)blocks;
        shared.position = (int)(all * block / blocks);
        shared.end = (int)(block < blocks ? all * (block + 1) / blocks : shared.position);
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
        const int in_row = (position - row_start) / units, first = (position - row_start) % units;
        const int last = min(units, first + (shared.end - position));
        const int head_index = in_row / PASSES, pass = in_row % PASSES;
        const int before = shared.lengths[row];
        const i64 flat = (i64)row * heads + head_index;
        const Head head = {k_sinks + flat * K_SINKS * DIM, k_buffer + flat * K_BUFFER * DIM, v_sinks + flat * V_SINKS * DIM, v_buffer + flat * V_BUFFER * DIM,
                           k_pages + ((i64)row * max_k_pages * heads + head_index) * K_RECORD, v_pages + ((i64)row * max_v_pages * heads + head_index) * V_RECORD,
                           heads * K_RECORD, heads * V_RECORD,
                           min((int)max_k_pages, kv_pages(before, K_SINKS, K_WINDOW, K_BUFFER, k_page_at, (int)k_events)),
                           min((int)max_v_pages, kv_pages(before, V_SINKS, V_WINDOW, V_BUFFER, v_page_at, (int)v_events)), before + 1};
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
        fetch_keys(first_page);
        fetch_values(first_page);
        prepare_query(a, shared, row, head_index, pass, thread);
        if (thread == 0) {
            shared.virtual_head = row * per_row + in_row;
            shared.head_start = row_start + in_row * units; shared.head_units = units;
            shared.is_whole = last - first == units;
        }
        __syncthreads();
        State state;
        state.start();
        float* held = shared.out[warp];
        {
            float out[TILES][4];
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[t][i] = 0.f;
            for (int unit = first_dense; unit < last; unit += WARPS) {
                const int number = unit - packed_units, sink_units = BASE < head.num_tokens ? (BASE + UNIT - 1) / UNIT : units;
                const bool is_sink = number < sink_units;
                const int token = is_sink ? number * UNIT : BASE + packed_units * PAGE + (number - sink_units) * UNIT;
                const int stop = is_sink ? min(BASE, head.num_tokens) : head.num_tokens;
                dense_unit(state, out, head, token, stop, shared, warp, lane, log2_scale, softcap);
            }
            if (first_dense < last) reorder(state, out, shared.swap[warp], lane);
            store_out(out, held, lane);
        }
#if V_BITS != 16
        for (int page = first_page; page < stop_page; page += WARPS) {
            float s[PAGE / 16][4];
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
            float down[2];
            const bool raised = state.raise(s, down);
            wait_all_but<1>();
            __syncwarp();
            packed_values(state, s, raised, down, held, v_slot, shared.swap[warp], lane);
            __syncwarp();
            fetch_values(page + WARPS);
        }
        wait_all_but<0>();
#endif

        // This warp's part, head by head.
        {
            const int g = lane >> 2, quad = lane & 3;
            const float unit = V_PACKED ? power2(24 - V_LIFT + state.exponent) : 1.f;
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    state.sum[h] += shuffle(state.sum[h], mask);
#pragma unroll
                    for (int i = 0; i < V_GROUPS; i++) state.zero[i][h] += shuffle(state.zero[i][h], mask);
                }
            float out[TILES][4];
            load_out(out, held, lane);
            __syncwarp();
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    held[(2 * quad + (i & 1)) * DIM + 16 * t + i / 2 * 8 + g] =
                        fmaf(out[t][i], unit, V_PACKED ? state.zero[16 * t / V_GROUP][i & 1] : 0.f);
            if (g == 0)
#pragma unroll
                for (int h = 0; h < 2; h++) { shared.max_[warp][2 * quad + h] = state.max_[h]; shared.sum[warp][2 * quad + h] = state.sum[h]; }
        }
        __syncthreads();
        finish(a, shared, thread);
        __syncthreads();
        if (thread == 0) shared.position = min(shared.end, shared.head_start + shared.head_units);
        __syncthreads();
    }
}
