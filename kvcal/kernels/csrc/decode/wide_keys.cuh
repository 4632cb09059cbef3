// Scores of packed keys for 8 heads a tile of columns: codes become bytes once, and meet the high and the low limbs of all
// heads. (Limbs in neighbouring columns, as in keys.cuh, serve 4 heads a tile.)
//
// A page's tokens lie in the rows of the tiles so that scores come out as tensor cores take probabilities: row g of tile
// t is token 32 (g / 2) + 8 (g % 2) + t, and row g + 8 the sixteenth after it (wide_values.cuh). All of them lie in one
// group, whose scales fold into the query.

#include "decode/tiers.cuh"
#include "decode/wide_limbs.cuh"

namespace decode_ {

#if WIDE
// Bytes before a token's row in a plane of ``COLUMNS`` codes of ``WIDTH`` bits, and of a quad's quarter of it. The bits of
// lane_token and of score_token differ, and so do those of their places: places add up.
template <int COLUMNS, int WIDTH> struct Rows {
    static constexpr int SEGMENT = COLUMNS * WIDTH / 32, R = kv_rows_per_load(PAGE, COLUMNS, WIDTH);
    static constexpr int QUAD = R ? R * SEGMENT : SEGMENT;
    static __device__ __forceinline__ constexpr int place(int token) {
        return R ? (token / (8 * (R ? R : 1)) * 8 + token % 8) * 4 * QUAD + token / 8 % (R ? R : 1) * SEGMENT : token * (COLUMNS * WIDTH / 8);
    }
};

// BYTES at ``from``, in words of 32 bits.
template <int BYTES, int COUNT> __device__ __forceinline__ void load_bytes(u32 (&word)[COUNT], const u8* from) {
    static_assert(COUNT == (BYTES + 3) / 4, "whole words");
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i += 4) { const uint4 v = *reinterpret_cast<const uint4*>(from + 4 * i); word[i] = v.x; word[i + 1] = v.y; word[i + 2] = v.z; word[i + 3] = v.w; }
    } else if constexpr (BYTES == 8) {
        const uint2 v = *reinterpret_cast<const uint2*>(from); word[0] = v.x; word[1] = v.y;
    } else if constexpr (BYTES % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) word[i] = *reinterpret_cast<const u32*>(from + 4 * i);
    } else {
        static_assert(BYTES % 2 == 0, "halves of words");
#pragma unroll
        for (int i = 0; i < COUNT; i++) word[i] = 0;
#pragma unroll
        for (int i = 0; i < BYTES / 2; i++) word[i / 2] |= (u32)*reinterpret_cast<const u16*>(from + 2 * i) << i % 2 * 16;
    }
}

// Bytes of a lane's quarter of the row of a token, lane_token + ``token``: at[w][e], of channels 16 w + 4 j + e, times 2^K_LIFT.
__device__ __forceinline__ void key_bytes(u32 (&at)[QUERY_WORDS / 4][4], const u8* record, int token, int lane) {
    constexpr int WORDS = QUERY_WORDS / 4, PLANES = planes_of(K_BITS), PLANE = PAGE * DIM / 4;
    typedef Rows<DIM, 2> Two;
    u32 word[PLANES + 1][WORDS], last[WORDS];
    const int turn = TURNED_BYTES && lane & TURN_LANE ? token % 2 ? -64 : 64 : 0;  // tokens of a tile have one of two halves
    const int lane_place = Two::place(lane_token(lane)) + (lane & 3) * Two::QUAD + turn;
#pragma unroll
    for (int p = 0; p < PLANES; p++) load_bytes<Two::SEGMENT>(word[p], record + p * PLANE + Two::place(token) + lane_place);
    if constexpr (has_last(K_BITS)) {
        typedef Rows<DIM, 1> One;
        u32 bits[(One::SEGMENT + 3) / 4];
        load_bytes<One::SEGMENT>(bits, record + PLANES * PLANE + One::place(token) + One::place(lane_token(lane)) + (lane & 3) * One::QUAD);
#pragma unroll
        for (int w = 0; w < WORDS; w++) last[w] = w % 2 ? spread<1>(bits[w / 2]) : spread<0>(bits[w / 2]);
    }
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
        u32 words[4] = {};
#pragma unroll
        for (int p = 0; p < PLANES; p++) words[p] = word[p][w];
        bytes_of<K_BITS, K_LIFT>(words, has_last(K_BITS) ? last[w] : 0, at[w]);
    }
}

