// Eight tokens of a rotated page by a block, in a step that completes a stripe. As few tokens as have whole bytes in every plane, so
// that a stripe occupies several SMs: its time is that of the channels of one token, which are rounded one after the other.
//
// With error feedback a chain is a token with one candidate for its scales (feedback.cuh has them 32 to a warp, for many tokens).
// Here four lanes have a chain, and its targets in registers: a lane has 4 channels of every block of 16. All four round each channel.
// So an error is where it is needed at once: the target after it takes it in first, all others while the next channel is rounded, for
// which that target is passed on before. A target is summed up in the order of the channels, as on a CPU.

#include "rotated_token.cuh"

enum { SHARING = 4, FEW_CHAINS = FEW * CANDIDATES };

// Sizes, and shared memory, of eight tokens.
template <class S>
struct FewScratch {
    static constexpr int groups = Page<S>::groups, blocks = Page<S>::padded / BLOCK, words = WORDS<S>;
    static constexpr int chains = S::has_feedback ? FEW_CHAINS : FEW;
    static constexpr int stride = Page<S>::padded + 4, columns = Page<S>::padded;

    alignas(16) unsigned short tile[FEW * Page<S>::stride];  // tokens as they come
    alignas(16) float x[FEW * stride];                       // rotated
    // U, from its diagonal on, which holds the costs; 0 for channels beyond the last. More of a row is loaded than there is.
    alignas(16) float factor[S::has_feedback ? columns * columns + blocks * BLOCK : 4];
    unsigned codes[blocks * words * chains];
    float cost[FEW_CHAINS];
    int chain[FEW];                     // whose codes a token takes
    unsigned char lowest[groups * FEW];  // bits of its scales, or of the lowest candidates
};

// U in fp32, by all warps from the first on: a row each, and all that it loads at once.
template <class S, int FIRST_WARP>
KV_INLINE void spread_factor(FewScratch<S>& scratch, const unsigned short* factor, int warp) {
    constexpr int COLUMNS = FewScratch<S>::columns, PARTS = kv_ceil_div(COLUMNS, 32);
    constexpr int WARPS = THREADS / 32 - FIRST_WARP, ROWS = kv_min(kv_ceil_div(COLUMNS, WARPS), 13);
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int row = warp - FIRST_WARP; row < COLUMNS; row += ROWS * WARPS) {
        unsigned short found[ROWS][PARTS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int at = row + i * WARPS;
            const unsigned short* of_row = factor + at * (2 * S::dim - at - 1) / 2;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const int column = 32 * part + lane;
                found[i][part] = at <= column && column < S::dim ? of_row[column] : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int at = row + i * WARPS;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const int column = 32 * part + lane;
                if (at < COLUMNS && column < COLUMNS) {
                    scratch.factor[at * COLUMNS + column] = kv_float_of<KV_FLOAT16>(found[i][part]);
                }
            }
        }
    }
}

// The tokens from `first` of the page on, rotated, and their scales: by the first two warps, of which each needs nothing of the other.
template <class S>
KV_INLINE void rotate_eight(const Source& source, FewScratch<S>& scratch, int first, int* error) {
    constexpr int LANES = 8, OWN = S::dim / LANES, LOADS = S::dim / 8, HALF = FEW / 2;
    const Turn<S, LANES> turn(source);
    const int half = threadIdx.x / 32 * HALF, token = threadIdx.x / LANES, lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = threadIdx.x % 32; i < HALF * LOADS; i += 32) {
        const int at = half + i / LOADS, load = i % LOADS;
        ((uint4*)(scratch.tile + at * Page<S>::stride))[load] = ((const uint4*)source.at(first + at))[load];
    }
    __syncwarp();
    float x[OWN];
    rotate_token<S, LANES>(x, scratch.tile + token * Page<S>::stride, source, turn);
#pragma unroll
    for (int i = 0; i < Page<S>::padded / LANES; ++i) {
        scratch.x[token * FewScratch<S>::stride + LANES * i + lane] = i < OWN ? x[kv_min(i, OWN - 1)] : 0.0f;
    }
