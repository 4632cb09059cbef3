// Parts of a softmax become one, in a fixed order.

#include "decode/instructions.cuh"
#include "hadamard.cuh"

namespace decode_ {

// A merged softmax: of one head, and four channels.
struct Merged { float top, sum, value[4]; };

// Merge ``count`` parts, in order: max and sum of this head at m and l, channels at o; ``stride`` and ``o_stride`` floats
// lie between parts. MERGED are loaded at a time, then taken in: each time waits for memory once.
__device__ __forceinline__ Merged merge(const float* m, const float* l, const float* o, int count, int stride, int o_stride) {
    constexpr int TAKEN = MERGED;
    Merged merged = {-INFINITY, 0.f, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll 1
    for (int from = 0; from < count; from += TAKEN) {
        float part_max[TAKEN], part_sum[TAKEN], top = merged.top;
        float4 part[TAKEN];
#pragma unroll
        for (int i = 0; i < TAKEN; i++) {
            const int at = min(from + i, count - 1);
            part_max[i] = from + i < count ? m[at * stride] : -INFINITY;
            part_sum[i] = l[at * stride];
            part[i] = *reinterpret_cast<const float4*>(o + at * o_stride);
        }
#pragma unroll
        for (int i = 0; i < TAKEN; i++) top = fmaxf(top, part_max[i]);
        const float old = merged.top == -INFINITY ? 0.f : exp2_(merged.top - top);
        merged.sum *= old;
#pragma unroll
        for (int k = 0; k < 4; k++) merged.value[k] *= old;
        merged.top = top;
#pragma unroll
        for (int i = 0; i < TAKEN; i++) {
            const float weight = part_max[i] == -INFINITY ? 0.f : exp2_(part_max[i] - top);
            merged.sum = fmaf(weight, part_sum[i], merged.sum);
#pragma unroll
            for (int k = 0; k < 4; k++) merged.value[k] = fmaf(weight, (&part[i].x)[k], merged.value[k]);
        }
    }
    return merged;
}

// The result of a head, channels first, ... of its query head h of this pass.
__device__ __forceinline__ void write_result(const Args& a, int virtual_head, const Merged& merged, u32 h, u32 first) {
    const int member = virtual_head % PASSES * HEADS + (int)h;
    if (member >= GROUP_HEADS) return;
    const int heads = (int)a.heads, kv_head = virtual_head / PASSES, token = token_of(member), of_token = member - token * TOKEN_HEADS;
    float weight = 1.f, sum = merged.sum;
    if (a.s_aux) {  // a sink: weight in the sum, no value
        const float sink = a.s_aux[kv_head % heads * TOKEN_HEADS + of_token] * LOG2E;
        const float higher = fmaxf(merged.top, sink);
        weight = exp2_(merged.top - higher);
        sum = sum * weight + exp2_(sink - higher);
    }
    weight /= sum;
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; i++) value[i] = merged.value[i] * weight;
    // Without drafts, no division: heads of all rows follow one another.
    const int before = QUERY_TOKENS == 1 ? 0 : (kv_head / heads * (QUERY_TOKENS - 1) + token) * heads;  // KV heads of other tokens
    const i64 at = ((i64)(before + kv_head) * TOKEN_HEADS + of_token) * DIM + first;
#if Q_DTYPE == 2
    *reinterpret_cast<float4*>(reinterpret_cast<float*>(a.out) + at) = make_float4(value[0], value[1], value[2], value[3]);
#elif Q_DTYPE == 1
    *reinterpret_cast<uint2*>(reinterpret_cast<u16*>(a.out) + at) = make_uint2(bhalves(value[0], value[1]), bhalves(value[2], value[3]));
#else
    *reinterpret_cast<uint2*>(reinterpret_cast<u16*>(a.out) + at) = make_uint2(halves(value[0], value[1]), halves(value[2], value[3]));
#endif
}

// The warps' parts of a head become the block's, and those of all its blocks the result. Both in one piece of code, which
// is fetched from memory when a head ends.
__device__ __forceinline__ void finish(const Args& a, Shared& shared, u32 thread) {
    constexpr int PART = HEADS * (DIM + 2);
    const int virtual_head = shared.virtual_head, num_blocks = shared.num_blocks;
    float* part = a.parts + (i64)(blockIdx.x + virtual_head) * PART;
    const float *m = shared.max_[0], *l = shared.sum[0], *o = reinterpret_cast<const float*>(shared.slots[0]);
    int count = shared.num_warps, stride = HEADS, o_stride = SLOT_BYTES / 4;
#pragma unroll 1
    for (bool is_result = num_blocks == 1;; is_result = true) {
        for (u32 item = thread; item < HEADS * DIM / 4; item += WARPS * 32) {
            const u32 h = item * 4 / DIM;
            Merged merged = merge(m + h, l + h, o + item * 4, count, stride, o_stride);
            if (is_result) {
#if V_ROTATED  // rotated back: neighbouring lanes have four channels each, and the order of bits does not matter
                hadamard<kv_min(kv_hadamard_block(DIM), 128) / 4>(merged.value, (int)thread % 32);
#pragma unroll
                for (int i = 0; i < 4; i++) merged.value[i] *= shared.v_signs[item * 4 % DIM + i];
#endif
                write_result(a, virtual_head, merged, h, item * 4 % DIM);
            } else {
                if (item * 4 % DIM == 0) { part[h] = merged.top; part[HEADS + h] = merged.sum; }
                *reinterpret_cast<float4*>(part + 2 * HEADS + item * 4) = make_float4(merged.value[0], merged.value[1], merged.value[2], merged.value[3]);
            }
        }
        if (is_result) return;
        __syncthreads();
        if (thread == 0) {
            shared.is_last = count_up(a.counters + virtual_head) == num_blocks - 1;
            if (shared.is_last) a.counters[virtual_head] = 0;
        }
        __syncthreads();
        if (!shared.is_last) return;
        m = a.parts + (i64)(shared.first_block + virtual_head) * PART; l = m + HEADS; o = l + HEADS;
        count = num_blocks; stride = o_stride = PART;
    }
}

}  // namespace decode_
