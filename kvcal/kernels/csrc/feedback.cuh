// Codes with error feedback of tokens that have scales of their own (kvcal/pages/error_feedback.py and
// systems/basis/rotated.py), bit for bit.
//
// A chain is a token with one candidate for its scales: one lane rounds its channels one after the other. A
// target is summed up when it is due, over the errors before it in the order of the channels, which is what
// pushes of every error give. Channels come in blocks of 16. What a block's targets take from earlier blocks
// is an outer product of 16 channels and the 32 chains of a warp: a lane has 4 of each, so that two loads
// serve 16 products and 16 sums. The rest is within the lane that rounds.
//
// Shared memory keeps the errors of 64 channels. When they are complete, all later targets take them in, and
// their room is free.
//
// Where a block of 12 warps packs 32 tokens alone, the warps that would have none make up teams: four share
// the outer products of 32 chains, of which one rounds.

#include "rotated_token.cuh"

enum { BLOCKS_KEPT = 4, TEAM = 4, LANES_OF_COST = 8 };

// Sizes of a part: up to PART_TOKENS tokens of a page, and a thread for each of their chains. Three warps
// share 32 tokens, or three teams those of a large head.
template <class S>
struct Part {
    static constexpr bool is_large = PART_TEAM > 1;
    static constexpr int tokens = PART_TOKENS, stride = Page<S>::stride, groups = Page<S>::groups;
    static constexpr int blocks = Page<S>::padded / BLOCK;
    static constexpr int words = WORDS<S>;
    static constexpr int chains = S::has_feedback ? CANDIDATES * tokens : tokens;
    static constexpr int kept = kv_min(blocks, BLOCKS_KEPT) * BLOCK;
};

// What error feedback keeps in shared memory. Row j of a block's 16 columns holds U_jk, its diagonal the costs; what is
// below is 0, and so are channels beyond the last.
template <class S, bool HAS_FEEDBACK = S::has_feedback, bool IS_LARGE = Part<S>::is_large>
struct FeedbackScratch {
    alignas(16) float factor[8 * Part<S>::blocks * (Part<S>::blocks + 1) * BLOCK];
    union {
        // Errors, and targets that are not yet due; before them, the factor as the plan has it.
        alignas(16) float kept[Part<S>::kept * Part<S>::chains];
        unsigned short stored[FACTOR<S>];
    };
    float cost[Part<S>::chains];
};
template <class S, bool IS_LARGE>
struct FeedbackScratch<S, false, IS_LARGE> {};

template <class S>
struct PartScratch : FeedbackScratch<S> {
    alignas(16) unsigned short tile[Part<S>::tokens * Part<S>::stride];  // tokens, rotated
    double squares[Part<S>::groups * Part<S>::tokens];                   // their sums
    int chain[Part<S>::tokens];                               // whose codes a token takes
    unsigned char lowest[Part<S>::groups * Part<S>::tokens];  // bits of its scales, or of the lowest candidates
    unsigned codes[Part<S>::blocks * Part<S>::words * Part<S>::chains];
};

// The chain of a token with a candidate.
KV_INLINE constexpr int chain_of(int token, int number) {
    return (token / 32 * CANDIDATES + number) * 32 + token % 32;
}

KV_INLINE constexpr int kv_factor_row(int block, int row) { return (8 * block * (block + 1) + row) * BLOCK; }

template <class Word>
KV_INLINE void copy_words(void* to, const void* from, int bytes) {
#pragma unroll 8
    for (int i = threadIdx.x; i < bytes / (int)sizeof(Word); i += THREADS) {
        ((Word*)to)[i] = ((const Word*)from)[i];
    }
}

// The factor as the plan has it, for ``order_factor``.
template <class S>
KV_INLINE void fetch_factor(const unsigned short* from, PartScratch<S>& scratch) {
    constexpr int BYTES = S::dim * (S::dim + 1);
    if constexpr (S::dim % BLOCK == 0) {  // so many bytes are a multiple of 16, else of 8
        copy_words<uint4>(scratch.stored, from, BYTES);
    } else {
        copy_words<uint2>(scratch.stored, from, BYTES);
    }
}

