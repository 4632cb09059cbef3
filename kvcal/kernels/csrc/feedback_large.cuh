// Codes with error feedback of heads of more than 128 channels, whose factor shared memory has no room for, nor for all errors:
// bit for bit those of feedback.cuh.
//
// A block packs 32 tokens. Of each of the three candidates a team of four warps has all targets that are not yet due in
// registers, those of every fourth block of channels a warp, a corner of 4 channels and 4 chains a lane. In turn one warp
// rounds a block, whose targets are then complete; the errors go through shared memory to the targets of all later blocks. So a
// target takes errors in the order of the channels, and of the factor the rows of one block are needed at a time: the next ones
// are on their way meanwhile.

#include "feedback.cuh"

template <class S>
struct FeedbackScratch<S, true, true> {
    static constexpr int rows = BLOCK * Page<S>::padded;
    alignas(16) float factor[2][rows];                    // of this block and the next one: U_jk, as in feedback.cuh
    alignas(16) float kept[BLOCK * Part<S>::chains];      // targets of the block, then errors
    float squares_of_lanes[LANES_OF_COST * Part<S>::chains];
    float cost[Part<S>::chains];
};

// A thread's share of the factor's rows of a block of channels, on its way from the plan's order.
template <class S>
struct FactorRows {
    static constexpr int PADDED = Page<S>::padded, LOADS = kv_ceil_div(BLOCK * PADDED, THREADS);
    unsigned short number[LOADS];

    KV_INLINE void fetch(const unsigned short* from, int block) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int at = i * THREADS + threadIdx.x, row = block * BLOCK + at / PADDED, channel = at % PADDED;
            const bool is_there = at < BLOCK * PADDED && row <= channel && channel < S::dim;
            number[i] = is_there ? from[row * (2 * S::dim - row - 1) / 2 + channel] : 0;
        }
    }

    KV_INLINE void store(float* to) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int at = i * THREADS + threadIdx.x;
            if (at < BLOCK * PADDED) {
                to[at] = kv_float_of<KV_FLOAT16>(number[i]);
            }
        }
    }
};

// Adds a block's errors to this lane's targets in a later block, whose columns begin at `factor`.
template <class S>
KV_INLINE void take_in_block(
    float (&target)[4][4], const PartScratch<S>& scratch, const Corner<S>& corner, const float* factor) {
    constexpr int PADDED = Page<S>::padded;
    factor += corner.channel;
    float4 next = corner.errors(scratch, 0), next_factor = *(const float4*)factor;
#pragma unroll 4
    for (int row = 0; row < BLOCK; ++row) {
        const float4 errors = next, of_row = next_factor;
        const int after = kv_min(row + 1, BLOCK - 1);
        next = corner.errors(scratch, after);
        next_factor = *(const float4*)(factor + after * PADDED);
        take_in(target, of_row, errors);
    }
}

// Codes and costs of all chains of 32 tokens. from: the factor as the plan has it.
template <class S>
KV_INLINE void choose_codes_of_large(const unsigned short* from, PartScratch<S>& scratch) {
    static_assert(Part<S>::tokens == 32 && THREADS == 32 * CANDIDATES * TEAM, "a team a candidate");
    constexpr int BLOCKS = Part<S>::blocks, OWN = kv_ceil_div(BLOCKS, TEAM), PADDED = Page<S>::padded;
    const int warp = threadIdx.x / 32, number = warp % CANDIDATES, member = warp / CANDIDATES;
    const int token = threadIdx.x % 32, chain = chain_of(token, number);
    const Corner<S> corner(chain_of(0, number), 0);
    FactorRows<S> rows;
    rows.fetch(from, 0);
    float target[OWN][4][4];  // of the block of this round that is the warp's, then of those of later rounds
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        corner.start(target[i], scratch, kv_min(TEAM * i + member, BLOCKS - 1));
    }
    rows.store(scratch.factor[0]);
#pragma unroll 1
    for (int block = 0; block < BLOCKS; ++block) {
        __syncthreads();
        const float* factor = scratch.factor[block % 2];
        if (block + 1 < BLOCKS) {
            rows.fetch(from, block + 1);
        }
        if (member == block % TEAM) {
            corner.store(target[0], scratch, 0);
            const unsigned char lowest = scratch.lowest[block * BLOCK / S::group * Part<S>::tokens + token];
            const Grid grid(kv_float_of_e5m2(lowest + number), Page<S>::mean_code);
            float* before = scratch.squares_of_lanes + chain;
            float squares[LANES_OF_COST];
#pragma unroll
            for (int i = 0; i < LANES_OF_COST; ++i) {
                squares[i] = block == 0 ? 0.0f : before[i * Part<S>::chains];
            }
            __syncwarp();
            round_block(scratch, grid, factor + block * BLOCK, PADDED, block, 0, token, chain, squares);
            if (block == BLOCKS - 1) {
                scratch.cost[chain] = cost_of(squares);
            } else {
#pragma unroll
                for (int i = 0; i < LANES_OF_COST; ++i) {
                    before[i * Part<S>::chains] = squares[i];
                }
            }
        }
        team_sync();
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int later = block / TEAM * TEAM + TEAM * i + member;
            if (later > block && later < BLOCKS) {
                take_in_block(target[i], scratch, corner, factor + later * BLOCK);
            }
        }
        if (block + 1 < BLOCKS) {
            rows.store(scratch.factor[(block + 1) % 2]);
        }
        if (block % TEAM == TEAM - 1) {
#pragma unroll
            for (int i = 0; i + 1 < OWN; ++i) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
#pragma unroll
                    for (int t = 0; t < 4; ++t) {
                        target[i][k][t] = target[i + 1][k][t];
                    }
                }
            }
        }
    }
}
