// Rows of fp32 numbers as integers of at most 2^14, two digits to the base of 256 each: what tensor cores multiply. See
// kvcal/kernels/predict.py and pages/predictor.py; csrc/digit_sums.cu goes back to numbers.
//
// Every number is made by the single IEEE operations of the reference, so that the integers are its integers.

#include "common.cuh"

enum { THREADS = 256 };

constexpr int INPUTS = FIRST + SECOND, ROUNDS = kv_ceil_div(PADDED_INPUTS, 4 * THREADS);
constexpr bool IS_WHOLE = FIRST % 4 == 0 && SECOND % 4 == 0;  // four neighbouring inputs are aligned, and of one part
static_assert(PADDED_INPUTS >= INPUTS && PADDED_INPUTS % 4 == 0, "see kvcal/kernels/predict.py");

// Inputs number `at` to `at` + 3 of a row; 0 beyond the last.
KV_INLINE void load_inputs(float* x, const float* first, const float* second, int at) {
    if constexpr (IS_WHOLE) {
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at < INPUTS) {
            y = *(const float4*)(at < FIRST ? first + at : second + (at - FIRST));
        }
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int input = at + k;
            x[k] = input >= INPUTS ? 0.0f : input < FIRST ? first[input] : second[input - FIRST];
        }
    }
}

// Grid: a block for each row, 256 threads. A row is FIRST + SECOND inputs, PADDED_INPUTS digits.
//   first   fp32 [rows, FIRST]; second  fp32 [rows, SECOND]
//   scales  fp32 [FIRST + SECOND]: what inputs are multiplied by, powers of two
//   high, low  int8: of a row, `stride` bytes from those of the row before
//   units   fp64 [rows]; NaN of a row with NaN or infinity
extern "C" __global__ void __launch_bounds__(THREADS) digits(
    const float* first, const float* second, const float* scales, signed char* high, signed char* low,
    long long stride, double* units) {
    __shared__ float of_warp[THREADS / 32];
    const long long row = blockIdx.x;
    float x[ROUNDS][4], largest = 0.0f;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int at = 4 * (round * THREADS + threadIdx.x);
        float by[4];
        load_inputs(x[round], first + row * FIRST, second + row * SECOND, at);
        load_inputs(by, scales, scales + FIRST, at);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            x[round][k] = __fmul_rn(x[round][k], by[k]);
            largest = kv_max_nan(largest, fabsf(x[round][k]));
        }
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        largest = kv_max_nan(largest, __shfl_xor_sync(~0u, largest, lane));
    }
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = largest;
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) {
        largest = kv_max_nan(largest, of_warp[warp]);
    }
    const bool is_finite = kv_finite(largest);
    const int exponent = kv_max((int)(__float_as_uint(largest) >> 23) - 126, LEAST_EXPONENT);  // largest < 2^exponent
    const float per_unit = __uint_as_float((unsigned)(127 + INTEGER_BITS - exponent) << 23);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const int at = 4 * (round * THREADS + threadIdx.x);
        if (at < PADDED_INPUTS) {
            unsigned high_digits = 0, low_digits = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int number = __float2int_rn(__fmul_rn(x[round][k], per_unit)), digit = (signed char)number;
                high_digits |= ((unsigned)((number - digit) >> 8) & 255) << 8 * k;
                low_digits |= ((unsigned)digit & 255) << 8 * k;
            }
            *(unsigned*)(high + row * stride + at) = high_digits;
            *(unsigned*)(low + row * stride + at) = low_digits;
        }
    }
    if (threadIdx.x == 0) {
        units[row] = __hiloint2double(is_finite ? (1023 + exponent - INTEGER_BITS) << 20 : 0x7ff80000, 0);
    }
}
