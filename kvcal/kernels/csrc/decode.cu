// Attention of the new tokens of each sequence, mostly one, over the packed cache of one layer: dequantization, Q K^T, online
// softmax and P V in one pass, and the merge of the parts.
//
// The algebra is folded, so that a code costs no multiplication of its own: scales go to the operand that is not the
// cache, per-channel key scales into the query, once a page, value scales into the probabilities; zeros into one sum a
// head. Per-token key scales multiply the scores. Where pages are rotated, so is the query, and what values have added up
// to is rotated back, once a head; what is not packed joins it rotated.
//
// Codes are bytes and that operand is in fixed point of two bytes, so that the tensor core's integer products are
// exact (limbs.cuh). The cache is the A operand of mma.m16n8k32 (16 tokens, or 16 channels, by 32); N are the high and low
// bytes of 4 query heads of a group, and a second tile of 4 where a group has more. The planes' bytes lie so that a lane's
// 16-byte load is its operand (kvcal/pages/packing.py), four codes a mask (codes.cuh). Lane = 4 g + quad. If WIDE, N are 8
// heads: their limbs are two operands, and values meet probabilities in half precision (wide_keys.cuh, wide_values.cuh).
//
// Work: a row's tokens are cut in units: a page of packed values each, and UNIT tokens each of what is not packed (sinks,
// ring, 16-bit pages). All units of all rows and heads are dealt evenly to a fixed grid, from lengths on the device, so
// that ragged batches balance and a captured graph stays valid. The warps of a block take units in turn, each with its own
// softmax, and room for one record of keys and one of values: while one is in work, the other is on its way, and the table
// was asked for the slot of the one after it before that. Parts of a
// head that several blocks share are merged in the order of the blocks by whichever comes last: bitwise repeatable.
//
// Several tokens of a sequence (QUERY_TOKENS) are more query heads of each group: all of them meet the same pages, but for
// one that comes to be read in between, and see unpacked tokens up to their own.
//
// What runs once a head costs as much as many pages: its code comes from memory, and so does the query. Hence short code
// there, few divisions, and requests in the order in which they are waited for.

#include "decode/dense.cuh"
#include "decode/values.cuh"
#include "decode/query.cuh"
#include "decode/merge.cuh"

