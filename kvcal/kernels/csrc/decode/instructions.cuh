// One instruction each: half precision, tensor cores, copies to shared memory; and numbers of any dtype.

#include "decode/decode_shape.cuh"

namespace decode_ {

__device__ __forceinline__ u32 halves(float lo, float hi) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
__device__ __forceinline__ u32 bhalves(float lo, float hi) { u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
__device__ __forceinline__ float exp2_(float x) { float d; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x)); return d; }
__device__ __forceinline__ u32 transpose(u32 a) { u32 d; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a)); return d; }
__device__ __forceinline__ float shuffle(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// What integer products start from: as a float, the bits of the sum are 1.5 2^23 + the sum, below 2^22 in size; or where
// nothing is negative, 2^23 + the sum, below 2^23.
template <bool IS_SIGNED> struct Magic {
    static constexpr int bits = IS_SIGNED ? 0x4b400000 : 0x4b000000;
    static constexpr float number = IS_SIGNED ? 12582912.f : 8388608.f;
};

// Bytes: codes, unsigned, times limbs, signed or not. 32 columns, or 16.
template <bool IS_SIGNED> __device__ __forceinline__ void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const int (&c)[4]) {
#define MMA_BYTES(type) asm("mma.sync.aligned.m16n8k32.row.col.s32.u8." type ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};" \
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]))
    if constexpr (IS_SIGNED) MMA_BYTES("s8"); else MMA_BYTES("u8");
#undef MMA_BYTES
}
__device__ __forceinline__ void mma_half(int (&d)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(b0));
}

// Halves, summed in fp32; products of two of them; the largest of a warp.
__device__ __forceinline__ void mma_fp16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bool from_zero) {
#define MMA_HALVES(c0, c1, c2, c3) asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};" \
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3))
    if (from_zero) MMA_HALVES(0.f, 0.f, 0.f, 0.f); else MMA_HALVES(d[0], d[1], d[2], d[3]);
#undef MMA_HALVES
}
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 largest_of_warp(u32 x) { u32 d; asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(x)); return d; }

// The cache's dtype.
__device__ __forceinline__ void mma_dense(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if DTYPE == 1
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float dense_to_float(u16 x) { return kv_float_of<DTYPE>(x); }
__device__ __forceinline__ u32 dense_pair(float lo, float hi) { return DTYPE == 1 ? bhalves(lo, hi) : halves(lo, hi); }

// A number of dtype TYPE (as DTYPE).
template <int TYPE> __device__ __forceinline__ float number_at(const void* p, i64 index) {
    if constexpr (TYPE == KV_FLOAT32) return reinterpret_cast<const float*>(p)[index];
    else if constexpr (TYPE == KV_E5M2) return kv_float_of_e5m2(reinterpret_cast<const u8*>(p)[index]);
    else return kv_float_of<TYPE>(reinterpret_cast<const u16*>(p)[index]);
}

// To shared memory, and first to leave the L2 cache: a record is read once a step, what else is there more often. AT: bytes
// from both, which cost no instruction.
template <int AT> __device__ __forceinline__ void copy16(u32 to, const u8* from) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0 + %3], [%1 + %3], 16, %2;" :: "r"(to), "l"(from), "l"(policy), "n"(AT));
}
__device__ __forceinline__ void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" :: "l"(line)); }

// Adds 1: all that the block wrote before its last barrier is seen by whoever finds that.
__device__ __forceinline__ int count_up(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait_all_but() { asm volatile("cp.async.wait_group %0;" :: "n"(N)); }

// A record, from byte AT on, by a warp: ``to`` and ``from`` are this lane's, and ``turned`` is ``to`` with halves of 128 bytes
// exchanged: for every second TURN bytes of the first TURNED ones.
template <int BYTES, int TURNED, int AT> __device__ __forceinline__ void load_lane(u32 to, u32 turned, const u8* from, int lane) {
    if constexpr (AT < BYTES) {
        if (AT + 512 <= BYTES || AT + lane * 16 < BYTES) copy16<AT>(AT < TURNED && AT / TURN % 2 ? turned : to, from);
        load_lane<BYTES, TURNED, AT + 512>(to, turned, from, lane);
    }
}
template <int BYTES, int TURNED> __device__ __forceinline__ void load_record(u8* slot, const u8* record, int lane) {
    const u32 to = (u32)__cvta_generic_to_shared(slot);
    load_lane<BYTES, TURNED, 0>(to + lane * 16, to + (lane * 16 ^ 64), record + lane * 16, lane);
}

}  // namespace decode_