#if K_TIERS > 0
// High bits of one tier: ``ROW`` bytes a row and plane, four columns a step.
template <int COLUMNS, int FIRST_SLOT, int ROOM, int PLANES> struct WideTier {
    static constexpr int ROW = COLUMNS / 4, STEPS = (ROW + 3) / 4;
    static constexpr bool INTERLEAVED = kv_rows_per_load(PAGE, COLUMNS, 2) > 0, TAKES_ZEROS = PLANES > 1;
    typedef Rows<COLUMNS, 2> Two;
    u32 op[STEPS][2];

    // Operands of the query; ``zero`` gets what rounding takes, times the mean code.
    __device__ __forceinline__ void prepare(float& zero, const u8* scale, float up, const Shared& shared, int warp, int lane) {
        constexpr float MEAN = MEAN_CODE(2 * PLANES) * (1 << K_BITS);
        const u32* channels = shared.channels[warp] + FIRST_SLOT;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int slot = INTERLEAVED ? (lane & 3) * (COLUMNS / 4) + 4 * step : 16 * step + 4 * (lane & 3);
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                // Read anyway: a branch would wait for one channel after the other.
                const u32 found = slot + j < ROOM ? channels[slot + j] : NO_CHANNEL, places = found == NO_CHANNEL ? 0 : found;
                const float product = query_at(shared, 0, lane >> 2, places) * number_at<K_PARAM>(scale + (places >> 16), 0);
                x[j] = found == NO_CHANNEL ? 0.f : product;
            }
            four_limbs(x, up, op[step][0], op[step][1]);
            if (PLANES > 1) zero = fmaf(lost(x, up), __fdividef(MEAN, up), zero);
        }
    }

    // acc += high planes of a tile's tokens.
    __device__ __forceinline__ void multiply(int (&acc)[2][4], const u8* high, int tile, int lane) const {
        constexpr int LIFT = K_LIFT + K_BITS;
        const int lane_place = Two::place(lane_token(lane)) + (INTERLEAVED ? (lane & 3) * Two::QUAD : (lane & 3));
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 bytes[2];
            const bool is_there = INTERLEAVED || 4 * step + (lane & 3) < ROW;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u8* at = high + Two::place(tile + 16 * half) + lane_place + (INTERLEAVED ? step : 4 * step);
                bytes[half] = four_bytes<LIFT>(is_there ? at[0] : 0);
                if (PLANES > 1) bytes[half] |= four_bytes<LIFT + 2 * (PLANES > 1)>(is_there ? at[PAGE * ROW] : 0);
                if (PLANES > 2) bytes[half] |= four_bytes<LIFT + 4 * (PLANES > 2)>(is_there ? at[2 * PAGE * ROW] : 0);
            }
#pragma unroll
            for (int limb = 0; limb < 2; limb++) mma_half(acc[limb], bytes[0], bytes[1], op[step][limb]);
        }
    }
};
template <> struct WideTier<0, 0, 0, 0> {  // of 16 bits, or none
    static constexpr bool TAKES_ZEROS = false;
    __device__ __forceinline__ void prepare(float&, const u8*, float, const Shared&, int, int) {}
    __device__ __forceinline__ void multiply(int (&)[2][4], const u8*, int, int) const {}
};
#define WIDE_TIER(i) WideTier<K_TIER##i##_COLUMNS, K_TIER##i##_COLUMNS ? K_TIER##i##_SLOT : 0, K_TIER##i##_COLUMNS ? K_TIER##i##_ROOM : 0, \
    K_TIER##i##_COLUMNS ? (K_TIER##i##_BITS - K_BITS) / 2 : 0>
typedef WIDE_TIER(0) Tier0;
#if K_TIERS > 1
typedef WIDE_TIER(1) Tier1;
#else
typedef WideTier<0, 0, 0, 0> Tier1;
#define K_TIER1_HIGH 0
#endif
#if K_TIERS > 2
typedef WIDE_TIER(2) Tier2;
#else
typedef WideTier<0, 0, 0, 0> Tier2;
#define K_TIER2_HIGH 0
#endif
#define TIERS_TAKE_ZEROS (Tier0::TAKES_ZEROS || Tier1::TAKES_ZEROS || Tier2::TAKES_ZEROS)
#endif

// The operands of a page's keys: high limbs, low limbs.
struct WideQuery {
    u32 op[2][QUERY_WORDS];
#if K_TIERS > 0
    Tier0 tier0; Tier1 tier1; Tier2 tier2;
#endif
};

// Bytes of the tokens of a tile: rows g, and g + 8.
struct TileBytes {
    u32 low[QUERY_WORDS / 4][4], high[QUERY_WORDS / 4][4];