#pragma unroll
    for (int group = 0; group < FewScratch<S>::groups; ++group) {
        scratch.lowest[group * FEW + token] = scale_bits<S>(square_of_group<S, LANES>(x, group), group, error);
    }
}

// Every value's nearest code: a thread has a block of a token.
template <class S>
KV_INLINE void round_eight(FewScratch<S>& scratch) {
    const int block = threadIdx.x / FEW, token = threadIdx.x % FEW;
    if (block >= FewScratch<S>::blocks) {
        return;
    }
    const Grid grid(kv_float_of_e5m2(scratch.lowest[block * BLOCK / S::group * FEW + token]), Page<S>::mean_code);
    unsigned codes[WORDS<S>] = {};
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) {
        const float code = grid.code<(1u << S::bits) - 1>(scratch.x[token * FewScratch<S>::stride + block * BLOCK + k]);
        if (block * BLOCK + k < S::dim) {
            append_code<S>(codes, k, code);
        }
    }
#pragma unroll
    for (int word = 0; word < WORDS<S>; ++word) {
        scratch.codes[(block * WORDS<S> + word) * FewScratch<S>::chains + token] = codes[word];
    }
}

// A lane's part of a chain.
template <class S>
struct Chain {
    enum { BLOCKS = FewScratch<S>::blocks, COLUMNS = FewScratch<S>::columns };
    FewScratch<S>& scratch;
    int token, number, lane;  // the candidate's number, and the lane's among the four
    Grid grid;
    float due, error;  // the target to be rounded, and the error before it, which no other target has yet
    // Costs of every eighth channel. Even lanes have those of the first four channels of eight, odd lanes the others.
    float squares[4];

    KV_INLINE Chain(FewScratch<S>& scratch_, int number_)
        : scratch(scratch_), token(threadIdx.x % 32 / SHARING), number(number_), lane(threadIdx.x % SHARING), grid(0.0f, 0.0f),
          due(values(0)[0]), error(0.0f), squares{} {}

    KV_INLINE const float* values(int block) const { return scratch.x + token * FewScratch<S>::stride + block * BLOCK; }

    // Rounds the blocks from AT on. Their targets are this lane's channels of every block; row: the factors with which these take in
    // the error before.
    template <int AT>
    KV_INLINE void round(float (&target)[BLOCKS - AT][4], float4 (&row)[BLOCKS - AT]) {
        constexpr unsigned LEVELS = (1u << S::bits) - 1;
        constexpr int TARGETS = BLOCKS - AT;
        if (AT * BLOCK % S::group == 0) {
            grid = Grid(kv_float_of_e5m2(scratch.lowest[AT * BLOCK / S::group * FEW + token] + number), Page<S>::mean_code);
        }
        unsigned codes[WORDS<S>] = {};
#pragma unroll 1
        for (int quad = 0; quad < BLOCK / 4; ++quad) {
            const float4 x = *(const float4*)(values(AT) + 4 * quad);
            const float value[4] = {x.x, x.y, x.z, x.w};
            const bool has_squares = quad % 2 == lane % 2;
            unsigned four[WORDS<S>] = {};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float* factor = scratch.factor + (AT * BLOCK + k) * COLUMNS + AT * BLOCK + quad * 4 * COLUMNS;
                const float cost = factor[4 * quad + k], of_next = factor[4 * quad + k + 1];
                float4 next_row[TARGETS];
#pragma unroll
                for (int i = 0; i < TARGETS; ++i) {
                    next_row[i] = *(const float4*)(factor + i * BLOCK + 4 * lane);
                }
                __syncwarp();  // else the compiler loads everything where it is used, and waits for it
#pragma unroll
                for (int i = 0; i < TARGETS; ++i) {
                    target[i][0] = __fadd_rn(target[i][0], __fmul_rn(row[i].x, error));
                    target[i][1] = __fadd_rn(target[i][1], __fmul_rn(row[i].y, error));
                    target[i][2] = __fadd_rn(target[i][2], __fmul_rn(row[i].z, error));
                    target[i][3] = __fadd_rn(target[i][3], __fmul_rn(row[i].w, error));
                    row[i] = next_row[i];
                }
                const bool is_last = k == 3 && quad == BLOCK / 4 - 1;  // what follows is of the next block
                const float found = is_last ? target[kv_min(1, TARGETS - 1)][0] : target[0][(k + 1) % 4];
                const float next = __shfl_sync(0xffffffffu, found, (k == 3 ? quad + 1 : quad) % SHARING, SHARING);
                const float code = grid.code<LEVELS>(due), decoded = grid.decoded(code), rest = __fsub_rn(due, decoded);
                error = __fsub_rn(value[k], decoded);
                due = __fadd_rn(next, __fmul_rn(of_next, error));
                const float square = __fmul_rn(__fmul_rn(rest, rest), cost);
                squares[k] = has_squares ? __fadd_rn(squares[k], square) : squares[k];
                append_code<S>(four, k, code);
            }
#pragma unroll
            for (int word = 0; word < WORDS<S>; ++word) {
                codes[word] |= four[word] << (word < S::bits / 2 ? 8 : 4) * quad;
            }
        }
#pragma unroll
        for (int word = 0; word < WORDS<S>; ++word) {
            if (S::dim % BLOCK && AT == BLOCKS - 1) {  // channels beyond the last
                codes[word] &= word < S::bits / 2 ? 0xffff : 0xff;
            }
            if (lane == 0) {
                scratch.codes[(AT * WORDS<S> + word) * FEW_CHAINS + number * FEW + token] = codes[word];
            }
        }
        if constexpr (AT + 1 < BLOCKS) {
            float later[BLOCKS - AT - 1][4];
            float4 of_later[BLOCKS - AT - 1];
#pragma unroll
            for (int i = 0; i < BLOCKS - AT - 1; ++i) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    later[i][k] = target[i + 1][k];
                }
                of_later[i] = row[i + 1];
            }
            round<AT + 1>(later, of_later);
        }
    }
};

