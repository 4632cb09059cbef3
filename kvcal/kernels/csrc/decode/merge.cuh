// Parts of a softmax become one, in a fixed order.

#include "decode/instructions.cuh"
#include "hadamard.cuh"

namespace decode_ {

// A merged softmax: of one head, and four channels; of both halves of a head where a rotation of more channels than a warp has
// mixes them.
constexpr int FOURS = V_ROTATED && kv_hadamard_block(DIM) > 128 ? 2 : 1, APART = DIM / FOURS;
static_assert(kv_hadamard_block(DIM) <= 128 * FOURS || !V_ROTATED, "a warp rotates a head back");
struct Merged { float top, sum, value[4 * FOURS]; };

// Merge ``count`` parts, in order: max and sum of this head at m and l, channels at o; ``stride`` and ``o_stride`` floats
// lie between parts. MERGED loads are asked for at a time, then taken in: each time waits for memory once.
__device__ __forceinline__ Merged merge(const float* m, const float* l, const float* o, int count, int stride, int o_stride) {
    constexpr int TAKEN = MERGED / FOURS;
    Merged merged = {-INFINITY, 0.f, {}};
#pragma unroll 1
    for (int from = 0; from < count; from += TAKEN) {
        float part_max[TAKEN], part_sum[TAKEN], top = merged.top;
        float4 part[TAKEN][FOURS];
#pragma unroll
        for (int i = 0; i < TAKEN; i++) {
            const int at = min(from + i, count - 1);
            part_max[i] = from + i < count ? m[at * stride] : -INFINITY;
            part_sum[i] = l[at * stride];
#pragma unroll
            for (int four = 0; four < FOURS; four++) part[i][four] = *reinterpret_cast<const float4*>(o + at * o_stride + four * APART);
        }
#pragma unroll
        for (int i = 0; i < TAKEN; i++) top = fmaxf(top, part_max[i]);
        const float old = merged.top == -INFINITY ? 0.f : exp2_(merged.top - top);
        merged.sum *= old;
#pragma unroll
        for (int k = 0; k < 4 * FOURS; k++) merged.value[k] *= old;
        merged.top = top;
#pragma unroll
        for (int i = 0; i < TAKEN; i++) {
            const float weight = part_max[i] == -INFINITY ? 0.f : exp2_(part_max[i] - top);
            merged.sum = fmaf(weight, part_sum[i], merged.sum);
#pragma unroll
            for (int k = 0; k < 4 * FOURS; k++) merged.value[k] = fmaf(weight, (&part[i][k / 4].x)[k % 4], merged.value[k]);
        }
    }
    return merged;
}

// The result of a head, channels first, ... of its query head h of this pass, and those APART.
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
    // Without drafts, no division: heads of all rows follow one another.
    const int before = QUERY_TOKENS == 1 ? 0 : (kv_head / heads * (QUERY_TOKENS - 1) + token) * heads;  // KV heads of other tokens
    const i64 from = ((i64)(before + kv_head) * TOKEN_HEADS + of_token) * DIM + first;
#pragma unroll
    for (int four = 0; four < FOURS; four++) {
        const i64 at = from + four * APART;
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] = merged.value[4 * four + i] * weight;
#if Q_DTYPE == 2
        *reinterpret_cast<float4*>(reinterpret_cast<float*>(a.out) + at) = make_float4(value[0], value[1], value[2], value[3]);
#elif Q_DTYPE == 1
        *reinterpret_cast<uint2*>(reinterpret_cast<u16*>(a.out) + at) = make_uint2(bhalves(value[0], value[1]), bhalves(value[2], value[3]));
#else
        *reinterpret_cast<uint2*>(reinterpret_cast<u16*>(a.out) + at) = make_uint2(halves(value[0], value[1]), halves(value[2], value[3]));
#endif
    }
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
        for (u32 item = thread; item < HEADS * APART / 4; item += WARPS * 32) {
            const u32 h = item * 4 / APART, first = item * 4 % APART, at = h * DIM + first;
            Merged merged = merge(m + h, l + h, o + at, count, stride, o_stride);
            if (is_result) {
#if V_ROTATED  // rotated back: neighbouring lanes have four channels each, and the order of bits does not matter
                hadamard<kv_min(kv_hadamard_block(DIM), 128) / 4>(merged.value, (int)thread % 32);
#pragma unroll
                for (int i = 0; i < 4 * FOURS; i++) merged.value[i] *= shared.v_signs[first + i / 4 * APART + i % 4];
#endif
                write_result(a, virtual_head, merged, h, first);
            } else {
                if (first == 0) { part[h] = merged.top; part[HEADS + h] = merged.sum; }
#pragma unroll
                for (int four = 0; four < FOURS; four++) {
                    const float* value = merged.value + 4 * four;
                    *reinterpret_cast<float4*>(part + 2 * HEADS + at + four * APART) = make_float4(value[0], value[1], value[2], value[3]);
                }
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
