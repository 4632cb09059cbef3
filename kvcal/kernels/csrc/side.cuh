// One side of a head range as the kernels that write pages are compiled for it: from its macros.

#include "common.cuh"

#if DTYPE != 0 && DTYPE != 1
#error "pages are packed from float16 or bfloat16"
#endif

// Tokens that a block packs of a rotated page at most, its threads, the warps that share the chains of one. Blocks of an SM
// bound registers only where it has room for several.
#ifndef PART_TOKENS
#define PART_TOKENS 0
#define PART_THREADS 256
#endif
#ifdef PART_BLOCKS
#define PART_BOUNDS PART_THREADS, PART_BLOCKS
#else
#define PART_BLOCKS 1
#define PART_BOUNDS PART_THREADS
#endif
#ifndef PART_TEAM
#define PART_TEAM 1
#endif
enum { CANDIDATES = 3, THREADS = PART_THREADS, NO_SLOT = 255, RAW_BITS = 16 };
enum { FEW = 8 };  // PART_TOKENS where stripes are packed by pack_eight.cuh
enum { MAGNITUDE, VARIANCE, RANGE, QUERY_MAGNITUDE, QUERY_RANGE };


// Channels of a page with `bits` bits: slots from `first` on, their high planes (`columns` slots wide with padding)
// from byte `high` of the record on. `above`: the bits of an fp64 that a score must exceed, if has_above.
struct Tier {
    int bits, room, first, high, columns;
    bool has_above;
    long long above;
};

#define TIER(i) \
    Tier { \
        K_TIER##i##_BITS, K_TIER##i##_ROOM, K_TIER##i##_SLOT, K_TIER##i##_HIGH, K_TIER##i##_COLUMNS, \
            K_TIER##i##_HAS_ABOVE != 0, K_TIER##i##_ABOVE \
    }

#ifndef K_FEEDBACK
#define K_FEEDBACK 0
#endif
#ifndef V_FEEDBACK
#define V_FEEDBACK 0
#endif

#ifdef K_DIM
#if K_TIERS == 0
#define K_SCORE 0
#define K_SLOTS 0
#define K_RAW 0
#define K_RAW_SLOTS 0
#define K_INDEX K_RECORD
#endif
struct Keys {
    static constexpr int side = 0, dim = K_DIM, bits = K_BITS, axis = K_AXIS, group = K_GROUP, param = K_PARAM;
    static constexpr int record = K_RECORD, scale = K_SCALE, zero = K_ZERO;
    static constexpr int sinks = K_SINKS, window = K_WINDOW, ring = K_RING, stripe = K_STRIPE;
    static constexpr int tiers = K_TIERS, score = K_SCORE, slots = K_SLOTS;
    static constexpr int raw = K_RAW, raw_slots = K_RAW_SLOTS, index = K_INDEX;
    static constexpr bool has_rescale = K_RESCALE, has_offset = K_OFFSET, has_feedback = K_FEEDBACK && bits != RAW_BITS;
    static constexpr bool has_gain = false;
    static constexpr bool is_rotated = K_ROTATED;  // and have no zeros: they are -mean_code scales
    static constexpr long long gaussian_step = K_STEP;  // of rotated codes, in standard deviations: the bits of an fp64
    static constexpr bool needs_queries = tiers > 0 && (score == QUERY_MAGNITUDE || score == QUERY_RANGE);

    // Tier i, from most bits to fewest.
    KV_INLINE static constexpr Tier tier(int i) {
#if K_TIERS > 2
        if (i == 2) {
            return TIER(2);
        }
#endif
#if K_TIERS > 1
        if (i == 1) {
            return TIER(1);
        }
#endif
#if K_TIERS > 0
        return TIER(0);
#else
        return Tier{};
#endif
    }
};
#endif

#ifdef V_DIM
struct Values {
    static constexpr int side = 1, dim = V_DIM, bits = V_BITS, axis = V_AXIS, group = V_GROUP, param = V_PARAM;
    static constexpr int record = V_RECORD, scale = V_SCALE, zero = V_ZERO;
    static constexpr int sinks = V_SINKS, window = V_WINDOW, ring = V_RING, stripe = V_STRIPE;
    static constexpr int tiers = 0, score = 0, slots = 0, raw = 0, raw_slots = 0, index = record;
    static constexpr bool has_rescale = false, has_offset = false, has_feedback = V_FEEDBACK && bits != RAW_BITS;
    static constexpr bool has_gain = V_GAIN && bits != RAW_BITS;
    static constexpr bool is_rotated = V_ROTATED;
    static constexpr long long gaussian_step = V_STEP;
    static constexpr bool needs_queries = false;
};
#endif