    __device__ __forceinline__ TileBytes(const u8* record, int tile, int lane) {
        key_bytes(low, record, tile, lane);
        key_bytes(high, record, tile + 16, lane);
    }
};

// acc = Magic + products of the tokens of a tile with both limbs of the query.
__device__ __forceinline__ void multiply_tile(int (&acc)[2][4], const TileBytes& tile, const u32 (&op)[2][QUERY_WORDS]) {
    constexpr int magic = Magic<true>::bits;
    const int start[4] = {magic, magic, magic, magic};
#pragma unroll
    for (int w = 0; w < QUERY_WORDS / 4; w++)
#pragma unroll
        for (int e = 0; e < 4; e += 2)
#pragma unroll
            for (int limb = 0; limb < 2; limb++) {
                const int at = 4 * w + e;
                const u32 (&low)[4] = tile.low[w], (&high)[4] = tile.high[w];
                if (at == 0) mma<true>(acc[limb], low[0], high[0], low[1], high[1], op[limb][0], op[limb][1], start);
                else mma<true>(acc[limb], low[e], high[e], low[e + 1], high[e + 1], op[limb][at], op[limb][at + 1], acc[limb]);
            }
}

__device__ __forceinline__ void tile_products(int (&acc)[2][4], const WideQuery& query, const u8* record, int tile, int lane) {
    multiply_tile(acc, TileBytes(record, tile, lane), query.op);
#if K_TIERS > 0
    query.tier0.multiply(acc, record + K_TIER0_HIGH, tile, lane);
    query.tier1.multiply(acc, record + K_TIER1_HIGH, tile, lane);
    query.tier2.multiply(acc, record + K_TIER2_HIGH, tile, lane);
#endif
}

#if K_AXIS == 0
// Sums over the channels, for scores of head 4 n + quad: of the query in fixed point, in its units.
__device__ __forceinline__ void sum_fixed(float (&fixed_sum)[2], const WideQuery& query) {
    int acc[2][4];
    const int start[4] = {Magic<true>::bits, Magic<true>::bits, Magic<true>::bits, Magic<true>::bits};
    const u32 one = in_every_byte(1);
#pragma unroll
    for (int limb = 0; limb < 2; limb++)
#pragma unroll
        for (int i = 0; i < QUERY_WORDS; i += 2) {
            const u32 (&op)[QUERY_WORDS] = query.op[limb];
            if (i == 0) mma<true>(acc[limb], one, one, one, one, op[0], op[1], start);
            else mma<true>(acc[limb], one, one, one, one, op[i], op[i + 1], acc[limb]);
        }
#pragma unroll
    for (int n = 0; n < 2; n++) fixed_sum[n] = sum_of_limbs<true>(acc[0][n], acc[1][n], 1.f, 0.f);
}

// And of the query times what the code halfway stands for.
__device__ __forceinline__ void sum_middle(float (&middle)[2], const u8* record, const Shared& shared, int lane) {
    const int g = lane >> 2, quad = lane & 3;
#if K_ZEROS_BY_HALVES
    // Row 0: with zeros, 1: with scales. A load is an operand as it comes: half of it counts in rows g, the other in g + 8.
    float sums[2][4], sum[2];
    const u8* row = record + (g ? K_SCALE : K_ZERO) + quad * QUARTER * 2;
#pragma unroll
    for (int i = 0; i < QUARTER / 8; i++) {
        const uint4 a = *reinterpret_cast<const uint4*>(row + 16 * i);
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const uint4 b = *reinterpret_cast<const uint4*>(shared.query_halves[part][i][lane]);
            mma_fp16(sums[0], a.x, a.y, a.z, a.w, b.x, b.y, i + part == 0);
            mma_fp16(sums[1], a.x, a.y, a.z, a.w, b.z, b.w, i + part == 0);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++) sum[n] = sums[0][n] + sums[1][2 + n];
#pragma unroll
    for (int n = 0; n < 2; n++)
        middle[n] = fmaf(__shfl_sync(0xffffffffu, sum[n], 4 + quad), MEAN_CODE(K_BITS), __shfl_sync(0xffffffffu, sum[n], quad)) * shared.query_power[4 * n + quad];
#else
    float x[QUARTER], sum = 0.f;
    load_quarter(x, shared, lane);
#pragma unroll
    for (int i = 0; i < QUARTER; i += 8) {
        float scale[8], zero[8];
        load_numbers<K_PARAM>(scale, record + K_SCALE, quad * QUARTER + i);
        load_numbers<K_PARAM>(zero, record + K_ZERO, quad * QUARTER + i);
#pragma unroll
        for (int k = 0; k < 8; k++) sum = fmaf(x[i + k], fmaf(scale[k], MEAN_CODE(K_BITS), zero[k]), sum);
    }
    sum = sum_of_column(sum);
#pragma unroll
    for (int n = 0; n < 2; n++) middle[n] = to_wide_scores(sum, n, lane);
#endif
}
#endif

