// Rotated pages (kvcal/systems/basis/rotated.py), of which every token has scales of its own: a block packs PART_TOKENS of a page's 128
// tokens, and parts need nothing of each other.

#include "feedback.cuh"
#include "hadamard.cuh"

// The staged tokens, rotated and rounded to the cache's dtype, and the sums of squares of every group. Eight lanes share a
// token.
template <class S>
KV_INLINE void rotate_part(const Source& source, PartScratch<S>& scratch) {
    constexpr int LANES = 8, OWN = S::dim / LANES, SIZE = kv_min(S::group, S::dim) / LANES;
    static_assert(Page<S>::is_staged && S::dim % LANES == 0 && S::tiers == 0, "at most 128 channels, 8 at a time");
    const int lane = threadIdx.x % LANES;
#pragma unroll 1
    for (int token = threadIdx.x / LANES; token < Part<S>::tokens; token += THREADS / LANES) {
        unsigned short* row = scratch.tile + token * Part<S>::stride + lane;
        float x[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int channel = LANES * i + lane;
            float y = transformed<S>(kv_float_of<DTYPE>(row[LANES * i]), source, channel);
            if constexpr (S::has_gain) {
                y = __fmul_rn(y, kv_float_of<KV_FLOAT16>(source.feedback[FACTOR<S> - S::dim + channel]));
            }
            x[i] = __fmul_rn(y, (float)source.signs[channel]);
        }
        hadamard<LANES>(x, lane);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            row[LANES * i] = kv_bits_of<DTYPE>(x[i]);
            x[i] = kv_float_of<DTYPE>(row[LANES * i]);
        }
        if constexpr (S::dim % BLOCK) {
            row[LANES * OWN] = 0;  // channels beyond the last, of the last block
        }
#pragma unroll
        for (int group = 0; group < Part<S>::groups; ++group) {
            double sum = halving_sum<1, kv_power_of_two(SIZE)>(0, [&](int i) {
                const double y = i < SIZE && group * SIZE + i < OWN ? (double)x[kv_min(group * SIZE + i, OWN - 1)] : 0.0;
                return __dmul_rn(y, y);
            });
#pragma unroll
            for (int apart = LANES / 2; apart > 0; apart /= 2) {
                sum = __dadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, apart));
            }
            if (lane == 0) {
                scratch.squares[group * Part<S>::tokens + token] = sum;
            }
        }
    }
}

// The scale of every token and group that errs least on Gaussians of its norm: to nearest, or the lowest of the candidates.
template <class S>
KV_INLINE void scale_part(PartScratch<S>& scratch, int* error) {
    constexpr int SIZE = kv_min(S::group, S::dim);
#pragma unroll 1
    for (int i = threadIdx.x; i < Part<S>::groups * Part<S>::tokens; i += THREADS) {
        const int count = S::dim % SIZE == 0 ? SIZE : kv_min(SIZE, S::dim - i / Part<S>::tokens * SIZE);
        const double mean = S::dim % SIZE == 0 && (SIZE & SIZE - 1) == 0 ? __dmul_rn(scratch.squares[i], 1.0 / SIZE)
                                                                         : __ddiv_rn(scratch.squares[i], (double)count);
        const double rms = __dsqrt_rn(mean);
        const float scale = __double2float_rn(__dmul_rn(rms, __longlong_as_double(S::gaussian_step)));
        const unsigned bits = kv_bits_of<KV_FLOAT16>(scale) + (S::has_feedback ? 0 : 0x80) >> 8;
        if (!kv_finite(kv_float_of_e5m2(bits))) {
            atomicOr(error, NON_FINITE);
        }
        scratch.lowest[i] = (unsigned char)bits;
    }
    __syncthreads();
}

// Every value's nearest code.
template <class S>
KV_INLINE void round_part(PartScratch<S>& scratch) {
    constexpr int TOKENS = Part<S>::tokens;
#pragma unroll 1
    for (int i = threadIdx.x; i < TOKENS * Part<S>::blocks; i += THREADS) {
        const int token = i % TOKENS, block = i / TOKENS;
        const unsigned char scale = scratch.lowest[block * BLOCK / S::group * TOKENS + token];
        const Grid grid(kv_float_of_e5m2(scale), Page<S>::mean_code);
        unsigned codes[Part<S>::words] = {};
#pragma unroll
        for (int k = 0; k < BLOCK; ++k) {
            const float x = kv_float_of<DTYPE>(scratch.tile[token * Part<S>::stride + block * BLOCK + k]);
            if (block * BLOCK + k < S::dim) {
                append_code<S>(codes, k, grid.code<(1u << S::bits) - 1>(x));
            }
        }
#pragma unroll
        for (int word = 0; word < Part<S>::words; ++word) {
            scratch.codes[(block * Part<S>::words + word) * TOKENS + token] = codes[word];
        }
    }
}

