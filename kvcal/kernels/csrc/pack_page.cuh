// One page of one head and side by one block: staged, transformed, scored, quantized, written. What the quantizer meets
// is ``value``. Rotated pages are packed by parts (pack_part.cuh).

#include "side.cuh"

// What the page stores of a token's channel, before the quantizer.
template <class S>
KV_INLINE float value(const Source& source, const Scratch<S>& scratch, int token, int channel) {
    float x;
    if constexpr (Page<S>::is_staged) {
        x = kv_float_of<DTYPE>(scratch.tile[token * Page<S>::stride + channel]);
    } else {
        x = kv_float_of<DTYPE>(source.at(token)[channel]);
    }
    return transformed<S>(x, source, channel);
}

// Where the scale and the zero of a token's channel lie.
template <class S>
KV_INLINE int place_of_params(int token, int channel) {
    return S::axis == 0 ? token / S::group * Page<S>::others + channel : channel / S::group * Page<S>::others + token;
}

// A token's channel as a code.
template <class S>
KV_INLINE unsigned code_at(const Source& source, const Scratch<S>& scratch, int token, int channel) {
    if constexpr (S::has_feedback) {
        if constexpr (S::tiers > 0) {
            if (scratch.level[channel] == 0) return 0;  // of 16 bits: the tile has its target
        }
        return scratch.tile[token * Page<S>::stride + channel];  // see choose_codes
    } else {
        const int i = place_of_params<S>(token, channel);
        unsigned levels = S::tiers ? scratch.level[channel] : (1u << S::bits) - 1;
        float x = value<S>(source, scratch, token, channel);
        return kv_code_of(x, scratch.params.zero[i], scratch.params.step[i], levels);
    }
}

// scratch.score[c] = mean of term(t, c) over tokens; four threads share a channel.
template <class S, class F>
KV_INLINE void mean_over_tokens(Scratch<S>& scratch, F term) {
    for (int i = threadIdx.x; i < 4 * S::dim; i += blockDim.x) {
        int part = i / S::dim, channel = i % S::dim;
        scratch.partial[part][channel] = halving_sum<4>(part, [&](int token) { return term(token, channel); });
    }
    __syncthreads();
    for (int channel = threadIdx.x; channel < S::dim; channel += blockDim.x) {
        double even = __dadd_rn(scratch.partial[0][channel], scratch.partial[2][channel]);
        double odd = __dadd_rn(scratch.partial[1][channel], scratch.partial[3][channel]);
        scratch.score[channel] = __dmul_rn(__dadd_rn(even, odd), 1.0 / KV_PAGE_TOKENS);
    }
    __syncthreads();
}

// Scores of all channels (scores.py). query: sum of |q| of every channel over `query_count` vectors.
template <class S>
KV_INLINE void score_channels(
    const Source& source, Scratch<S>& scratch, const float* query, float query_count, int* error) {
    if constexpr (S::score == MAGNITUDE || S::score == QUERY_MAGNITUDE) {
        mean_over_tokens<S>(scratch, [&](int t, int c) { return fabs((double)value<S>(source, scratch, t, c)); });
    } else if constexpr (S::score == VARIANCE) {
        mean_over_tokens<S>(scratch, [&](int t, int c) { return (double)value<S>(source, scratch, t, c); });
        mean_over_tokens<S>(scratch, [&](int t, int c) {
            double deviation = __dsub_rn((double)value<S>(source, scratch, t, c), scratch.score[c]);
            return __dmul_rn(deviation, deviation);
        });
    }
    for (int channel = threadIdx.x; channel < S::dim; channel += blockDim.x) {
        double score = scratch.score[channel];
        if constexpr (S::score == RANGE || S::score == QUERY_RANGE) {
            float low = value<S>(source, scratch, 0, channel), high = low;
#pragma unroll 8
            for (int token = 1; token < KV_PAGE_TOKENS; ++token) {
                float x = value<S>(source, scratch, token, channel);
                low = kv_min_nan(low, x);
                high = kv_max_nan(high, x);
            }
            score = __ddiv_rn(__dsub_rn((double)high, (double)low), 3.0);
        }
        if constexpr (S::needs_queries) {
            float mean = __fdiv_rn(query[channel], query_count);
            if constexpr (S::has_rescale) {
                mean = __fmul_rn(mean, source.rescale[channel]);
            }
            score = __dmul_rn(score, (double)mean);
        }
        score = __dadd_rn(score, 0.0);  // no -0: scores are then ordered as their bits are
        if ((__double_as_longlong(score) & 0x7ff0000000000000ll) == 0x7ff0000000000000ll) {
            atomicOr(error, NON_FINITE);
        }
        scratch.score[channel] = score;
    }
    __syncthreads();
}