namespace decode_ {

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
// x HEADS (DIM + 2) floats; counters: rows heads PASSES ints, 0 before and after. q [rows, QUERY_TOKENS, heads TOKEN_HEADS, DIM] in
// Q_DTYPE (as DTYPE), with strides in elements; out the same, contiguous. lengths: tokens of every row before these. ring_rows: each one's row of sinks and ring, or 0: in their order. The memory is that of
// kvcal/kernels/operands.py: sinks and rings k_sink_row, ... elements from row to row, pages k_page_stride, ... bytes from slot to
// slot, the slots in table [rows, table_width], table_row elements from row to row.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) decode(
    const void* q, i64 q_row, i64 q_head, const u16* k_sinks, i64 k_sink_row, const u16* k_ring, i64 k_ring_row, const u8* k_pages,
    i64 k_page_stride, const u16* v_sinks, i64 v_sink_row, const u16* v_ring, i64 v_ring_row, const u8* v_pages, i64 v_page_stride,
    const int* lengths, const int* ring_rows, i64 rows, i64 heads, const int* table, i64 table_row, i64 table_width,
    const int* k_read_at, i64 k_events, const int* v_read_at, i64 v_events, const float* k_rescale, const float* k_offset,
    const signed char* k_signs, const signed char* v_signs, const float* s_aux, float* parts, int* counters, void* out,
    float scale, float softcap QUERY_PARAMETERS) {
    using namespace decode_;
    kv_let_next_start();
    static_assert(sizeof(Shared) <= SHARED_BYTES, "kvcal.kernels.decode asks for less shared memory than the kernel takes");
    extern __shared__ unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
#if QUERY_TOKENS == 1
    const i64 q_token = 0;
#endif
    const Args a = {q, q_row, q_head, q_token, heads, k_rescale, k_offset, s_aux, parts, counters, out};
    // Tokens that are read from pages after so many.
    const int in_pages = (int)table_width * PAGE;
    auto k_read_behind = [&](int tokens) {
        return WHOLE_RING ? 0 : min(in_pages, kv_tokens_read(tokens, K_WINDOW, K_RING, K_STRIPE, HAS_WINDOW_RULE ? k_read_at : nullptr, (int)k_events));
    };
    auto v_read_behind = [&](int tokens) {
        return WHOLE_RING ? 0 : min(in_pages, kv_tokens_read(tokens, V_WINDOW, V_RING, V_STRIPE, HAS_WINDOW_RULE ? v_read_at : nullptr, (int)v_events));
    };
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int per_row = (int)(heads * PASSES);
    if (warp == 0) {
        // Beyond what was allocated nothing is read, whatever the lengths say (`append` reports it).
        const int room = WHOLE_RING ? 1 + K_RING : in_pages + min(K_RING, V_RING);
        int total = 0, of_first = 0;
        for (int from = 0; from < rows; from += 32) {
            int row = from + lane, count = 0, tokens = row < rows ? min(lengths[row], room - QUERY_TOKENS) : 0;
            const int last = tokens + QUERY_TOKENS - 1;
            if (row < rows) count = Cut(K_LEADS ? k_read_behind(last) : 0, v_read_behind(last), v_read_behind(tokens)).units(last + 1);
#pragma unroll
            for (int step = 1; step < 32; step *= 2) { int other = __shfl_up_sync(0xffffffffu, count, step); if (lane >= step) count += other; }
            if (row < rows) { shared.units[row] = total + count; shared.lengths[row] = tokens; }
            total += __shfl_sync(0xffffffffu, count, 31);
            if (from == 0) of_first = __shfl_sync(0xffffffffu, count, 0);
        }
        // Equal rows: so many blocks that none has parts of two heads, if that leaves few of them idle.
        u32 all = total * per_row, heads_in_all = (u32)rows * per_row, grid = gridDim.x;
        u32 blocks = min(grid, all), extra = EXTRA_UNITS;
        if (total == (int)rows * of_first) {
            const u32 each = (heads_in_all + grid - 1) / grid, of_head = grid / max(heads_in_all, 1u);
            const u32 even = of_head ? of_head * heads_in_all : heads_in_all % each ? grid : heads_in_all / each;
            // A head that leaves warps idle has no more parts than are merged at twice.
            const u32 few = of_head ? max(2u * MERGED, ((u32)of_first + WARPS - 1) / WARPS) * heads_in_all : even;
            if (even * 10 >= grid * 9) { blocks = min(min(even, few), all); extra = 0; }
        }
        all += extra * heads_in_all;
        const u32 unit = first_unit(all, blocks, min(blockIdx.x + lane, blocks));  // in lane 1 the next block's
        if (lane == 0) { shared.all = all; shared.blocks = blocks; shared.position = unit; shared.extra = extra; }
        if (lane == 1) shared.end = unit;
    }
    __syncthreads();
    const float log2_scale = scale * LOG2E;
    // What a block is at lies in shared memory: the loop over pages needs the registers.
    while (*(volatile int*)&shared.position < *(volatile int*)&shared.end) {
        const int position = shared.position, extra = shared.extra;
        auto units_before = [&](int row) { return row ? shared.units[row - 1] + row * extra : 0; };
        int row = 0;
        for (int high = (int)rows - 1; row < high;) { int middle = (row + high) / 2; if ((i64)units_before(middle + 1) * per_row <= position) row = middle + 1; else high = middle; }
        const int row_start = units_before(row) * per_row, units = units_before(row + 1) - units_before(row);
        const int in_row = (u32)(position - row_start) / (u32)units, start = row_start + in_row * units;
        const int first = max(0, position - start - extra), last = min(units, shared.end - start) - extra;
        if (last <= first) {  // all of it is extra
            __syncthreads();
            if (thread == 0) shared.position = min(shared.end, start + units);
            __syncthreads();
            continue;
        }
        const int head_index = in_row / PASSES, pass = in_row % PASSES;
        const int before = shared.lengths[row], before_last = before + QUERY_TOKENS - 1, stored = kv_row_of(ring_rows, row);
        const int k_read = k_read_behind(before_last), v_read = v_read_behind(before_last);
        const Head head = {k_sinks + kv_row_start(stored, k_sink_row) + (i64)head_index * (K_SINKS * DIM),
                           k_ring + kv_row_start(stored, k_ring_row) + (i64)head_index * (K_RING * DIM),
                           v_sinks + kv_row_start(stored, v_sink_row) + (i64)head_index * (V_SINKS * DIM),
                           v_ring + kv_row_start(stored, v_ring_row) + (i64)head_index * (V_RING * DIM),
                           k_pages + head_index * K_RECORD, v_pages + head_index * V_RECORD, (u32)k_page_stride, (u32)v_page_stride,
                           table + row * table_row, kv_ceil_div(k_read, PAGE), kv_ceil_div(v_read, PAGE), before_last + 1};
        const Cut cut(k_read, v_read, QUERY_TOKENS > 1 ? v_read_behind(before) : v_read);
        u8 *k_slot = shared.slots[warp], *v_slot = k_slot + K_SLOT;

        // Units first + warp, + WARPS, ...: pages, then what is not packed. The next record is on its way while one is in work.
        const int first_packed = first + warp, stop_packed = min(last, cut.pages);
        const int first_dense = first_packed + (max(0, cut.pages - first_packed) + WARPS - 1) / WARPS * WARPS;
        auto slot_of = [&](int unit) { return V_PACKED && unit < stop_packed ? head.slots[FIRST_PAGE + unit] : 0; };
        auto fetch_keys = [&](int unit, int slot) {
            if (K_PACKED && V_PACKED && unit < min(stop_packed, head.num_k_pages - FIRST_PAGE)) load_record<K_RECORD, TURNED_BYTES>(k_slot, head.k_page(slot), lane);
            commit();
        };
        auto fetch_values = [&](int unit, int slot) {
            if (V_PACKED && unit < stop_packed) load_record<V_RECORD, 0>(v_slot, head.v_page(slot), lane);
            commit();
        };
        // Tokens of a unit that is not packed: the first one, and as ``dense_unit`` has it, from and stop.
        auto dense_tokens = [&](int unit, int& from, int& stop) {
            const int number = unit - cut.pages;
            const bool is_sink = number < cut.sinks;
            from = is_sink ? -1 : cut.from;
            stop = is_sink ? BASE : head.num_tokens;
            return is_sink ? number * UNIT : cut.start + (number - cut.sinks) * UNIT;
        };
        auto dense_slot_of = [&](int unit) {
            int from, stop;
            const int page = dense_tokens(unit, from, stop) / PAGE;
            return DENSE_READS_PAGES && unit < last && page < max(head.num_k_pages, head.num_v_pages) ? head.slots[page] : 0;
        };
        int slot = V_PACKED ? slot_of(first_packed) : dense_slot_of(first_dense), next_slot = slot_of(first_packed + WARPS);
        Signs signs;
        signs.fetch(k_signs, v_signs, thread);
        kv_wait_for_previous();
        // What is waited for first is asked for first: after the records of all warps, memory takes microseconds.
        float query[DIM / 32];
        fetch_query(query, a, row, head_index, pass, warp, lane);
        if (DENSE_IS_RARE && first_dense < last) {
            int from, stop;
            const int token = dense_tokens(first_dense, from, stop);
            prefetch_dense(head, token, stop, 0, lane);
        }
        fetch_keys(first_packed, slot);
        fetch_values(first_packed, slot);
        prepare_query(query, signs, a, shared, row, head_index, pass, thread);
#if QUERY_TOKENS > 1
        if (thread < HEADS) {
            const int tokens = before + min((pass * HEADS + (int)thread) / TOKEN_HEADS, QUERY_TOKENS - 1);
            shared.seen_from[thread] = V_PACKED ? v_read_behind(tokens) : 0;
            shared.seen_to[thread] = tokens + 1;
            shared.packed_keys[thread] = k_read_behind(tokens);
        }
        if (thread == 0) { shared.shared_pages = v_read_behind(before) / PAGE; shared.shared_key_pages = k_read_behind(before) / PAGE; }
#endif
        if (thread == WARPS * 32 - 1) {
            shared.virtual_head = row * per_row + in_row;
            shared.head_start = start; shared.head_units = units;
            shared.num_warps = min(WARPS, last - first);
            shared.first_block = block_of(shared.all, shared.blocks, start + extra);
            shared.num_blocks = block_of(shared.all, shared.blocks, start + units - 1) - shared.first_block + 1;
        }
        __syncthreads();
        State state;
        state.start();
#if V_BITS != 16
        for (int unit = first_packed; unit < stop_packed; unit += WARPS) {
            const int page = FIRST_PAGE + unit;
            float s[QUERY_TILES][PAGE / 8];
            wait_all_but<1>();
            __syncwarp();
#if WIDE
            float step[QUERY_TILES], from[QUERY_TILES], base[QUERY_TILES];
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) base[n] = state.base(n);
            wide_scores(s, step, from, base, k_slot, shared, warp, lane, log2_scale);
#else
#if K_BITS != 16
            if (!K_LAGS || page < head.num_k_pages) packed_scores<PAGE / 16>(s, k_slot, 0, shared, warp, lane, log2_scale);
            else
#endif
                dense_scores<PAGE / 16>(s, head, page * PAGE, head.num_tokens, slot, shared, lane, log2_scale);
#endif
            __syncwarp();
            fetch_keys(unit + WARPS, next_slot);
            if (BASE % PAGE && unit == 0) {  // sinks are read elsewhere
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                    for (int i = 0; i < (WIDE ? PAGE / 8 : kv_ceil_div(BASE % PAGE, 8)); i++)
                        if (score_token(i) + lane_token(lane) < BASE % PAGE) s[n][i] = -INFINITY;
            }
#if HAS_STRIPES && QUERY_TOKENS == 1
            if ((page + 1) * PAGE > cut.start) {  // tokens that are read in the ring, or not there yet
                const int seen = cut.start - page * PAGE - lane_token(lane);
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                    for (int i = 0; i < PAGE / 8; i++)
                        if (score_token(i) >= seen) s[n][i] = -INFINITY;
            }
#endif
            cap(s, softcap);
#if HAS_STRIPES && QUERY_TOKENS > 1
            if (page >= shared.shared_pages)
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++) {
                    const int seen = shared.seen_from[4 * n + (lane & 3)] - page * PAGE - lane_token(lane);
#pragma unroll
                    for (int i = 0; i < PAGE / 8; i++)
                        if (score_token(i) >= seen) s[n][i] = UNSEEN;
                }
#elif QUERY_TOKENS > 1
            if (page >= shared.shared_pages)
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++)
                    if (shared.seen_from[4 * n + (lane & 3)] <= page * PAGE) {  // still in the ring for this query
#pragma unroll
                        for (int i = 0; i < PAGE / 8; i++) s[n][i] = LAZY_SCORES ? 0.f : UNSEEN;
#if WIDE
                        step[n] = LAZY_SCORES ? 0.f : step[n]; from[n] = LAZY_SCORES ? UNSEEN : from[n];
#endif
                    }