// Codes and costs of all chains of one candidate, by a warp.
template <class S>
KV_INLINE void choose_codes_of_eight(FewScratch<S>& scratch, int number) {
    constexpr int BLOCKS = FewScratch<S>::blocks;
    static_assert(FEW * SHARING == 32, "a warp has the chains of a candidate");
    Chain<S> chain(scratch, number);
    float target[BLOCKS][4];
    float4 row[BLOCKS];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        const float4 x = *(const float4*)(chain.values(i) + 4 * chain.lane);
        target[i][0] = x.x, target[i][1] = x.y, target[i][2] = x.z, target[i][3] = x.w;
        row[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    chain.template round<0>(target, row);
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[i] = __fadd_rn(chain.squares[i], __shfl_xor_sync(0xffffffffu, chain.squares[i], 1));
    }
    if (chain.lane == 0) {
        scratch.cost[number * FEW + chain.token] = __fadd_rn(__fadd_rn(sum[0], sum[2]), __fadd_rn(sum[1], sum[3]));
    }
}

// A thread of those that do something together.
struct Member {
    int number, of;
};

// Stores the codes that `word_of(block, word, token)` gives to the tokens from `first` on.
template <class S, class F>
KV_INLINE void store_eight(unsigned char* record, int first, Member member, F word_of) {
    constexpr int ROWS = Page<S>::rows, COLUMNS = Page<S>::columns, PLANE = kv_plane_bytes(ROWS, COLUMNS, 2);
    constexpr int UNITS = S::side == 0 ? FEW * FewScratch<S>::blocks : ROWS;
#pragma unroll 1
    for (int i = member.number; i < UNITS; i += member.of) {
#pragma unroll
        for (int word = 0; word < WORDS<S>; ++word) {
            const bool is_pair = word < S::bits / 2;
            unsigned char* plane = record + word * PLANE;
            if constexpr (S::side == 0) {
                const int token = i % FEW, block = i / FEW;
                const unsigned codes = word_of(block, word, token);
                if (is_pair) {
                    kv_store_unit<ROWS, COLUMNS, 2>(plane, first + token, block * BLOCK, codes);
                } else {
                    kv_store_unit<ROWS, COLUMNS, 1>(plane, first + token, block * BLOCK, codes);
                }
            } else {
                unsigned codes = 0;
#pragma unroll
                for (int token = 0; token < FEW; ++token) {
                    const unsigned of_token = word_of(i / BLOCK, word, token);
                    codes |= is_pair ? (of_token >> 2 * (i % BLOCK) & 3) << 2 * token
                                     : (of_token >> i % BLOCK & 1) << token;
                }
                // Half a unit, which lies together in 128 columns.
                if (is_pair) {
                    *(unsigned short*)(plane + kv_plane_byte<ROWS, COLUMNS, 2>(i, first)) = (unsigned short)codes;
                } else {
                    plane[kv_plane_byte<ROWS, COLUMNS, 1>(i, first)] = (unsigned char)codes;
                }
            }
        }
    }
}

