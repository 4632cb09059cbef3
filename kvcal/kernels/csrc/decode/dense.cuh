// Tokens that are not packed: sinks, the ring, pages of 16 bits.

#include "decode/softmax.cuh"
#include "decode/keys.cuh"
#include "hadamard.cuh"

namespace decode_ {

// Where a token lies in a ring of RING tokens; a sliding window reads all of it after the one sink, in any order.
template <int RING> __device__ __forceinline__ int ring_slot(int token) { return WHOLE_RING ? token - 1 : (int)((u32)token % RING); }

// What one sequence and head stores. ``slot``: of the page that the token lies in, if one is read.
struct Head {
    const u16 *k_sinks, *k_ring, *v_sinks, *v_ring;
    const u8 *k_pages, *v_pages;                  // of this head in slot 0; the next slot is k_stride bytes on
    u32 k_stride, v_stride;
    const int* slots;
    int num_k_pages, num_v_pages, num_tokens;

    __device__ __forceinline__ const u8* k_page(int slot) const { return k_pages + (u64)(u32)slot * k_stride; }
    __device__ __forceinline__ const u8* v_page(int slot) const { return v_pages + (u64)(u32)slot * v_stride; }
    __device__ __forceinline__ const u16* key(int token, int slot) const {
        if (token < K_SINKS) return k_sinks + token * DIM;
        if (!K_PACKED && token < num_k_pages * PAGE) return reinterpret_cast<const u16*>(k_page(slot)) + token % PAGE * DIM;
        return k_ring + ring_slot<K_RING>(token) * DIM;
    }
    __device__ __forceinline__ const u16* value(int token, int slot) const {
        if (token < V_SINKS) return v_sinks + token * DIM;
        if (!V_PACKED && token < num_v_pages * PAGE) return reinterpret_cast<const u16*>(v_page(slot)) + token % PAGE * DIM;
        return v_ring + ring_slot<V_RING>(token) * DIM;
    }
    // The same, of a token of the unit of ``from``, which is found once where units lie in a row.
    __device__ __forceinline__ const u16* key(int from, int token, int slot) const {
        return UNITS_IN_A_ROW ? key(from, slot) + (token - from) * DIM : key(token, slot);
    }
    __device__ __forceinline__ const u16* value(int from, int token, int slot) const {
        return UNITS_IN_A_ROW ? value(from, slot) + (token - from) * DIM : value(token, slot);
    }
};

// Ask for the keys and values of a tile, to be near when its turn comes.
__device__ __forceinline__ void prefetch_dense(const Head& head, int token, int stop, int slot, int lane) {
    const int at = token + lane % 16;
    if (at < stop)
#pragma unroll
        for (int i = 0; i < DIM; i += 64) prefetch((lane < 16 ? head.key(at, slot) : head.value(at, slot)) + i);
}

// Keys of 16 tokens, as an operand: rows g and g + 8. Tokens from ``stop`` on are replaced by the last one before it: the
// tile may begin beyond, where there is no token, or one in a packed page.
struct DenseKeys {
    uint4 low[DIM / 32], high[DIM / 32];

    __device__ __forceinline__ void load(const Head& head, int token, int stop, int slot, int lane) {
        const int at = token + (lane >> 2);
        const u16 *low_row = head.key(token, min(at, stop - 1), slot) + 8 * (lane & 3);
        const u16 *high_row = head.key(token, min(at + 8, stop - 1), slot) + 8 * (lane & 3);
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) {
            low[j] = *reinterpret_cast<const uint4*>(low_row + 32 * j);
            high[j] = *reinterpret_cast<const uint4*>(high_row + 32 * j);
        }
    }
};

// Whether eight channels from ``first`` + 8 g on are there: the last of DENSE_PARTS may be short.
__device__ __forceinline__ bool is_channel(int first, int lane) { return DIM % 64 == 0 || first + 8 * (lane >> 2) < DIM; }

// Their values: tokens 2 quad, + 1, + 8 and + 9; 0 from ``stop`` on.
struct DenseValues {
    uint4 rows[DENSE_PARTS][4];

