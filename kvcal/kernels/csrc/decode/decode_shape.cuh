// What `decode` is compiled for: sizes from the macros of a variant, the shared memory of a block, its arguments.

#include "common.cuh"

#ifndef QUERY_TOKENS
#define QUERY_TOKENS 1                            // of a step: drafts that are verified come several at a time
#endif
#define TOKEN_HEADS (GROUP_HEADS / QUERY_TOKENS)  // of the GROUP_HEADS queries that share a KV head, those of one token
#if QUERY_TOKENS > 1
#define QUERY_PARAMETERS , i64 q_token
#else
#define QUERY_PARAMETERS
#endif
#define MAX_ROWS 512
// HEADS: those that one pass over the cache serves (kvcal/kernels/decode.py).
#define QUERY_TILES (HEADS / 4)                   // of 4 query heads: two columns of the tensor core's tile each; if
                                                  // WIDE, one of each of them (wide_keys.cuh)
#define COLUMN_TILES ((QUERY_TILES + 1) / 2)      // of 8 columns, for all of which codes are expanded once: 2 if WIDE, at most
#define PASSES ((GROUP_HEADS + HEADS - 1) / HEADS)
#define DIM K_DIM
#define PAGE 128
#define K_PACKED (K_BITS != 16)
#define V_PACKED (V_BITS != 16)
#define HAS_STRIPES (V_STRIPE < PAGE)                        // of pages, the last of which is read in part: both sides have
                                                             // them, and equal windows and sinks
#define BASE (V_PACKED ? V_SINKS : K_PACKED ? K_SINKS : 0)  // tokens before it are read from sinks, the others from pages
#define FIRST_PAGE (BASE / PAGE)                             // that is read
#define TILES (DIM / 16)
#define QUARTER (DIM / 4)                                    // channels of a lane of a quad
#define QUERY_WORDS ((QUARTER + 15) / 16 * 4)                // of four channels, of a lane's column: whole words of 16 codes
#define QUERY_IN_LIMBS (K_PACKED && K_AXIS)                   // once a head; else with every page's scales
#define QUERY_IN_FLOATS (K_PACKED && !K_AXIS)
#define K_ZEROS_BY_HALVES (WIDE && K_AXIS == 0 && K_PARAM == 0)  // zeros of keys are an operand, too
// Whether a page's scores stay sums of products until they are exponents.
#define LAZY_SCORES (WIDE && K_AXIS == 0 && !HAS_SOFTCAP && K_RAW_SLOTS == 0 && BASE % PAGE == 0)
// Whether they come out relative to the maximum so far.
#define RELATIVE_SCORES (WIDE && K_AXIS && !HAS_SOFTCAP)
#ifndef K_RAW_SLOTS
#define K_RAW_SLOTS 0
#endif
// Planes of keys that wide tiles read lie so that lanes meet different banks: halves of 128 bytes are exchanged in every second
// TURN bytes, which lanes g that differ in the bit TURN_LANE read at a time.
#define TURN (DIM == 128 ? 1024 : 512)
#define TURN_LANE (DIM == 256 ? 4 : 8)
#define TURNED_BYTES (WIDE && (DIM == 64 || DIM == 128 || DIM == 256) ? K_BITS / 2 * PAGE * DIM / 4 : 0)
#define DENSE_PARTS ((DIM + 63) / 64)                        // of values that are not packed, 64 channels each
#define K_GROUPS (K_AXIS == 0 ? PAGE / K_GROUP : (DIM + K_GROUP - 1) / K_GROUP)
#define V_GROUPS ((DIM + V_GROUP - 1) / V_GROUP)
// Large heads have no registers for codes that meet one group of channels after the other: they meet all groups tile by tile.
#define K_EXPANDED_ONCE (K_GROUPS > 1 && DIM > 128)
#define MAX2(a, b) ((a) > (b) ? (a) : (b))
#define MIN2(a, b) ((a) < (b) ? (a) : (b))
// Power of two of the bytes that hold codes of values (codes.cuh); K_LIFT, of keys: kvcal/kernels/choice.py.
#define V_LIFT (V_BITS == 1 ? 7 : V_BITS == 2 ? 6 : V_BITS == 8 ? 0 : 4)
// Records of keys and of values, each at a multiple of 128 bytes; at the end of a head, what its warp found.
#define ALIGNED(bytes) (((bytes) + 127) / 128 * 128)
#define K_SLOT (K_PACKED && V_PACKED ? ALIGNED(K_RECORD) : 0)
#define SLOT_BYTES MAX2(K_SLOT + (V_PACKED ? ALIGNED(V_RECORD) : 0), HEADS * DIM * 4)
// A page of packed values whose keys are not packed: only where their windows differ, or keys have 16 bits.
#define K_LAGS (!K_PACKED || HAS_WINDOW_RULE || K_WINDOW > V_WINDOW)
// And a page of packed keys whose values are not.
#define K_LEADS (K_PACKED && (!V_PACKED || HAS_WINDOW_RULE || V_WINDOW > K_WINDOW))
// Tokens of a unit that is not packed. Where they are few, one tile, for which values are loaded together with keys.
#define DENSE_IS_RARE (K_PACKED && V_PACKED && !K_LEADS)
#define UNIT (DENSE_IS_RARE ? 16 : 32)
// Whether keys or values of such a unit may lie in a page. All units begin at a multiple of UNIT, so it is one page.
#define DENSE_READS_PAGES (!K_PACKED || !V_PACKED || K_LEADS)
// Whether such a unit lies in one page, or in the ring without a turn of it.
#define UNITS_IN_A_ROW (!K_PACKED && !V_PACKED && K_SINKS + V_SINKS == 0 && K_RING % UNIT + V_RING % UNIT == 0 && !WHOLE_RING)
// Units in whose time a block does what it does once a head: where heads are not dealt whole, they count for more.
#define EXTRA_UNITS 16
#define MERGED 16  // parts that are loaded at a time
#define INFINITY __int_as_float(0x7f800000)
// A score of a token that some queries see and others do not. Finite, since a warp may see none for a query: what it then
// sums up has no weight next to what another warp sees.
#define UNSEEN -1e30f
#define LOG2E 1.4426950408889634f

