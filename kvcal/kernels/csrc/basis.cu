// New tokens enter the basis of their KV head, and the queries that read them turn: `enter`. Attention's outputs, and tokens that are
// read back, leave it: `leave`. Both are a product with a matrix [DIM, DIM] a head (kvcal/systems/basis/basis.py).
//
// Entering decides bytes: the integers of basis.py, T in 16 bits a row and x - c in 24 bits a token, are cut into bytes,
// which tensor cores multiply and add up exactly. Sums of products of equal weight share an int32: at most 2 DIM 255^2.
// They become one integer of 64 bits, which is rounded once. There is no fp64, and no order of sums that could matter.
// Queries and outputs are fp32 numbers: both operands are scaled by powers of two and split into two halves. The product of the
// lower two, some 2^-22 of the result, is left out.
//
// A warp has 16 channels of the result of a head, whose rows of the matrix stay in registers, and takes 8 tokens, or 8 queries,
// at a time. Nothing is shared between warps, and the matrix is loaded before the kernel waits for the one before it.
// Lane = 4 g + quad of an operand: channels 32 s + 8 quad + (0 ... 7) of row g, or g + 8, of the matrix in step s, and of token g.
// The order of channels within a sum is free, so that eight neighbours are one or two loads. Rows g and g + 8 of an operand are
// channels 2 g and 2 g + 1 of the result, which are stored together.
//
// Macros: DIM, a multiple of 8; GROUP, query heads of a KV head; DTYPE of the cache and Q_DTYPE of queries for `enter`, IN_DTYPE and
// OUT_DTYPE for `leave` (as variants.py numbers them).

#include "common.cuh"

typedef unsigned u32;
typedef long long i64;

constexpr int WARPS = 2, THREADS = 32 * WARPS, TILE = 16, AT_ONCE = 8, STEPS = kv_ceil_div(DIM, 32);
constexpr int BLOCKS_OF_HEAD = kv_ceil_div(DIM, WARPS * TILE);
constexpr u32 INFINITE = 255;                          // exponent of infinity and NaN
constexpr u32 LEAST_OF_ROWS = 64, LEAST_OF_TOKENS = 32;  // LEAST_EXPONENTS of basis.py, plus 126

// Rows of `heads` heads each: [outer, inner, heads, DIM], by strides in elements.
struct Rows {
    const void* first;
    i64 outer, inner, head;
    int per_outer;

    KV_INLINE i64 at(int row, int number) const {
        return row / per_outer * outer + row % per_outer * inner + number * head;
    }
};

// A block's share of the rows: of `of` blocks, that take 8 of them in turn, it is number `number`.
struct Share {
    int number, of;
};

struct Lane {
    int g, quad;
    KV_INLINE int channel(int step) const { return 32 * step + 8 * quad; }
};

KV_INLINE float power_of_two(u32 biased) { return __uint_as_float(biased << 23); }

// ---- 8 neighbours as fp32

template <int TYPE>
KV_INLINE void load_eight(float (&x)[8], const void* first, i64 at, bool is_there) {
    if constexpr (TYPE == KV_FLOAT32) {
        const float4* from = (const float4*)((const float*)first + at);
        const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f), low = is_there ? from[0] : zero, high = is_there ? from[1] : zero;
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
        const uint4* from = (const uint4*)((const unsigned short*)first + at);
        const uint4 words = is_there ? from[0] : make_uint4(0, 0, 0, 0);
        const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = kv_float_of<TYPE>((unsigned short)(word[i / 2] >> 16 * (i % 2)));
        }
    }
}

// ---- the largest numbers of rows

// The largest of the four lanes of a row.
KV_INLINE u32 largest_of_quads(u32 x) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return max(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The biased exponent of the largest number of a row; all four lanes get it.
template <u32 LEAST = LEAST_OF_ROWS>
KV_INLINE u32 exponent_of(const float (&x)[STEPS][8]) {
    u32 top = 0;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            top = max(top, __float_as_uint(x[s][i]) & 0x7fffffffu);
        }
    }
    return max(largest_of_quads(top) >> 23, LEAST);
}

// ---- tokens enter

#ifdef DTYPE

// d += a b of bytes: 16 rows, 8 columns, 32 products each.
template <bool IS_A_SIGNED, bool IS_B_SIGNED>
KV_INLINE void multiply_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#define MMA_BYTES(a_type, b_type) \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." a_type "." b_type ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (IS_A_SIGNED && IS_B_SIGNED) {
        MMA_BYTES("s8", "s8");
    } else if constexpr (IS_A_SIGNED) {
        MMA_BYTES("s8", "u8");
    } else if constexpr (IS_B_SIGNED) {
        MMA_BYTES("u8", "s8");
    } else {
        MMA_BYTES("u8", "u8");
    }
