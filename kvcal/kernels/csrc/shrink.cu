// Pages of FROM_BITS become pages of TO_BITS, each where it is (kvcal/pages/shrink.py): codes are halved by the
// equivalent right shift as often as needed, and scales follow in fp32. Pages of 16 bits hold values in DTYPE; they
// are transformed and quantized to 8 bits first. A narrow record begins where the wide one did, which lies in shared
// memory meanwhile; slide.cu closes the gaps.
//
// Macros: SIDE (0 keys: rows are tokens, 1 values: rows are channels), DIM, AXIS, GROUP, DTYPE, FROM_* and TO_*: BITS,
// RECORD, SCALE, ZERO (bytes from the record's start); HAS_RESCALE, HAS_OFFSET.
//
// Left out: widening, which only a cropped cache needs, and static caches refuse.

#include "common.cuh"
#include "stage.cuh"

static_assert(FROM_BITS == 16 || FROM_BITS == 8 || FROM_BITS == 4 || FROM_BITS == 2, "bits that have a half");
static_assert(TO_BITS < FROM_BITS && FROM_BITS % TO_BITS == 0, "fewer bits, by halves");

// Bits of the codes that are shifted: a page of 16 bits has 8 once it is quantized.
constexpr int WIDE_BITS = FROM_BITS == 16 ? 8 : FROM_BITS;
constexpr int PADDED = kv_round_up(DIM, 16);
constexpr int ROWS = SIDE == 0 ? KV_PAGE_TOKENS : PADDED, COLUMNS = SIDE == 0 ? PADDED : KV_PAGE_TOKENS;
constexpr int OTHERS = AXIS == 0 ? PADDED : KV_PAGE_TOKENS;
constexpr int PARAMS = kv_ceil_div(AXIS == 0 ? KV_PAGE_TOKENS : DIM, GROUP) * OTHERS;

struct Level {
    float step, zero;
};

// What the quantizer is given of a 16-bit page of one head.
KV_INLINE float raw_value(
    const unsigned char* record, const float* rescale, const float* offset, int token, int channel) {
    float x = kv_float_of<DTYPE>(((const unsigned short*)record)[token * DIM + channel]);
    if constexpr (HAS_OFFSET != 0) {
        x = __fsub_rn(x, offset[channel]);
    }
    if constexpr (HAS_RESCALE != 0) {
        x = __fdiv_rn(x, rescale[channel]);
    }
    return x;
}

// Codes of 2 B bits -> B bits, and so on down to TO_BITS.
template <int B>
KV_INLINE unsigned halved(unsigned code) {
    if constexpr (B < TO_BITS) {
        return code;
    } else {
        code = (((1u << 2 * B) - (1u << B) + 1) * (code + (1u << (B - 1)))) >> 3 * B;
        return halved<B / 2>(code);
    }
}

template <int B>
KV_INLINE void halve_scale(float& scale) {
    if constexpr (B >= TO_BITS) {
        scale = __fmul_rn(scale, (float)((1 << B) + 1));
        halve_scale<B / 2>(scale);
    }
}

// Scale and zero number i of the wide codes. Of values, quantized now; `error` is set where they are not finite.
KV_INLINE Level wide_level(
    const unsigned char* record, const float* rescale, const float* offset, int i, int* error) {
    if constexpr (FROM_BITS != 16) {
        return {((const float*)(record + FROM_SCALE))[i], ((const float*)(record + FROM_ZERO))[i]};
    } else {
        const int first = i / OTHERS * GROUP, other = i % OTHERS;
        if (AXIS == 0 && other >= DIM) {
            return {0.0f, 0.0f};
        }
        const int last = kv_min(first + GROUP, AXIS == 0 ? KV_PAGE_TOKENS : DIM);
        float low = raw_value(record, rescale, offset, AXIS == 0 ? first : other, AXIS == 0 ? other : first), high = low;
#pragma unroll 8
        for (int k = first + 1; k < last; ++k) {
            const float x = raw_value(record, rescale, offset, AXIS == 0 ? k : other, AXIS == 0 ? other : k);
            low = kv_min_nan(low, x);
            high = kv_max_nan(high, x);
        }
        low = __fadd_rn(low, 0.0f);  // as pack.cu has it
        const float scale = __fdiv_rn(__fsub_rn(__fadd_rn(high, 0.0f), low), 255.0f);
        if (!kv_finite(scale) || !kv_finite(low)) {
            atomicOr(error, 1);
        }
        return {scale, low};
    }
}

