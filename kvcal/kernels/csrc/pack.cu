// Tokens become pages, and pages tokens again: `append` (one decode step), `pack` (a prompt), `unpack`.
//
// One block writes the page of one row, head and side: 128 tokens are staged in shared memory (heads of more than 128
// channels are read in place), every group gets its scale and zero, and the planes are written 16 codes at a time,
// neighbouring threads to neighbouring words. The bytes are those of kvcal/quantizers (pages, tiers, scores, packing),
// bit for bit. Values are converted again wherever they are read, which costs less than room for fp32.
//
// `pack` and `unpack` are compiled with SIDE (0 keys, 1 values) and need that side's macros; without SIDE, `append` is
// compiled and needs both. 256 threads a block, no dynamic shared memory. Tensors are contiguous where no strides are
// given; pointers are multiples of 16 bytes and strides multiples of 8 elements.
//
// Left out: a ring buffer (moving a window once a page costs less than a modulus in every load of `decode`).

#include "page.cuh"
#include "stage.cuh"
#include "stored.cuh"

#ifndef SIDE

// ---- one decode step

// One side of a head range: its memory, and the new token of every row.
struct Store {
    const unsigned short* incoming;
    long long row_stride, head_stride;
    unsigned short* sinks;
    unsigned short* buffer;
    unsigned char* pages;
    const int* page_at;
    long long page_at_length, max_pages;
};

template <class S>
KV_INLINE void append_side(
    const Store& store, Scratch<S>& scratch, const unsigned short* q, long long q_row_stride, long long q_head_stride,
    float* query_sum, int* query_start, const int* lengths, const float* rescale, const float* offset, int first_head,
    int* error) {
    const int head = blockIdx.x, heads = gridDim.x, row = blockIdx.y, tokens = lengths[row];
    const long long of_head = (long long)row * heads + head;
    const int length = (int)store.page_at_length;
    const int pages = kv_pages_of<S>(tokens, store.page_at, length);
    const int packed = kv_pages_of<S>(kv_max(0, tokens - 1), store.page_at, length);
    unsigned short* buffer = store.buffer + of_head * (S::buffer * S::dim);
    const int held = kv_max(0, tokens - S::sinks) - KV_PAGE_TOKENS * pages;
    const bool due = pages > packed;
    query_sum += of_head * S::dim;
    if (due) {
        if (packed < store.max_pages) {
            const long long number = (row * store.max_pages + packed) * heads + head;
            unsigned char* record = store.pages + number * S::record;
            float count = 1.0f;
            if constexpr (S::hears_queries) {
                count = (float)(GROUP_HEADS * (tokens - query_start[of_head]));
            }
            Source source{buffer, S::dim, rescale + head * S::dim, offset + head * S::dim};
            pack_page<S>(source, scratch, record, query_sum, count, packed, first_head + head, error);
        } else {
            atomicOr(error, NO_ROOM);
        }
        // 128 tokens at a time: a part may be overwritten once it has been moved, or packed, itself.
        constexpr int KEPT = S::buffer - KV_PAGE_TOKENS;
        for (int start = 0; start < KEPT; start += KV_PAGE_TOKENS) {
            __syncthreads();
            unsigned short* to = buffer + start * S::dim;
            copy_tokens<S>(to, S::dim, to + KV_PAGE_TOKENS * S::dim, S::dim, kv_min(KV_PAGE_TOKENS, KEPT - start));
        }
        __syncthreads();
    }
    unsigned short* place = buffer + held * S::dim;
    if (tokens < S::sinks) {
        place = store.sinks + (of_head * S::sinks + tokens) * S::dim;
    }
    copy_tokens<S>(place, S::dim, store.incoming + row * store.row_stride + head * store.head_stride, S::dim, 1);
    if constexpr (S::hears_queries) {
        const unsigned short* of_group = q + row * q_row_stride + (long long)head * GROUP_HEADS * q_head_stride;
        for (int channel = threadIdx.x; channel < S::dim; channel += blockDim.x) {
            float sum = 0.0f;
            for (int member = 0; member < GROUP_HEADS; ++member) {
                sum = __fadd_rn(sum, fabsf(kv_float_of<DTYPE>(of_group[member * q_head_stride + channel])));
            }
            query_sum[channel] = __fadd_rn(due ? 0.0f : query_sum[channel], sum);
        }
        if (due && threadIdx.x == 0) {
            query_start[of_head] = tokens;
        }
    }
}