// Sets to 0 what a page that begins has of later stripes, and its padding: each eight of the first stripe clear its places in the others.
// Nothing is read of what was there before.
template <class S>
KV_INLINE void clear_rest(unsigned char* record, int first, Member member) {
    constexpr int GROUPS = FewScratch<S>::groups, END = S::scale + GROUPS * KV_PAGE_TOKENS;
#pragma unroll 1
    for (int later = first + S::stripe; later < KV_PAGE_TOKENS; later += S::stripe) {
        store_eight<S>(record, later, member, [](int, int, int) { return 0u; });
        for (int i = member.number; i < GROUPS * FEW; i += member.of) {
            record[S::scale + i / FEW * KV_PAGE_TOKENS + later + i % FEW] = 0;
        }
    }
    for (int i = END + member.number; first == 0 && i < S::record; i += member.of) {
        record[i] = 0;
    }
}

// Which candidate of every token costs least, the first of equals; and the scales, to the record. A thread a token.
template <class S>
KV_INLINE void choose_scale(FewScratch<S>& scratch, unsigned char* record, int first, int token) {
    int chosen = 0;
    if constexpr (S::has_feedback) {
        float least = scratch.cost[token];
#pragma unroll
        for (int number = 1; number < CANDIDATES; ++number) {
            const float cost = scratch.cost[number * FEW + token];
            if (cost < least) {
                least = cost, chosen = number;
            }
        }
    }
    scratch.chain[token] = chosen * FEW + token;
    for (int group = 0; group < FewScratch<S>::groups; ++group) {
        record[S::scale + group * KV_PAGE_TOKENS + first + token] =
            (unsigned char)(scratch.lowest[group * FEW + token] + chosen);
    }
}

// The eight tokens of a page from `first` on, by the whole block.
template <class S>
KV_INLINE void pack_eight(const Source& source, FewScratch<S>& scratch, unsigned char* record, int first, int* error) {
    constexpr int ROTATING = 2, CHAIN_THREADS = 32 * CANDIDATES;
    static_assert(sizeof(FewScratch<S>) <= PART_BYTES, "kvcal.kernels.packing asks for less than eight tokens take");
    static_assert(S::stripe % FEW == 0 && THREADS > CHAIN_THREADS, "some warps are left to clear");
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // which lets the compiler know that a warp stays together
    if (warp < ROTATING) {
        rotate_eight<S>(source, scratch, first, error);
    } else if constexpr (S::has_feedback) {
        spread_factor<S, ROTATING>(scratch, source.feedback, warp);
    }
    __syncthreads();
    if (warp >= CANDIDATES) {
        if (first < S::stripe) {
            clear_rest<S>(record, first, Member{(int)threadIdx.x - CHAIN_THREADS, THREADS - CHAIN_THREADS});
        }
    } else if constexpr (S::has_feedback) {
        choose_codes_of_eight<S>(scratch, warp);
    } else {
        round_eight<S>(scratch);
    }
    __syncthreads();
    if (threadIdx.x < FEW) {
        choose_scale<S>(scratch, record, first, threadIdx.x);
    }
    __syncthreads();
    store_eight<S>(record, first, Member{(int)threadIdx.x, THREADS}, [&](int block, int word, int token) {
        return scratch.codes[(block * WORDS<S> + word) * FewScratch<S>::chains + scratch.chain[token]];
    });
}
