// Eight tokens of a rotated page by a block, in a step that completes a stripe. As few tokens as have whole bytes in every plane, so
// that a stripe occupies several SMs: its time is that of the channels of one token, which are rounded one after the other.
//
// With error feedback a chain is a token with one candidate for its scales (feedback.cuh has them 32 to a warp, for many tokens).
// Here a warp has eight of them. Four lanes round each channel, all of them the same: an error is where it is needed at once. Each has
// four of the targets in a block of 16 channels, and of the next block. The target after a channel takes its error in first, those of the
// block while the next channel is rounded, those of the next block in the second half of the block.
// Two more warps sum up what all blocks before add to the block after the next. So a target is summed up in the order of the channels, as
// on a CPU; and the code is one short loop, which a step that packs has to fetch, since other kernels have driven it from caches.

#include "rotated_token.cuh"

enum { SHARING = 4, FEW_CHAINS = FEW * CANDIDATES, HELPERS = 2, FEW_WARPS = 4 * CANDIDATES };

// Sizes, and shared memory, of eight tokens.
template <class S>
struct FewScratch {
    static constexpr int groups = Page<S>::groups, blocks = Page<S>::padded / BLOCK, words = WORDS<S>;
    static constexpr int chains = S::has_feedback ? FEW_CHAINS : FEW;
    static constexpr int stride = Page<S>::padded + 4, columns = Page<S>::padded;
    static constexpr int lanes = kv_min(32, kv_hadamard_block(kv_min(S::group, S::dim) | S::dim));  // that rotate a token

    alignas(16) unsigned short tile[FEW * Page<S>::stride];  // tokens as they come
    alignas(16) float x[FEW * stride];                       // rotated
    // Of each chain, errors of channels; and targets of the block after the next one to be rounded.
    alignas(16) float errors[S::has_feedback ? FEW_CHAINS * stride : 4];
    // U, from its diagonal on, which holds the costs; 0 for channels beyond the last. More of a row is loaded than there is.
    alignas(16) float factor[S::has_feedback ? columns * columns + blocks * BLOCK : 4];
    float turn[S::dim];  // signs and gains
    unsigned codes[blocks * words * chains];
    float cost[FEW_CHAINS];
    int chain[FEW];                     // whose codes a token takes
    unsigned char lowest[groups * FEW];  // bits of its scales, or of the lowest candidates
};

// Rows of a factor whose loads a warp has on their way. Before compute capability 9.0 more spill where two blocks share an SM.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
enum { ROWS_AT_ONCE = PART_BLOCKS > 1 ? 4 : 11 };
#else
enum { ROWS_AT_ONCE = 11 };
#endif

// What is the same for all tokens of a head, by the whole block: U in fp32, a row a warp, and all that it loads at once.
template <class S>
KV_INLINE void prepare_eight(FewScratch<S>& scratch, const unsigned short* feedback, const signed char* signs) {
    constexpr int COLUMNS = FewScratch<S>::columns, PARTS = kv_ceil_div(COLUMNS, 32);
    constexpr int WARPS = THREADS / 32, ROWS = kv_min(kv_ceil_div(COLUMNS, WARPS), ROWS_AT_ONCE);
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < S::dim) {
        scratch.turn[threadIdx.x] = turn_of<S>(feedback, signs, threadIdx.x);
    }
