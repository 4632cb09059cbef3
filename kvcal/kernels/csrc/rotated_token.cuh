// A token of a rotated page (kvcal/systems/basis/rotated.py) before it has codes, by neighbouring lanes: rotated, and the scale of each
// group. And the grid that its codes belong to. Bit for bit, as is all that packs.

#include "hadamard.cuh"
#include "side.cuh"

enum { BLOCK = 16 };  // channels whose codes fill a word of every plane

template <class S>
constexpr int WORDS = S::bits / 2 + S::bits % 2;  // of a block: of every plane one

// What a channel is multiplied with before it is rotated: its sign and gain. A product with both is rounded once.
template <class S>
KV_INLINE float turn_of(const unsigned short* feedback, const signed char* signs, int channel) {
    const float sign = (float)signs[channel];
    return S::has_gain ? sign * kv_float_of<KV_FLOAT16>(feedback[FACTOR<S> - S::dim + channel]) : sign;
}

// The same of all channels of a lane.
template <class S, int LANES>
struct Turn {
    float by[S::dim / LANES];

    template <class F>
    KV_INLINE Turn(F of_channel) {
#pragma unroll
        for (int i = 0; i < S::dim / LANES; ++i) {
            by[i] = of_channel(LANES * i + threadIdx.x % LANES);
        }
    }
};

// Rotates a staged token and rounds it to the cache's dtype, in place and in registers: a lane has the channels LANES i + lane of it.
// All lanes of the warp take part.
template <class S, int LANES>
KV_INLINE void rotate_token(
    float (&x)[S::dim / LANES], unsigned short* row, const Source& source, const Turn<S, LANES>& turn) {
    constexpr int OWN = S::dim / LANES;
    static_assert(S::dim % LANES == 0 && S::tiers == 0, "channels 8 at a time");
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const float y = transformed<S>(kv_float_of<DTYPE>(row[LANES * i + lane]), source, LANES * i + lane);
        x[i] = __fmul_rn(y, turn.by[i]);
    }
    hadamard<LANES>(x, lane);
#pragma unroll
    for (int i = 0; i < OWN; i += 2) {
        const unsigned bits = kv_bits_of<DTYPE>(x[i], i + 1 < OWN ? x[i + 1] : 0.0f);
#pragma unroll
        for (int k = 0; k < kv_min(2, OWN - i); ++k) {
            const unsigned short half = (unsigned short)(bits >> 16 * k);
            row[LANES * (i + k) + lane] = half;
            x[i + k] = kv_float_of<DTYPE>(half);
        }
    }
}

// The sum of squares of a group of such a token; all of its lanes get it.
template <class S, int LANES>
KV_INLINE double square_of_group(const float (&x)[S::dim / LANES], int group) {
    constexpr int OWN = S::dim / LANES, SIZE = kv_min(S::group, S::dim) / LANES;
    double sum = halving_sum<1, kv_power_of_two(SIZE)>(0, [&](int i) {
        const int own = group * SIZE + i;
        const double y = i < SIZE && own < OWN ? (double)x[kv_min(own, OWN - 1)] : 0.0;
        return __dmul_rn(y, y);
    });
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2) {
        sum = __dadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, apart));
    }
    return sum;
}

// The scale of a group that errs least on Gaussians of its norm: to nearest, or the lowest of the candidates.
template <class S>
KV_INLINE unsigned char scale_bits(double squares, int group, int* error) {
    constexpr int SIZE = kv_min(S::group, S::dim);
    const int size = S::dim % SIZE == 0 ? SIZE : kv_min(SIZE, S::dim - group * SIZE);
    const double mean = S::dim % SIZE == 0 && (SIZE & SIZE - 1) == 0 ? __dmul_rn(squares, 1.0 / SIZE)
                                                                     : __ddiv_rn(squares, (double)size);
    const double rms = __dsqrt_rn(mean);
    const float scale = __double2float_rn(__dmul_rn(rms, __longlong_as_double(S::gaussian_step)));
    const unsigned bits = kv_bits_of<KV_FLOAT16>(scale) + (S::has_feedback ? 0 : 0x80) >> 8;
    if (!kv_finite(kv_float_of_e5m2(bits))) {
        atomicOr(error, NON_FINITE);
    }
    return (unsigned char)bits;
}

constexpr float MAGIC = 12582912.0f;  // 1.5 2^23: a sum with it is rounded to a whole number, half to even

// 1 / step, rounded to nearest, of a number of 8 bits; 0 of 0.
KV_INLINE float kv_reciprocal_of_e5m2(float step) {
    const unsigned bits = __float_as_uint(step), quarters = bits >> 21 & 3;
    const unsigned one = quarters == 0   ? 0x3f800000
                         : quarters == 1 ? 0x3f4ccccd
                         : quarters == 2 ? 0x3f2aaaab
                                         : 0x3f124925;
    return step == 0.0f ? 0.0f : __uint_as_float(one + 0x3f800000 - (bits & 0x7f800000));
}

// A grid of whole numbers 0 ... LEVELS, times a step of 3 bits, around 0.
struct Grid {
    float step, inverse, zero;

    KV_INLINE Grid(float step_, float mean_code)
        : step(step_), inverse(kv_reciprocal_of_e5m2(step_)), zero(__fmul_rn(step_, -mean_code)) {}

    // The code nearest to x, plus MAGIC. The quotient is rounded to nearest (Markstein); below 3 no tie is missed without that. Both
    // tests/kernels/test_pack_emulated.py tries for every step.
    template <unsigned LEVELS>
    KV_INLINE float code(float x) const {
        const float y = __fsub_rn(x, zero), about = __fmul_rn(y, inverse);
        const float quotient = LEVELS <= 3 ? about : __fmaf_rn(__fmaf_rn(-about, step, y), inverse, about);
        return __fadd_rn(fminf(fmaxf(quotient, 0.0f), (float)LEVELS), MAGIC);
    }

    // What the code stands for, exactly.
    KV_INLINE float decoded(float code) const { return __fmaf_rn(__fsub_rn(code, MAGIC), step, zero); }
};

// Appends a code to the words of a block, of which every one holds a plane.
template <class S>
KV_INLINE void append_code(unsigned (&words)[WORDS<S>], int k, float code) {
    const unsigned bits = __float_as_uint(code) & (1u << S::bits) - 1;
#pragma unroll
    for (int word = 0; word < WORDS<S>; ++word) {
        const bool is_pair = word < S::bits / 2;
        words[word] |= (bits >> 2 * word & (is_pair ? 3 : 1)) << (is_pair ? 2 : 1) * k;
    }
}
