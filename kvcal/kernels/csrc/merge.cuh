// Parts of a softmax become one, in a fixed order.

#include "instructions.cuh"

namespace decode_ {

// Merge ``count`` parts (max, sum, out[8][DIM]) of a head, in order, and write the result: to ``to`` as one more part, or to
// the output. m and l are ``stride`` floats apart, o ``o_stride``. Eight parts are loaded at a time, then taken in.
__device__ __forceinline__ void merge(const Args& a, i64 virtual_head, const float* m, const float* l, const float* o, int count,
                                      i64 stride, i64 o_stride, float* to, int thread) {
    constexpr int TAKEN = 8;
    for (int item = thread; item < HEADS * DIM / 4; item += WARPS * 32) {
        const int h = item * 4 / DIM;
        float top = -INFINITY, sum = 0.f, value[4] = {0.f, 0.f, 0.f, 0.f};
        for (int from = 0; from < count; from += TAKEN) {
            float part_max[TAKEN], part_sum[TAKEN];
            float4 part[TAKEN];
#pragma unroll
            for (int i = 0; i < TAKEN; i++) {
                const int at = min(from + i, count - 1);
                part_max[i] = from + i < count ? m[at * stride + h] : -INFINITY;
                part_sum[i] = l[at * stride + h];
                part[i] = *reinterpret_cast<const float4*>(o + at * o_stride + item * 4);
            }
            float higher = top;
#pragma unroll
            for (int i = 0; i < TAKEN; i++) higher = fmaxf(higher, part_max[i]);
            const float old = top == -INFINITY ? 0.f : exp2_(top - higher);
            sum *= old; value[0] *= old; value[1] *= old; value[2] *= old; value[3] *= old;
            top = higher;
#pragma unroll
            for (int i = 0; i < TAKEN; i++) {
                const float weight = part_max[i] == -INFINITY ? 0.f : exp2_(part_max[i] - top);
                sum = fmaf(weight, part_sum[i], sum);
                value[0] = fmaf(weight, part[i].x, value[0]); value[1] = fmaf(weight, part[i].y, value[1]);
                value[2] = fmaf(weight, part[i].z, value[2]); value[3] = fmaf(weight, part[i].w, value[3]);
            }
        }
        if (to) {
            if (item * 4 % DIM == 0) { to[h] = top; to[HEADS + h] = sum; }
            *reinterpret_cast<float4*>(to + 2 * HEADS + item * 4) = make_float4(value[0], value[1], value[2], value[3]);
            continue;
        }
        const int member = (int)(virtual_head % PASSES) * HEADS + h;
        if (member >= GROUP_HEADS) continue;
        float weight = 1.f;
        if (a.s_aux) {  // a sink: weight in the sum, no value
            const float sink = a.s_aux[(virtual_head / PASSES) % a.heads * GROUP_HEADS + member] * LOG2E;
            const float higher = fmaxf(top, sink);
            weight = exp2_(top - higher);
            sum = sum * weight + exp2_(sink - higher);
        }
        weight /= sum;
        const i64 at = ((virtual_head / PASSES) * GROUP_HEADS + member) * DIM + item * 4 % DIM;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (Q_DTYPE == 2) reinterpret_cast<float*>(a.out)[at + i] = value[i] * weight;
            else reinterpret_cast<u16*>(a.out)[at + i] = (u16)((Q_DTYPE == 1 ? bhalves(value[i] * weight, 0.f) : halves(value[i] * weight, 0.f)) & 0xffffu);
        }
    }
}

// The warps' parts of a head become the block's, and those of all its blocks the result.
__device__ __forceinline__ void finish(const Args& a, Shared& shared, int thread) {
    constexpr i64 part_floats = HEADS * (DIM + 2);
    const i64 virtual_head = shared.virtual_head;
    float* part = shared.is_whole ? nullptr : a.parts + (blockIdx.x + virtual_head) * part_floats;
    merge(a, virtual_head, shared.max_[0], shared.sum[0], shared.out[0], WARPS, HEADS, HEADS * DIM, part, thread);
    if (!part) return;
    const i64 start = shared.head_start, all = shared.all, blocks = shared.blocks;
    const i64 first_block = ((start + 1) * blocks - 1) / all, last_block = ((start + shared.head_units) * blocks - 1) / all;
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        const int others = atomicAdd(a.counters + virtual_head, 1);
        shared.is_last = others == (int)(last_block - first_block);
        if (shared.is_last) a.counters[virtual_head] = 0;
    }
    __syncthreads();
    if (!shared.is_last) return;
    __threadfence();
    const float* from = a.parts + (first_block + virtual_head) * part_floats;
    merge(a, virtual_head, from, from + HEADS, from + 2 * HEADS, (int)(last_block - first_block) + 1, part_floats, part_floats, nullptr, thread);
}

}  // namespace decode_
