// Planes of 1- and 2-bit codes become bytes, four codes a register, as tensor cores take them: kvcal/pages/packing.py
// defines the order of a plane.
//
// A lane of a quad holds a quarter of a row's columns, in words of 16. Column 4 j + e of a word lies, at 2 bits, in byte j:
// one mask leaves the codes e of all four bytes, each times a power of two, and shifts make it the same power, 2^LIFT, for
// every e. With more planes, a byte is put together first, so that a product is made once, not plane by plane.

#include "decode/instructions.cuh"

namespace decode_ {

// Planes of 2 bits, and whether one of 1 bit follows them.
__device__ __forceinline__ constexpr int planes_of(int bits) { return bits / 2; }
__device__ __forceinline__ constexpr bool has_last(int bits) { return bits % 2; }

__device__ __forceinline__ u32 shifted(u32 word, int left) { return left >= 0 ? word << left : word >> -left; }
// Bits of a where the mask has ones, of b elsewhere.
__device__ __forceinline__ u32 choose(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
__device__ __forceinline__ constexpr u32 in_every_byte(u32 byte) { return byte * 0x01010101u; }

// 16 columns of a row: a word of every plane of 2 bits, and the half word of a plane of 1 bit in ``last``, spread so that
// column 4 j + e is bit 4 + e of byte j. at[e] = bytes of columns 4 j + e, times 2^LIFT.
template <int BITS, int LIFT> __device__ __forceinline__ void bytes_of(const u32* word, u32 last, u32 (&at)[4]) {
    static_assert(BITS + LIFT <= 8, "a byte holds the code");
    if constexpr (BITS == 1) {
#pragma unroll
        for (int e = 0; e < 4; e++) at[e] = shifted(last, LIFT - 4 - e) & in_every_byte(1 << LIFT);
    } else if constexpr (BITS == 2) {
#pragma unroll
        for (int e = 0; e < 4; e++) at[e] = shifted(word[0], LIFT - 2 * e) & in_every_byte(3 << LIFT);
    } else if constexpr (BITS == 3) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            at[e] = choose(in_every_byte(4 << LIFT), shifted(last, LIFT - 2 - e), shifted(word[0], LIFT - 2 * e)) & in_every_byte(7 << LIFT);
    } else {
        static_assert(BITS == 4 || BITS == 8, "planes of 2 bits come in ones, twos and fours");
        // Nibbles of columns 4 j + e (low) and 4 j + e + 2 (high), for e = 0, 1.
        u32 nibbles[2][2];
#pragma unroll
        for (int pair = 0; pair < BITS / 4; pair++) {
            nibbles[pair][0] = choose(0x33333333u, word[2 * pair], word[2 * pair + 1] << 2);
            nibbles[pair][1] = choose(0x33333333u, word[2 * pair] >> 2, word[2 * pair + 1]);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if constexpr (BITS == 4) {
                at[e] = shifted(nibbles[0][e], LIFT) & in_every_byte(15 << LIFT);
                at[e + 2] = shifted(nibbles[0][e], LIFT - 4) & in_every_byte(15 << LIFT);
            } else {
                at[e] = choose(0x0f0f0f0fu, nibbles[0][e], nibbles[1][e] << 4);
                at[e + 2] = choose(0x0f0f0f0fu, nibbles[0][e] >> 4, nibbles[1][e]);
            }
        }
    }
}

// Words of rows g and g + 8 of COUNT tiles of a plane of 2 bits, from tile ``first``; COLUMNS codes a row.
template <int COLUMNS, int COUNT> __device__ __forceinline__
void load_words(u32 (&lo)[COUNT][COLUMNS / 64], u32 (&hi)[COUNT][COLUMNS / 64], const u8* plane, int first, int lane) {
    constexpr int WORDS = COLUMNS / 64;
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        if (WORDS == 2) {
            const uint4 v = *reinterpret_cast<const uint4*>(plane + ((first + t) * 32 + lane) * 16);
            lo[t][0] = v.x; lo[t][WORDS - 1] = v.y; hi[t][0] = v.z; hi[t][WORDS - 1] = v.w;
        } else if (t % 2 == 0) {
            const uint4 v = *reinterpret_cast<const uint4*>(plane + ((first + t) / 2 * 32 + lane) * 16);
            lo[t][0] = v.x; hi[t][0] = v.y; lo[t + 1][0] = v.z; hi[t + 1][0] = v.w;
        }
    }
}

