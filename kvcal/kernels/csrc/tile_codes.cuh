// A page of one head, in fp32 in a tile, becomes codes with a scale and zero for every group, as csrc/page.cuh writes
// them from tokens.

#include "page.cuh"
#include "uniform.cuh"

constexpr int HEADS_OF_TILE = 1;

struct Tile {
    const float* values;
};

typedef Scratch<Stored, false> Room;

constexpr int SCRATCH_FLOATS = sizeof(Room) / 4;
static_assert(TILE_TOKENS == KV_PAGE_TOKENS, "groups run along tokens, too");

template <class S>
KV_INLINE float value(const Tile& tile, const Room&, int token, int channel) {
    return tile.values[token * tile_stride(WIDTH) + tile_place(channel)];
}

// Begins and ends without a barrier.
KV_INLINE void encode_tile(
    float* tile, float* scratch, unsigned char* record, int, const float*, const signed char*, float, int* error) {
    Room& room = *(Room*)scratch;
    store_params<Stored>(Tile{tile}, room, record, error);
    store_planes<Stored>(Tile{tile}, room, record);
}