// Per token, a rescaling of keys is in the query, whose numbers may then be of any size: what 16 bits of the largest one
// leave of them is an operand of its own. (Per channel, scales of keys undo it.)
#define QUERY_PARTS (K_AXIS && K_RESCALE ? 2 : 1)
// bf16 keys meet a query of more bits in two products.
#define SPLIT_QUERY (DTYPE == 1 && Q_DTYPE != 1)

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;

namespace decode_ {

// Probabilities of 4 heads on their way from the lanes that computed them to the lanes that multiply them: words between
// parts of 4 tokens, and between heads, which keep both sides free of bank conflicts.
constexpr int SWAP_PART = 164, SWAP_HEAD = 40, SWAP_WORDS = 3 * SWAP_PART + 3 * SWAP_HEAD + 32;
constexpr int SWAP_ROOM = WIDE ? 4 * DIM : QUERY_TILES * SWAP_WORDS;

// The token of score ``i`` of a page: by tiles of 16, or where pages are wide, as tensor cores take values (wide_values.cuh).
__device__ __forceinline__ constexpr int lane_token(int lane) { return WIDE ? lane / 8 * 32 + lane / 4 % 2 * 8 : lane / 4; }
__device__ __forceinline__ constexpr int score_token(int i) { return WIDE ? i % 2 * 16 + i / 2 : 8 * i; }

struct __align__(128) Shared {
    unsigned char slots[WARPS][SLOT_BYTES];
#if QUERY_IN_LIMBS
    u32 query_limbs[QUERY_PARTS][QUERY_TILES * QUERY_WORDS / 4][32][4];  // the query as operands, for all pages of a head
#endif
#if QUERY_IN_FLOATS
    float query[QUERY_TILES * DIM / 32][32][4];   // as pages meet it: the columns of every lane (limbs.cuh, wide_keys.cuh)
#endif
#if V_ROTATED
    signed char v_signs[DIM] __attribute__((aligned(16)));
#endif
#if WIDE
    u32 ones[16];                                 // 32 tokens of 1, in half precision
#if K_ZEROS_BY_HALVES
    u32 query_halves[2][QUARTER / 8][32][4];  // the query in half precision, and what that leaves, as operands
    float query_power[HEADS];                     // in units of this
#endif
#endif
    u32 query_dense[COLUMN_TILES][DIM / 32][32][4];  // as it came, for keys that are not packed
#if SPLIT_QUERY
    u32 query_rest[COLUMN_TILES][DIM / 32][32][4];   // what its first half leaves
#endif
    float query_offset[HEADS];                    // q . offset
#if QUERY_IN_LIMBS
    float query_sum[K_GROUPS][HEADS];             // over channel groups, for per-token zeros
    float query_lost[K_GROUPS][HEADS];            // of what rounding to limbs takes from it
    float query_unit[QUERY_PARTS][HEADS];         // of query_limbs
#endif
    float max_[WARPS][HEADS], sum[WARPS][HEADS];
#if QUERY_TOKENS > 1
    int seen_from[HEADS], seen_to[HEADS];         // tokens whose values each query meets unpacked, besides the sinks
    int packed_keys[HEADS];                       // and those whose keys it does not, before that
    int shared_pages, shared_key_pages;           // that all queries meet
#endif
#if K_TIERS > 0
    u32 channels[WARPS][K_SLOTS];
#endif
    int is_last;
    int all, blocks, position, end;               // units, and the block's part of them that is left
    int extra;                                    // units that a head counts for beyond its own
    int virtual_head, first_block, num_blocks;    // that have parts of it
    int num_warps;                                // of this block, likewise
    int head_start, head_units;
    int units[MAX_ROWS];                          // running sums
    int lengths[MAX_ROWS];
    float swap[WARPS][SWAP_ROOM] __attribute__((aligned(16)));
};

// The token, of several in a step, that a member of a group of queries is of.
__device__ __forceinline__ int token_of(int member) { return QUERY_TOKENS == 1 ? 0 : member / TOKEN_HEADS; }

// What the query, and the merge of parts, are told.
struct Args {
    const void* q; i64 q_row, q_head, q_token, heads;
    const float *k_rescale, *k_offset, *s_aux; float* parts; int* counters; void* out;
};

// How the tokens of a sequence are cut in units: pages of packed values from FIRST_PAGE on, sinks, and tokens from
// ``start`` on, of which those before ``from`` are left out. While no page has a token after the sinks, all tokens from 0
// on are one run, and no key is read from a page of codes (from = -1). Of several query tokens, the first meets ``v_first``
// tokens in pages and the last ``v_read``: what is in a page for some and not for others is in units of both kinds.
struct Cut {
    int pages, sinks, start, from;

    __device__ __forceinline__ Cut(int k_read, int v_read, int v_first) {
        const bool has_pages = V_PACKED && v_read > BASE, is_split = has_pages || (K_LEADS && k_read > BASE);
        pages = has_pages ? kv_ceil_div(v_read, PAGE) - FIRST_PAGE : 0;
        sinks = is_split ? (BASE + UNIT - 1) / UNIT : 0;
        start = has_pages ? v_first : is_split ? BASE / UNIT * UNIT : 0;
        if (QUERY_TOKENS > 1 && has_pages) start = max(start, BASE / UNIT * UNIT);
        from = is_split ? BASE : -1;
    }
    __device__ __forceinline__ int units(int tokens) const { return pages + sinks + (tokens - start + UNIT - 1) / UNIT; }
};

}  // namespace decode_