// Slots and levels of all channels by score: a channel's rank is the number of better ones, the lower first on ties.
template <class S>
KV_INLINE void select_channels(Scratch<S>& scratch) {
    for (int slot = threadIdx.x; slot < S::slots; slot += blockDim.x) {
        scratch.channel[slot] = -1;
    }
    __syncthreads();
    for (int channel = threadIdx.x; channel < S::dim; channel += blockDim.x) {
        long long own = __double_as_longlong(scratch.score[channel]);
        int rank = 0, eligible[S::tiers] = {};
        for (int other = 0; other < S::dim; ++other) {
            long long score = __double_as_longlong(scratch.score[other]);
            rank += score > own || (score == own && other < channel);
#pragma unroll
            for (int i = 0; i < S::tiers; ++i) {
                eligible[i] += !S::tier(i).has_above || score > S::tier(i).above;
            }
        }
        int taken = 0, slot = NO_SLOT, level = (1 << S::bits) - 1;
#pragma unroll
        for (int i = 0; i < S::tiers; ++i) {
            const Tier tier = S::tier(i);
            int count = kv_min(kv_max(eligible[i] - taken, 0), tier.room);
            if (rank >= taken && rank < taken + count) {
                slot = rank - taken + tier.first;
                level = tier.bits == RAW_BITS ? 0 : (1 << tier.bits) - 1;
                scratch.channel[slot] = channel;
            }
            taken += count;
        }
        scratch.slot[channel] = slot;
        scratch.level[channel] = level;
    }
    __syncthreads();
}

// Scale and zero of every group, to the record and, as codes need them, to shared memory.
template <class S>
KV_INLINE void store_params(const Source& source, Scratch<S>& scratch, unsigned char* record, int* error) {
    for (int i = threadIdx.x; i < Page<S>::groups * Page<S>::others; i += blockDim.x) {
        int first = i / Page<S>::others * S::group, other = i % Page<S>::others;
        unsigned levels = (1u << S::bits) - 1;
        if constexpr (S::tiers) {
            levels = other < S::dim ? scratch.level[other] : 0;
        }
        float low = 0.0f, scale = 0.0f;
        if ((S::axis == 1 || other < S::dim) && levels > 0) {
            int last = S::axis == 0 ? first + S::group : kv_min(first + S::group, S::dim);
            float high;
            low = value<S>(source, scratch, S::axis == 0 ? first : other, S::axis == 0 ? other : first);
            high = low;
#pragma unroll 8
            for (int k = first + 1; k < last; ++k) {
                float x = value<S>(source, scratch, S::axis == 0 ? k : other, S::axis == 0 ? other : k);
                low = kv_min_nan(low, x);
                high = kv_max_nan(high, x);
            }
            low = __fadd_rn(low, 0.0f);  // no -0, whose order among zeros is the device's
            scale = __fdiv_rn(__fsub_rn(__fadd_rn(high, 0.0f), low), (float)levels);
        }
        scale = kv_store_param<S::param>(record + S::scale, i, scale);
        const float zero = kv_store_param<S::param>(record + S::zero, i, low);
        if (!kv_finite(scale) || !kv_finite(zero)) {
            atomicOr(error, NON_FINITE);
        }
        scratch.params.step[i] = kv_step_of(scale);
        scratch.params.zero[i] = zero;
    }
    __syncthreads();
}

// Codes with error feedback, as kvcal/pages/error_feedback.py chooses them: they take the place of the staged values; in that of
// a 16-bit channel are the bits of its target. Eight lanes share a token, lane l has the channels l, l + 8, ... in
// registers, and each error goes from its lane to the others. A target is summed up in the order of the channels.
template <class S>
KV_INLINE void choose_codes(const Source& source, Scratch<S>& scratch) {
    constexpr int LANES = 8, OWN = S::dim / LANES;
    static_assert(Page<S>::is_staged && S::dim % LANES == 0, "at most 128 channels, 8 at a time");
    const int lane = threadIdx.x % LANES;
    for (int token = threadIdx.x / LANES; token < KV_PAGE_TOKENS; token += THREADS / LANES) {
        float x[OWN], target[OWN];
        unsigned short kept[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            x[i] = target[i] = value<S>(source, scratch, token, LANES * i + lane);
        }
        const unsigned short* row = source.feedback;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
#pragma unroll 1
            for (int owner = 0; owner < LANES; ++owner) {
                const int channel = LANES * i + owner;
                float error = 0.0f;
                if (lane == owner) {
                    const int place = place_of_params<S>(token, channel);
                    const float step = scratch.params.step[place], zero = scratch.params.zero[place];
                    const unsigned levels = S::tiers ? scratch.level[channel] : (1u << S::bits) - 1;
                    kept[i] = (unsigned short)kv_code_of(target[i], zero, step, levels);
                    // A scale of 0 is an infinite step.
                    float decoded = __fadd_rn(__fmul_rn((float)kept[i], kv_finite(step) ? step : 0.0f), zero);
                    if (S::tiers && levels == 0) {
                        kept[i] = kv_bits_of<DTYPE>(target[i]);
                        decoded = kv_float_of<DTYPE>(kept[i]);
                    }
                    error = __fsub_rn(x[i], decoded);
                }
                error = __shfl_sync(0xffffffffu, error, owner, LANES);
#pragma unroll
                for (int k = i; k < OWN; ++k) {
                    const int ahead = LANES * k + lane - channel;
                    if (ahead > 0) {
                        target[k] = __fadd_rn(target[k], __fmul_rn(kv_float_of<KV_FLOAT16>(row[ahead]), error));
                    }
                }
                row += S::dim - channel;
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            scratch.tile[token * Page<S>::stride + LANES * i + lane] = kept[i];
        }
    }
    __syncthreads();
}