    __device__ __forceinline__ void load(const Head& head, int token, int stop, int slot, int lane) {
#pragma unroll
        for (int part = 0; part < DENSE_PARTS; part++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = token + 2 * (lane & 3) + i / 2 * 8 + i % 2;
                rows[part][i] = at < stop && is_channel(64 * part, lane) ? *reinterpret_cast<const uint4*>(head.value(token, at, slot) + 64 * part + 8 * (lane >> 2)) : make_uint4(0, 0, 0, 0);
            }
    }
};

// Scores of a tile of keys; as packed_scores has them, s[n][0] and s[n][1].
__device__ __forceinline__ void tile_scores(float (&s)[QUERY_TILES][2], const DenseKeys& keys, int token, int stop, const Shared& shared, int lane, float scale) {
    float acc[COLUMN_TILES][4] = {};
#pragma unroll
    for (int j = 0; j < DIM / 32; j++)
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; c++) {
            const uint4 a = keys.low[j], b = keys.high[j], q = *reinterpret_cast<const uint4*>(shared.query_dense[c][j][lane]);
            mma_dense(acc[c], a.x, b.x, a.y, b.y, q.x, q.y);
            mma_dense(acc[c], a.z, b.z, a.w, b.w, q.z, q.w);
#if SPLIT_QUERY
            const uint4 r = *reinterpret_cast<const uint4*>(shared.query_rest[c][j][lane]);
            mma_dense(acc[c], a.x, b.x, a.y, b.y, r.x, r.y);
            mma_dense(acc[c], a.z, b.z, a.w, b.w, r.z, r.w);
#endif
        }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) s[n][half] = token + 8 * half + (lane >> 2) < stop ? acc[n / 2][2 * half + n % 2] * scale : -INFINITY;
}

// Scores of COUNT tiles of tokens that are not packed, from ``token``; those from ``stop`` on are left out.
template <int COUNT> __device__ __forceinline__
void dense_scores(float (&s)[QUERY_TILES][2 * COUNT], const Head& head, int token, int stop, int slot, const Shared& shared, int lane, float scale) {
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        DenseKeys keys;
        float tile[QUERY_TILES][2];
        keys.load(head, token + 16 * t, stop, slot, lane);
        tile_scores(tile, keys, token + 16 * t, stop, shared, lane, scale);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++) { s[n][2 * t] = tile[n][0]; s[n][2 * t + 1] = tile[n][1]; }
    }
}

// Probabilities of the heads n at tokens g and g + 8 of a tile, times its values, added to ``out``.
__device__ __forceinline__ void add_values(float (&out)[COLUMN_TILES][4 * DENSE_PARTS][4], const float (&p)[QUERY_TILES][2], const DenseValues& values) {
    u32 b[COLUMN_TILES][2], rest[COLUMN_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * COLUMN_TILES; i++) {
        const int c = i / 2, half = i % 2;
        const float p0 = p[2 * c][half], p1 = QUERY_TILES > 1 ? p[MIN2(2 * c + 1, QUERY_TILES - 1)][half] : 0.f;
        b[c][half] = transpose(dense_pair(p0, p1));
#if DTYPE == 1  // 8 bits of a probability are too few: the rest goes in a second product
        rest[c][half] = transpose(bhalves(p0 - dense_to_float((u16)(bhalves(p0, 0.f) & 0xffffu)), p1 - dense_to_float((u16)(bhalves(p1, 0.f) & 0xffffu))));
#endif
    }
#pragma unroll
    for (int part = 0; part < DENSE_PARTS; part++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 w0 = (&values.rows[part][0].x)[i], w1 = (&values.rows[part][1].x)[i], w2 = (&values.rows[part][2].x)[i], w3 = (&values.rows[part][3].x)[i];
            const u32 a0 = permute(w0, w1, 0x5410), a1 = permute(w0, w1, 0x7632), a2 = permute(w2, w3, 0x5410), a3 = permute(w2, w3, 0x7632);
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c++) {
                mma_dense(out[c][4 * part + i], a0, a1, a2, a3, b[c][0], b[c][1]);
#if DTYPE == 1
                mma_dense(out[c][4 * part + i], a0, a1, a2, a3, rest[c][0], rest[c][1]);
#endif
            }
        }
}