#if K_AXIS
// The limbs of the query, which lie so that a lane's 16 bytes are its operands.
__device__ __forceinline__ void load_limbs(u32 (&op)[2][QUERY_WORDS], const u32 (*limbs)[32][4], int lane) {
#pragma unroll
    for (int i = 0; i < 2 * QUERY_WORDS; i += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(limbs[i / 4][lane]);
        u32 (&to)[QUERY_WORDS] = op[i / QUERY_WORDS];
        const int at = i % QUERY_WORDS;
        to[at] = v.x; to[at + 1] = v.y; to[at + 2] = v.z; to[at + 3] = v.w;
    }
}

// Adds to a score of head h what a token's codes of a group of channels are, whose products with both limbs are given.
__device__ __forceinline__ void add_dot(float& to, int high, int low, float token_scale, float token_zero, const Shared& shared, int part, int group, int h, float scale) {
    const float unit = shared.query_unit[part][h] * (scale / (1 << K_LIFT));
    const float sum = part == 0 ? shared.query_sum[group][h] * scale : 0.f;
    const float lost = part == 0 ? shared.query_lost[group][h] * (MEAN_CODE(K_BITS) * scale) : 0.f;
    const float centre = fmaf(unit, -Magic<true>::number, K_ROTATED ? fmaf(sum, -MEAN_CODE(K_BITS), lost) : lost);
    const float product = fmaf(__int_as_float(high) - Magic<true>::number, 256.f, __int_as_float(low));
    to = fmaf(fmaf(product, unit, centre), token_scale, K_ROTATED ? to : fmaf(token_zero, sum, to));
}
#endif

// Scores of a page, in log2 units, less base[n] if RELATIVE_SCORES: s[n][i] step[n] + from[n] is of token lane_token + score_token(i) and head 4 n + quad.
__device__ __forceinline__ void wide_scores(float (&s)[QUERY_TILES][PAGE / 8], float (&step)[QUERY_TILES], float (&from)[QUERY_TILES], const float (&base)[QUERY_TILES], const u8* record, Shared& shared, int warp, int lane, float scale) {
    const int quad = lane & 3;
#if K_AXIS == 0
    static_assert(K_GROUP >= PAGE && COLUMN_TILES == 1, "one group of tokens, and its query");
    WideQuery query;
#if K_TIERS > 0
    list_channels(shared.channels[warp], record, lane);
#endif
    float middle[2], fixed_sum[2];
#if K_TIERS > 0  // the order that the compiler makes the most of: 3 % faster here, 1 % slower without tiers
    sum_middle(middle, record, shared, lane);
#endif
    float x[4 * QUERY_WORDS];
    load_quarter(x, shared, lane);
#pragma unroll
    for (int i = 0; i < QUARTER; i += 8) {
        float param[8];
        load_numbers<K_PARAM>(param, record + K_SCALE, quad * QUARTER + i);
#pragma unroll
        for (int k = 0; k < 8; k++) x[i + k] *= param[k];
    }
    const float up = __fdividef(LARGEST<true>, largest_of_column(x));
    wide_limbs(x, up, query.op);
    // A rounding error of the query is to meet code - mean: what it has of the mean is taken away, and added as it was.
    sum_fixed(fixed_sum, query);
#if K_TIERS == 0
    sum_middle(middle, record, shared, lane);
#else
    float zero = 0.f;
    query.tier0.prepare(zero, record + K_SCALE, up, shared, warp, lane);
    query.tier1.prepare(zero, record + K_SCALE, up, shared, warp, lane);
    query.tier2.prepare(zero, record + K_SCALE, up, shared, warp, lane);
    if (TIERS_TAKE_ZEROS) zero = sum_of_column(zero);
#endif
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float unit = to_wide_scores(__fdividef(1.f, up), n, lane);
        float add = fmaf(fixed_sum[n] * unit, -MEAN_CODE(K_BITS), middle[n]) + shared.query_offset[4 * n + quad];
#if K_TIERS > 0
        if (TIERS_TAKE_ZEROS) add += to_wide_scores(zero, n, lane);
#endif
        step[n] = unit * (scale / (1 << K_LIFT));
        from[n] = add * scale - Magic<true>::number * step[n];
    }
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        int acc[2][4];
        tile_products(acc, query, record, tile, lane);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                s[n][2 * tile + half] = fmaf(__int_as_float(acc[0][2 * half + n]) - Magic<true>::number, 256.f, __int_as_float(acc[1][2 * half + n]));
    }
