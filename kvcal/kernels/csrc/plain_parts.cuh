// A head's attention from its parts: of the threads of a block, then of the blocks that shared the head's tiles.

#include "plain_tile.cuh"

namespace plain {

#define PASSES kv_ceil_div(GROUP_HEADS, HEADS)

constexpr float LOG2E = 1.4426950408889634f, LOWEST = -3.402823466e38f;  // in place of minus infinity
constexpr int QUADS = DIM / 4;                              // channels of a thread: 4 side by side
constexpr int SPLITS = kv_min(THREADS / QUADS, TOKENS);     // threads that share the tokens of the same channels
constexpr int PART = DIM + 4;                               // floats of a head's part: P V, maximum, sum, 2 of padding

// Where results go. s_aux: logits of sinks without a key, or 0.
struct Results {
    const float* s_aux;
    float* parts;
    int* counters;
    void* out;
    int heads;
};

KV_INLINE float4 scaled(float4 x, float by) { return make_float4(x.x * by, x.y * by, x.z * by, x.w * by); }

KV_INLINE float4 added(float4 sum, float4 x, float weight) {
    return make_float4(
        fmaf(weight, x.x, sum.x), fmaf(weight, x.y, sum.y), fmaf(weight, x.z, sum.z), fmaf(weight, x.w, sum.w));
}

// The output of channels 4 quad to 4 quad + 3 of query head h of the pass, from P V and the softmax's maximum (log2)
// and sum.
template <int TYPE>
KV_INLINE void write_result(
    const Results& to, long long virtual_head, int h, int quad, float4 value, float top, float sum) {
    const int member = (int)(virtual_head % PASSES) * HEADS + h;
    if (member >= GROUP_HEADS) {
        return;
    }
    float weight = 1.0f;
    if (to.s_aux != nullptr) {  // has weight in the sum, and no value
        const float sink = to.s_aux[virtual_head / PASSES % to.heads * GROUP_HEADS + member] * LOG2E;
        const float higher = fmaxf(top, sink);
        weight = exp2f(top - higher);
        sum = fmaf(sum, weight, exp2f(sink - higher));
    }
    const float4 x = scaled(value, weight / sum);
    const long long at = (virtual_head / PASSES * GROUP_HEADS + member) * QUADS + quad;
    if constexpr (TYPE == KV_FLOAT32) {
        ((float4*)to.out)[at] = x;
    } else {
        const unsigned low = kv_bits_of<TYPE>(x.x) | (unsigned)kv_bits_of<TYPE>(x.y) << 16;
        const unsigned high = kv_bits_of<TYPE>(x.z) | (unsigned)kv_bits_of<TYPE>(x.w) << 16;
        ((uint2*)to.out)[at] = make_uint2(low, high);
    }
}

// Sums of the threads' shares of P V, in order, as a part or, if the block had all tiles of the head, as the result.
// scratch: THREADS float4.
KV_INLINE void finish_block(
    const Results& to, long long virtual_head, const float4 (&shares)[HEADS], const float* tops, const float* sums,
    float4* scratch, float* part) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        __syncthreads();
        scratch[threadIdx.x] = shares[h];
        __syncthreads();
        if (threadIdx.x >= QUADS) {
            continue;
        }
        float4 value = scratch[threadIdx.x];
        for (int split = 1; split < SPLITS; ++split) {
            value = added(value, scratch[split * QUADS + threadIdx.x], 1.0f);
        }
        if (part == nullptr) {
            write_result<Q_DTYPE>(to, virtual_head, h, threadIdx.x, value, tops[h], sums[h]);
            continue;
        }
        ((float4*)(part + h * PART))[threadIdx.x] = value;
        if (threadIdx.x == 0) {
            part[h * PART + DIM] = tops[h];
            part[h * PART + DIM + 1] = sums[h];
        }
    }
}

// The result of `count` parts that follow one another, taken in their order.
KV_INLINE void merge_parts(const Results& to, long long virtual_head, const float* parts, int count) {
    for (int i = threadIdx.x; i < HEADS * QUADS; i += THREADS) {
        const int h = i / QUADS, quad = i % QUADS;
        const float* from = parts + h * PART;
        float top = LOWEST, sum = 0.0f;
        float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int k = 0; k < count; ++k) {
            top = fmaxf(top, from[(long long)k * HEADS * PART + DIM]);
        }
#pragma unroll 4
        for (int k = 0; k < count; ++k) {
            const float* part = from + (long long)k * HEADS * PART;
            const float weight = exp2f(part[DIM] - top);
            sum = fmaf(weight, part[DIM + 1], sum);
            value = added(value, ((const float4*)part)[quad], weight);
        }
        write_result<Q_DTYPE>(to, virtual_head, h, quad, value, top, sum);
    }
}

}  // namespace plain
