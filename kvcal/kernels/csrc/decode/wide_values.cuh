// Probabilities of 8 heads a tile of columns times packed values, in half precision with sums in fp32.
//
// A code of up to 8 bits is a half below the normal ones as it lies in its word: one AND leaves two of them, whose powers of
// two go to the probabilities. A probability is rounded to half precision once. That number is the probability: also of the
// zeros, and of the sum that is divided by, which are columns of products with it. Times the value's scale it is rounded
// once more, and to meet code - mean this time: the product with a row of the largest codes says what to take away.
//
// Scores lie so that one transposition of 8 x 8 halves makes them an operand: a lane's rows are columns i and i + 8 of the
// words of its quarter (wide_keys.cuh), no number passes through shared memory. A page's sums begin at 0 and are added in fp32:
// tensor cores cut off what a long sum would lose.

#include "decode/softmax.cuh"
#include "decode/wide_keys.cuh"

namespace decode_ {

#if WIDE
// Columns i and i + 8 of a word of 16 codes are a pair of halves, codes times 2^(pair_shift(i) - 24).
template <int BITS> __device__ __forceinline__ constexpr int pair_shift(int i) {
    return BITS == 1 ? 4 + i % 4 : BITS == 2 ? i % 5 * 2 : BITS == 4 ? i / 2 % 2 * 4 : 0;
}
template <int BITS> __device__ __forceinline__ constexpr u32 pair_mask(int i) { return (u32)((1 << BITS) - 1) * 0x00010001u << pair_shift<BITS>(i); }

// word: of every plane of 2 bits, ``last``: of a plane of 1 bit, as ``bytes_of`` has them.
template <int BITS> __device__ __forceinline__ void pairs_of(const u32* word, u32 last, u32 (&at)[8]) {
    if constexpr (BITS == 1) {
#pragma unroll
        for (int i = 0; i < 8; i++) at[i] = shifted(last, -(i / 4 * 8)) & pair_mask<1>(i);
    } else if constexpr (BITS == 2) {
#pragma unroll
        for (int i = 0; i < 8; i++) at[i] = shifted(word[0], i < 5 ? 0 : -10) & pair_mask<2>(i);
    } else if constexpr (BITS == 3) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            at[i] = choose(0x00040004u, shifted(last, -(i / 4 * 8 + 2 + i % 4)), shifted(word[0], -2 * i)) & pair_mask<3>(i);
    } else {
        u32 nibbles[BITS / 4][2];  // columns 2 m, and 2 m + 1
#pragma unroll
        for (int pair = 0; pair < BITS / 4; pair++) {
            nibbles[pair][0] = choose(0x33333333u, word[2 * pair], word[2 * pair + 1] << 2);
            nibbles[pair][1] = choose(0x33333333u, word[2 * pair] >> 2, word[2 * pair + 1]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if constexpr (BITS == 4) at[i] = shifted(nibbles[0][i % 2], -(i / 4 * 8)) & pair_mask<4>(i);
            else at[i] = choose(0x000f000fu, shifted(nibbles[0][i % 2], -(i / 2 * 4)), shifted(nibbles[BITS / 4 - 1][i % 2], 4 - i / 2 * 4)) & pair_mask<8>(i);
        }
    }
}

// A quad's 32 halves of a field of 128, in pairs of columns i and i + 8: at[8 w + i].
__device__ __forceinline__ void load_pairs(u32 (&at)[16], const u8* from) {
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const uint4 a = *reinterpret_cast<const uint4*>(from + 32 * w), b = *reinterpret_cast<const uint4*>(from + 32 * w + 16);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            at[8 * w + 2 * m] = permute((&a.x)[m], (&b.x)[m], 0x5410);
            at[8 * w + 2 * m + 1] = permute((&a.x)[m], (&b.x)[m], 0x7632);
        }
    }
}

// Those of the scales of values, of the tokens of this quarter.
__device__ __forceinline__ void load_scales(u32 (&at)[16], const u8* scales, int quad) {
#if V_ROTATED
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const uint4 v = *reinterpret_cast<const uint4*>(scales + quad * 32 + 16 * w);
#pragma unroll
        for (int i = 0; i < 8; i++) at[8 * w + i] = permute((&v.x)[i / 4], (&v.z)[i / 4], i % 4 << 4 | (4 + i % 4) << 12) & 0xff00ff00u;
    }
#else
    load_pairs(at, scales + quad * 64);
#endif
}

