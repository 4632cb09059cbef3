// A tile, the next 32 tokens of a head, as fp32 in shared memory: whatever they are stored as.
//
// Tiles begin at the first token behind the sinks of values, and at every 32nd from there in both directions. So a tile
// of values lies in one page, or in none, and a page's 16 codes of a channel, which lie together, in one tile. Keys may
// have another number of sinks: their codes lie together by channels, and every token is found by itself.

#include "stored.cuh"

namespace plain {

constexpr int TOKENS = 32, DIM = Keys::dim;
constexpr int PADDED = Page<Keys>::padded, UNITS = PADDED / 16;
// Floats from token to token: an odd number of 16-byte words, which spreads equal channels of tokens over the banks.
constexpr int STRIDE = PADDED + 4;
// Tokens that the first tile lacks.
constexpr int LACKING = kv_round_up(Values::sinks, TOKENS) - Values::sinks;
static_assert(DIM % 8 == 0 && DIM == Values::dim, "tokens are loaded 8 channels at a time");

// What one row and head stores of one side; the next page's record is `page_stride` bytes on.
struct Head {
    const unsigned short* sinks;
    const unsigned short* buffer;
    const unsigned char* pages;
    long long page_stride;
    int num_pages;
};

// Whether a token lies in a page of codes.
template <class S>
KV_INLINE bool is_coded(const Head& head, int token) {
    return !Page<S>::is_raw && token >= S::sinks && (token - S::sinks) / KV_PAGE_TOKENS < head.num_pages;
}

template <class S>
KV_INLINE const unsigned char* record_of(const Head& head, int token) {
    return head.pages + (token - S::sinks) / KV_PAGE_TOKENS * head.page_stride;
}

// A token that is stored as it is: a sink, in a page of 16 bits, or in the buffer.
template <class S>
KV_INLINE const unsigned short* token_of(const Head& head, int token) {
    if (token < S::sinks) {
        return head.sinks + token * S::dim;
    }
    const int rest = token - S::sinks;
    if (Page<S>::is_raw && rest < head.num_pages * KV_PAGE_TOKENS) {
        return (const unsigned short*)record_of<S>(head, token) + rest % KV_PAGE_TOKENS * S::dim;
    }
    return head.buffer + (rest - head.num_pages * KV_PAGE_TOKENS) * S::dim;
}

// 8 values in the cache's dtype, at a multiple of 16 bytes.
template <int TYPE>
KV_INLINE void load_eight(const unsigned short* from, float* x) {
    const uint4 words = *(const uint4*)from;
    const unsigned pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        x[i] = kv_float_of<TYPE>((unsigned short)(pairs[i / 2] >> 16 * (i % 2)));
    }
}

// Scales or zeros number first to first + 15, first a multiple of 16.
template <int TYPE>
KV_INLINE void load_params(const unsigned char* field, int first, float* x) {
    if constexpr (TYPE == KV_FLOAT32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 words = ((const float4*)field)[first / 4 + i];
            x[4 * i] = words.x, x[4 * i + 1] = words.y, x[4 * i + 2] = words.z, x[4 * i + 3] = words.w;
        }
    } else {
        load_eight<TYPE>((const unsigned short*)field + first, x);
        load_eight<TYPE>((const unsigned short*)field + first + 8, x + 8);
    }
}

// 16 neighbouring channels of a token of a page of keys, as they are stored.
template <class S>
KV_INLINE void load_keys(const unsigned char* record, int token, int channel, float* x) {
    unsigned code[16];
    kv_load_codes<Page<S>::rows, Page<S>::columns, S::bits>(record, token, channel, code);
    unsigned slots[4] = {~0u, ~0u, ~0u, ~0u};  // no slot
    if constexpr (S::tiers > 0) {
        const uint4 words = *(const uint4*)(record + S::index + channel);
        slots[0] = words.x, slots[1] = words.y, slots[2] = words.z, slots[3] = words.w;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int slot = slots[i / 4] >> 8 * (i % 4) & 255;
            if (slot != NO_SLOT && channel + i < S::dim) {
                code[i] |= high_bits<S, 0>(record, token, slot);
            }
        }
    }
    if constexpr (S::axis == 0) {
        const int first = token / S::group * Page<S>::others + channel;
        float zero[16];
        load_params<S::param>(record + S::scale, first, x);
        load_params<S::param>(record + S::zero, first, zero);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            x[i] = fmaf((float)code[i], x[i], zero[i]);
        }
    } else {
        const int place = channel / S::group * Page<S>::others + token;
        const float scale = kv_load_param<S::param>(record + S::scale, place);
        const float zero = kv_load_param<S::param>(record + S::zero, place);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            x[i] = fmaf((float)code[i], scale, zero);
        }
    }
    if constexpr (S::raw_slots > 0) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int slot = slots[i / 4] >> 8 * (i % 4) & 255;
            if (slot < S::raw_slots && channel + i < S::dim) {
                x[i] = kv_float_of<DTYPE>(((const unsigned short*)(record + S::raw))[slot * KV_PAGE_TOKENS + token]);
            }
        }
    }
}

