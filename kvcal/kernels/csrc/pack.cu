// Tokens become pages, and pages tokens again: `append` (one decode step), `pack` (a prompt), `unpack`.
//
// One block writes the page of one row, head and side (pack_page.cuh): 128 tokens are staged in shared memory (heads of
// more than 128 channels are read in place), every group gets its scale and zero, and the planes are written 16 codes at a time,
// neighbouring threads to neighbouring words. Of a rotated page, a block writes PART_TOKENS tokens (pack_part.cuh), so that a few
// pages occupy the whole GPU. The bytes are those of kvcal/pages and kvcal/systems, bit for bit.
//
// `pack` and `unpack` are compiled with SIDE (0 keys, 1 values) and need that side's macros; without SIDE, `append` is
// compiled and needs both. PART_TOKENS is given where a side is rotated, and PART_BYTES of dynamic shared memory with it.
// Pointers are multiples of 16 bytes and strides multiples of 8 elements. Heads lie side by side: strides of sinks and rings
// are those from sequence to sequence, and strides of pages, in bytes, those from slot to slot.

#include "hadamard.cuh"
#include "pack_page.cuh"
#include "stored.cuh"
#if PART_TOKENS
#include "pack_eight.cuh"
#include "pack_part.cuh"
#endif

// Shared memory of a block, of so many bytes where none is dynamic.
#if PART_TOKENS
#define SHARED_MEMORY(bytes) extern __shared__ unsigned char memory[];
#else
#define SHARED_MEMORY(bytes) alignas(16) __shared__ unsigned char memory[bytes];
#endif

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

constexpr int STRIPE = Keys::stripe;  // tokens that are packed together
static_assert(STRIPE == Values::stripe && STRIPE % 16 == 0 && KV_PAGE_TOKENS % STRIPE == 0, "alike on both sides");
// Stripes of up to 128 channels are packed in eights, of larger heads one by a block.
constexpr bool HAS_STRIPES = STRIPE < KV_PAGE_TOKENS, IN_EIGHTS = PART_TOKENS == FEW;

// One side of a head range: the new tokens of every sequence, its memory, and what its pages need.
struct Store {
    const unsigned short* incoming;
    long long row_stride, head_stride, token_stride;
    unsigned short* sinks;
    long long sink_stride;
    unsigned short* ring;
    long long ring_stride;
    unsigned char* pages;
    long long page_stride;
    const unsigned short* feedback;
    const signed char* signs;
};

// The step, as ``append`` is told of it.
struct Step {
    int heads, sequences;
    const int *lengths, *rows, *table;
    long long table_stride, table_width;
    const float *rescale, *offset;
    int* error;

    // Whether the step completes a stripe, or a page where these are packed whole.
    KV_INLINE bool completes_stripe(int sequence) const { return is_last(lengths[sequence]); }
    KV_INLINE static bool is_last(int tokens) { return tokens % STRIPE >= STRIPE - QUERY_TOKENS; }
    // The first token of the stripe that the next token lies in, within its page.
    KV_INLINE int stripe_start(int sequence) const { return lengths[sequence] % KV_PAGE_TOKENS / STRIPE * STRIPE; }
};

template <class S>
KV_INLINE unsigned short* ring_of(const Store& store, const Step& step, int sequence, int head) {
    return store.ring + kv_row_start(kv_row_of(step.rows, sequence), store.ring_stride) +
           (long long)head * S::ring * S::dim;
}

// 16 bytes of a new token: to the ring, and to the sinks while they have room.
template <class S>
KV_INLINE void store_load(const Store& store, const Step& step, int sequence, int head, int number, int part) {
    const int at = step.lengths[sequence] + number;
    const unsigned short* incoming =
        store.incoming + sequence * store.row_stride + head * store.head_stride + number * store.token_stride;
    const uint4 token = ((const uint4*)incoming)[part];
    ((uint4*)(ring_of<S>(store, step, sequence, head) + at % S::ring * S::dim))[part] = token;
    if (at < S::sinks) {
        const long long first = kv_row_start(kv_row_of(step.rows, sequence), store.sink_stride);
        ((uint4*)(store.sinks + first + ((long long)head * S::sinks + at) * S::dim))[part] = token;
    }
}

