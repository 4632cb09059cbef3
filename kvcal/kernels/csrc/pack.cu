// Tokens become pages, and pages tokens again: `append` (one decode step), `pack` (a prompt), `unpack`.
//
// One block writes the page of one row, head and side (pack_page.cuh): 128 tokens are staged in shared memory (heads of
// more than 128 channels are read in place), every group gets its scale and zero, and the planes are written 16 codes at a time,
// neighbouring threads to neighbouring words. The bytes are those of kvcal/pages (uniform, tiered, scores, packing),
// bit for bit. Values are converted again wherever they are read, which costs less than room for fp32.
//
// `pack` and `unpack` are compiled with SIDE (0 keys, 1 values) and need that side's macros; without SIDE, `append` is
// compiled and needs both. 256 threads a block, no dynamic shared memory. Pointers are multiples of 16 bytes and strides
// multiples of 8 elements. Heads lie side by side: strides of sinks and rings are those from sequence to sequence, and
// strides of pages, in bytes, those from slot to slot.

#include "pack_page.cuh"
#include "stored.cuh"

#ifndef SIDE

// ---- one decode step

#ifndef QUERY_TOKENS
#define QUERY_TOKENS 1  // that the step stores
#endif
#if QUERY_TOKENS > 1
#define TOKEN_PARAMETERS , long long k_token_stride, long long v_token_stride
#else
#define TOKEN_PARAMETERS
#endif

// One side of a head range: the new tokens of every sequence, and its memory. `k_` and `v_` arguments of ``append``.
struct Store {
    const unsigned short* incoming;
    long long row_stride, head_stride, token_stride;
    unsigned short* sinks;
    long long sink_stride;
    unsigned short* ring;
    long long ring_stride;
    unsigned char* pages;
    long long page_stride;
};

// What queries have summed up to, [D] and one number of a sequence and head, and the step's queries of the first head.
struct Queries {
    const unsigned short* q;
    long long head_stride;
    float* sum;
    int* since;
};

template <class S>
KV_INLINE void append_side(
    const Store& store, Scratch<S>& scratch, const Queries& queries, int row, int tokens, const int* slots, int num_slots,
    const float* rescale, const float* offset, const unsigned short* feedback, const signed char* signs, int* error) {
    static_assert(QUERY_TOKENS == 1 || !S::needs_queries, "queries of tokens that are taken back would stay counted");
    const int head = blockIdx.x, page = tokens / KV_PAGE_TOKENS;
    const bool is_complete = tokens % KV_PAGE_TOKENS >= KV_PAGE_TOKENS - QUERY_TOKENS;
    unsigned short* ring = store.ring + kv_row_start(row, store.ring_stride) + (long long)head * S::ring * S::dim;
    const unsigned short* incoming = store.incoming + blockIdx.y * store.row_stride + head * store.head_stride;
    for (int load = threadIdx.x; load < QUERY_TOKENS * (S::dim / 8); load += blockDim.x) {
        const int number = QUERY_TOKENS == 1 ? 0 : load / (S::dim / 8), at = tokens + number;
        const int part = load - number * (S::dim / 8);
        const uint4 token = ((const uint4*)(incoming + number * store.token_stride))[part];
        ((uint4*)(ring + at % S::ring * S::dim))[part] = token;
        if (at < S::sinks) {
            const long long first = kv_row_start(row, store.sink_stride) + (long long)head * S::sinks * S::dim;
            ((uint4*)(store.sinks + first + at * S::dim))[part] = token;
        }
    }
    if constexpr (S::needs_queries) {
        for (int channel = threadIdx.x; channel < S::dim; channel += blockDim.x) {
            float sum = 0.0f;
            for (int member = 0; member < GROUP_HEADS; ++member) {
                sum = __fadd_rn(sum, fabsf(kv_float_of<DTYPE>(queries.q[member * queries.head_stride + channel])));
            }
            queries.sum[channel] = __fadd_rn(queries.sum[channel], sum);
        }
    }
    if (!is_complete) {
        return;
    }
    __syncthreads();  // the token and the sum are there
    if (page < num_slots) {
        unsigned char* record = store.pages + slots[page] * store.page_stride + head * S::record;
        const int first = page * KV_PAGE_TOKENS;
        // Sinks do not stretch the page's ranges.
        Source source{
            ring, S::dim, rescale + head * S::dim, offset + head * S::dim, S::ring, first,
            kv_min(S::sinks, first + KV_PAGE_TOKENS - 1), feedback + head * FACTOR<S>, signs};
        float count = 1.0f;
        if constexpr (S::needs_queries) {
            count = (float)(GROUP_HEADS * (tokens + 1 - *queries.since));
        }
        pack_page<S>(source, scratch, record, queries.sum, count, error);
    } else if (threadIdx.x == 0) {
        atomicOr(error, NO_ROOM);
    }
    if constexpr (S::needs_queries) {
        __syncthreads();
        for (int channel = threadIdx.x; channel < S::dim; channel += blockDim.x) {
            queries.sum[channel] = 0.0f;
        }
        if (threadIdx.x == 0) {
            *queries.since = tokens + 1;
        }
    }
}

