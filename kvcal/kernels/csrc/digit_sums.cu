// Sums of products of digits become predictions. See kvcal/kernels/predict.py; csrc/digits.cu makes the digits.
//
// The three sums of an output are one integer, which fp64 holds, and the rest is the reference's arithmetic.

#include "common.cuh"

enum { THREADS = 256 };

// Grid: any, 256 threads. OUTPUTS of a row count, of PADDED_OUTPUTS that are there, a multiple of 4.
//   high, cross, low  int32 [rows, PADDED_OUTPUTS]: of the high digits; of high and low ones, both ways; of the low ones
//   row_units  fp64 [rows]; output_units  fp64 [OUTPUTS]; bias  fp64 [OUTPUTS], or 0
//   out        fp32 [rows, OUTPUTS]
extern "C" __global__ void __launch_bounds__(THREADS) digit_sums(
    const int4* high, const int4* cross, const int4* low, const double* row_units, const double* output_units,
    const double* bias, float* out, long long rows) {
    constexpr int QUADS = kv_ceil_div(OUTPUTS, 4);
    const long long step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < rows * QUADS; i += step) {
        const long long row = i / QUADS, quad = i % QUADS, at = row * (PADDED_OUTPUTS / 4) + quad;
        const int4 a = high[at], b = cross[at], c = low[at];
        const int highs[4] = {a.x, a.y, a.z, a.w}, crosses[4] = {b.x, b.y, b.z, b.w}, lows[4] = {c.x, c.y, c.z, c.w};
        const double row_unit = row_units[row];
        float y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int output = 4 * (int)quad + k;
            if (output < OUTPUTS) {
                const long long sum = 65536ll * highs[k] + 256ll * crosses[k] + lows[k];
                double x = __dmul_rn(__dmul_rn(__ll2double_rn(sum), output_units[output]), row_unit);
                if (bias != nullptr) {
                    x = __dadd_rn(x, bias[output]);
                }
                y[k] = __double2float_rn(x);
            }
        }
        float* to = out + row * OUTPUTS + 4 * quad;
        if constexpr (OUTPUTS % 4 == 0) {
            *(float4*)to = make_float4(y[0], y[1], y[2], y[3]);
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (4 * quad + k < OUTPUTS) {
                    to[k] = y[k];
                }
            }
        }
    }
}
