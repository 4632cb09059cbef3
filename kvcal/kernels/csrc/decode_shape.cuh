// What `decode` is compiled for: sizes from the macros of a variant, the shared memory of a block, its arguments.

#include "common.cuh"

#define MAX_ROWS 512
#define HEADS 8                                   // the N of the tensor core's tile
#define PASSES ((GROUP_HEADS + HEADS - 1) / HEADS)
#define DIM K_DIM
#define PAGE 128
#define K_PACKED (K_BITS != 16)
#define V_PACKED (V_BITS != 16)
#define BASE (V_PACKED ? V_SINKS : K_PACKED ? K_SINKS : 0)  // pages hold the tokens from here on
#define UNIT 32                                   // tokens of a unit that is not packed
#define TILES (DIM / 16)
#define PAIRS (DIM / 8)                           // operand registers of a lane for DIM columns
#define PAIRS_V (PAGE / 8)
#define K_GROUPS (K_AXIS == 0 ? PAGE / K_GROUP : (DIM + K_GROUP - 1) / K_GROUP)
#define V_GROUPS ((DIM + V_GROUP - 1) / V_GROUP)
#define PLANES2(bits) ((bits) / 2)
#define TOP(bits) (((bits) + 1) / 2 - 1)           // log4 of the weight of the highest plane

#ifdef K_TIER0_BITS
#define TIER0_TOP (K_TIER0_BITS == 16 ? 0 : TOP(K_TIER0_BITS))
#else
#define TIER0_TOP 0
#endif
#ifdef K_TIER1_BITS
#define TIER1_TOP (K_TIER1_BITS == 16 ? 0 : TOP(K_TIER1_BITS))
#else
#define TIER1_TOP 0
#endif
#define MAX2(a, b) ((a) > (b) ? (a) : (b))
#ifdef K_TIER2_BITS
#define TIER2_TOP TOP(K_TIER2_BITS)
#else
#define TIER2_TOP 0
#endif
// Powers of two that keep operands below 2^16 at their heaviest plane.
#define K_LIFT (15 - 2 * MAX2(MAX2(TOP(K_BITS), TIER2_TOP), MAX2(TIER0_TOP, TIER1_TOP)))
#define V_LIFT (15 - 2 * TOP(V_BITS))
#define SWAP_STRIDE 76                            // words a head in the exchange of P; no bank conflicts
#define K_SLOT (K_PACKED && V_PACKED ? K_RECORD : 0)
#define SLOT_BYTES MAX2(K_SLOT + (V_PACKED ? V_RECORD : 0), 16)
// A page of packed values whose keys are not packed: only where their windows differ, or keys have 16 bits.
#define K_LAGS (!K_PACKED || HAS_WINDOW_RULE || K_WINDOW > V_WINDOW)
#define INFINITY __int_as_float(0x7f800000)
#define LOG2E 1.4426950408889634f


// bf16 keys meet a query of more bits in two products.
#define SPLIT_QUERY (DTYPE == 1 && Q_DTYPE != 1)

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

namespace decode_ {

struct __align__(16) Shared {
    u32 query[PAIRS / 4][32][4];                  // normalised, lifted, times 4^-e, for packed keys
    u32 query_plain[PAIRS / 4][32][4];            // normalised, for their zeros; per-token keys: as query, what fp16 leaves of it
    u32 query_dense[DIM / 32][32][4];             // as it came, for keys that are not packed
#if SPLIT_QUERY
    u32 query_rest[DIM / 32][32][4];              // what its first half leaves
#endif
#if K_TIERS > 0
    u16 query_rows[HEADS][DIM];                   // normalised, channel by channel
#endif
    float query_scale[HEADS];                     // 2^E of the normalisation
    float query_offset[HEADS];                    // q . offset
#if K_AXIS
    float query_sum[K_GROUPS][HEADS];             // over channel groups, for per-token zeros
    float query_lost[K_GROUPS][HEADS];            // of what rounding to fp16 takes from it
#endif
    float max_[WARPS][HEADS], sum[WARPS][HEADS];
#if K_TIERS > 0
    u8 channel_of[WARPS][256];
#endif
    int is_last;
    int all, blocks, position, end;               // units, and the block's part of them that is left
    int head_start, head_units, virtual_head, is_whole;
    int units[MAX_ROWS];                          // running sums
    int lengths[MAX_ROWS];
    u32 swap[WARPS][HEADS * SWAP_STRIDE] __attribute__((aligned(16)));
    float out[WARPS][HEADS * DIM] __attribute__((aligned(16)));           // P V so far, in the order of ``load_out``; then a part
    unsigned char slots[WARPS][SLOT_BYTES] __attribute__((aligned(16)));  // a record of keys, one of values
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
