// Prelude of every kernel source: number conversions, the quantizer's arithmetic, the bit layout of a plane, the count
// of pages. Nothing here depends on a macro. NVRTC compiles without headers, so half precision is inline PTX. What
// decides a byte is one IEEE operation at a time, by an intrinsic that the compiler never contracts.

#include "follow.cuh"

constexpr int KV_PAGE_TOKENS = 128;
// Numbers of dtypes, as variants.py writes them.
enum { KV_FLOAT16, KV_BFLOAT16, KV_FLOAT32, KV_E5M2 };
// Bits of `error`: a page with NaN, infinity or a range beyond its params; a page beyond the room of its tensor.
enum { NON_FINITE = 1, NO_ROOM = 2 };

KV_INLINE constexpr int kv_ceil_div(int a, int b) { return (a + b - 1) / b; }
KV_INLINE constexpr int kv_round_up(int a, int b) { return kv_ceil_div(a, b) * b; }
KV_INLINE constexpr int kv_min(int a, int b) { return a < b ? a : b; }
KV_INLINE constexpr int kv_max(int a, int b) { return a > b ? a : b; }

// The smaller, or larger, of two; NaN if one is NaN, as torch has it.
KV_INLINE float kv_min_nan(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

KV_INLINE float kv_max_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

KV_INLINE bool kv_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// 16 bits of dtype TYPE -> fp32, exactly.
template <int TYPE>
KV_INLINE float kv_float_of(unsigned short bits) {
    static_assert(TYPE == KV_FLOAT16 || TYPE == KV_BFLOAT16, "a dtype of 16 bits");
    float y;
    if constexpr (TYPE == KV_FLOAT16) {
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    } else {
        y = __uint_as_float((unsigned)bits << 16);
    }
    return y;
}

// fp32 -> 16 bits of dtype TYPE, to nearest even; infinity beyond its range.
template <int TYPE>
KV_INLINE unsigned short kv_bits_of(float x) {
    static_assert(TYPE == KV_FLOAT16 || TYPE == KV_BFLOAT16, "a dtype of 16 bits");
    unsigned short y;
    if constexpr (TYPE == KV_FLOAT16) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    } else {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    }
    return y;
}

// Two of them in a word, which takes one quick instruction.
template <int TYPE>
KV_INLINE unsigned kv_bits_of(float lo, float hi) {
    static_assert(TYPE == KV_FLOAT16 || TYPE == KV_BFLOAT16, "a dtype of 16 bits");
    unsigned d;
    if constexpr (TYPE == KV_FLOAT16) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    }
    return d;
}

KV_INLINE constexpr int kv_param_bytes(int type) { return type == KV_FLOAT32 ? 4 : type == KV_E5M2 ? 1 : 2; }

// A number of 8 bits, the upper half of a float16.
KV_INLINE float kv_float_of_e5m2(unsigned bits) { return kv_float_of<KV_FLOAT16>((unsigned short)(bits << 8)); }

// Scale or zero number i of a field in dtype TYPE.
template <int TYPE>
KV_INLINE float kv_load_param(const unsigned char* field, int i) {
    if constexpr (TYPE == KV_FLOAT32) {
        return ((const float*)field)[i];
    } else if constexpr (TYPE == KV_E5M2) {
        return kv_float_of_e5m2(field[i]);
    } else {
        return kv_float_of<TYPE>(((const unsigned short*)field)[i]);
    }
}

// Stores x as number i of the field; returns what was stored.
template <int TYPE>
KV_INLINE float kv_store_param(unsigned char* field, int i, float x) {
    if constexpr (TYPE == KV_FLOAT32) {
        ((float*)field)[i] = x;
        return x;
    } else {
        unsigned short bits = kv_bits_of<TYPE>(x);
        ((unsigned short*)field)[i] = bits;
        return kv_float_of<TYPE>(bits);
    }
}

// ---- the uniform quantizer (pages/uniform.py)

// What codes are divided by: a stored scale, or infinity for 0, which makes every code 0.
KV_INLINE float kv_step_of(float scale) { return scale == 0.0f ? __uint_as_float(0x7f800000u) : scale; }

// The conversion rounds half to even, and takes what is below 0, and NaN, to 0.
KV_INLINE unsigned kv_code_of(float x, float zero, float step, unsigned levels) {
    return min(__float2uint_rn(__fdiv_rn(__fsub_rn(x, zero), step)), levels);
}