// The low bits of every code.
template <class S>
KV_INLINE void store_planes(const Source& source, const Scratch<S>& scratch, unsigned char* record) {
    constexpr int ROWS = Page<S>::rows, COLUMNS = Page<S>::columns;
    for (int unit = threadIdx.x; unit < ROWS * COLUMNS / 16; unit += blockDim.x) {
        int row, column;
        kv_unit_place<ROWS, COLUMNS>(unit, row, column);
        unsigned code[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            int token = S::side == 0 ? row : column + i, channel = S::side == 0 ? column + i : row;
            code[i] = channel < S::dim ? code_at<S>(source, scratch, token, channel) : 0;
        }
        kv_store_codes<ROWS, COLUMNS, S::bits>(record, row, column, code);
    }
}

// High planes of tiers I, I + 1, ...
template <class S, int I>
KV_INLINE void store_high_planes(const Source& source, const Scratch<S>& scratch, unsigned char* record) {
    constexpr Tier tier = S::tier(I);
    if constexpr (tier.bits != RAW_BITS) {
        static_assert((tier.bits - S::bits) % 2 == 0 && tier.columns % 4 == 0, "high planes are of 2 bits");
        for (int i = threadIdx.x; i < KV_PAGE_TOKENS * (tier.columns / 4); i += blockDim.x) {
            int token = i / (tier.columns / 4), column = i % (tier.columns / 4) * 4;
            unsigned high[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                int channel = column + k < tier.room ? scratch.channel[tier.first + column + k] : -1;
                high[k] = channel < 0 ? 0 : code_at<S>(source, scratch, token, channel) >> S::bits;
            }
            unsigned char* at = record + tier.high + kv_plane_byte<KV_PAGE_TOKENS, tier.columns, 2>(token, column);
#pragma unroll
            for (int plane = 0; plane < (tier.bits - S::bits) / 2; ++plane) {
                unsigned byte = 0;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    byte |= (high[k] >> 2 * plane & 3) << 2 * k;
                }
                at[plane * kv_plane_bytes(KV_PAGE_TOKENS, tier.columns, 2)] = (unsigned char)byte;
            }
        }
    }
    if constexpr (I + 1 < S::tiers) {
        store_high_planes<S, I + 1>(source, scratch, record);
    }
}

// High planes, 16-bit values and index of a page with tiers.
template <class S>
KV_INLINE void store_tiers(const Source& source, const Scratch<S>& scratch, unsigned char* record, int* error) {
    store_high_planes<S, 0>(source, scratch, record);
    for (int i = threadIdx.x; i < S::raw_slots * KV_PAGE_TOKENS; i += blockDim.x) {
        // Tiers run from most bits to fewest, so 16-bit slots are the first ones.
        int channel = scratch.channel[i / KV_PAGE_TOKENS], token = i % KV_PAGE_TOKENS;
        unsigned short bits = 0;
        if (channel >= 0) {
            bits = S::has_feedback ? scratch.tile[token * Page<S>::stride + channel]
                                   : kv_bits_of<DTYPE>(value<S>(source, scratch, token, channel));
            if (!kv_finite(kv_float_of<DTYPE>(bits))) {
                atomicOr(error, NON_FINITE);
            }
        }
        ((unsigned short*)(record + S::raw))[i] = bits;
    }
    for (int i = threadIdx.x; i < S::record - S::index; i += blockDim.x) {
        record[S::index + i] = i < S::dim ? scratch.slot[i] : 0;
    }
}

// One page -> its record, by the whole block.
template <class S>
KV_INLINE void pack_page(
    const Source& source, Scratch<S>& scratch, unsigned char* record, const float* query, float query_count,
    int* error) {
    if constexpr (Page<S>::is_raw) {
        static_assert(!S::has_rescale && !S::has_offset, "16-bit pages hold what the model made");
        copy_tokens<S>((unsigned short*)record, S::dim, source, 0, KV_PAGE_TOKENS);
    } else {
        if constexpr (Page<S>::is_staged) {
            copy_tokens<S>(scratch.tile, Page<S>::stride, source, 0, KV_PAGE_TOKENS);
            __syncthreads();
        }
        if constexpr (S::tiers > 0) {
            score_channels<S>(source, scratch, query, query_count, error);
            select_channels<S>(scratch);
        }
        store_params<S>(source, scratch, record, error);
        if constexpr (S::has_feedback) {
            choose_codes<S>(source, scratch);
        }
        store_planes<S>(source, scratch, record);
        if constexpr (S::tiers > 0) {
            store_tiers<S>(source, scratch, record, error);
        }
    }
}