#pragma unroll 1
    for (int row = threadIdx.x / 32; S::has_feedback && row < COLUMNS; row += ROWS * WARPS) {
        unsigned short found[ROWS][PARTS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int at = row + i * WARPS;
            const unsigned short* of_row = feedback + at * (2 * S::dim - at - 1) / 2;
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

// The tokens from `first` of the page on, rotated, and their scales: by as many warps as they have lanes for, of which each needs
// nothing of the others.
template <class S>
KV_INLINE void rotate_eight(const Source& source, FewScratch<S>& scratch, int first, int* error) {
    constexpr int LANES = FewScratch<S>::lanes, OWN = S::dim / LANES, LOADS = S::dim / 8, TOKENS = 32 / LANES;
    const int token = threadIdx.x / LANES, lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = threadIdx.x % 32; i < TOKENS * LOADS; i += 32) {
        const int at = threadIdx.x / 32 * TOKENS + i / LOADS, load = i % LOADS;
        ((uint4*)(scratch.tile + at * Page<S>::stride))[load] = ((const uint4*)source.at(first + at))[load];
    }
    __syncwarp();
    const Turn<S, LANES> turn([&](int channel) { return scratch.turn[channel]; });
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

KV_INLINE void load_four(float (&to)[4], const float* from) {
    const float4 four = *(const float4*)from;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

KV_INLINE void take_in_four(float (&target)[4], const float (&factor)[4], float error) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        target[i] = __fadd_rn(target[i], __fmul_rn(factor[i], error));
    }
}

// The warps of a candidate wait for each other.
KV_INLINE void candidate_sync(int number) {
    const int id = 1 + number, count = 32 * (1 + HELPERS);
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// Codes and costs of all chains of one candidate, by a warp. A lane's targets are its four channels of a block, and of the next one.
template <class S>
KV_INLINE void round_chains(FewScratch<S>& scratch, int number) {
    constexpr int BLOCKS = FewScratch<S>::blocks, COLUMNS = FewScratch<S>::columns, QUADS = BLOCK / 4, HANDOVER = 2;
    constexpr unsigned LEVELS = (1u << S::bits) - 1;
    static_assert(FEW * SHARING == 32 && QUADS == SHARING, "a warp has the chains of a candidate, a lane four channels");
    const int token = threadIdx.x % 32 / SHARING, lane = threadIdx.x % SHARING;
    const float* values = scratch.x + token * FewScratch<S>::stride;
    float* errors = scratch.errors + (number * FEW + token) * FewScratch<S>::stride;
    float next[4], squares[2] = {};
    Grid grid(0.0f, 0.0f);
    load_four(next, values + 4 * lane);
    float due = __shfl_sync(0xffffffffu, next[0], 0, SHARING);
#pragma unroll 1
    for (int block = 0; block < BLOCKS; ++block) {
        const float* diagonal = scratch.factor + block * BLOCK * (COLUMNS + 1);
        const float* rows = diagonal + 4 * lane;
        if (block * BLOCK % S::group == 0) {
            grid = Grid(kv_float_of_e5m2(scratch.lowest[block * BLOCK / S::group * FEW + token] + number), Page<S>::mean_code);
        }
        float target[4] = {next[0], next[1], next[2], next[3]}, error[BLOCK], row[4];
        unsigned codes[WORDS<S>] = {};
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            if (quad == HANDOVER && block + 1 < BLOCKS) {
                if (block > 0) {
                    candidate_sync(number);
                }
                load_four(next, (block > 0 ? errors : values) + BLOCK + 4 * lane);
            }
            float value[4], u[4][4], of_due[4], own_rest = 0.0f;
            load_four(value, values + 4 * quad);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                of_due[k] = diagonal[(4 * quad + k) * (COLUMNS + 1) + 1];
                load_four(u[k], rows + (4 * quad + k) * COLUMNS);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int channel = 4 * quad + k;
                // The next block's targets take in what came before they were handed over, two errors at a time, then one.
                const int last_of_next = quad < HANDOVER ? -1 : quad == HANDOVER ? 2 * k + 1 : channel - 4;
                if (channel > 0) {
                    take_in_four(target, row, error[kv_max(channel - 1, 0)]);
                }
                const float later = __shfl_sync(0xffffffffu, target[(k + 1) % 4], (channel + 1) % BLOCK / 4, SHARING);
                const float code = grid.code<LEVELS>(due), decoded = grid.decoded(code), rest = __fsub_rn(due, decoded);
                error[channel] = __fsub_rn(value[k], decoded);
                append_code<S>(codes, channel, code);
                own_rest = lane == k ? rest : own_rest;
                due = __fadd_rn(later, __fmul_rn(of_due[k], error[channel]));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    row[i] = u[k][i];
                }
#pragma unroll
                for (int i = quad == HANDOVER ? 2 * k : kv_max(channel - 4, 0); i <= last_of_next; ++i) {
                    float factor[4];
                    load_four(factor, rows + i * COLUMNS + BLOCK);
                    take_in_four(next, factor, error[i]);
                }
            }
            // Costs of every eighth channel.
            const float cost = diagonal[(4 * quad + lane) * (COLUMNS + 1)];
            squares[quad % 2] = __fadd_rn(squares[quad % 2], __fmul_rn(__fmul_rn(own_rest, own_rest), cost));
            if (lane == 0) {
                *(float4*)(errors + 4 * quad) =
                    make_float4(error[4 * quad], error[4 * quad + 1], error[4 * quad + 2], error[4 * quad + 3]);
            }
        }
#pragma unroll
        for (int channel = BLOCK - 4; channel < BLOCK; ++channel) {
            float factor[4];
            load_four(factor, rows + channel * COLUMNS + BLOCK);
            take_in_four(next, factor, error[channel]);
        }
        due = __shfl_sync(0xffffffffu, next[0], 0, SHARING);
#pragma unroll
        for (int word = 0; word < WORDS<S>; ++word) {
            if (S::dim % BLOCK && block == BLOCKS - 1) {  // channels beyond the last
                codes[word] &= word < S::bits / 2 ? 0xffff : 0xff;
            }
            if (lane == 0) {
                scratch.codes[(block * WORDS<S> + word) * FEW_CHAINS + number * FEW + token] = codes[word];
            }
        }
        if (block + 2 < BLOCKS) {
            candidate_sync(number);
        }
        values += BLOCK, errors += BLOCK;
    }
    float sum = __fadd_rn(squares[0], squares[1]);
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
    if (lane == 0) {
        scratch.cost[number * FEW + token] = sum;
    }
}

