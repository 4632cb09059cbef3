// Tokens that are not packed: sinks, the buffer, pages of 16 bits.

#include "softmax.cuh"
#include "keys.cuh"

namespace decode_ {


struct Head {
    const u16 *k_sinks, *k_buffer, *v_sinks, *v_buffer;
    const u8 *k_pages, *v_pages;                  // of this head; the next page is k_stride bytes on
    i64 k_stride, v_stride;
    int num_k_pages, num_v_pages, num_tokens;

    __device__ __forceinline__ const u16* key(int token) const {
        if (token < K_SINKS) return k_sinks + token * DIM;
        int rest = token - K_SINKS;
        if (!K_PACKED && rest < num_k_pages * PAGE)
            return reinterpret_cast<const u16*>(k_pages + (rest / PAGE) * k_stride) + rest % PAGE * DIM;
        return k_buffer + (rest - num_k_pages * PAGE) * DIM;
    }
    __device__ __forceinline__ const u16* value(int token) const {
        if (token < V_SINKS) return v_sinks + token * DIM;
        int rest = token - V_SINKS;
        if (!V_PACKED && rest < num_v_pages * PAGE)
            return reinterpret_cast<const u16*>(v_pages + (rest / PAGE) * v_stride) + rest % PAGE * DIM;
        return v_buffer + (rest - num_v_pages * PAGE) * DIM;
    }
};

// Scores of COUNT tiles of tokens that are not packed, from ``token``; those from ``stop`` on are left out.
template <int COUNT> __device__ __forceinline__
void dense_scores(float (&s)[COUNT][4], const Head& head, int token, int stop, const Shared& shared, int lane, float scale) {
    const int g = lane >> 2, quad = lane & 3;
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        const int low = token + t * 16 + g, high = low + 8;
        const u16* rows[2] = {head.key(low < stop ? low : token) + 8 * quad, head.key(high < stop ? high : token) + 8 * quad};
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) {
            const uint4 a = *reinterpret_cast<const uint4*>(rows[0] + 32 * j), b = *reinterpret_cast<const uint4*>(rows[1] + 32 * j);
            const uint4 q = *reinterpret_cast<const uint4*>(shared.query_dense[j][lane]);
            mma_dense(acc, a.x, b.x, a.y, b.y, q.x, q.y);
            mma_dense(acc, a.z, b.z, a.w, b.w, q.z, q.w);
#if SPLIT_QUERY
            const uint4 r = *reinterpret_cast<const uint4*>(shared.query_rest[j][lane]);
            mma_dense(acc, a.x, b.x, a.y, b.y, r.x, r.y);
            mma_dense(acc, a.z, b.z, a.w, b.w, r.z, r.w);
#endif
        }
        s[t][0] = low < stop ? acc[0] * scale : -INFINITY; s[t][1] = low < stop ? acc[1] * scale : -INFINITY;
        s[t][2] = high < stop ? acc[2] * scale : -INFINITY; s[t][3] = high < stop ? acc[3] * scale : -INFINITY;
    }
}

// 32 tokens whose values are not packed.
__device__ __forceinline__ void dense_unit(State& state, float (&out)[TILES][4], const Head& head, int token, int stop, Shared& shared, int warp,
                                           int lane, float scale, float softcap) {
    const int g = lane >> 2, quad = lane & 3;
    float s[UNIT / 16][4];
    if (K_PACKED && token >= BASE && (token - BASE) / PAGE < head.num_k_pages) {
        int page = (token - BASE) / PAGE;
#if K_BITS != 16
        packed_scores<UNIT / 16>(s, head.k_pages + page * head.k_stride, (token - BASE) % PAGE / 16, shared, warp, lane, scale);
#pragma unroll
        for (int t = 0; t < UNIT / 16; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (token + t * 16 + i / 2 * 8 + g >= stop) s[t][i] = -INFINITY;
#endif
    } else {
        dense_scores<UNIT / 16>(s, head, token, stop, shared, lane, scale);
    }
    cap(s, softcap);
    float down[2];
    if (state.raise(s, down)) rescale(out, down[0], down[1]);
#pragma unroll
    for (int t = 0; t < UNIT / 16; t++) {
        u32 b[2], rest[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float p0 = exp2_(s[t][half * 2] - state.max_[0]), p1 = exp2_(s[t][half * 2 + 1] - state.max_[1]);
            state.sum[0] += p0; state.sum[1] += p1;
            b[half] = transpose(dense_pair(p0, p1));
#if DTYPE == 1  // 8 bits of a probability are too few: the rest goes in a second product
            float r0 = p0 - __int_as_float((bhalves(p0, 0.f) & 0xffffu) << 16), r1 = p1 - __int_as_float((bhalves(p1, 0.f) & 0xffffu) << 16);
            rest[half] = transpose(bhalves(r0, r1));
#endif
        }
        const int first = token + t * 16 + 2 * quad;
#pragma unroll
        for (int part = 0; part < DIM; part += 64) {
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = first + i / 2 * 8 + i % 2;
                v[i] = at < stop ? *reinterpret_cast<const uint4*>(head.value(at) + part + 8 * g) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 w0 = (&v[0].x)[i], w1 = (&v[1].x)[i], w2 = (&v[2].x)[i], w3 = (&v[3].x)[i];
                const u32 a0 = permute(w0, w1, 0x5410), a1 = permute(w0, w1, 0x7632), a2 = permute(w2, w3, 0x5410), a3 = permute(w2, w3, 0x7632);
                mma_dense(out[part / 16 + i], a0, a1, a2, a3, b[0], b[1]);
#if DTYPE == 1
                mma_dense(out[part / 16 + i], a0, a1, a2, a3, rest[0], rest[1]);
#endif
            }
        }
    }
}

// Dense units leave channels 64 (t / 4) + 8 g + 2 (t % 4) and the next one in out[t]: bring them into the order of the
// packed ones, and to their units.
__device__ __forceinline__ void reorder(const State& state, float (&out)[TILES][4], u32* swap, int lane) {
    const int g = lane >> 2, quad = lane & 3;
    float* to = reinterpret_cast<float*>(swap);
    const float unit = V_PACKED ? power2(V_LIFT - 24 - state.exponent) : 1.f;
#pragma unroll
    for (int half = 0; half < 2; half++) {  // heads 4 half .. 4 half + 3
        __syncwarp();
        if (quad / 2 == half)
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) to[(2 * (quad & 1) + (i & 1)) * DIM + 64 * (t / 4) + 8 * g + 2 * (t % 4) + i / 2] = out[t][i];
        __syncwarp();
        if (quad / 2 == half)
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) out[t][i] = to[(2 * (quad & 1) + (i & 1)) * DIM + 16 * t + i / 2 * 8 + g] * unit;
    }
    __syncwarp();
}

}  // namespace decode_