// Grid (n heads, B sequences, 2 sides), 256 threads. Stores every sequence's new tokens, and packs the page that they
// complete, if they do; the ring has room for the page and the tokens after it.
//   k_new, v_new  [B, QUERY_TOKENS, n, D] in DTYPE, by strides in elements; q [B, n GROUP_HEADS, D] likewise, for query scores
//   query_sum     [B, n, D] fp32, sum of |q| since it was last 0; query_since [B, n] int32, the sequence's tokens then
//   k_sinks ...   the memory of the head range, as kvcal/kernels/operands.py has it
//   lengths       [B] int32, tokens before this step
//   rows          [B] int32, each sequence's row of sinks, ring and query statistic, or 0: in their order
//   table         [B, table_width] int32, slots of pages
//   k_rescale, k_offset  fp32 [n, D] of these heads, or 0
//   k_feedback, v_feedback  fp16 [n, D (D + 1) / 2], the factors of error feedback, or 0
//   k_signs, v_signs  int8 [D], of rotated pages, or 0
//   error         int32, gets the bits NON_FINITE and NO_ROOM
extern "C" __global__ void __launch_bounds__(THREADS) append(
    const unsigned short* k_new, long long k_row_stride, long long k_head_stride, const unsigned short* v_new,
    long long v_row_stride, long long v_head_stride, const unsigned short* q, long long q_row_stride,
    long long q_head_stride, float* query_sum, long long query_sum_stride, int* query_since,
    long long query_since_stride, unsigned short* k_sinks, long long k_sink_stride, unsigned short* k_ring,
    long long k_ring_stride, unsigned char* k_pages, long long k_page_stride, unsigned short* v_sinks,
    long long v_sink_stride, unsigned short* v_ring, long long v_ring_stride, unsigned char* v_pages,
    long long v_page_stride, const int* lengths, const int* rows, const int* table, long long table_stride, long long table_width,
    const float* k_rescale, const float* k_offset, const unsigned short* k_feedback, const unsigned short* v_feedback,
    const signed char* k_signs, const signed char* v_signs, int* error TOKEN_PARAMETERS) {
    kv_wait_for_previous();
    kv_let_next_start();
#if QUERY_TOKENS == 1
    const long long k_token_stride = 0, v_token_stride = 0;
#endif
    __shared__ union { Scratch<Keys> k; Scratch<Values> v; } scratch;
    const int head = blockIdx.x, sequence = blockIdx.y, tokens = lengths[sequence], row = kv_row_of(rows, sequence);
    const int* slots = table + sequence * table_stride;
    if (blockIdx.z == 0) {
        const Store store{
            k_new, k_row_stride, k_head_stride, k_token_stride, k_sinks, k_sink_stride, k_ring, k_ring_stride, k_pages,
            k_page_stride};
        const Queries queries{
            q + sequence * q_row_stride + (long long)head * GROUP_HEADS * q_head_stride, q_head_stride,
            query_sum + row * query_sum_stride + head * Keys::dim, query_since + row * query_since_stride + head};
        append_side<Keys>(
            store, scratch.k, queries, row, tokens, slots, (int)table_width, k_rescale, k_offset, k_feedback, k_signs,
            error);
    } else {
        const Store store{
            v_new, v_row_stride, v_head_stride, v_token_stride, v_sinks, v_sink_stride, v_ring, v_ring_stride, v_pages,
            v_page_stride};
        append_side<Values>(
            store, scratch.v, Queries{}, row, tokens, slots, (int)table_width, k_rescale, k_offset, v_feedback, v_signs,
            error);
    }
}

