// What a record stores: one code, or one value, wherever it lies.

#include "side.cuh"

// The code at (row, column) of planes of BITS bits.
template <int ROWS, int COLUMNS, int BITS>
KV_INLINE unsigned read_code(const unsigned char* planes, int row, int column) {
    constexpr int PAIRS = BITS / 2, PLANE = kv_plane_bytes(ROWS, COLUMNS, 2);
    const int byte = kv_plane_byte<ROWS, COLUMNS, 2>(row, column);
    unsigned code = 0;
#pragma unroll
    for (int plane = 0; plane < PAIRS; ++plane) {
        code |= (planes[plane * PLANE + byte] >> 2 * (column % 4) & 3) << 2 * plane;
    }
    if constexpr (BITS % 2 == 1) {
        int last = planes[PAIRS * PLANE + kv_plane_byte<ROWS, COLUMNS, 1>(row, column)];
        code |= (last >> column % 8 & 1) << 2 * PAIRS;
    }
    return code;
}

// Zero number i of a record, next to its scale.
template <class S>
KV_INLINE float zero_of(const unsigned char* record, int i, float scale) {
    if constexpr (S::is_rotated) {
        return __fmul_rn(scale, -Page<S>::mean_code);
    } else {
        return kv_load_param<S::param>(record + S::zero, i);
    }
}

// What a channel's slot, in one of tiers I, I + 1, ..., adds to its code.
template <class S, int I>
KV_INLINE unsigned high_bits(const unsigned char* record, int token, int slot) {
    constexpr Tier tier = S::tier(I);
    if constexpr (tier.bits != RAW_BITS) {
        if (slot >= tier.first && slot < tier.first + tier.room) {
            constexpr int BITS = tier.bits - S::bits;
            const unsigned char* planes = record + tier.high;
            return read_code<KV_PAGE_TOKENS, tier.columns, BITS>(planes, token, slot - tier.first) << S::bits;
        }
    }
    if constexpr (I + 1 < S::tiers) {
        return high_bits<S, I + 1>(record, token, slot);
    }
    return 0;
}

// 16 codes from a column that is a multiple of 16, without those of tiers.
template <class S>
KV_INLINE void load_codes(const unsigned char* record, int row, int column, unsigned (&code)[16]) {
    kv_load_codes<Page<S>::rows, Page<S>::columns, S::bits>(record, row, column, code);
}

// One stored value, before the transforms are undone.
template <class S>
KV_INLINE float stored_value(const unsigned char* record, int token, int channel) {
    if constexpr (Page<S>::is_raw) {
        return kv_float_of<DTYPE>(((const unsigned short*)record)[token * S::dim + channel]);
    } else {
        const int row = S::side == 0 ? token : channel, column = S::side == 0 ? channel : token;
        unsigned code = read_code<Page<S>::rows, Page<S>::columns, S::bits>(record, row, column);
        if constexpr (S::tiers > 0) {
            const int slot = record[S::index + channel];
            if (slot < S::raw_slots) {
                return kv_float_of<DTYPE>(((const unsigned short*)(record + S::raw))[slot * KV_PAGE_TOKENS + token]);
            }
            code |= high_bits<S, 0>(record, token, slot);
        }
        const int i =
            S::axis == 0 ? token / S::group * Page<S>::others + channel : channel / S::group * Page<S>::others + token;
        const float scale = kv_load_param<S::param>(record + S::scale, i);
        return __fadd_rn(__fmul_rn((float)code, scale), zero_of<S>(record, i, scale));
    }
}