// The largest scale of four tokens, as the bits of a half.
__device__ __forceinline__ u32 largest_of_four(const u8* scales, int lane) {
#if V_ROTATED
    const u32 four = reinterpret_cast<const u32*>(scales)[lane];
    return max(max(four & 255u, four >> 8 & 255u), max(four >> 16 & 255u, four >> 24)) << 8;
#else
    const uint2 four = *reinterpret_cast<const uint2*>(scales + lane * 8);
    return max(max(four.x & 0xffffu, four.x >> 16), max(four.y & 0xffffu, four.y >> 16));
#endif
}

// Scores s step + from of a page become exponents: what they are above the state's maximum. Where all of them are below it,
// their largest is not looked for: sums may be relative to any number near it. Else the maximum becomes 1 more than that.
__device__ __forceinline__ void to_exponents(float (&s)[QUERY_TILES][PAGE / 8], State& state, const float (&step)[QUERY_TILES], const float (&from)[QUERY_TILES], int lane) {
    u32 are_below = ~0u;  // the sign
    float base[QUERY_TILES];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        base[n] = state.base(n);
        are_below = state.max_[n] == -INFINITY ? 0u : are_below;
        const float low = from[n] - base[n];
#pragma unroll
        for (int i = 0; i < PAGE / 8; i++) {
            if (!RELATIVE_SCORES) s[n][i] = LAZY_SCORES ? fmaf(s[n][i], step[n], low) : s[n][i] + low;
            are_below &= __float_as_uint(s[n][i]);
        }
    }
    if (!__any_sync(0xffffffffu, (int)are_below >= 0)) return;
    float top[QUERY_TILES], down[QUERY_TILES];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        top[n] = s[n][0];
#pragma unroll
        for (int i = 1; i < PAGE / 8; i++) top[n] = fmaxf(top[n], s[n][i]);
        top[n] += 1.f + base[n];
        if (QUERY_TOKENS > 1 && top[n] < .5f * UNSEEN) top[n] = -INFINITY;
    }
    state.raise_to(top, down, lane);
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        const float raised = state.max_[n] == -INFINITY ? 0.f : state.max_[n] - base[n];
#pragma unroll
        for (int i = 0; i < PAGE / 8; i++) s[n][i] -= raised;
    }
}

// Probabilities of a page times its values, taken into ``state``. exponent: of all 128 tokens.
__device__ __forceinline__ void wide_values(State& state, const float (&exponent)[QUERY_TILES][PAGE / 8], const u8* record, const Shared& shared, int lane) {
    static_assert(V_PARAM == (V_ROTATED ? KV_E5M2 : KV_FLOAT16) && V_GROUPS <= 3, "two rows a group, and one, of the tile of zeros");
    constexpr int PER = MIN2(V_GROUP / 16, TILES), PLANES = planes_of(V_BITS), PLANE = PAGE * DIM / 4;
    constexpr int SIDE = TILES % 4 || PER % 4 || K_AXIS ? 2 : AT_ONCE;  // two are 1 to 2 % faster with scales of keys per token
    const int g = lane >> 2, quad = lane & 3;
    u32 p[COLUMN_TILES][16];  // of columns i and i + 8 of word w, at 8 w + i
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
        for (int i = 0; i < 16; i++) p[c][i % 2 * 8 + i / 2] = transpose(halves(exp2_(exponent[2 * c][i]), exp2_(exponent[2 * c + 1][i])));
    {  // Row 2 i: zeros of group i; 2 i + 1: its scales; all others: 1. (Zeros and mean codes of rotated values add up to nothing.)
        u32 row[16];
        const u8* from = !V_ROTATED && g < 2 * V_GROUPS ? record + (g % 2 ? V_SCALE : V_ZERO) + g / 2 * PAGE * 2 + quad * 64 : reinterpret_cast<const u8*>(shared.ones);
        load_pairs(row, from);
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; c++) {
            float sum[2][4];  // four pairs are an operand, of which two count in rows g, two in g + 8
#pragma unroll
            for (int i = 0; i < 16; i += 4)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    mma_fp16(sum[half], row[i], row[i + 1], row[i + 2], row[i + 3], p[c][i + half], p[c][i + 2 + half], i == 0);
#pragma unroll
            for (int n = 0; n < 2; n++) state.rows[2 * c + n] += sum[0][n] + sum[1][2 + n];
        }
    }