// ---- the bit layout of a plane of ROWS x COLUMNS codes of WIDTH bits (pages/packing.py)

KV_INLINE constexpr int kv_plane_bytes(int rows, int columns, int width) { return rows * columns * width / 8; }

// Bytes of a quarter of a row, one for each thread of a quad; 0 if they are not whole.
KV_INLINE constexpr int kv_segment_bytes(int columns, int width) {
    return columns * width % 32 == 0 ? columns * width / 32 : 0;
}

// R of the interleaved order, 0 where rows follow one another.
KV_INLINE constexpr int kv_rows_per_load(int rows, int columns, int width) {
    int segment = kv_segment_bytes(columns, width);
    if (segment == 0 || 16 % segment != 0) {
        return 0;
    }
    return rows % (8 * (16 / segment)) == 0 ? 16 / segment : 0;
}

// The byte that holds the code at (row, column).
template <int ROWS, int COLUMNS, int WIDTH>
KV_INLINE int kv_plane_byte(int row, int column) {
    constexpr int R = kv_rows_per_load(ROWS, COLUMNS, WIDTH), SEGMENT = kv_segment_bytes(COLUMNS, WIDTH);
    int byte = column * WIDTH / 8;
    if constexpr (R == 0) {
        return row * (COLUMNS * WIDTH / 8) + byte;
    } else {
        int block = row / (8 * R), r = row / 8 % R, g = row % 8;
        return (((block * 8 + g) * 4 + byte / SEGMENT) * R + r) * SEGMENT + byte % SEGMENT;
    }
}

// A unit is 16 neighbouring codes of a row: 4 bytes of a plane of 2 bits, 2 of one of 1 bit. Whether they lie together:
template <int ROWS, int COLUMNS, int WIDTH>
KV_INLINE constexpr bool kv_unit_is_whole() {
    return kv_rows_per_load(ROWS, COLUMNS, WIDTH) == 0 || kv_segment_bytes(COLUMNS, WIDTH) >= 2 * WIDTH;
}

// Place of unit number `unit`, numbered in the order of the bytes of a plane of 2 bits (if units are whole there), so
// that neighbouring threads touch neighbouring words.
template <int ROWS, int COLUMNS>
KV_INLINE void kv_unit_place(int unit, int& row, int& column) {
    constexpr int R = kv_rows_per_load(ROWS, COLUMNS, 2), WORDS = COLUMNS / 64;
    if constexpr (R > 0 && kv_unit_is_whole<ROWS, COLUMNS, 2>()) {
        int word = unit % WORDS, r = unit / WORDS % R, quad = unit / (WORDS * R) % 4, g = unit / (WORDS * R * 4) % 8;
        row = (unit / (WORDS * R * 32) * R + r) * 8 + g;
        column = (quad * WORDS + word) * 16;
    } else {
        row = unit / (COLUMNS / 16);
        column = unit % (COLUMNS / 16) * 16;
    }
}

// Stores the unit at (row, column): code i in bits [WIDTH i, WIDTH i + WIDTH) of `codes`.
template <int ROWS, int COLUMNS, int WIDTH>
KV_INLINE void kv_store_unit(unsigned char* plane, int row, int column, unsigned codes) {
    if constexpr (!kv_unit_is_whole<ROWS, COLUMNS, WIDTH>()) {
#pragma unroll
        for (int i = 0; i < 2 * WIDTH; ++i) {
            plane[kv_plane_byte<ROWS, COLUMNS, WIDTH>(row, column + i * (8 / WIDTH))] = (unsigned char)(codes >> 8 * i);
        }
    } else if constexpr (WIDTH == 2) {
        *(unsigned*)(plane + kv_plane_byte<ROWS, COLUMNS, WIDTH>(row, column)) = codes;
    } else {
        *(unsigned short*)(plane + kv_plane_byte<ROWS, COLUMNS, WIDTH>(row, column)) = (unsigned short)codes;
    }
}

// Inverse of kv_store_unit.
template <int ROWS, int COLUMNS, int WIDTH>
KV_INLINE unsigned kv_load_unit(const unsigned char* plane, int row, int column) {
    if constexpr (!kv_unit_is_whole<ROWS, COLUMNS, WIDTH>()) {
        unsigned codes = 0;
#pragma unroll
        for (int i = 0; i < 2 * WIDTH; ++i) {
            codes |= (unsigned)plane[kv_plane_byte<ROWS, COLUMNS, WIDTH>(row, column + i * (8 / WIDTH))] << 8 * i;
        }
        return codes;
    } else if constexpr (WIDTH == 2) {
        return *(const unsigned*)(plane + kv_plane_byte<ROWS, COLUMNS, WIDTH>(row, column));
    } else {
        return *(const unsigned short*)(plane + kv_plane_byte<ROWS, COLUMNS, WIDTH>(row, column));
    }
}