// From the plan's order to that of the blocks, 4 columns a thread.
template <class S>
KV_INLINE void order_factor(PartScratch<S>& scratch) {
#pragma unroll 1
    for (int block = 0; block < Part<S>::blocks; ++block) {
#pragma unroll 4
        for (int i = threadIdx.x; i < BLOCK * BLOCK / 4 * (block + 1); i += THREADS) {
            const int row = i / (BLOCK / 4), channel = block * BLOCK + i % (BLOCK / 4) * 4;
            const unsigned short* of_row = scratch.stored + row * (2 * S::dim - row - 1) / 2;
            float u[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const bool is_there = row <= channel + k && channel + k < S::dim;
                u[k] = is_there ? kv_float_of<KV_FLOAT16>(of_row[channel + k]) : 0.0f;
            }
            float* to = scratch.factor + kv_factor_row(block, row) + channel % BLOCK;
            *(float4*)to = make_float4(u[0], u[1], u[2], u[3]);
        }
    }
}

// 16 bits of dtype DTYPE each.
KV_INLINE void kv_floats_of(const uint2& bits, float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[i] = kv_float_of<DTYPE>((unsigned short)((i < 2 ? bits.x : bits.y) >> 16 * (i % 2)));
    }
}

// Adds the errors of one channel, of this lane's 4 chains, to 4 of their targets.
KV_INLINE void take_in(float (&target)[4][4], const float4& factor, const float4& error) {
    const float u[4] = {factor.x, factor.y, factor.z, factor.w}, e[4] = {error.x, error.y, error.z, error.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            target[k][t] = __fadd_rn(target[k][t], __fmul_rn(u[k], e[t]));
        }
    }
}

// This lane's place in outer products: its chains are 4 neighbours, its channels 4 of every block. Lanes 2 i
// and 2 i + 1 have the same chains, and lanes i and i ^ 2 the same channels: so a load of 16 bytes takes the
// fewest cycles.
template <class S>
struct Corner {
    int chain, channel, token;

    KV_INLINE Corner(int first_chain, int first_token) {
        const int lane = threadIdx.x % 32, own = 4 * (lane >> 1 & 1 | lane >> 2 & 6);
        chain = first_chain + own;
        channel = 4 * (lane & 1 | lane >> 1 & 2);
        token = first_token + own;
    }

    // Its targets in a block, before any error is taken in: the values.
    KV_INLINE void start(float (&target)[4][4], const PartScratch<S>& scratch, int block) const {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            float x[4];
            kv_floats_of(
                *(const uint2*)(scratch.tile + (token + t) * Part<S>::stride + block * BLOCK + channel), x);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                target[k][t] = x[k];
            }
        }
    }

    KV_INLINE float* kept(PartScratch<S>& scratch, int row) const {
        return scratch.kept + (row + channel) * Part<S>::chains + chain;
    }

    KV_INLINE void store(const float (&target)[4][4], PartScratch<S>& scratch, int row) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            *(float4*)(kept(scratch, row) + k * Part<S>::chains) =
                make_float4(target[k][0], target[k][1], target[k][2], target[k][3]);
        }
    }

    KV_INLINE void load(float (&target)[4][4], PartScratch<S>& scratch, int row) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float4 found = *(const float4*)(kept(scratch, row) + k * Part<S>::chains);
            target[k][0] = found.x, target[k][1] = found.y, target[k][2] = found.z, target[k][3] = found.w;
        }
    }

    KV_INLINE float4 errors(const PartScratch<S>& scratch, int row) const {
        return *(const float4*)(scratch.kept + row * Part<S>::chains + chain);
    }

    KV_INLINE float4 factor(const PartScratch<S>& scratch, int block, int row) const {
        return *(const float4*)(scratch.factor + kv_factor_row(block, row) + channel);
    }
};

// Adds the errors of the first `rows` that are kept to the targets in a block; `first` is the channel of the
// first. What a row takes is loaded while the one before it is in work.
template <class S>
KV_INLINE void take_in_rows(
    float (&target)[4][4], const PartScratch<S>& scratch, const Corner<S>& corner, int block, int first, int rows) {
    if (rows == 0) {
        return;
    }
    float4 next = corner.errors(scratch, 0), next_factor = corner.factor(scratch, block, first);
#pragma unroll 4
    for (int row = 0; row < rows; ++row) {
        const float4 errors = next, factor = next_factor;
        next = corner.errors(scratch, kv_min(row + 1, rows - 1));
        next_factor = corner.factor(scratch, block, first + row + 1);
        take_in(target, factor, errors);
    }
}