// UNIT tokens whose values are not packed. Keys lie in a page of codes where ``from`` says that some may, and are left out
// before it. out[c]: P V of heads 8 c + quad and 8 c + quad + 4, of channels 64 (t / 4) + 8 g + 2 (t % 4) and the next one.
__device__ __forceinline__ void dense_unit(State& state, float (&out)[COLUMN_TILES][4 * DENSE_PARTS][4], const Head& head, int token, int from, int stop, int slot,
                                           Shared& shared, int warp, int lane, float scale, float softcap) {
    float s[QUERY_TILES][UNIT / 8];
    DenseValues values;
    if (DENSE_IS_RARE) values.load(head, token, stop, slot, lane);  // together with the keys
#if K_LEADS
    if (from >= 0 && token / PAGE < head.num_k_pages) {
        packed_scores<UNIT / 16>(s, head.k_page(slot), token % PAGE / 16, shared, warp, lane, scale);
#if QUERY_TOKENS > 1
        if (token / PAGE >= shared.shared_key_pages) {  // a page for some queries, still in the ring for others
            float unpacked[QUERY_TILES][UNIT / 8];
            dense_scores<UNIT / 16>(unpacked, head, token, stop, slot, shared, lane, scale);
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
                for (int i = 0; i < UNIT / 8; i++)
                    if (token >= shared.packed_keys[4 * n + (lane & 3)]) s[n][i] = unpacked[n][i];
        }
#endif
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
            for (int i = 0; i < UNIT / 8; i++) {
                const int at = token + 8 * i + (lane >> 2);
                if (at >= stop || (BASE % UNIT && at < from)) s[n][i] = -INFINITY;
            }
    } else
#endif
        dense_scores<UNIT / 16>(s, head, token, stop, slot, shared, lane, scale);
    cap(s, softcap);
#if QUERY_TOKENS > 1
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        const int column = 4 * n + (lane & 3), seen_from = shared.seen_from[column], seen_to = shared.seen_to[column];
#pragma unroll
        for (int i = 0; i < UNIT / 8; i++) {
            const int at = token + 8 * i + (lane >> 2);
            if (at >= seen_to || at < from || (at >= BASE && at < seen_from)) s[n][i] = UNSEEN;
        }
    }
#endif
    float down[QUERY_TILES];
    if (state.raise(s, down, lane))
#pragma unroll
        for (int t = 0; t < 4 * DENSE_PARTS; t++)
#pragma unroll
            for (int n = 0; n < QUERY_TILES; n++) { out[n / 2][t][n % 2] *= down[n]; out[n / 2][t][2 + n % 2] *= down[n]; }
#pragma unroll
    for (int t = 0; t < UNIT / 16; t++) {
        if (!DENSE_IS_RARE) values.load(head, token + 16 * t, stop, slot, lane);
        float p[QUERY_TILES][2];
#pragma unroll
        for (int n = 0; n < QUERY_TILES; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) { p[n][half] = exp2_(s[n][2 * t + half] - state.max_[n]); state.sum[n] += p[n][half]; }
        add_values(out, p, values);
    }
}

// What dense units left in ``out`` is added to the state, in its order of channels; rotated where packed values are, of which
// there are more.
__device__ __forceinline__ void reorder(State& state, const float (&out)[COLUMN_TILES][4 * DENSE_PARTS][4], Shared& shared, int warp, int lane) {
    static_assert(4 * DIM <= SWAP_ROOM, "four heads at a time");
    const int g = lane >> 2, quad = lane & 3;
    float* swap = shared.swap[warp];
#pragma unroll
    for (int n = 0; n < QUERY_TILES; n++) {
        __syncwarp();
#pragma unroll
        for (int t = 0; t < 4 * DENSE_PARTS; t++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (is_channel(t / 4 * 64, lane)) swap[quad * DIM + 64 * (t / 4) + 8 * g + 2 * (t % 4) + i] = out[n / 2][t][2 * i + n % 2];
        __syncwarp();
#if V_ROTATED
#pragma unroll 1
        for (int h = 0; h < 4; h++) {
            float x[DIM / 32];
#pragma unroll
            for (int i = 0; i < DIM / 32; i++) x[i] = swap[h * DIM + 32 * i + lane] * shared.v_signs[32 * i + lane];
            hadamard<32>(x, lane);
#pragma unroll
            for (int i = 0; i < DIM / 32; i++) swap[h * DIM + 32 * i + lane] = x[i];
        }
        __syncwarp();
#endif
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) state.out[n][t][half] += swap[quad * DIM + 16 * t + 8 * half + g];
    }
    __syncwarp();
}

}  // namespace decode_