#pragma unroll
    for (int group = 0; group < V_GROUPS; group++) {
        u32 op[COLUMN_TILES][16];
        const u8* scales = record + V_SCALE + group * PAGE * kv_param_bytes(V_PARAM);
        const u32 top = largest_of_warp(largest_of_four(scales, lane));
        // 2^up: scales are below 2^15 with it, and it is a normal half itself.
        const int up = max(-1, min(15, 29 - (int)(top >> 10)));
        const float unit = __uint_as_float((u32)(127 + 24 - up) << 23);
        {
            u32 scale[16];
            load_scales(scale, scales, quad);
            const u32 power = (u32)(15 + up) * 0x04000400u, all = ((1 << V_BITS) - 1) * 0x00010001u;
#pragma unroll
            for (int i = 0; i < 16; i++) scale[i] = multiply_halves(scale[i], power);
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c++) {
#pragma unroll
                for (int i = 0; i < 16; i++) op[c][i] = multiply_halves(p[c][i], scale[i]);
                float sum[4];
#pragma unroll
                for (int i = 0; i < 16; i += 2) mma_fp16(sum, all, all, all, all, op[c][i], op[c][i + 1], i == 0);
#pragma unroll
                for (int i = 0; i < 16; i++)
                    if (pair_shift<V_BITS>(i % 8)) op[c][i] = multiply_halves(op[c][i], (u32)(15 - pair_shift<V_BITS>(i % 8)) * 0x04000400u);
#pragma unroll
                for (int n = 0; n < 2; n++) state.zero[group][2 * c + n] = fmaf(sum[n], -.5f * unit, state.zero[group][2 * c + n]);
            }
        }
#pragma unroll
        for (int first = group * PER; first < MIN2((group + 1) * PER, TILES); first += SIDE) {
            float acc[COLUMN_TILES][SIDE][4];
            u32 lo[PLANES + 1][SIDE][2], hi[PLANES + 1][SIDE][2];
#pragma unroll
            for (int plane = 0; plane < PLANES; plane++) load_words<PAGE, SIDE>(lo[plane], hi[plane], record + plane * PLANE, first, lane);
            if (has_last(V_BITS)) load_bits<PAGE, SIDE>(lo[PLANES], hi[PLANES], record + PLANES * PLANE, first, lane);
#pragma unroll
            for (int w = 0; w < 2; w++) {
                u32 low[SIDE][8], high[SIDE][8];
#pragma unroll
                for (int t = 0; t < SIDE; t++) {
                    u32 low_words[4] = {}, high_words[4] = {};
#pragma unroll
                    for (int plane = 0; plane < PLANES; plane++) { low_words[plane] = lo[plane][t][w]; high_words[plane] = hi[plane][t][w]; }
                    pairs_of<V_BITS>(low_words, has_last(V_BITS) ? lo[PLANES][t][w] : 0, low[t]);
                    pairs_of<V_BITS>(high_words, has_last(V_BITS) ? hi[PLANES][t][w] : 0, high[t]);
                }
#pragma unroll
                for (int i = 0; i < 8; i += 2)
#pragma unroll
                    for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
                        for (int t = 0; t < SIDE; t++)
                            mma_fp16(acc[c][t], low[t][i], high[t][i], low[t][i + 1], high[t][i + 1], op[c][8 * w + i], op[c][8 * w + i + 1], w + i == 0);
            }
#pragma unroll
            for (int t = 0; t < SIDE; t++)
#pragma unroll
                for (int i = 0; i < 4 * COLUMN_TILES; i++) {
                    float& to = state.out[i / 4 * 2 + i % 2][first + t][i % 4 / 2];
                    to = fmaf(acc[i / 4][t][i % 4], unit, to);
                }
        }
    }
}

// Once a warp and head: rows of zeros, scales and ones become what they are for.
__device__ __forceinline__ void take_rows(State& state, int lane) {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
#pragma unroll
        for (int i = 0; i < (V_ROTATED ? 0 : V_GROUPS); i++)
            state.zero[i][n] += __shfl_sync(0xffffffffu, state.rows[n], 8 * i + (lane & 3)) +
                                MEAN_CODE(V_BITS) * __shfl_sync(0xffffffffu, state.rows[n], 8 * i + 4 + (lane & 3));
        const float sum = __shfl_sync(0xffffffffu, state.rows[n], 8 * V_GROUPS + (lane & 3));
        if (lane < 4) state.sum[n] += sum;
        state.rows[n] = 0.f;
    }
}
#endif

}  // namespace decode_