// Where a tile of keys has a channel, in floats from its token on: the first 4 channels of all units, the next 4, ...
// Neighbouring threads, which have neighbouring units, so write to neighbouring places.
KV_INLINE constexpr int key_place(int channel) { return (channel % 16 / 4 * UNITS + channel / 16) * 4 + channel % 4; }

// Keys `first` to first + 31; those beyond the `num_tokens` of the row are not written. rescale, offset: of this head.
template <class S>
KV_INLINE void load_key_tile(
    float* tile, const Head& head, int first, int num_tokens, const float* rescale, const float* offset) {
    for (int i = threadIdx.x; i < TOKENS * UNITS; i += THREADS) {
        const int row = i / UNITS, channel = i % UNITS * 16, token = first + row;
        if (token < 0 || token >= num_tokens) {
            continue;
        }
        float x[16] = {};
        bool coded = false;
        if constexpr (!Page<S>::is_raw) {
            coded = is_coded<S>(head, token);
            if (coded) {
                load_keys<S>(record_of<S>(head, token), (token - S::sinks) % KV_PAGE_TOKENS, channel, x);
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    if (channel + k < S::dim) {
                        if constexpr (S::has_rescale) {
                            x[k] *= rescale[channel + k];
                        }
                        if constexpr (S::has_offset) {
                            x[k] += offset[channel + k];
                        }
                    }
                }
            }
        }
        if (!coded) {
            const unsigned short* from = token_of<S>(head, token) + channel;
            load_eight<DTYPE>(from, x);
            if (channel + 8 < S::dim) {
                load_eight<DTYPE>(from + 8, x + 8);
            }
        }
#pragma unroll
        for (int k = 0; k < 16; k += 4) {
            *(float4*)(tile + row * STRIDE + key_place(channel + k)) = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
        }
    }
}

// Values `first` to first + 31, channel by channel; zeros beyond the `num_tokens` of the row.
template <class S>
KV_INLINE void load_value_tile(float* tile, const Head& head, int first, int num_tokens) {
    if constexpr (!Page<S>::is_raw) {
        if (is_coded<S>(head, first)) {
            const unsigned char* record = record_of<S>(head, first);
            for (int i = threadIdx.x; i < TOKENS / 16 * S::dim; i += THREADS) {
                const int channel = i % S::dim, row = i / S::dim * 16;
                const int column = (first - S::sinks) % KV_PAGE_TOKENS + row;
                const int place = channel / S::group * Page<S>::others + column;
                unsigned code[16];
                float scale[16], zero[16];
                kv_load_codes<Page<S>::rows, Page<S>::columns, S::bits>(record, channel, column, code);
                load_params<S::param>(record + S::scale, place, scale);
                load_params<S::param>(record + S::zero, place, zero);
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    tile[(row + k) * STRIDE + channel] = fmaf((float)code[k], scale[k], zero[k]);
                }
            }
            return;
        }
    }
    for (int i = threadIdx.x; i < TOKENS * (S::dim / 8); i += THREADS) {
        const int row = i / (S::dim / 8), channel = i % (S::dim / 8) * 8, token = first + row;
        float x[8] = {};
        if (token >= 0 && token < num_tokens) {
            load_eight<DTYPE>(token_of<S>(head, token) + channel, x);
        }
        float4* to = (float4*)(tile + row * STRIDE + channel);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
}

}  // namespace plain