#undef MMA_BYTES
}

// Byte NUMBER of each of four words.
template <int NUMBER>
KV_INLINE u32 bytes_of(const u32* word) {
    constexpr u32 SELECTOR = 0x40 + 0x11 * NUMBER;
    return __byte_perm(__byte_perm(word[0], word[1], SELECTOR), __byte_perm(word[2], word[3], SELECTOR), 0x5410);
}

// 16 rows of T: their bytes as operands, and the units of rows g and g + 8.
struct Matrix {
    u32 low[STEPS][4], high[STEPS][4];
    float unit[2];

    KV_INLINE void load(const float* matrix, int channel, Lane lane) {
        float x[2][STEPS][8];  // asked for all at once
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int from = lane.channel(s);
                load_eight<KV_FLOAT32>(x[half][s], matrix, (channel + half) * DIM + from, channel < DIM && from < DIM);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 exponent = exponent_of(x[half]);
            const float up = power_of_two(127 + 15 + 126 - exponent);
            unit[half] = power_of_two(exponent - 126 - 15 + 127);
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                u32 word[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {  // 1.5 2^23 is 0 in its last 16 bits
                    word[i] = __float_as_uint(__fadd_rn(fminf(__fmul_rn(x[half][s][i], up), 32767.f), 12582912.f));
                }
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    low[s][2 * part + half] = bytes_of<0>(word + 4 * part);
                    high[s][2 * part + half] = bytes_of<1>(word + 4 * part);
                }
            }
        }
    }
};

// One side: x [rows, heads, DIM] -> out, contiguous. center: fp32 [heads, DIM], or 0.
KV_INLINE void enter_side(
    const Rows& x, const float* matrices, const float* centers, unsigned short* out, int rows, int heads, Share share, int* error) {
    const int head = blockIdx.x / BLOCKS_OF_HEAD, warp = threadIdx.x / 32;
    const Lane lane{(int)threadIdx.x % 32 / 4, (int)threadIdx.x % 4};
    const int channel = (blockIdx.x % BLOCKS_OF_HEAD * WARPS + warp) * TILE + 2 * lane.g;
    float center[STEPS][8];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        load_eight<KV_FLOAT32>(center[s], centers, head * DIM + lane.channel(s), centers && lane.channel(s) < DIM);
    }
    Matrix matrix;
    matrix.load(matrices + (i64)head * DIM * DIM, channel, lane);
    kv_wait_for_previous();
    kv_let_next_start();
    bool is_beyond = false;
    for (int first = share.number * AT_ONCE; first < rows; first += share.of * AT_ONCE) {
        const int row = kv_min(first + lane.g, rows - 1);
        const i64 at = x.at(row, head);
        float token[STEPS][8];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            load_eight<DTYPE>(token[s], x.first, at + lane.channel(s), lane.channel(s) < DIM);
        }
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                token[s][i] = __fsub_rn(token[s][i], center[s][i]);
            }
        }
        const u32 exponent = exponent_of<LEAST_OF_TOKENS>(token);
        const float up = power_of_two(127 + 23 + 126 - exponent);
        int sum[4][4] = {};  // of products that count 2^0, 2^8, 2^16, 2^24
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            u32 word[8], byte[3][2];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                word[i] = (u32)min(__float2int_rn(__fmul_rn(token[s][i], up)), 0x7fffff);
            }
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                byte[0][part] = bytes_of<0>(word + 4 * part);
                byte[1][part] = bytes_of<1>(word + 4 * part);
                byte[2][part] = bytes_of<2>(word + 4 * part);
            }
            multiply_bytes<false, false>(sum[0], matrix.low[s], byte[0][0], byte[0][1]);
            multiply_bytes<false, false>(sum[1], matrix.low[s], byte[1][0], byte[1][1]);
            multiply_bytes<false, true>(sum[2], matrix.low[s], byte[2][0], byte[2][1]);
            multiply_bytes<true, false>(sum[1], matrix.high[s], byte[0][0], byte[0][1]);
            multiply_bytes<true, false>(sum[2], matrix.high[s], byte[1][0], byte[1][1]);
            multiply_bytes<true, true>(sum[3], matrix.high[s], byte[2][0], byte[2][1]);
        }