#else

// ---- a prompt, and back

#if SIDE == 0
typedef Keys Packed;
#else
typedef Values Packed;
#endif

// Grid (pages P, n heads, b sequences), 256 threads.
//   x            [b, n, 128 P, D] in DTYPE, by strides in elements
//   pages        records of the n heads of a slot side by side
//   slots        [b, P] int32, rows slot_stride elements apart
//   rescale, offset  fp32 [n, D] of these heads, or 0; k_feedback, v_feedback  fp16 [n, D (D + 1) / 2], or 0
//   k_signs, v_signs  int8 [D], or 0
//   query_mean   [b, n, D] fp32, for query scores, or 0
//   error        int32, gets the bit NON_FINITE
extern "C" __global__ void __launch_bounds__(THREADS) pack(
    const unsigned short* x, long long row_stride, long long head_stride, long long token_stride, unsigned char* pages,
    long long page_stride, const int* slots, long long slot_stride, const float* rescale,
    const float* offset, const unsigned short* k_feedback, const unsigned short* v_feedback, const signed char* k_signs,
    const signed char* v_signs, const float* query_mean, int* error) {
    __shared__ Scratch<Packed> scratch;
    const int head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
    const long long first_token = (long long)blockIdx.x * KV_PAGE_TOKENS, slot = slots[row * slot_stride + blockIdx.x];
    const Source source{
        x + row * row_stride + head * head_stride + first_token * token_stride, token_stride,
        rescale + head * Packed::dim, offset + head * Packed::dim, 0, 0, 0,
        (SIDE == 0 ? k_feedback : v_feedback) + head * FACTOR<Packed>, SIDE == 0 ? k_signs : v_signs};
    const float* query = query_mean + ((long long)row * heads + head) * Packed::dim;
    pack_page<Packed>(
        source, scratch, pages + slot * page_stride + head * Packed::record, query, 1.0f, error);
}

// Grid (pages P, n heads, b sequences), 256 threads: pages of these slots -> x [b, n, 128 P, D] in dtype number `type`,
// by strides in elements. Transforms are undone. signs: of this side, or 0; other arguments as for pack.
extern "C" __global__ void __launch_bounds__(THREADS) unpack(
    const unsigned char* pages, long long page_stride, const int* slots, long long slot_stride, void* x, long long type,
    long long row_stride, long long head_stride, long long token_stride, const float* rescale, const float* offset,
    const signed char* signs) {
    constexpr int DIM = Packed::dim, LANES = Packed::is_rotated ? 8 : 1, OWN = Packed::is_rotated ? DIM / LANES : 1;
    const int head = blockIdx.y, row = blockIdx.z;
    const long long slot = slots[row * slot_stride + blockIdx.x];
    const unsigned char* record = pages + slot * page_stride + head * Packed::record;
    const long long first_token = (long long)blockIdx.x * KV_PAGE_TOKENS;
    const long long start = row * row_stride + head * head_stride + first_token * token_stride;
    // One channel a thread, or where pages are rotated, a token for eight lanes.
    for (int i = threadIdx.x; i < KV_PAGE_TOKENS * DIM / OWN; i += blockDim.x) {
        const int token = i / (DIM / OWN), first = i % (DIM / OWN);
        float values[OWN];
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            values[k] = stored_value<Packed>(record, token, first + k * LANES);
        }
        if constexpr (Packed::is_rotated) {
            hadamard<LANES>(values, first);
        }
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const int channel = first + k * LANES;
            float y = values[k];
            if constexpr (Packed::is_rotated) {
                y = __fmul_rn(y, (float)signs[channel]);
            }
            if constexpr (Packed::has_rescale) {
                y = __fmul_rn(y, rescale[head * DIM + channel]);
            }
            if constexpr (Packed::has_offset) {
                y = __fadd_rn(y, offset[head * DIM + channel]);
            }
            const long long at = start + token * token_stride + channel;
            if (type == KV_FLOAT32) {
                ((float*)x)[at] = y;
            } else {
                ((unsigned short*)x)[at] = type == KV_FLOAT16 ? kv_bits_of<KV_FLOAT16>(y) : kv_bits_of<KV_BFLOAT16>(y);
            }
        }
    }
}

#endif