// Targets of each block after the first two, with the errors of all blocks but the one before it: by the helpers of a candidate, two
// channels a lane.
template <class S>
KV_INLINE void sum_up_targets(FewScratch<S>& scratch, int number, int helper) {
    constexpr int COLUMNS = FewScratch<S>::columns;
    const int token = threadIdx.x % 32 / SHARING, channel = BLOCK / HELPERS * helper + threadIdx.x % SHARING * 2;
    float* errors = scratch.errors + (number * FEW + token) * FewScratch<S>::stride;
#pragma unroll 1
    for (int block = 2; block < FewScratch<S>::blocks; ++block) {
        const int at = block * BLOCK + channel;
        const float* first = scratch.x + token * FewScratch<S>::stride + at;
        float target[2] = {first[0], first[1]};
#pragma unroll 1
        for (int before = 0; before < block - 1; ++before) {
            if (before == block - 2) {
                candidate_sync(number);  // its errors are there
            }
#pragma unroll
            for (int quad = 0; quad < BLOCK / 4; ++quad) {
                float error[4];
                load_four(error, errors + before * BLOCK + 4 * quad);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const uint2 u = *(const uint2*)(scratch.factor + (before * BLOCK + 4 * quad + k) * COLUMNS + at);
                    target[0] = __fadd_rn(target[0], __fmul_rn(__uint_as_float(u.x), error[k]));
                    target[1] = __fadd_rn(target[1], __fmul_rn(__uint_as_float(u.y), error[k]));
                }
            }
        }
        errors[at] = target[0], errors[at + 1] = target[1];
        candidate_sync(number);
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

// The eight tokens of a page from `first` on, by the whole block, which is prepared. Warps i and i + 4 share a scheduler: chains have one
// to themselves with one helper each, and the other helpers have the fourth.
template <class S>
KV_INLINE void pack_eight(const Source& source, FewScratch<S>& scratch, unsigned char* record, int first, int* error) {
    constexpr int ROTATING = FEW * FewScratch<S>::lanes / 32, CLEARING = 2 * SHARING;
    static_assert(sizeof(FewScratch<S>) <= PART_BYTES, "kvcal.kernels.packing asks for less than eight tokens take");
    static_assert(S::stripe % FEW == 0 && THREADS == 32 * FEW_WARPS && CANDIDATES == 3 && HELPERS == 2, "a part for each warp");
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // which lets the compiler know that a warp stays together
    if (warp < ROTATING) {
        rotate_eight<S>(source, scratch, first, error);
    }
    __syncthreads();
    if (warp < CANDIDATES) {
        if constexpr (S::has_feedback) {
            round_chains<S>(scratch, warp);
        } else {
            round_eight<S>(scratch);
        }
    } else if (warp % 4 == 3 || warp < CLEARING) {
        if constexpr (S::has_feedback) {
            sum_up_targets<S>(scratch, warp % 4 == 3 ? warp / 4 : warp - 4, warp % 4 == 3);
        }
    } else if (first < S::stripe) {
        clear_rest<S>(record, first, Member{(int)threadIdx.x - 32 * CLEARING, 32 * CANDIDATES});
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