// The step's tokens to rings and sinks, by the blocks from `first_block` on.
KV_INLINE void store_tokens(const Store& k, const Store& v, const Step& step, int first_block) {
    constexpr int LOADS = Keys::dim / 8;  // of a token
    const int of_side = step.sequences * step.heads, number = (int)blockIdx.x - first_block;
    for (int i = number * THREADS + threadIdx.x; number >= 0 && i < 2 * of_side * QUERY_TOKENS * LOADS;
         i += (gridDim.x - first_block) * THREADS) {
        const int part = i % LOADS, token = i / LOADS % QUERY_TOKENS, item = i / LOADS / QUERY_TOKENS;
        const int head = item % step.heads, sequence = item / step.heads % step.sequences;
        if (item < of_side) {
            store_load<Keys>(k, step, sequence, head, token, part);
        } else {
            store_load<Values>(v, step, sequence, head, token, part);
        }
    }
}

// The page that a sequence completes in the step: its record, or nullptr where it has no room, which is noted.
template <class S>
KV_INLINE unsigned char* record_of(const Store& store, const Step& step, int sequence, int head) {
    const int page = step.lengths[sequence] / KV_PAGE_TOKENS;
    if (page >= step.table_width) {
        if (threadIdx.x == 0) {
            atomicOr(step.error, NO_ROOM);
        }
        return nullptr;
    }
    return store.pages + step.table[sequence * step.table_stride + page] * store.page_stride + head * S::record;
}

template <class S>
KV_INLINE Source source_of(const Store& store, const Step& step, int sequence, int head) {
    const int stored = step.lengths[sequence], first = stored / KV_PAGE_TOKENS * KV_PAGE_TOKENS;
    // Sinks do not stretch the ranges of what is packed.
    return Source{
        ring_of<S>(store, step, sequence, head), S::dim, step.rescale + head * S::dim, step.offset + head * S::dim,
        S::ring, first, kv_min(S::sinks, first + step.stripe_start(sequence) + STRIPE - 1), store.feedback + head * FACTOR<S>, store.signs,
        store.incoming + sequence * store.row_stride + head * store.head_stride, store.token_stride, stored};
}

// What queries have summed up to, [D] and one number of a sequence and head, and the step's queries of the first head.
struct Queries {
    const unsigned short* q;
    long long head_stride;
    float* sum;
    int* since;
};

// Counts the queries of a sequence and head, and packs the page that it completes, if it does.
template <class S>
KV_INLINE void append_page(
    const Store& store, const Step& step, Scratch<S>& scratch, const Queries& queries, int sequence, int head) {
    static_assert(QUERY_TOKENS == 1 || !S::needs_queries, "queries of tokens that are taken back would stay counted");
    if constexpr (S::needs_queries) {
        for (int channel = threadIdx.x; channel < S::dim; channel += blockDim.x) {
            float sum = 0.0f;
            for (int member = 0; member < GROUP_HEADS; ++member) {
                sum = __fadd_rn(sum, fabsf(kv_float_of<DTYPE>(queries.q[member * queries.head_stride + channel])));
            }
            queries.sum[channel] = __fadd_rn(queries.sum[channel], sum);
        }
        __syncthreads();
    }
    if (!step.completes_stripe(sequence)) {
        return;
    }
    if (unsigned char* record = record_of<S>(store, step, sequence, head)) {
        float count = 1.0f;
        if constexpr (S::needs_queries) {
            count = (float)(GROUP_HEADS * (step.lengths[sequence] + 1 - *queries.since));
        }
        pack_page<S>(source_of<S>(store, step, sequence, head), scratch, record, queries.sum, count, step.error);
    }
    __syncthreads();
    if constexpr (S::needs_queries) {
        for (int channel = threadIdx.x; channel < S::dim; channel += blockDim.x) {
            queries.sum[channel] = 0.0f;
        }
        if (threadIdx.x == 0) {
            *queries.since = step.lengths[sequence] + 1;
        }
    }
}

