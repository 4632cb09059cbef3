// Rotated pages (kvcal/systems/basis/rotated.py), of which every token has scales of its own: a block packs
// some of a page's 128 tokens, and parts need nothing of each other. So pages need not be complete: stripes of 16 tokens
// have whole bytes of a record, and are packed as they come. A warp packs 32 tokens, half of which are then copies.

#include "feedback_large.cuh"

// The staged tokens, rotated and rounded to the cache's dtype, and the sums of squares of every group. Eight
// lanes share a token.
template <class S, int LANES>
KV_INLINE void rotate_part(const Source& source, PartScratch<S>& scratch, const Turn<S, LANES>& turn, int count) {
    constexpr int OWN = S::dim / LANES;
    static_assert(Page<S>::is_staged != Part<S>::is_large, "of more channels than are staged");
    const int lane = threadIdx.x % LANES;
#pragma unroll 1
    for (int token = threadIdx.x / LANES; token < count; token += THREADS / LANES) {
        unsigned short* row = scratch.tile + token * Part<S>::stride;
        float x[OWN];
        rotate_token<S, LANES>(x, row, source, turn);
        if constexpr (S::dim % BLOCK) {
            row[LANES * OWN + lane] = 0;  // channels beyond the last, of the last block
        }
#pragma unroll
        for (int group = 0; group < Part<S>::groups; ++group) {
            const double sum = square_of_group<S, LANES>(x, group);
            if (lane == 0) {
                scratch.squares[group * Part<S>::tokens + token] = sum;
            }
        }
    }
}

// The scale of every token and group that errs least on Gaussians of its norm: to nearest, or the lowest of
// the candidates.
template <class S>
KV_INLINE void scale_part(PartScratch<S>& scratch, int count, int* error) {
#pragma unroll 1
    for (int i = threadIdx.x; i < Part<S>::groups * count; i += THREADS) {
        const int group = i % Part<S>::groups, at = group * Part<S>::tokens + i / Part<S>::groups;
        scratch.lowest[at] = scale_bits<S>(scratch.squares[at], group, error);
    }
}

// Every value's nearest code.
template <class S>
KV_INLINE void round_part(PartScratch<S>& scratch, int count) {
    constexpr int TOKENS = Part<S>::tokens;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * Part<S>::blocks; i += THREADS) {
        const int block = i / 32 % Part<S>::blocks, token = i / 32 / Part<S>::blocks * 32 + i % 32;
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

// The tokens of a page that a block packs: `count` from `first` on, 32 or a multiple, of which those from `begin` to `end`
// - 1 are there and are stored, whole stripes.
struct Tokens {
    int first, count, begin, end;

    KV_INLINE bool are_there(int token) const { return first + token >= begin && first + token < end; }
};

// Which candidate of every token costs least, the first of equals; and the scales, to the record.
template <class S>
KV_INLINE void choose_scales(PartScratch<S>& scratch, unsigned char* record, const Tokens& tokens) {
#pragma unroll 1
    for (int token = threadIdx.x; token < tokens.count; token += THREADS) {
        int chosen = 0;
        if constexpr (S::has_feedback) {
            float least = scratch.cost[chain_of(token, 0)];
            for (int number = 1; number < CANDIDATES; ++number) {
                const float cost = scratch.cost[chain_of(token, number)];
                if (cost < least) {
                    least = cost, chosen = number;
                }
            }
        }
        scratch.chain[token] = S::has_feedback ? chain_of(token, chosen) : token;
        for (int group = 0; tokens.are_there(token) && group < Part<S>::groups; ++group) {
            record[S::scale + group * KV_PAGE_TOKENS + tokens.first + token] =
                (unsigned char)(scratch.lowest[group * Part<S>::tokens + token] + chosen);
        }
    }
}

// The codes of the chains that were chosen, to the planes of the record.
template <class S>
KV_INLINE void store_part(const PartScratch<S>& scratch, unsigned char* record, const Tokens& tokens) {
    constexpr int ROWS = Page<S>::rows, COLUMNS = Page<S>::columns, CHAINS = Part<S>::chains, WORDS = Part<S>::words;
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens.count * Part<S>::blocks; i += THREADS) {
        const int block = i / 32 % Part<S>::blocks, token = i / 32 / Part<S>::blocks * 32 + i % 32;  // of keys
        const int channel = i % Page<S>::padded, column = i / Page<S>::padded * BLOCK;               // of values
        if (S::stripe < KV_PAGE_TOKENS && !tokens.are_there(S::side == 0 ? token : column)) {
            continue;
        }
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            const bool is_pair = word < S::bits / 2;
            unsigned codes = 0;
            if constexpr (S::side == 0) {
                codes = scratch.codes[(block * WORDS + word) * CHAINS + scratch.chain[token]];
            } else {
                const unsigned* of_block = scratch.codes + (channel / BLOCK * WORDS + word) * CHAINS;
#pragma unroll
                for (int k = 0; k < BLOCK; ++k) {
                    const unsigned of_token = of_block[scratch.chain[column + k]];
                    codes |= is_pair ? (of_token >> 2 * (channel % BLOCK) & 3) << 2 * k
                                     : (of_token >> channel % BLOCK & 1) << k;
                }
            }
            const int at_row = S::side == 0 ? tokens.first + token : channel;
            const int at_column = S::side == 0 ? block * BLOCK : tokens.first + column;
            unsigned char* plane = record + word * kv_plane_bytes(ROWS, COLUMNS, 2);
            if (is_pair) {
                kv_store_unit<ROWS, COLUMNS, 2>(plane, at_row, at_column, codes);
            } else {
                kv_store_unit<ROWS, COLUMNS, 1>(plane, at_row, at_column, codes);
            }
        }
    }
}

// These tokens of a page, by the whole block.
template <class S>
KV_INLINE void pack_part(
    const Source& source, PartScratch<S>& scratch, unsigned char* record, const Tokens& tokens, int* error) {
    const int count = tokens.count;
    static_assert(sizeof(PartScratch<S>) <= PART_BYTES, "kvcal.kernels.packing asks for less than a part takes");
    const Turn<S, 8> turn([&](int channel) { return turn_of<S>(source.feedback, source.signs, channel); });
    if constexpr (S::has_feedback && !Part<S>::is_large) {
        fetch_factor<S>(source.feedback, scratch);
    }
    copy_tokens<S>(scratch.tile, Part<S>::stride, source, tokens.first, count, tokens.begin, tokens.end);
    __syncthreads();
    if constexpr (S::has_feedback && !Part<S>::is_large) {
        order_factor<S>(scratch);
    }
    rotate_part<S>(source, scratch, turn, count);
    __syncthreads();
    scale_part<S>(scratch, count, error);
    __syncthreads();
    if constexpr (S::has_feedback && Part<S>::is_large) {
        choose_codes_of_large<S>(source.feedback, scratch);
    } else if constexpr (S::has_feedback) {
        choose_codes_of_part<S>(scratch, count);
    } else {
        round_part<S>(scratch, count);
    }
    __syncthreads();
    choose_scales<S>(scratch, record, tokens);
    __syncthreads();
    store_part<S>(scratch, record, tokens);
}
