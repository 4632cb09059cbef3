// The memory of pages that shrink is laid out anew for the next stage: two launches move every record, in place.
//
// ``squeeze``: from the old layout to the left, as close as the narrower records lie. ``spread``: from there to the
// right, where every row gets room for the pages of the new stage. Records are moved in the order of their addresses
// (spread: from the last one on), so that none is written to where a later one is still to be read.
//
// Blocks take records by ticket. A block reads its record, says so, waits until no lower ticket is being read, and
// writes. A block waits only for lower tickets, and those are held by blocks that run: any grid comes to its end.
// The bytes of a record mean nothing here; shrink.cu has converted them before, where they were.
//
// Left out: vectors wider than 16 bytes; records of regions that do not move are skipped, not avoided.

#include "common.cuh"
#include "stage.cuh"

constexpr unsigned long long NOT_READING = ~0ull;

struct Move {
    unsigned char* from;
    unsigned char* to;
    int bytes;
};

KV_INLINE long long records_of(const Region& region, long long rows) { return rows * region.pages * region.heads; }

// Record number `index` of a region: [row, page, head].
KV_INLINE Move move_of(unsigned char* arena, const Region& old, const Region& next, long long index, bool spread) {
    const long long per_row = old.pages * old.heads;
    const long long spread_index = index / per_row * (next.pages * next.heads) + index % per_row;
    unsigned char* squeezed = arena + next.squeezed + index * next.record;
    if (spread) {
        return {squeezed, arena + next.base + spread_index * next.record, (int)next.record};
    }
    return {arena + old.base + index * old.record, squeezed, (int)next.record};
}

// Grid: any, 256 threads; dynamic shared memory: the largest record.
//   arena     uint8, all pages; stage int64 [1]; starts int64 [stages]: columns with which each begins; columns int64 [1]
//   layout    [stages, regions]; present [regions]: the row of the stage, which ``spread`` replaces
//   rows      of the batch
//   counters  [2], tickets and blocks that are done, and reading [grid], the ticket + 1 that each block reads, 0 while
//             it takes one. All of them are zero, or NOT_READING, before and after
KV_INLINE void slide(
    unsigned char* arena, long long* stage, const long long* starts, const Region* layout, Region* present,
    long long num_stages, long long num_regions, const long long* columns, long long rows,
    unsigned long long* counters, volatile unsigned long long* reading, bool spread) {
    extern __shared__ uint4 held[];
    __shared__ unsigned long long ticket;
    __shared__ bool is_last;
    if (!kv_stage_is_over(stage, starts, num_stages, columns)) {
        return;
    }
    const Region* old = layout + *stage * num_regions;
    const Region* next = old + num_regions;
    const long long step = spread ? -1 : 1;
    long long number = spread ? num_regions - 1 : 0, before = 0;  // the region, and the records of those before it
    for (;;) {
        if (threadIdx.x == 0) {
            reading[blockIdx.x] = 0;
            __threadfence();
            ticket = atomicAdd(counters, 1ull);
            __threadfence();
            reading[blockIdx.x] = ticket + 1;
        }
        __syncthreads();
        const unsigned long long own = ticket;
        long long index = (long long)own - before;
        while (number >= 0 && number < num_regions && index >= records_of(old[number], rows)) {
            index -= records_of(old[number], rows);
            before += records_of(old[number], rows);
            number += step;
        }
        const bool is_over = number < 0 || number >= num_regions;
        Move move{};
        if (!is_over) {
            index = spread ? records_of(old[number], rows) - 1 - index : index;
            move = move_of(arena, old[number], next[number], index, spread);
        }
        const bool moves = move.from != move.to;
        if (moves) {
            for (int i = threadIdx.x; i < move.bytes / 16; i += blockDim.x) {
                held[i] = ((const uint4*)move.from)[i];
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            reading[blockIdx.x] = NOT_READING;
        }
        if (is_over) {
            break;
        }
        if (moves) {
            for (int block = threadIdx.x; block < gridDim.x; block += blockDim.x) {
                while (reading[block] <= own) {
                }
            }
            __threadfence();
            __syncthreads();
            for (int i = threadIdx.x; i < move.bytes / 16; i += blockDim.x) {
                ((uint4*)move.to)[i] = held[i];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(counters + 1, 1ull) == gridDim.x - 1;
    }
    __syncthreads();
    if (is_last) {
        if (spread) {
            for (int i = threadIdx.x; i < num_regions; i += blockDim.x) {
                present[i] = next[i];
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            counters[0] = counters[1] = 0;
            *stage += spread;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) squeeze(
    unsigned char* arena, long long* stage, const long long* starts, const Region* layout, Region* present,
    long long num_stages, long long num_regions, const long long* columns, long long rows,
    unsigned long long* counters, unsigned long long* reading) {
    slide(arena, stage, starts, layout, present, num_stages, num_regions, columns, rows, counters, reading, false);
}

extern "C" __global__ void __launch_bounds__(256) spread(
    unsigned char* arena, long long* stage, const long long* starts, const Region* layout, Region* present,
    long long num_stages, long long num_regions, const long long* columns, long long rows,
    unsigned long long* counters, unsigned long long* reading) {
    slide(arena, stage, starts, layout, present, num_stages, num_regions, columns, rows, counters, reading, true);
}