// Which candidate of every token costs least, the first of equals; and the scales, to the record.
template <class S>
KV_INLINE void choose_scales(PartScratch<S>& scratch, unsigned char* record, int first) {
    constexpr int TOKENS = Part<S>::tokens;
#pragma unroll 1
    for (int token = threadIdx.x; token < TOKENS; token += THREADS) {
        int chosen = 0;
        if constexpr (S::has_feedback) {
            float least = scratch.cost[token];
            for (int number = 1; number < CANDIDATES; ++number) {
                const float cost = scratch.cost[number * TOKENS + token];
                if (cost < least) {
                    least = cost, chosen = number;
                }
            }
        }
        scratch.chain[token] = chosen * TOKENS + token;
        for (int group = 0; group < Part<S>::groups; ++group) {
            record[S::scale + group * KV_PAGE_TOKENS + first + token] =
                (unsigned char)(scratch.lowest[group * TOKENS + token] + chosen);
        }
    }
    __syncthreads();
}

// The codes of the chains that were chosen, to the planes of the record.
template <class S>
KV_INLINE void store_part(const PartScratch<S>& scratch, unsigned char* record, int first) {
    constexpr int ROWS = Page<S>::rows, COLUMNS = Page<S>::columns, CHAINS = Part<S>::chains, WORDS = Part<S>::words;
    constexpr int ACROSS = S::side == 0 ? Part<S>::tokens : Page<S>::padded;
#pragma unroll 1
    for (int i = threadIdx.x; i < Part<S>::tokens * Part<S>::blocks; i += THREADS) {
        const int row = S::side == 0 ? first + i % ACROSS : i % ACROSS;
        const int column = S::side == 0 ? i / ACROSS * BLOCK : first + i / ACROSS * BLOCK;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            const bool is_pair = word < S::bits / 2;
            unsigned codes;
            if constexpr (S::side == 0) {
                codes = scratch.codes[(i / ACROSS * WORDS + word) * CHAINS + scratch.chain[i % ACROSS]];
            } else {
                codes = 0;
                const unsigned* of_block = scratch.codes + (row / BLOCK * WORDS + word) * CHAINS;
#pragma unroll
                for (int k = 0; k < BLOCK; ++k) {
                    const unsigned of_token = of_block[scratch.chain[i / ACROSS * BLOCK + k]];
                    codes |= is_pair ? (of_token >> 2 * (row % BLOCK) & 3) << 2 * k : (of_token >> row % BLOCK & 1) << k;
                }
            }
            unsigned char* plane = record + word * kv_plane_bytes(ROWS, COLUMNS, 2);
            if (is_pair) {
                kv_store_unit<ROWS, COLUMNS, 2>(plane, row, column, codes);
            } else {
                kv_store_unit<ROWS, COLUMNS, 1>(plane, row, column, codes);
            }
        }
    }
}

// The tokens `first`, first + 1, ... of a page, by the whole block.
template <class S>
KV_INLINE void pack_part(
    const Source& source, PartScratch<S>& scratch, unsigned char* record, int first, int* error) {
    static_assert(sizeof(PartScratch<S>) <= PART_BYTES, "kvcal.kernels.packing asks for less shared memory than a part takes");
    static_assert(!S::has_feedback || THREADS >= CANDIDATES * PART_TOKENS, "a thread for every chain");
    if constexpr (S::has_feedback) {
        fetch_factor<S>(source.feedback, scratch);
    }
    copy_tokens<S>(scratch.tile, Part<S>::stride, source, first, Part<S>::tokens);
    __syncthreads();
    if constexpr (S::has_feedback) {
        order_factor<S>(scratch);
    }
    rotate_part<S>(source, scratch);
    __syncthreads();
    scale_part<S>(scratch, error);
    if constexpr (S::has_feedback) {
        choose_codes_of_part<S>(scratch);
    } else {
        round_part<S>(scratch);
    }
    choose_scales<S>(scratch, record, first);
    store_part<S>(scratch, record, first);
}