#pragma unroll
        for (int column = 0; column < 2; ++column) {  // this lane's results are those of tokens 2 quad and 2 quad + 1
            const int number = 2 * lane.quad + column;
            const u32 of_token = __shfl_sync(0xffffffffu, exponent, 4 * number);
            const float down = power_of_two(of_token - 126 - 23 + 127);
            u32 pair = 0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = 2 * half + column;
                const i64 whole = sum[0][i] + ((i64)sum[1][i] << 8) + ((i64)sum[2][i] << 16) + ((i64)sum[3][i] << 24);
                float y = __fmul_rn(__fmul_rn(__ll2float_rn(whole), matrix.unit[half]), down);
                y = of_token == INFINITE ? __uint_as_float(0x7fc00000u) : y;
                const unsigned short bits = kv_bits_of<DTYPE>(y);
                is_beyond |= DTYPE == KV_FLOAT16 && (bits & 0x7c00) == 0x7c00 && first + number < rows && channel < DIM;
                pair |= (u32)bits << 16 * half;
            }
            if (first + number < rows && channel < DIM) {
                *(u32*)(out + ((i64)(first + number) * heads + head) * DIM + channel) = pair;
            }
        }
    }
    if (is_beyond) {
        atomicOr(error, NON_FINITE);
    }
}

#endif

// ---- queries turn, outputs leave

KV_INLINE void multiply_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers below 2^15 as halves, and what is left of them.
KV_INLINE void split(u32& high, u32& low, float even, float odd) {
    const u32 first = kv_bits_of<KV_FLOAT16>(even), second = kv_bits_of<KV_FLOAT16>(odd);
    const float even_rest = even - kv_float_of<KV_FLOAT16>(first), odd_rest = odd - kv_float_of<KV_FLOAT16>(second);
    high = first | second << 16;
    low = kv_bits_of<KV_FLOAT16>(even_rest) | (u32)kv_bits_of<KV_FLOAT16>(odd_rest) << 16;
}

// A row whose largest number has this exponent comes to lie below 2^15, and back.
KV_INLINE float up_to_halves(u32 exponent) { return power_of_two(127 + 15 + 126 - exponent); }
KV_INLINE float from_halves(u32 exponent) { return power_of_two(exponent - 126 - 15 + 127); }

// x [rows, heads GROUP, DIM] of dtype IN -> out [rows, heads GROUP, DIM] of dtype OUT, contiguous: the matrix of each KV head, or if
// IS_TURNED its transpose, times each of them. Added to it: fp32 [heads, DIM], or 0.
template <bool IS_TURNED, int IN, int OUT>
KV_INLINE void multiply(const Rows& x, const float* matrices, const float* added, void* out, int rows, int heads, Share share) {
    const int head = blockIdx.x / BLOCKS_OF_HEAD, warp = threadIdx.x / 32;
    const Lane lane{(int)threadIdx.x % 32 / 4, (int)threadIdx.x % 4};
    const int channel = (blockIdx.x % BLOCKS_OF_HEAD * WARPS + warp) * TILE + 2 * lane.g;
    const float* matrix = matrices + (i64)head * DIM * DIM;
    float entry[2][STEPS][8], unit[2], more[2] = {};
    if (!IS_TURNED && added && channel < DIM) {
        more[0] = added[head * DIM + channel];
        more[1] = added[head * DIM + channel + 1];
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int from = lane.channel(s);
        const bool is_there = channel < DIM && from < DIM;
        if constexpr (IS_TURNED) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint2 pair = is_there ? *(const uint2*)(matrix + (from + i) * DIM + channel) : make_uint2(0, 0);
                entry[0][s][i] = __uint_as_float(pair.x);
                entry[1][s][i] = __uint_as_float(pair.y);
            }
        } else {
            load_eight<KV_FLOAT32>(entry[0][s], matrix, channel * DIM + from, is_there);
            load_eight<KV_FLOAT32>(entry[1][s], matrix, (channel + 1) * DIM + from, is_there);
        }
    }
    u32 high[STEPS][2][4], low[STEPS][2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 exponent = exponent_of(entry[half]);
        const float up = up_to_halves(exponent);
        unit[half] = from_halves(exponent);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // two channels each, of which the first two pairs are one product's
                const int at = i % 2 * 2 + half;
                split(high[s][i / 2][at], low[s][i / 2][at], entry[half][s][2 * i] * up, entry[half][s][2 * i + 1] * up);
            }
        }
    }
    kv_wait_for_previous();
    kv_let_next_start();
    const int count = rows * GROUP;
    for (int first = share.number * AT_ONCE; first < count; first += share.of * AT_ONCE) {
        const int row = kv_min(first + lane.g, count - 1);
        const i64 at = x.at(row / GROUP, head * GROUP + row % GROUP);
        float number[STEPS][8], sum[4] = {}, rest[4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            load_eight<IN>(number[s], x.first, at + lane.channel(s), lane.channel(s) < DIM);
        }
        const u32 exponent = exponent_of(number);
        const float up = up_to_halves(exponent);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                u32 upper[2], lower[2];
                split(upper[0], lower[0], number[s][4 * k] * up, number[s][4 * k + 1] * up);
                split(upper[1], lower[1], number[s][4 * k + 2] * up, number[s][4 * k + 3] * up);
                multiply_halves(sum, high[s][k], upper[0], upper[1]);
                multiply_halves(rest, low[s][k], upper[0], upper[1]);
                if constexpr (IN == KV_FLOAT32) {  // of 16 bits nothing is left
                    multiply_halves(rest, high[s][k], lower[0], lower[1]);
                }
            }
        }
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            const int number_of = 2 * lane.quad + column, to_row = first + number_of;
            const float down = from_halves(__shfl_sync(0xffffffffu, exponent, 4 * number_of));
            if (to_row >= count || channel >= DIM) {
                continue;
            }
            const i64 to = ((i64)(to_row / GROUP * heads + head) * GROUP + to_row % GROUP) * DIM + channel;
            const float even = (sum[column] + rest[column]) * unit[0] * down + more[0];
            const float odd = (sum[2 + column] + rest[2 + column]) * unit[1] * down + more[1];
            if constexpr (OUT == KV_FLOAT32) {
                *(uint2*)((float*)out + to) = make_uint2(__float_as_uint(even), __float_as_uint(odd));
            } else {
                *(u32*)((unsigned short*)out + to) = kv_bits_of<OUT>(even) | (u32)kv_bits_of<OUT>(odd) << 16;
            }
        }
    }
}