#if PART_TOKENS

// Finds the sequences that complete a stripe. All lanes of a warp ask.
struct Completed {
    const Step& step;

    // Which of 32 sequences from the first on.
    KV_INLINE unsigned of(int first) const {
        const int sequence = first + threadIdx.x % 32;
        return __ballot_sync(0xffffffffu, sequence < step.sequences && step.completes_stripe(sequence));
    }

    // Whether the block of this number will have one, of so many blocks for each: before the kernel has waited, when lengths may be out of
    // date. So they are read past caches, by one warp, which tells the others.
    KV_INLINE bool may_have_work(void* memory, int blocks) const {
        volatile int* found = (volatile int*)memory;
        if (threadIdx.x < 32) {
            int count = 0;
#pragma unroll 1
            for (int first = 0; first < step.sequences; first += 32) {
                const int sequence = first + threadIdx.x;
                const int tokens = ((const volatile int*)step.lengths)[kv_min(sequence, step.sequences - 1)];
                count += __popc(__ballot_sync(0xffffffffu, sequence < step.sequences && Step::is_last(tokens)));
            }
            if (threadIdx.x == 0) {
                *found = count;
            }
        }
        __syncthreads();
        const bool has_work = blockIdx.x < *found * blocks;
        __syncthreads();
        return has_work;
    }

    KV_INLINE int count() const {
        int count = 0;
#pragma unroll 4
        for (int first = 0; first < step.sequences; first += 32) {
            count += __popc(of(first));
        }
        return count;
    }

    // Number n of them, below the count.
    KV_INLINE int number(int n) const {
        int first = 0;
        unsigned found = of(first);
        while (n >= __popc(found)) {
            n -= __popc(found);
            found = of(first += 32);
        }
        for (; n > 0; --n) {
            found &= found - 1;
        }
        return first + __ffs(found) - 1;
    }
};

// What a block holds that is the same for all eights of a head and side (``prepare_eight``): of an item, side by side.
struct Preparation {
    const Store &k, &v;
    const Step& step;
    void* memory;
    int item = -1;

    KV_INLINE void prepare(int item_) {
        if (IN_EIGHTS && item != item_) {
            if (Keys::is_rotated && item_ < step.heads) {
                of_side<Keys>(k, item_);
            } else {
                of_side<Values>(v, item_ % step.heads);
            }
            item = item_;
        }
    }

    template <class S>
    KV_INLINE void of_side(const Store& store, int head) const {
        if constexpr (IN_EIGHTS && S::is_rotated) {
            prepare_eight<S>(*(FewScratch<S>*)memory, store.feedback + head * FACTOR<S>, store.signs);
            __syncthreads();
        }
    }
};

// Packs these tokens of a sequence's page: whole stripes, or eight tokens of one.
template <class S>
KV_INLINE void append_part(
    const Store& store, const Step& step, void* memory, int sequence, int head, const Tokens& tokens) {
    if constexpr (S::is_rotated) {
        if (unsigned char* record = record_of<S>(store, step, sequence, head)) {
            const Source source = source_of<S>(store, step, sequence, head);
            if constexpr (IN_EIGHTS) {
                pack_eight<S>(source, *(FewScratch<S>*)memory, record, tokens.first, step.error);
            } else {
                if (HAS_STRIPES && tokens.begin == 0) {  // nothing is read of what was there before
                    for (int i = threadIdx.x; i < S::record / 16; i += THREADS) {
                        ((uint4*)record)[i] = make_uint4(0, 0, 0, 0);
                    }
                }
                pack_part<S>(source, *(PartScratch<S>*)memory, record, tokens, step.error);
            }
            __syncthreads();
        }
    }
}

