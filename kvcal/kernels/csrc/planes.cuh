// Planes of 1- and 2-bit codes times an operand, on tensor cores: kvcal/quantizers/packing.py defines their order.

#include "instructions.cuh"

namespace decode_ {


// log4 of the factor that the mask leaves on pair e of a 2-bit word: five pairs lie under 10 bits, one shift, three more.
__host__ __device__ constexpr int lift_of(int e) { return e < 5 ? e : e - 5; }

// Step 0 .. 3 of 16 columns of a lane, rows g (lo) and g + 8 (hi) of a tile: pairs 2 step and 2 step + 1.
template <int STEP> __device__ __forceinline__ void mma_step2(float (&d)[4], u32 lo, u32 hi, const u32* op) {
    const u32 m = 0x00030003u;
    const u32 a = STEP < 3 ? m << (4 * STEP) : m << 2, b = STEP < 2 ? m << (4 * STEP + 2) : STEP == 2 ? m : m << 4;
    const u32 lo_a = STEP < 3 ? lo : lo >> 10, hi_a = STEP < 3 ? hi : hi >> 10;
    const u32 lo_b = STEP < 2 ? lo : lo >> 10, hi_b = STEP < 2 ? hi : hi >> 10;
    mma(d, lo_a & a, hi_a & a, lo_b & b, hi_b & b, op[2 * STEP], op[2 * STEP + 1]);
}

// The same for one bit: the words hold columns e in the low byte of each half.
template <int STEP> __device__ __forceinline__ void mma_step1(float (&d)[4], u32 lo, u32 hi, const u32* op) {
    const u32 a = 0x00010001u << (2 * STEP), b = 0x00010001u << (2 * STEP + 1);
    mma(d, lo & a, hi & a, lo & b, hi & b, op[2 * STEP], op[2 * STEP + 1]);
}

// acc[t] += WORDS words of rows g and g + 8 of COUNT tiles times op. Products that follow one another are of different
// tiles: one alone takes some 30 cycles.
template <int WIDTH, int WORDS, int COUNT> __device__ __forceinline__
void mma_words(float (*acc)[4], const u32 (&lo)[COUNT][WORDS], const u32 (&hi)[COUNT][WORDS], const u32* op) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
#define STEP(i) \
    _Pragma("unroll") for (int t = 0; t < COUNT; t++) { \
        if (WIDTH == 2) mma_step2<i>(acc[t], lo[t][w], hi[t][w], op + 8 * w); \
        else mma_step1<i>(acc[t], lo[t][w], hi[t][w], op + 8 * w); \
    }
        STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
    }
}

#ifndef AT_ONCE
#define AT_ONCE 4                                 // tiles that are multiplied side by side
#endif

// acc[t] += plane rows of tile first + t times op; COLUMNS codes a row. op: pairs (16 w + e, + 8) of the lane's columns.
template <int COLUMNS, int COUNT> __device__ __forceinline__
void mma_plane2(float (&acc)[COUNT][4], const u8* plane, int first, const u32* op, int lane) {
    constexpr int SIDE = COUNT < AT_ONCE ? COUNT : AT_ONCE, WORDS = COLUMNS / 64;
#pragma unroll
    for (int from = 0; from < COUNT; from += SIDE) {
        u32 lo[SIDE][WORDS], hi[SIDE][WORDS];
#pragma unroll
        for (int t = 0; t < SIDE; t++) {
            if (WORDS == 2) {
                uint4 v = *reinterpret_cast<const uint4*>(plane + ((first + from + t) * 32 + lane) * 16);
                lo[t][0] = v.x; lo[t][WORDS - 1] = v.y; hi[t][0] = v.z; hi[t][WORDS - 1] = v.w;
            } else if (t % 2 == 0) {
                uint4 v = *reinterpret_cast<const uint4*>(plane + ((first + from + t) / 2 * 32 + lane) * 16);
                lo[t][0] = v.x; hi[t][0] = v.y; lo[t + 1][0] = v.z; hi[t + 1][0] = v.w;
            }
        }
        mma_words<2, WORDS, SIDE>(acc + from, lo, hi, op);
    }
}

template <int COLUMNS, int COUNT> __device__ __forceinline__
void mma_plane1(float (&acc)[COUNT][4], const u8* plane, int first, const u32* op, int lane) {
    constexpr int SIDE = COUNT < AT_ONCE ? COUNT : AT_ONCE, WORDS = COLUMNS / 64;
#pragma unroll
    for (int from = 0; from < COUNT; from += SIDE) {
        u32 lo[SIDE][WORDS], hi[SIDE][WORDS];
#pragma unroll
        for (int t = 0; t < SIDE; t++) {
            const int tile = first + from + t;
            if (WORDS == 2) {  // a word is 32 columns of a row; a load holds the rows of two tiles
                const u32* at = reinterpret_cast<const u32*>(plane + (tile / 2 * 32 + lane) * 16) + tile % 2 * 2;
                lo[t][0] = permute(at[0], 0, 0x4140); lo[t][WORDS - 1] = permute(at[0], 0, 0x4342);
                hi[t][0] = permute(at[1], 0, 0x4140); hi[t][WORDS - 1] = permute(at[1], 0, 0x4342);
            } else {  // a word is 16 columns of two rows
                const u32 word = reinterpret_cast<const u32*>(plane + (tile / 4 * 32 + lane) * 16)[tile % 4];
                lo[t][0] = permute(word, 0, 0x4140); hi[t][0] = permute(word, 0, 0x4342);
            }
        }
        mma_words<1, WORDS, SIDE>(acc + from, lo, hi, op);
    }
}

// Sum over the contraction of op alone, as if all codes were 1, in every row: what codes are centred with. An operand is
// rounded to 11 bits; this lets its error be multiplied by code - mean in place of the code.
template <int PAIRS_OF> __device__ __forceinline__ void mma_ones(float (&d)[4], const u32 (&op)[PAIRS_OF]) {
    float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < PAIRS_OF; i += 2) {
        const u32 a = 0x00010001u << (2 * lift_of(i % 8)), b = 0x00010001u << (2 * lift_of((i + 1) % 8));
        if (i % 4 == 0) mma(even, a, a, b, b, op[i], op[i + 1]); else mma(odd, a, a, b, b, op[i], op[i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = even[i] + odd[i];
}

#define MEAN_CODE(bits) (.5f * ((1 << (bits)) - 1))

// All planes of BITS, low bits first. op is for the lowest 2-bit plane.
template <int BITS, int COLUMNS, int ROWS, int COUNT> __device__ __forceinline__
void mma_planes(float (&acc)[COUNT][4], const u8* planes, int first, u32 (&op)[COLUMNS / 8], int lane) {
    const u32 four = 0x44004400u;
#pragma unroll
    for (int p = 0; p < PLANES2(BITS); p++) {
        if (p > 0) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) op[i] = mul2(op[i], four);
        }
        mma_plane2<COLUMNS, COUNT>(acc, planes + p * (ROWS * COLUMNS / 4), first, op, lane);
    }
    if (BITS % 2) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {  // 4^lift of the 2-bit words becomes 2^e
            int exponent = 2 * lift_of(i % 8) - i % 8 + (BITS > 1 ? 2 : 0);
            u32 factor = (u32)(15 + exponent) << 10;
            op[i] = mul2(op[i], factor | factor << 16);
        }
        mma_plane1<COLUMNS, COUNT>(acc, planes + PLANES2(BITS) * (ROWS * COLUMNS / 4), first, op, lane);
    }
}

}  // namespace decode_