// All later targets take in the errors that are kept, and get their room.
template <class S>
KV_INLINE void make_room(PartScratch<S>& scratch, const Corner<S>& corner) {
    constexpr int LATER = Part<S>::blocks - BLOCKS_KEPT;
    float target[LATER][4][4];
    float4 next = corner.errors(scratch, 0), next_factor[LATER];
#pragma unroll
    for (int i = 0; i < LATER; ++i) {
        corner.start(target[i], scratch, BLOCKS_KEPT + i);
        next_factor[i] = corner.factor(scratch, BLOCKS_KEPT + i, 0);
    }
#pragma unroll 2
    for (int row = 0; row < Part<S>::kept; ++row) {
        const float4 errors = next;
        next = corner.errors(scratch, kv_min(row + 1, Part<S>::kept - 1));
#pragma unroll
        for (int i = 0; i < LATER; ++i) {
            const float4 factor = next_factor[i];
            next_factor[i] = corner.factor(scratch, BLOCKS_KEPT + i, row + 1);
            take_in(target[i], factor, errors);
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LATER; ++i) {
        corner.store(target[i], scratch, i * BLOCK);
    }
}

// The four warps of a candidate wait for each other.
KV_INLINE void team_sync() {
    const int id = 1 + threadIdx.x / 32 % CANDIDATES, count = 32 * TEAM;
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// ``make_room`` by a team, a block of targets each.
template <class S>
KV_INLINE void make_room_as_team(PartScratch<S>& scratch, const Corner<S>& corner, int member) {
    float target[4][4];
    const bool is_there = BLOCKS_KEPT + member < Part<S>::blocks;
    if (is_there) {
        corner.start(target, scratch, BLOCKS_KEPT + member);
        take_in_rows(target, scratch, corner, BLOCKS_KEPT + member, 0, Part<S>::kept);
    }
    team_sync();
    if (is_there) {
        corner.store(target, scratch, member * BLOCK);
    }
    team_sync();
}

// The targets of a block by a team, 4 channels each: of a lane one, of its 4 chains. `row`: their place among
// those that are kept.
template <class S>
KV_INLINE void sum_up_as_team(
    PartScratch<S>& scratch, const Corner<S>& corner, int member, int block, int first, int row) {
    const int channel = TEAM * member + corner.channel / 4;
    float* place = scratch.kept + (row + channel) * Part<S>::chains + corner.chain;
    float target[4];
    if (first == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = (corner.token + i) * Part<S>::stride + block * BLOCK + channel;
            target[i] = kv_float_of<DTYPE>(scratch.tile[at]);
        }
    } else {
        const float4 found = *(const float4*)place;
        target[0] = found.x, target[1] = found.y, target[2] = found.z, target[3] = found.w;
    }
    const float* factor = scratch.factor + kv_factor_row(block, first) + channel;
#pragma unroll 8
    for (int before = 0; before < row; ++before) {
        const float4 errors = corner.errors(scratch, before);
        const float u = factor[before * BLOCK], e[4] = {errors.x, errors.y, errors.z, errors.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            target[i] = __fadd_rn(target[i], __fmul_rn(u, e[i]));
        }
    }
    *(float4*)place = make_float4(target[0], target[1], target[2], target[3]);
}

// Codes of a block of channels of one chain, whose targets are kept from `row` on and become its errors. factor: the block's
// own rows and columns, so many floats from row to row. squares: of rounding errors times their costs, eight sums of channels.
template <class S>
KV_INLINE void round_block(
    PartScratch<S>& scratch, const Grid& grid, const float* factor, int factor_stride, int block, int row, int token, int chain,
    float (&squares)[LANES_OF_COST]) {
    constexpr int CHAINS = Part<S>::chains;
    constexpr unsigned LEVELS = (1u << S::bits) - 1;
    float x[BLOCK], due[BLOCK];
    float* kept = scratch.kept + row * CHAINS + chain;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 bits = *(const uint4*)(scratch.tile + token * Part<S>::stride + block * BLOCK + 8 * i);
        float four[2][4];
        kv_floats_of(make_uint2(bits.x, bits.y), four[0]);
        kv_floats_of(make_uint2(bits.z, bits.w), four[1]);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            x[8 * i + k] = four[k / 4][k % 4];
        }
    }
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) {
        due[k] = kept[k * CHAINS];
    }
    unsigned codes[Part<S>::words] = {};
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) {
        float u[BLOCK];
#pragma unroll
        for (int i = k / 4; i < BLOCK / 4; ++i) {
            const float4 four = *(const float4*)(factor + k * factor_stride + 4 * i);
            u[4 * i] = four.x, u[4 * i + 1] = four.y, u[4 * i + 2] = four.z, u[4 * i + 3] = four.w;
        }
        const float code = grid.code<LEVELS>(due[k]), decoded = grid.decoded(code);
        const float error = __fsub_rn(x[k], decoded), rest = __fsub_rn(due[k], decoded);
        squares[k % LANES_OF_COST] = __fadd_rn(squares[k % LANES_OF_COST], __fmul_rn(__fmul_rn(rest, rest), u[k]));
        kept[k * CHAINS] = error;
#pragma unroll
        for (int later = k + 1; later < BLOCK; ++later) {
            due[later] = __fadd_rn(due[later], __fmul_rn(u[later], error));
        }
        append_code<S>(codes, k, code);
    }