// Sizes that follow from a side.
template <class S>
struct Page {
    static constexpr int padded = kv_round_up(S::dim, 16);
    static constexpr int rows = S::side == 0 ? KV_PAGE_TOKENS : padded;
    static constexpr int columns = S::side == 0 ? padded : KV_PAGE_TOKENS;
    static constexpr int groups = kv_ceil_div(S::axis == 0 ? KV_PAGE_TOKENS : S::dim, S::group);
    static constexpr int others = S::axis == 0 ? padded : KV_PAGE_TOKENS;
    static constexpr float mean_code = .5f * ((1 << S::bits) - 1);
    static constexpr bool is_raw = S::bits == RAW_BITS, is_staged = !is_raw && S::dim <= 128;
    static constexpr int stride = S::dim + 8;  // of the staged tokens: 16 bytes more, which spreads them over banks
};

// Shared memory of one page, with its tokens if they are staged.
template <class S, bool IS_STAGED = Page<S>::is_staged>
struct Scratch {
    struct Params {
        float step[Page<S>::is_raw ? 1 : Page<S>::groups * Page<S>::others];
        float zero[Page<S>::is_raw ? 1 : Page<S>::groups * Page<S>::others];
    };
    alignas(16) unsigned short tile[IS_STAGED ? KV_PAGE_TOKENS * Page<S>::stride : 8];
    union {
        Params params;
        double partial[4][S::tiers ? S::dim : 1];  // sums of every fourth token, before there are params
    };
    double score[S::tiers ? S::dim : 1];
    short channel[S::tiers ? S::slots : 1];      // of every slot, -1 for none
    unsigned char slot[S::tiers ? S::dim : 1];   // of every channel
    unsigned char level[S::tiers ? S::dim : 1];  // largest code of every channel, 0 for the 16-bit tier
};

// Numbers of error feedback of one head: the factor's, and the gains.
template <class S>
constexpr int FACTOR = S::dim * (S::dim + 1) / 2 + (S::has_gain ? S::dim : 0);

// The 128 tokens of a page of one head as the model made them, and the transforms of its pages.
struct Source {
    const unsigned short* tokens;
    long long stride;  // elements from token to token
    const float* rescale;
    const float* offset;
    // Of a ring of so many tokens, otherwise 0: the page's first token, and the token that stands for those before it.
    int ring, first, least;
    // The factor of error feedback (kvcal/pages/error_feedback.py): fp16, U row by row, on its diagonal the costs of channels;
    // after it the gains of channels, if there are any.
    const unsigned short* feedback;
    const signed char* signs;  // of rotated pages

    // The step's tokens, which the ring may not have yet: number `stored` and those after it, so many elements apart.
    const unsigned short* incoming;
    long long incoming_stride;
    int stored;

    KV_INLINE const unsigned short* at(int token) const {
        if (ring == 0) {
            return tokens + token * stride;
        }
        const int at = kv_max(first + token, least);
        return at < stored ? tokens + at % ring * stride : incoming + (at - stored) * incoming_stride;
    }
};

// Copies `count` tokens of a page from `first` on, `stride` elements from one to the next, 16 bytes a thread. In place of
// tokens before `begin`, and from `end` on, come the nearest of the others.
template <class S>
KV_INLINE void copy_tokens(
    unsigned short* to, int stride, const Source& source, int first, int count, int begin = 0,
    int end = KV_PAGE_TOKENS) {
    constexpr int LOADS = S::dim / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < count * LOADS; i += THREADS) {
        const int token = i / LOADS, load = i % LOADS;
        ((uint4*)(to + token * stride))[load] = ((const uint4*)source.at(kv_min(kv_max(first + token, begin), end - 1)))[load];
    }
}

// A token's channel with offset and rescaling, before it is rotated or quantized.
template <class S>
KV_INLINE float transformed(float x, const Source& source, int channel) {
    if constexpr (S::has_offset) {
        x = __fsub_rn(x, source.offset[channel]);
    }
    if constexpr (S::has_rescale) {
        x = __fdiv_rn(x, source.rescale[channel]);
    }
    return x;
}