// A half word of 16 bits, low or high, spread as ``bytes_of`` wants it.
template <int HALF> __device__ __forceinline__ u32 spread(u32 word) {
    const u32 twice = permute(word, 0, HALF == 0 ? 0x1100 : 0x3322);
    return choose(0xff00ff00u, twice, twice << 4);
}

// The same of a plane of 1 bit, spread.
template <int COLUMNS, int COUNT> __device__ __forceinline__
void load_bits(u32 (&lo)[COUNT][COLUMNS / 64], u32 (&hi)[COUNT][COLUMNS / 64], const u8* plane, int first, int lane) {
    constexpr int WORDS = COLUMNS / 64;
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        const int tile = first + t;
        if (WORDS == 2) {  // a word is 32 columns of a row; a load holds the rows of two tiles
            const u32* at = reinterpret_cast<const u32*>(plane + (tile / 2 * 32 + lane) * 16) + tile % 2 * 2;
            lo[t][0] = spread<0>(at[0]); lo[t][WORDS - 1] = spread<1>(at[0]);
            hi[t][0] = spread<0>(at[1]); hi[t][WORDS - 1] = spread<1>(at[1]);
        } else {  // a word is 16 columns of two rows
            const u32 word = reinterpret_cast<const u32*>(plane + (tile / 4 * 32 + lane) * 16)[tile % 4];
            lo[t][0] = spread<0>(word); hi[t][0] = spread<1>(word);
        }
    }
}

#ifndef AT_ONCE
#define AT_ONCE 4  // tiles that are multiplied side by side: one product alone takes some 30 cycles
#endif

// acc[n][t] = Magic + rows of tile first + t of a record's planes, times 2^LIFT, times operand n. COLUMNS codes a row, ROWS
// rows a plane; op[n][4 w + e]: bytes of columns 16 w + 4 j + e of the lane's quarter.
template <bool IS_SIGNED, int BITS, int LIFT, int COLUMNS, int ROWS, int COUNT> __device__ __forceinline__
void multiply(int (&acc)[QUERY_TILES][COUNT][4], const u8* planes, int first, const u32 (&op)[QUERY_TILES][COLUMNS / 16], int lane) {
    constexpr int SIDE = COUNT < AT_ONCE ? COUNT : AT_ONCE, WORDS = COLUMNS / 64, PLANES = planes_of(BITS);
    constexpr int PLANE = ROWS * COLUMNS / 4;
    constexpr int magic = Magic<IS_SIGNED>::bits;
    const int start[4] = {magic, magic, magic, magic};
#pragma unroll
    for (int from = 0; from < COUNT; from += SIDE) {
        u32 lo[PLANES + 1][SIDE][WORDS], hi[PLANES + 1][SIDE][WORDS];
#pragma unroll
        for (int p = 0; p < PLANES; p++) load_words<COLUMNS, SIDE>(lo[p], hi[p], planes + p * PLANE, first + from, lane);
        if (has_last(BITS)) load_bits<COLUMNS, SIDE>(lo[PLANES], hi[PLANES], planes + PLANES * PLANE, first + from, lane);
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            u32 low[SIDE][4], high[SIDE][4];
#pragma unroll
            for (int t = 0; t < SIDE; t++) {
                u32 low_words[4] = {}, high_words[4] = {};
#pragma unroll
                for (int p = 0; p < PLANES; p++) { low_words[p] = lo[p][t][w]; high_words[p] = hi[p][t][w]; }
                bytes_of<BITS, LIFT>(low_words, has_last(BITS) ? lo[PLANES][t][w] : 0, low[t]);
                bytes_of<BITS, LIFT>(high_words, has_last(BITS) ? hi[PLANES][t][w] : 0, high[t]);
            }
#pragma unroll
            for (int e = 0; e < 4; e += 2)
#pragma unroll
                for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                    for (int t = 0; t < SIDE; t++) {
                        int (&d)[4] = acc[n][from + t];
                        if (w == 0 && e == 0) mma<IS_SIGNED>(d, low[t][0], high[t][0], low[t][1], high[t][1], op[n][0], op[n][1], start);
                        else mma<IS_SIGNED>(d, low[t][e], high[t][e], low[t][e + 1], high[t][e + 1], op[n][4 * w + e], op[n][4 * w + e + 1], d);
                    }
        }
    }
}

}  // namespace decode_