#pragma unroll
    for (int word = 0; word < Part<S>::words; ++word) {
        if (S::dim % BLOCK && block == Part<S>::blocks - 1) {  // channels beyond the last
            codes[word] &= word < S::bits / 2 ? 0xffff : 0xff;
        }
        scratch.codes[(block * Part<S>::words + word) * CHAINS + chain] = codes[word];
    }
}

// The sum of eight, halves first.
KV_INLINE float cost_of(float (&squares)[LANES_OF_COST]) {
#pragma unroll
    for (int apart = LANES_OF_COST / 2; apart > 0; apart /= 2) {
#pragma unroll
        for (int i = 0; i < apart; ++i) {
            squares[i] = __fadd_rn(squares[i], squares[i + apart]);
        }
    }
    return squares[0];
}

// Codes and costs of all chains of `count` tokens.
template <class S>
KV_INLINE void choose_codes_of_part(PartScratch<S>& scratch, int count) {
    constexpr int TOKENS = Part<S>::tokens;
    const bool is_team = TOKENS == 32 * TEAM && count == 32;
    const int warp = threadIdx.x / 32, number = warp % CANDIDATES, member = warp / CANDIDATES;
    const int first_token = is_team ? 0 : 32 * member, token = first_token + threadIdx.x % 32;
    const int chain = chain_of(token, number);
    if (first_token >= count) {
        return;
    }
    const Corner<S> corner(chain_of(first_token, number), first_token);
    Grid grid(0.0f, 0.0f);
    float squares[LANES_OF_COST] = {};
#pragma unroll 1
    for (int block = 0; block < Part<S>::blocks; ++block) {
        const int first = block < BLOCKS_KEPT ? 0 : BLOCKS_KEPT, row = (block - first) * BLOCK;
        if constexpr (Part<S>::blocks > BLOCKS_KEPT) {
            if (block == BLOCKS_KEPT) {
                if (is_team) {
                    make_room_as_team(scratch, corner, member);
                } else {
                    make_room(scratch, corner);
                }
            }
        }
        if (is_team) {
            sum_up_as_team(scratch, corner, member, block, first * BLOCK, row);
            team_sync();
            if (member > 0) {
                team_sync();
                continue;
            }
        } else {
            float target[4][4];
            if (first == 0) {
                corner.start(target, scratch, block);
            } else {
                corner.load(target, scratch, row);
            }
            take_in_rows(target, scratch, corner, block, first * BLOCK, row);
            corner.store(target, scratch, row);
            __syncwarp();
        }

        if (block * BLOCK % S::group == 0) {
            const int group = block * BLOCK / S::group;
            grid = Grid(kv_float_of_e5m2(scratch.lowest[group * TOKENS + token] + number), Page<S>::mean_code);
        }
        round_block(scratch, grid, scratch.factor + kv_factor_row(block, block * BLOCK), BLOCK, block, row, token, chain, squares);
        if (is_team) {
            team_sync();
        } else {
            __syncwarp();
        }
    }
    if (is_team && member > 0) {
        return;
    }
    scratch.cost[chain] = cost_of(squares);
}