#endif
#if WIDE
            to_exponents(s, state, step, from, lane);
            wait_all_but<1>();
            __syncwarp();
            wide_values(state, s, v_slot, shared, lane);
#else
            float down[QUERY_TILES];
            state.raise(s, down, lane);
            wait_all_but<1>();
            packed_values(state, s, v_slot, shared.swap[warp], lane);
#endif
            __syncwarp();
            fetch_values(unit + WARPS, next_slot);
            slot = next_slot;
            next_slot = slot_of(unit + 2 * WARPS);
        }
        wait_all_but<0>();
        __syncwarp();
#if WIDE
        take_rows(state, lane);
#endif
#endif
        if (first_dense < last) {  // last, for what they ask for to be there
            float out[COLUMN_TILES][4 * DENSE_PARTS][4] = {};
            if (V_PACKED) slot = dense_slot_of(first_dense);
#pragma unroll 1
            for (int unit = first_dense; unit < last; unit += WARPS) {
                int from, stop;
                const int token = dense_tokens(unit, from, stop);
                next_slot = dense_slot_of(unit + WARPS);
                dense_unit(state, out, head, token, from, stop, slot, shared, warp, lane, log2_scale, softcap);
                slot = next_slot;
            }
            reorder(state, out, shared, warp, lane);
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
                for (int i = 0; i < V_GROUPS; i++) zero[i] = V_PACKED ? zeros_of(state, i, n, lane) : 0.f;
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        part[(4 * n + quad) * DIM + 16 * t + 8 * half + g] = state.out[n][t][half] + zero[16 * t / V_GROUP];
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
