// What `decode` is compiled for: sizes from the macros of a variant, the shared memory of a block, its arguments.

#include "common.cuh"

#define MAX_ROWS 512
#define QUERY_TILES (GROUP_HEADS > 4 ? 2 : 1)      // of 4 query heads: two columns of the tensor core's tile each
#define HEADS (4 * QUERY_TILES)                   // that one pass over the cache serves
#define PASSES ((GROUP_HEADS + HEADS - 1) / HEADS)
#define DIM K_DIM
#define PAGE 128
#define K_PACKED (K_BITS != 16)
#define V_PACKED (V_BITS != 16)
#define BASE (V_PACKED ? V_SINKS : K_PACKED ? K_SINKS : 0)  // pages hold the tokens from here on
#define TILES (DIM / 16)
#define K_GROUPS (K_AXIS == 0 ? PAGE / K_GROUP : (DIM + K_GROUP - 1) / K_GROUP)
#define V_GROUPS ((DIM + V_GROUP - 1) / V_GROUP)
#define MAX2(a, b) ((a) > (b) ? (a) : (b))
// A tier's bits, where its codes have planes; tiers run from most bits to fewest, 16 bits first.
#if K_TIERS > 0 && K_TIER0_BITS != 16
#define K_WIDEST K_TIER0_BITS
#elif K_TIERS > 1
#define K_WIDEST K_TIER1_BITS
#else
#define K_WIDEST K_BITS
#endif
// Powers of two of the bytes that hold codes (codes.cuh), with room for the highest bits of a tier.
#define LIFT_OF(bits) ((bits) == 1 ? 7 : (bits) == 2 ? 6 : (bits) == 8 ? 0 : 4)
#define K_LIFT LIFT_OF(K_WIDEST)
#define V_LIFT LIFT_OF(V_BITS)
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
#define INFINITY __int_as_float(0x7f800000)
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

struct __align__(128) Shared {
    unsigned char slots[WARPS][SLOT_BYTES];
    float query[QUERY_TILES][DIM / 32][32][4];    // as pages meet it: the columns of every lane (limbs.cuh)
#if K_AXIS && K_PACKED
    u32 query_limbs[QUERY_PARTS][QUERY_TILES][DIM / 64][32][4];  // the same as operands
#endif
    u32 query_dense[DIM / 32][32][4];             // as it came, for keys that are not packed
#if SPLIT_QUERY
    u32 query_rest[DIM / 32][32][4];              // what its first half leaves
#endif
    float query_offset[HEADS];                    // q . offset
#if K_AXIS
    float query_sum[K_GROUPS][HEADS];             // over channel groups, for per-token zeros
    float query_lost[K_GROUPS][HEADS];            // of what rounding to limbs takes from it
    float query_unit[QUERY_PARTS][HEADS];         // of query_limbs
#endif
    float max_[WARPS][HEADS], sum[WARPS][HEADS];
#if K_TIERS > 0
    u32 channels[WARPS][K_SLOTS];
#endif
    int is_last;
    int all, blocks, position, end;               // units, and the block's part of them that is left
    int virtual_head, first_block, num_blocks;    // that have parts of it
    int head_start, head_units;
    int units[MAX_ROWS];                          // running sums
    int lengths[MAX_ROWS];
    float swap[WARPS][QUERY_TILES * SWAP_WORDS] __attribute__((aligned(16)));
};

struct Args {
    const void* q; i64 q_row, q_head;
    const u16 *k_sinks, *k_buffer; const u8* k_pages;
    const u16 *v_sinks, *v_buffer; const u8* v_pages;
    const int* lengths; i64 rows, heads, max_k_pages, max_v_pages;
    const int* k_page_at; i64 k_events; const int* v_page_at; i64 v_events;
    const float *k_rescale, *k_offset, *s_aux; float* parts; int* counters; void* out; float scale, softcap;
};

}  // namespace decode_