#if !LAZY_SCORES
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < PAGE / 8; i++) s[n][i] = fmaf(s[n][i], step[n], from[n]);
        step[n] = 1.f; from[n] = 0.f;
    }
#endif
#if K_TIERS > 0 && K_RAW_SLOTS > 0
    add_raw_slots<PAGE / 16>(s, record, shared, warp, 0, lane, scale);
#endif
#else
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
#pragma unroll
        for (int i = 0; i < PAGE / 8; i++) s[n][i] = fmaf(shared.query_offset[4 * n + quad], scale, RELATIVE_SCORES ? -base[n] : 0.f);
        step[n] = 1.f; from[n] = 0.f;
    }
#if K_EXPANDED_ONCE
    static_assert(COLUMN_TILES == 1, "there are no registers for more");
#pragma unroll 1
    for (int part = 0; part < QUERY_PARTS; part++) {
        u32 query[2][QUERY_WORDS];
        load_limbs(query, shared.query_limbs[part], lane);
#pragma unroll
        for (int tile = 0; tile < 8; tile++) {
            const TileBytes bytes(record, tile, lane);
#pragma unroll
            for (int group = 0; group < K_GROUPS; group++) {
                const int at = group * PAGE + lane_token(lane) + tile;
                u32 op[2][QUERY_WORDS];
#pragma unroll
                for (int i = 0; i < 2 * QUERY_WORDS; i++) op[i / QUERY_WORDS][i % QUERY_WORDS] = is_of_group(group, i % QUERY_WORDS / 4, lane) ? query[i / QUERY_WORDS][i % QUERY_WORDS] : 0u;
                int acc[2][4];
                multiply_tile(acc, bytes, op);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float token_scale = kv_load_param<K_PARAM>(record + K_SCALE, at + 16 * half);
                    const float token_zero = K_ROTATED ? 0.f : kv_load_param<K_PARAM>(record + K_ZERO, at + 16 * half);
#pragma unroll
                    for (int n = 0; n < 2; n++)
                        add_dot(s[n][2 * tile + half], acc[0][2 * half + n], acc[1][2 * half + n], token_scale, token_zero, shared, part, group, 4 * n + quad, scale);
                }
            }
        }
    }
#else
#pragma unroll
    for (int group = 0; group < K_GROUPS; group++) {
        const u8 *scales = record + K_SCALE + group * PAGE * kv_param_bytes(K_PARAM), *zeros = scales + (K_ZERO - K_SCALE);
#pragma unroll 1
        for (int part = 0; part < QUERY_PARTS; part++) {
            if (QUERY_PARTS > 1) __syncwarp();  // codes are read again: there are no registers for them
            u32 op[COLUMN_TILES][2][QUERY_WORDS];
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c++) {
                load_limbs(op[c], shared.query_limbs[part] + c * (QUERY_WORDS / 2), lane);
#pragma unroll
                for (int i = 0; i < 2 * QUERY_WORDS; i++)  // channels of other groups contribute nothing to it
                    if (!is_of_group(group, i % QUERY_WORDS / 4, lane)) op[c][i / QUERY_WORDS][i % QUERY_WORDS] = 0u;
            }
            float token_scale[2][8], token_zero[2][8];  // of tokens that follow one another
#pragma unroll
            for (int half = 0; half < 2; half++) {
                load_numbers<K_PARAM>(token_scale[half], scales, lane_token(lane) + 16 * half);
                if (!K_ROTATED) load_numbers<K_PARAM>(token_zero[half], zeros, lane_token(lane) + 16 * half);
            }
#pragma unroll
            for (int tile = 0; tile < 8; tile++) {
                const TileBytes bytes(record, tile, lane);
                int acc[COLUMN_TILES][2][4];
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; c++) multiply_tile(acc[c], bytes, op[c]);
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        add_dot(s[n][2 * tile + half], acc[n / 2][0][2 * half + n % 2], acc[n / 2][1][2 * half + n % 2], token_scale[half][tile], K_ROTATED ? 0.f : token_zero[half][tile], shared, part, group, 4 * n + quad, scale);
            }
        }
    }
#endif
#endif
}
#endif

}  // namespace decode_
