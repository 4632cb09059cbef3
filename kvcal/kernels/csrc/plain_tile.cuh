// A tile, the next 32 tokens of a head, as fp32 in shared memory: whatever they are stored as.
//
// Tiles begin at every 32nd token of the sequence. So a tile lies in one page, and the first tokens of it, a multiple of
// 16, are read there, all or none unless pages are packed in stripes. A page's 16 codes of a
// channel of values, which lie together, lie in one tile; sinks among its tokens then take the place of what was decoded.
// Codes of keys lie together by channels, and every token is found by itself.

#include "stored.cuh"
#include "hadamard.cuh"

namespace plain {

constexpr int TOKENS = 32, DIM = Keys::dim;
constexpr int PADDED = Page<Keys>::padded, UNITS = PADDED / 16;
// Floats from token to token: an odd number of 16-byte words, which spreads equal channels of tokens over the banks.
constexpr int STRIDE = PADDED + 4;
static_assert(DIM % 8 == 0 && DIM == Values::dim, "tokens are loaded 8 channels at a time");

// What one sequence and head stores of one side next to its pages, and how many tokens are read from these.
struct Head {
    const unsigned short* sinks;
    const unsigned short* ring;
    int read;
};

// Whether a token is read from a page of codes.
template <class S>
KV_INLINE bool is_coded(const Head& head, int token) {
    return !Page<S>::is_raw && token >= S::sinks && token < head.read;
}

// A token that is stored as it is: a sink, in a page of 16 bits, or in the ring, all of which a sliding window reads
// after its one sink, in any order. record: of the page that the token lies in, if one is read.
template <class S>
KV_INLINE const unsigned short* token_of(const Head& head, const unsigned char* record, int token) {
    if (token < S::sinks) {
        return head.sinks + token * S::dim;
    }
    if (Page<S>::is_raw && token < head.read) {
        return (const unsigned short*)record + token % KV_PAGE_TOKENS * S::dim;
    }
    return head.ring + (WHOLE_RING ? token - 1 : token % S::ring) * S::dim;
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
    } else if constexpr (TYPE == KV_E5M2) {
        const uint4 words = *(const uint4*)(field + first);
        const unsigned fours[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            x[i] = kv_float_of_e5m2(fours[i / 4] >> 8 * (i % 4) & 255);
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
    load_codes<S>(record, token, channel, code);
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
        const float zero = zero_of<S>(record, place, scale);
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

// Codes' values in a tile are rotated back, and then take the transforms of keys; place(channel): where a token has it. Eight
// lanes share a token, of which only those from pages of codes are changed.
template <class S, class Place>
KV_INLINE void unrotate_tile(
    float* tile, const Head& head, int first, const signed char* signs, const float* rescale, const float* offset,
    Place place) {
    constexpr int LANES = THREADS / TOKENS, OWN = S::dim / LANES;
    const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    float x[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        x[i] = tile[row * STRIDE + place(LANES * i + lane)];
    }
    hadamard<LANES>(x, lane);
    if (is_coded<S>(head, first + row)) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int channel = LANES * i + lane;
            float y = x[i] * signs[channel];
            if constexpr (S::has_rescale) {
                y *= rescale[channel];
            }
            if constexpr (S::has_offset) {
                y += offset[channel];
            }
            tile[row * STRIDE + place(channel)] = y;
        }
    }
    __syncthreads();
}

// Where a tile of keys has a channel, in floats from its token on: the first 4 channels of all units, the next 4, ...
// Neighbouring threads, which have neighbouring units, so write to neighbouring places.
KV_INLINE constexpr int key_place(int channel) { return (channel % 16 / 4 * UNITS + channel / 16) * 4 + channel % 4; }

// Keys `first` to first + 31, of the page in `record`; those beyond the `num_tokens` of the row are not written. rescale,
// offset: of this head.
template <class S>
KV_INLINE void load_key_tile(
    float* tile, const Head& head, const unsigned char* record, int first, int num_tokens, const float* rescale,
    const float* offset) {
    for (int i = threadIdx.x; i < TOKENS * UNITS; i += THREADS) {
        const int row = i / UNITS, channel = i % UNITS * 16, token = first + row;
        if (token >= num_tokens) {
            continue;
        }
        asm volatile("" : "+l"(record));  // no addresses that are ready before the loop: there are no registers for them
        float x[16] = {};
        bool coded = false;
        if constexpr (!Page<S>::is_raw) {
            coded = is_coded<S>(head, token);
            if (coded) {
                load_keys<S>(record, token % KV_PAGE_TOKENS, channel, x);
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    if (channel + k < S::dim) {
                        if constexpr (S::has_rescale && !S::is_rotated) {
                            x[k] *= rescale[channel + k];
                        }
                        if constexpr (S::has_offset && !S::is_rotated) {
                            x[k] += offset[channel + k];
                        }
                    }
                }
            }
        }
        if (!coded) {
            const unsigned short* from = token_of<S>(head, record, token) + channel;
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

// Tokens `first` to stop - 1 of values that are stored as they are, channel by channel; zeros from `num_tokens` on.
template <class S>
KV_INLINE void copy_values(
    float* tile, const Head& head, const unsigned char* record, int first, int stop, int num_tokens) {
    for (int i = threadIdx.x; i < (stop - first) * (S::dim / 8); i += THREADS) {
        const int row = i / (S::dim / 8), channel = i % (S::dim / 8) * 8, token = first + row;
        float x[8] = {};
        if (token < num_tokens) {
            load_eight<DTYPE>(token_of<S>(head, record, token) + channel, x);
        }
        float4* to = (float4*)(tile + row * STRIDE + channel);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
}

// Values `first` to first + 31, of the page in `record`; zeros beyond the `num_tokens` of the row.
template <class S>
KV_INLINE void load_value_tile(
    float* tile, const Head& head, const unsigned char* record, int first, int num_tokens) {
    if constexpr (!Page<S>::is_raw) {
        const int coded = kv_min(TOKENS, head.read - first);
        if (coded > 0 && first + TOKENS > S::sinks) {
            for (int i = threadIdx.x; i < coded / 16 * S::dim; i += THREADS) {
                const int channel = i % S::dim, row = i / S::dim * 16;
                const int column = first % KV_PAGE_TOKENS + row;
                const int place = channel / S::group * Page<S>::others + column;
                unsigned code[16];
                float scale[16], zero[16];
                load_codes<S>(record, channel, column, code);
                load_params<S::param>(record + S::scale, place, scale);
                if constexpr (S::is_rotated) {
#pragma unroll
                    for (int k = 0; k < 16; ++k) {
                        zero[k] = __fmul_rn(scale[k], -Page<S>::mean_code);
                    }
                } else {
                    load_params<S::param>(record + S::zero, place, zero);
                }
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    if (first + row + k >= S::sinks) {
                        tile[(row + k) * STRIDE + channel] = fmaf((float)code[k], scale[k], zero[k]);
                    }
                }
            }
            if (first < S::sinks) {
                copy_values<S>(tile, head, record, first, S::sinks, num_tokens);
            }
            if constexpr (S::stripe < KV_PAGE_TOKENS) {
                const int rest = kv_max(first + coded, S::sinks);
                copy_values<S>(tile + (rest - first) * STRIDE, head, record, rest, first + TOKENS, num_tokens);
            }
            return;
        }
    }
    copy_values<S>(tile, head, record, first, first + TOKENS, num_tokens);
}

}  // namespace plain