#endif

// Any number of blocks, but where pages of a side are packed whole, one for every sequence, head and side. Stores the new
// tokens of B sequences and n heads, and packs the stripes or pages that they complete; the ring has room for these and the
// tokens after them. New tokens of a page are read where they come from: no block waits for another.
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
extern "C" __global__ void __launch_bounds__(PART_BOUNDS) append(
    const unsigned short* k_new, long long k_row_stride, long long k_head_stride, const unsigned short* v_new,
    long long v_row_stride, long long v_head_stride, const unsigned short* q, long long q_row_stride,
    long long q_head_stride, float* query_sum, long long query_sum_stride, int* query_since,
    long long query_since_stride, unsigned short* k_sinks, long long k_sink_stride, unsigned short* k_ring,
    long long k_ring_stride, unsigned char* k_pages, long long k_page_stride, unsigned short* v_sinks,
    long long v_sink_stride, unsigned short* v_ring, long long v_ring_stride, unsigned char* v_pages,
    long long v_page_stride, const int* lengths, const int* rows, const int* table, long long table_stride, long long table_width,
    const float* k_rescale, const float* k_offset, const unsigned short* k_feedback, const unsigned short* v_feedback,
    const signed char* k_signs, const signed char* v_signs, int* error, long long heads,
    long long sequences TOKEN_PARAMETERS) {
#if QUERY_TOKENS == 1
    const long long k_token_stride = 0, v_token_stride = 0;
#endif
    SHARED_MEMORY(kv_max(sizeof(Scratch<Keys>), sizeof(Scratch<Values>)))
    const Step step{
        (int)heads, (int)sequences, lengths, rows, table, table_stride, table_width, k_rescale, k_offset, error};
    const Store k{
        k_new, k_row_stride, k_head_stride, k_token_stride, k_sinks, k_sink_stride, k_ring, k_ring_stride, k_pages,
        k_page_stride, k_feedback, k_signs};
    const Store v{
        v_new, v_row_stride, v_head_stride, v_token_stride, v_sinks, v_sink_stride, v_ring, v_ring_stride, v_pages,
        v_page_stride, v_feedback, v_signs};
    const int of_side = step.sequences * step.heads;
#if PART_TOKENS
    const Completed completed{step};
    const int of_sequence = (Keys::is_rotated + Values::is_rotated) * step.heads;
    Preparation preparation{k, v, step, memory};
    if (IN_EIGHTS && completed.may_have_work(memory, of_sequence * (STRIPE / FEW))) {
        preparation.prepare(blockIdx.x % of_sequence);
    }
#endif
    kv_wait_for_previous();
    kv_let_next_start();
    if (!IN_EIGHTS) {
        store_tokens(k, v, step, 0);
    }
    const int page_head = blockIdx.x % step.heads, page_sequence = blockIdx.x / step.heads % step.sequences;
    if (blockIdx.x < of_side) {
        if constexpr (!Keys::is_rotated) {
            const int row = kv_row_of(rows, page_sequence);
            const Queries queries{
                q + page_sequence * q_row_stride + (long long)page_head * GROUP_HEADS * q_head_stride, q_head_stride,
                query_sum + row * query_sum_stride + page_head * Keys::dim,
                query_since + row * query_since_stride + page_head};
            append_page<Keys>(k, step, *(Scratch<Keys>*)memory, queries, page_sequence, page_head);
        }
    } else if (blockIdx.x < 2 * of_side) {
        if constexpr (!Values::is_rotated) {
            append_page<Values>(v, step, *(Scratch<Values>*)memory, Queries{}, page_sequence, page_head);
        }
    }
#if PART_TOKENS
    const int pages = completed.count() * of_sequence;
    // Few pages are dealt to all blocks, 32 tokens each: a block takes as long for 32 as one warp does.
    int parts = IN_EIGHTS ? STRIPE / FEW : HAS_STRIPES ? 1 : KV_PAGE_TOKENS / PART_TOKENS;
    while (!HAS_STRIPES && parts < KV_PAGE_TOKENS / 32 && 2 * parts * pages <= gridDim.x) {
        parts *= 2;
    }
    const int count = IN_EIGHTS ? FEW : HAS_STRIPES ? 32 : KV_PAGE_TOKENS / parts;
    // A block packs eights of one head and side, if there are blocks for all of them.
    int packing = gridDim.x;
    if (IN_EIGHTS) {
        packing -= packing < of_sequence ? 0 : packing % of_sequence;
        const int first_idle = kv_min(pages * parts, packing);
        store_tokens(k, v, step, first_idle < gridDim.x ? first_idle : 0);  // by blocks that pack nothing, if there are any
    }
    for (int unit = blockIdx.x; blockIdx.x < packing && unit < pages * parts; unit += packing) {
        const int item = unit % of_sequence, head = item % step.heads, part = unit / of_sequence % parts;
        const int sequence = completed.number(unit / of_sequence / parts);
        const int first = (HAS_STRIPES ? step.stripe_start(sequence) : 0) + part * count;
        const Tokens tokens{first, count, first, first + kv_min(count, STRIPE)};
        preparation.prepare(item);
        if (Keys::is_rotated && item < step.heads) {
            append_part<Keys>(k, step, memory, sequence, head, tokens);
        } else {
            append_part<Values>(v, step, memory, sequence, head, tokens);
        }
    }
#endif
}