// Grid (n heads, B rows, 2 sides), 256 threads. Packs the page that is due, if one is, and stores the row's new token.
//   k_new, v_new  [B, n, D] in DTYPE, by strides in elements; q [B, n GROUP_HEADS, D] likewise, for query scores
//   k_sinks ...   the store of the head range, as kvcal/kernels/operands.py has it; *_max_pages: pages a row has room for
//   query_sum     [B, n, D] fp32, sum of |q| since it was last 0; query_start [B, n] int32, the row's tokens then
//   lengths       [B] int32, tokens before this step; *_page_at int32 [*_page_at_length] for a window rule, or 0
//   k_rescale, k_offset  fp32 [n, D] of these heads, or 0; first_head: the number of the first one in the layer
//   error         int32, gets the bits NON_FINITE and NO_ROOM
// With STAGED, k_pages and v_pages are the memory of all pages, and the regions say what of it is theirs, and its room.
extern "C" __global__ void __launch_bounds__(THREADS) append(
    const unsigned short* k_new, long long k_row_stride, long long k_head_stride, const unsigned short* v_new,
    long long v_row_stride, long long v_head_stride, const unsigned short* q, long long q_row_stride,
    long long q_head_stride, unsigned short* k_sinks, unsigned short* k_buffer, unsigned char* k_pages,
    unsigned short* v_sinks, unsigned short* v_buffer, unsigned char* v_pages, float* query_sum, int* query_start,
    const int* lengths, const int* k_page_at, long long k_page_at_length, const int* v_page_at,
    long long v_page_at_length, long long k_max_pages, long long v_max_pages, const float* k_rescale,
    const float* k_offset, long long first_head, int* error STAGE_PARAMETERS) {
    kv_let_next_start();
#ifdef STAGED
    if (k_region->bits != K_BITS || v_region->bits != V_BITS) {
        return;
    }
    k_pages += k_region->base, k_max_pages = k_region->pages;
    v_pages += v_region->base, v_max_pages = v_region->pages;
#endif
    __shared__ union { Scratch<Keys> k; Scratch<Values> v; } scratch;
    if (blockIdx.z == 0) {
        Store store{
            k_new, k_row_stride, k_head_stride, k_sinks, k_buffer, k_pages, k_page_at, k_page_at_length, k_max_pages};
        append_side<Keys>(
            store, scratch.k, q, q_row_stride, q_head_stride, query_sum, query_start, lengths, k_rescale, k_offset,
            (int)first_head, error);
    } else {
        Store store{
            v_new, v_row_stride, v_head_stride, v_sinks, v_buffer, v_pages, v_page_at, v_page_at_length, v_max_pages};
        append_side<Values>(
            store, scratch.v, q, 0, 0, query_sum, query_start, lengths, k_rescale, k_offset, (int)first_head, error);
    }
}

#else

// ---- a prompt, and back

#if SIDE == 0
typedef Keys Packed;
#else
typedef Values Packed;
#endif

// Grid (most pages of a row, n heads, B rows), 256 threads.
//   x            16 bits, by strides in elements; token t of the first page of row b is at column starts[b] + skip + t
//   starts       [B] int32, columns of padding before each row's tokens, or 0 for none; skip: tokens that are sinks
//   counts       [B] int32, pages to write, or 0 for the whole grid
//   first_page   number in the row of the first one; first_pages [B] int32 is added to it, or 0
//   pages        [B, max_pages, n, record]
//   rescale, offset  fp32 [n, D] of these heads, or 0
//   query_mean   [B, n, D] fp32, for query scores, or 0; first_head: the number of the first head in the layer
//   error        int32, as for append
extern "C" __global__ void __launch_bounds__(THREADS) pack(
    const unsigned short* x, long long row_stride, long long head_stride, long long token_stride, const int* starts,
    long long skip, const int* counts, long long first_page, const int* first_pages, unsigned char* pages,
    long long max_pages, const float* rescale, const float* offset, const float* query_mean, long long first_head,
    int* error) {
    __shared__ Scratch<Packed> scratch;
    const int head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
    if (counts != nullptr && (int)blockIdx.x >= counts[row]) {
        return;
    }
    const int page = blockIdx.x + (int)first_page + (first_pages == nullptr ? 0 : first_pages[row]);
    if (page >= max_pages) {
        atomicOr(error, NO_ROOM);
        return;
    }
    const long long column = (starts == nullptr ? 0 : starts[row]) + skip + (long long)blockIdx.x * KV_PAGE_TOKENS;
    Source source{
        x + row * row_stride + head * head_stride + column * token_stride, token_stride, rescale + head * Packed::dim,
        offset + head * Packed::dim};
    const float* query = query_mean + ((long long)row * heads + head) * Packed::dim;
    unsigned char* record = pages + (((long long)row * max_pages + page) * heads + head) * Packed::record;
    pack_page<Packed>(source, scratch, record, query, 1.0f, page, (int)first_head + head, error);
}

// Grid (pages, n heads, B rows), 256 threads: pages[b, first_page + p, h] of [B, max_pages, n, record] -> tokens 128 p
// to 128 p + 127 of x[b, h], in dtype number `type`, by strides in elements. Transforms are undone: rescale, offset as
// for pack.
extern "C" __global__ void __launch_bounds__(THREADS) unpack(
    const unsigned char* pages, long long max_pages, long long first_page, void* x, long long type,
    long long row_stride, long long head_stride, long long token_stride, const float* rescale, const float* offset) {
    constexpr int DIM = Packed::dim;
    const int head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
    const unsigned char* record =
        pages + ((row * max_pages + first_page + blockIdx.x) * heads + head) * Packed::record;
    const long long start = row * row_stride + head * head_stride + blockIdx.x * KV_PAGE_TOKENS * token_stride;
    for (int i = threadIdx.x; i < KV_PAGE_TOKENS * DIM; i += blockDim.x) {
        const int token = i / DIM, channel = i % DIM;
        float y = stored_value<Packed>(record, token, channel);
        if constexpr (Packed::has_rescale) {
            y = __fmul_rn(y, rescale[head * DIM + channel]);
        }
        if constexpr (Packed::has_offset) {
            y = __fadd_rn(y, offset[head * DIM + channel]);
        }
        const long long place = start + token * token_stride + channel;
        if (type == KV_FLOAT32) {
            ((float*)x)[place] = y;
        } else {
            ((unsigned short*)x)[place] = type == KV_FLOAT16 ? kv_bits_of<KV_FLOAT16>(y) : kv_bits_of<KV_BFLOAT16>(y);
        }
    }
}

#endif