// The 16 wide codes of the unit at (row, column).
KV_INLINE void wide_codes(
    const unsigned char* record, const float* rescale, const float* offset, const Level* levels, int row, int column,
    unsigned* code) {
    if constexpr (FROM_BITS != 16) {
        kv_load_codes<ROWS, COLUMNS, FROM_BITS>(record, row, column, code);
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int token = SIDE == 0 ? row : column + i, channel = SIDE == 0 ? column + i : row;
            code[i] = 0;
            if (channel < DIM) {
                const int at = AXIS == 0 ? token / GROUP * OTHERS + channel : channel / GROUP * OTHERS + token;
                code[i] = kv_code_of(
                    raw_value(record, rescale, offset, token, channel), levels[at].zero, levels[at].step, 255);
            }
        }
    }
}

// Equivalent shift of 16 codes at once, from their high and low plane, codes being b3 b2 b1 b0: y1 = b3,
// y0 = (~b3 & (b2 | b1 & b0)) | (b3 & b2 & (b1 | b0)).
KV_INLINE unsigned halved_word(unsigned low, unsigned high) {
    const unsigned b3 = high >> 1, b2 = high, b1 = low >> 1, b0 = low;
    const unsigned y0 = (~b3 & (b2 | (b1 & b0))) | (b3 & b2 & (b1 | b0));
    return (y0 & 0x55555555u) | (high & 0xaaaaaaaau);
}

// One record by the whole block: `wide` in shared memory -> `narrow`.
KV_INLINE void shrink_record(
    const unsigned char* wide, unsigned char* narrow, const float* rescale, const float* offset, Level* levels,
    int* error) {
    for (int i = threadIdx.x; i < PARAMS; i += blockDim.x) {
        Level level = wide_level(wide, rescale, offset, i, error);
        if constexpr (FROM_BITS == 16) {
            levels[i] = {kv_step_of(level.step), level.zero};
        }
        halve_scale<WIDE_BITS / 2>(level.step);
        ((float*)(narrow + TO_SCALE))[i] = level.step;
        ((float*)(narrow + TO_ZERO))[i] = level.zero;
    }
    __syncthreads();
    for (int unit = threadIdx.x; unit < ROWS * COLUMNS / 16; unit += blockDim.x) {
        if constexpr (FROM_BITS == 4 && TO_BITS == 2) {
            const unsigned* low = (const unsigned*)wide;
            ((unsigned*)narrow)[unit] = halved_word(low[unit], low[ROWS * COLUMNS / 16 + unit]);
        } else {
            int row, column;
            kv_unit_place<ROWS, COLUMNS>(unit, row, column);
            unsigned code[16];
            wide_codes(wide, rescale, offset, levels, row, column, code);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                code[i] = halved<WIDE_BITS / 2>(code[i]);
            }
            kv_store_codes<ROWS, COLUMNS, TO_BITS>(narrow, row, column, code);
        }
    }
}

// Grid: any, 256 threads; dynamic shared memory: FROM_RECORD bytes.
//   arena, stage, starts, layout, columns  as for slide.cu
//   members     [num_members] int64: regions of these formats; those that go from FROM_BITS to TO_BITS now do so
//   lengths     [rows] int32, tokens of every sequence
//   transforms  fp32, for HAS_RESCALE or HAS_OFFSET; error int32, gets bit 1 when values of 16 bits are not finite
extern "C" __global__ void __launch_bounds__(256) shrink(
    unsigned char* arena, const long long* stage, const long long* starts, const Region* layout, long long num_stages,
    long long num_regions, const long long* columns, const long long* members, long long num_members,
    const int* lengths, long long rows, const float* transforms, int* error) {
    extern __shared__ uint4 held[];
    __shared__ Level levels[FROM_BITS == 16 ? PARAMS : 1];
    if (!kv_stage_is_over(stage, starts, num_stages, columns)) {
        return;
    }
    const Region* old = layout + *stage * num_regions;
    for (long long member = 0; member < num_members; ++member) {
        const Region& region = old[members[member]];
        if (region.bits != FROM_BITS || old[num_regions + members[member]].bits != TO_BITS) {
            continue;
        }
        const long long count = rows * region.pages * region.heads;
        for (long long number = blockIdx.x; number < count; number += gridDim.x) {
            const long long page = number / region.heads % region.pages, head = number % region.heads;
            if (page >= lengths[number / region.heads / region.pages] / KV_PAGE_TOKENS) {
                continue;
            }
            unsigned char* record = arena + region.base + number * FROM_RECORD;
            for (int i = threadIdx.x; i < FROM_RECORD / 16; i += blockDim.x) {
                held[i] = ((const uint4*)record)[i];
            }
            __syncthreads();
            const float* rescale = transforms + region.transform + head * DIM;  // read only with HAS_*
            shrink_record(
                (const unsigned char*)held, record, rescale, rescale + region.heads * DIM, levels, error);
            __syncthreads();
        }
    }
}