#else

// ---- a prompt, and back

#if SIDE == 0
typedef Keys Packed;
#else
typedef Values Packed;
#endif

// Grid (pages P, or their parts; n heads, b sequences).
//   x            [b, n, T, D] in DTYPE, by strides in elements: tokens `begin` to `end` - 1, as the first page counts them
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
    const signed char* v_signs, const float* query_mean, int* error, long long begin, long long end) {
    SHARED_MEMORY(sizeof(Scratch<Packed>))
    constexpr int PARTS = PART_TOKENS ? KV_PAGE_TOKENS / kv_max(PART_TOKENS, 1) : 1;
    const int page = blockIdx.x / PARTS, head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
    const long long first_token = (long long)page * KV_PAGE_TOKENS - begin, slot = slots[row * slot_stride + page];
    const Source source{
        x + row * row_stride + head * head_stride + first_token * token_stride, token_stride,
        rescale + head * Packed::dim, offset + head * Packed::dim, 0, 0, 0,
        (SIDE == 0 ? k_feedback : v_feedback) + head * FACTOR<Packed>, SIDE == 0 ? k_signs : v_signs};
    unsigned char* record = pages + slot * page_stride + head * Packed::record;
#if PART_TOKENS
    const int first = blockIdx.x % PARTS * PART_TOKENS, before = (int)page * KV_PAGE_TOKENS;
    const Tokens tokens{
        first, PART_TOKENS, kv_max(first, (int)begin - before), kv_min(first + PART_TOKENS, (int)end - before)};
    if (tokens.begin < tokens.end) {
        pack_part<Packed>(source, *(PartScratch<Packed>*)memory, record, tokens, error);
    }
#else
    const float* query = query_mean + ((long long)row * heads + head) * Packed::dim;
    pack_page<Packed>(source, *(Scratch<Packed>*)memory, record, query, 1.0f, error);
#endif
}

enum { UNPACK_THREADS = 256 };

// Grid (pages P, n heads, b sequences), 256 threads: pages of these slots -> x [b, n, 128 P, D] in dtype number `type`,
// by strides in elements. Transforms are undone. signs: of this side, or 0; other arguments as for pack.
extern "C" __global__ void __launch_bounds__(UNPACK_THREADS) unpack(
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
