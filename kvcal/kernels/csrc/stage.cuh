// Pages that shrink on a schedule: where the pages of a region lie, stage by stage (kvcal/kernels/operands.py).
//
// A region is one side of a layer; all of them share one memory. A kernel that is compiled for the
// bits of one stage is launched in every stage, with STAGED, and does nothing in the others.

struct Region {
    long long bits;       // of its pages
    long long base;       // its first byte
    long long pages;      // room of a sequence, in pages
    long long heads;
    long long record;     // bytes of a page of a head
    long long squeezed;   // its first byte while the stage begins: records of this stage, room of the stage before
    long long transform;  // element of ``transforms`` where the region's λ [heads, D] begins; its offset follows
};

// Whether the next column ends the present stage.
KV_INLINE bool kv_stage_is_over(
    const long long* stage, const long long* starts, long long num_stages, const long long* columns) {
    const long long next = *stage + 1;
    return next < num_stages && *columns + 1 >= starts[next];
}

#ifdef STAGED
#define STAGE_PARAMETERS , const Region* k_region, const Region* v_region
#else
#define STAGE_PARAMETERS
#endif

// The slots of a sequence's pages: from the table, or where pages shrink, one after the other.
struct Slots {
#ifdef STAGED
    int first;
    KV_INLINE int operator[](int page) const { return first + page; }
#else
    const int* table;
    KV_INLINE int operator[](int page) const { return table[page]; }
#endif
};

// Of a sequence, of a table whose rows are `stride` elements apart; where pages shrink, `stride` is the room of a
// sequence in pages.
KV_INLINE Slots slots_of(const int* table, long long stride, long long row) {
#ifdef STAGED
    return {(int)(row * stride)};
#else
    return {table + row * stride};
#endif
}