// ---- the kernels

#ifdef DTYPE

// Grid (heads BLOCKS_OF_HEAD, shares), 64 threads. The first `side_shares` of the second number are x's, as many y's if y is not 0,
// and all others the queries'.
//   x, y          [rows / per_outer, per_outer, heads, DIM] in DTYPE, by strides in elements; into x_out and y_out
//   x_matrix ...  fp32 [heads, DIM, DIM]; x_center fp32 [heads, DIM], or 0
//   q             [rows / per_outer, per_outer, heads GROUP, DIM] in Q_DTYPE, by strides; q_out fp32: times the transpose of q_matrix
//   error         int32, gets the bit NON_FINITE where float16 cannot hold a number
extern "C" __global__ void __launch_bounds__(THREADS) enter(
    const void* x, i64 x_outer, i64 x_inner, i64 x_head, const float* x_matrix, const float* x_center, unsigned short* x_out,
    const void* y, i64 y_outer, i64 y_inner, i64 y_head, const float* y_matrix, const float* y_center, unsigned short* y_out,
    const void* q, i64 q_outer, i64 q_inner, i64 q_head, const float* q_matrix, float* q_out,
    i64 side_shares, i64 rows, i64 per_outer, i64 heads, int* error) {
    const int shares = (int)side_shares, number = blockIdx.y, of_sides = y ? 2 * shares : shares;
    if (number >= of_sides) {
        multiply<true, Q_DTYPE, KV_FLOAT32>(
            Rows{q, q_outer, q_inner, q_head, (int)per_outer}, q_matrix, nullptr, q_out, (int)rows, (int)heads,
            Share{number - of_sides, (int)gridDim.y - of_sides});
        return;
    }
    const bool is_x = number < shares;
    const Rows tokens = is_x ? Rows{x, x_outer, x_inner, x_head, (int)per_outer} : Rows{y, y_outer, y_inner, y_head, (int)per_outer};
    enter_side(
        tokens, is_x ? x_matrix : y_matrix, is_x ? x_center : y_center, is_x ? x_out : y_out, (int)rows, (int)heads,
        Share{number % shares, shares}, error);
}

#else

// Grid (heads BLOCKS_OF_HEAD, any number), 64 threads: y [rows / per_outer, per_outer, heads GROUP, DIM] in IN_DTYPE, by strides
// -> out, alike in OUT_DTYPE and contiguous. matrix fp32 [heads, DIM, DIM]; center fp32 [heads, DIM], or 0.
extern "C" __global__ void __launch_bounds__(THREADS) leave(
    const void* y, i64 y_outer, i64 y_inner, i64 y_head, const float* matrix, const float* center, void* out, i64 rows,
    i64 per_outer, i64 heads) {
    multiply<false, IN_DTYPE, OUT_DTYPE>(
        Rows{y, y_outer, y_inner, y_head, (int)per_outer}, matrix, center, out, (int)rows, (int)heads,
        Share{(int)blockIdx.y, (int)gridDim.y});
}

#endif