// Stores 16 codes of BITS bits, one each in code[0 .. 15], to all planes of a record.
template <int ROWS, int COLUMNS, int BITS>
KV_INLINE void kv_store_codes(unsigned char* planes, int row, int column, const unsigned* code) {
    constexpr int PAIRS = BITS / 2, PLANE = kv_plane_bytes(ROWS, COLUMNS, 2);
#pragma unroll
    for (int plane = 0; plane < PAIRS; ++plane) {
        unsigned word = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            word |= (code[i] >> 2 * plane & 3) << 2 * i;
        }
        kv_store_unit<ROWS, COLUMNS, 2>(planes + plane * PLANE, row, column, word);
    }
    if constexpr (BITS % 2 == 1) {
        unsigned word = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            word |= (code[i] >> 2 * PAIRS & 1) << i;
        }
        kv_store_unit<ROWS, COLUMNS, 1>(planes + PAIRS * PLANE, row, column, word);
    }
}

// Inverse of kv_store_codes.
template <int ROWS, int COLUMNS, int BITS>
KV_INLINE void kv_load_codes(const unsigned char* planes, int row, int column, unsigned* code) {
    constexpr int PAIRS = BITS / 2, PLANE = kv_plane_bytes(ROWS, COLUMNS, 2);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        code[i] = 0;
    }
#pragma unroll
    for (int plane = 0; plane < PAIRS; ++plane) {
        unsigned word = kv_load_unit<ROWS, COLUMNS, 2>(planes + plane * PLANE, row, column);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            code[i] |= (word >> 2 * i & 3) << 2 * plane;
        }
    }
    if constexpr (BITS % 2 == 1) {
        unsigned word = kv_load_unit<ROWS, COLUMNS, 1>(planes + PAIRS * PLANE, row, column);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            code[i] |= (word >> i & 1) << 2 * PAIRS;
        }
    }
}

// ---- which pages are read, and where things lie

// Pages that attention reads after `tokens` tokens where the window moves with the text (Format.pages_read). read_at:
// token count from which each page is read. Such a window is at most `ring` - 128 tokens: few entries are left to look
// at.
KV_INLINE int kv_pages(int tokens, int ring, const int* read_at, int length) {
    int pages = kv_max(0, tokens - (ring - KV_PAGE_TOKENS)) / KV_PAGE_TOKENS;
    int most = kv_min(tokens / KV_PAGE_TOKENS, length);
    while (pages < most && read_at[pages] <= tokens) {
        ++pages;
    }
    return pages;
}

// Tokens that attention reads from pages after `tokens` tokens (Format.tokens_read): whole stripes.
KV_INLINE int kv_tokens_read(int tokens, int window, int ring, int stripe, const int* read_at, int length) {
    if (read_at == nullptr) {
        return kv_max(0, tokens - window) / stripe * stripe;
    }
    return KV_PAGE_TOKENS * kv_pages(tokens, ring, read_at, length);
}

// The row of sinks and ring of a sequence: with RING_ROWS from a table of rows, else sequences follow one another.
KV_INLINE int kv_row_of(const int* rows, int sequence) {
#ifdef RING_ROWS
    return rows[sequence];
#else
    return sequence;
#endif
}

// Where the sinks, or the ring, of a row begin: `stride` elements lie from one to the next.
KV_INLINE long long kv_row_start(long long row, long long stride) { return row * stride; }

// Sum of term(t) over t = first, first + K, ... below COUNT: halves are added to each other, as scores.py and rotated.py do.
template <int K, int COUNT = KV_PAGE_TOKENS, class F>
KV_INLINE double halving_sum(int first, F term) {
    if constexpr (K == COUNT) {
        return term(first);
    } else {
        return __dadd_rn(halving_sum<2 * K, COUNT>(first, term), halving_sum<2 * K, COUNT>(first + K, term));
    }
}

// The least of the powers of two that are no less than `count`.
KV_INLINE constexpr int kv_power_of_two(int count) { return count > 1 ? 2 * kv_power_of_two((count + 1) / 2) : 1; }
