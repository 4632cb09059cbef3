// High bits of the channels of a page that have more of them: columns that the query meets a second time.

#include "decode/codes.cuh"
#include "decode/limbs.cuh"

namespace decode_ {

#if K_TIERS > 0
// Where the numbers of a channel lie, in bytes: its scale among those of its group of tokens, in the high half, and its
// query of the first head of a tile.
constexpr u32 NO_CHANNEL = ~0u;
__device__ __forceinline__ u32 places_of(u32 channel) {
    constexpr u32 PER = WIDE ? QUARTER : DIM / 8;
    const u32 part = channel / PER, rest = channel % PER;
    const u32 query = ((rest / 4 * 32 + (WIDE ? part : part % 2 * 4 + part / 2)) * 4 + rest % 4) * 4;
    return channel * (K_PARAM == KV_FLOAT32 ? 4 : 2) << 16 | query;
}
// Of the head of ``column`` of tile n.
__device__ __forceinline__ float query_at(const Shared& shared, int n, int column, u32 places) {
    return *reinterpret_cast<const float*>(reinterpret_cast<const u8*>(shared.query[n * (DIM / 32)][4 * column]) + (places & 0xffffu));
}

// Channels of a page's slots.
__device__ __forceinline__ void list_channels(u32* channels, const u8* record, int lane) {
    __syncwarp();
    for (int i = lane; i < K_SLOTS; i += 32) channels[i] = NO_CHANNEL;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < DIM; i += 32) {
        const u8 slot = record[K_INDEX + i + lane];
        if (slot != 255) channels[slot] = places_of(i + lane);
    }
    __syncwarp();
}

// Four codes of 2 bits in a byte -> a byte each, times 2^LIFT.
template <int LIFT> __device__ __forceinline__ u32 four_bytes(u32 byte) {
    const u32 nibbles = byte * ((1u << LIFT) + (1u << (12 + LIFT))) & (0x000f000fu << LIFT);
    return nibbles * 65u & in_every_byte(3 << LIFT);
}

#if !WIDE
// acc[n][t] += high planes of one tier of tokens of tile first + t; codes have K_BITS bits less. up: the query's units;
// ``zero`` gets what rounding takes, times the mean code.
template <int COLUMNS, int FIRST_SLOT, int ROOM, int PLANES, int LIFT, int COUNT> __device__ __forceinline__
void multiply_tier(int (&acc)[QUERY_TILES][COUNT][4], float (&zero)[QUERY_TILES], const u8* high, const u8* scale,
                   const float (&up)[QUERY_TILES], const Shared& shared, int warp, int first, int lane) {
    constexpr int ROW = COLUMNS / 4;                                   // bytes of a row of one plane
    constexpr int SEGMENT = COLUMNS % 16 == 0 ? COLUMNS / 16 : 0;      // bytes of a lane's quarter, if interleaved
    constexpr bool INTERLEAVED = SEGMENT == 1 || SEGMENT == 2 || SEGMENT == 4 || SEGMENT == 8;
    constexpr int R = INTERLEAVED ? 16 / (SEGMENT ? SEGMENT : 1) : 1;
    constexpr float MEAN = MEAN_CODE(2 * PLANES) * (1 << K_BITS);
    const int g = lane >> 2, quad = lane & 3;
    const u32* channels = shared.channels[warp] + FIRST_SLOT;
#pragma unroll
    for (int step = 0; step < (ROW + 3) / 4; step++) {
        const int slot = INTERLEAVED ? quad * (COLUMNS / 4) + 4 * step : 16 * step + 4 * quad;
        float x[QUERY_TILES][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // Read anyway: a branch would wait for one channel after the other.
            const u32 found = slot + j < ROOM ? channels[slot + j] : NO_CHANNEL, places = found == NO_CHANNEL ? 0 : found;
            const float factor = number_at<K_PARAM>(scale + (places >> 16), 0);
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) {
                const float product = query_at(shared, n, g / 2 * 2, places) * factor;
                x[n][j] = found == NO_CHANNEL ? 0.f : product;
            }
        }
        u32 op[QUERY_TILES];
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            op[n] = own_limb(x[n], up[n], lane);
            // Half: both lanes of a head have it. A few more bits err by too little to be worth it.
            if (PLANES > 1) zero[n] = fmaf(lost(x[n], up[n]), __fdividef(.5f * MEAN, up[n]), zero[n]);
        }
#pragma unroll
        for (int t = 0; t < COUNT; t++) {
            u32 bytes[2] = {0, 0};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int octet = 2 * (first + t) + half;
                const int at = INTERLEAVED ? ((octet / R * 32 + lane) * R + octet % R) * SEGMENT + step
                                           : (octet * 8 + g) * ROW + 4 * step + quad;
                const bool is_there = INTERLEAVED || 4 * step + quad < ROW;
                bytes[half] = four_bytes<LIFT>(is_there ? high[at] : 0);
                if (PLANES > 1) bytes[half] |= four_bytes<LIFT + 2 * (PLANES > 1)>(is_there ? high[at + PAGE * ROW] : 0);
                if (PLANES > 2) bytes[half] |= four_bytes<LIFT + 4 * (PLANES > 2)>(is_there ? high[at + 2 * PAGE * ROW] : 0);
            }
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) mma_half(acc[n][t], bytes[0], bytes[1], op[n]);
        }
    }
}

// All tiers whose codes have planes.
template <int LIFT, int COUNT> __device__ __forceinline__
void multiply_tiers(int (&acc)[QUERY_TILES][COUNT][4], float (&zero)[QUERY_TILES], const u8* record, const u8* scale,
                    const float (&up)[QUERY_TILES], const Shared& shared, int warp, int first, int lane) {
#define TIER_PLANES(i) \
    if constexpr (K_TIER##i##_BITS != 16) \
        multiply_tier<K_TIER##i##_COLUMNS, K_TIER##i##_SLOT, K_TIER##i##_ROOM, (K_TIER##i##_BITS - K_BITS) / 2, LIFT + K_BITS>( \
            acc, zero, record + K_TIER##i##_HIGH, scale, up, shared, warp, first, lane);
    TIER_PLANES(0)
#if K_TIERS > 1
    TIER_PLANES(1)
#endif
#if K_TIERS > 2
    TIER_PLANES(2)
#endif
#undef TIER_PLANES
}

#endif

#if K_RAW_SLOTS > 0
// s += query times the channels of the 16-bit tier.
template <int COUNT> __device__ __forceinline__
void add_raw_slots(float (&s)[QUERY_TILES][2 * COUNT], const u8* record, const Shared& shared, int warp, int first, int lane, float scale) {
    const int quad = lane & 3;
#pragma unroll
    for (int slot = 0; slot < K_RAW_SLOTS; slot++) {
        const u32 places = shared.channels[warp][slot];
        if (places == NO_CHANNEL) continue;
        const u16* values = reinterpret_cast<const u16*>(record + K_RAW) + slot * PAGE + first * 16 + lane_token(lane);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) {
            const float q = query_at(shared, WIDE ? 0 : n, 2 * quad + (WIDE ? n : 0), places) * scale;
#pragma unroll
            for (int i = 0; i < 2 * COUNT; i++) s[n][i] = fmaf(q, dense_to_float(values[score_token(i)]), s[n][i]);
        }
    }
}
#endif
#endif

}  // namespace decode_
