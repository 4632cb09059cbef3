// Blocks of a CUDA kernel on a CPU, one after the other: a thread is a fiber, and what a warp does together waits for its 32
// lanes. Copies to shared memory happen when they are waited for, not before. What instructions do is taken from the PTX
// manual; tensor cores' sums are exact and rounded once.

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#undef INFINITY
#define __device__
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __shared__ static

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace cpu {

constexpr int STACK_BYTES = 1 << 16;

struct Dim { unsigned x, y, z; };
typedef std::vector<std::pair<void*, const void*>> Copies;
// ``groups``: copies of 16 bytes that are on their way; the last group is open.
struct Fiber { void* stack; Dim thread; bool is_done; const unsigned long* awaited; unsigned long seen; std::vector<Copies> groups; };
// What lanes hand in and get back; ``round`` counts what they did together.
struct Warp { int arrived; unsigned long round; unsigned in[32][12], out[32][4]; };

inline Fiber* self;
inline void* scheduler;
inline Dim block, grid, block_size;
inline unsigned char* shared;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline int arrived, running;
inline unsigned long barriers;
inline int misaligned;  // loads and stores that a GPU would refuse
inline void (*body)();

// Called where -fsanitize=alignment finds one.
extern "C" inline __attribute__((used)) void __ubsan_handle_type_mismatch_v1(void*, uintptr_t) { misaligned++; }

// Saves what a call keeps on this stack, and goes on where the other one was left.
extern "C" void kv_switch(void** from, void* to);
asm(R"(
.text
.weak kv_switch
kv_switch:
  push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx
  ret
)");

inline void wait_for(const unsigned long& count) {
    self->awaited = &count;
    self->seen = count;
    kv_switch(&self->stack, scheduler);
}
inline void end_barrier() { arrived = 0; barriers++; }
struct Named { int arrived; unsigned long round; };
inline Named named[16];
// bar.sync of so many threads.
inline void barrier(int id, int count) {
    if (++named[id].arrived < count) return wait_for(named[id].round);
    named[id].arrived = 0;
    named[id].round++;
}
inline void barrier() { if (++arrived == running) end_barrier(); else wait_for(barriers); }
inline void start() {
    body();
    self->is_done = true;
    if (--running && arrived == running) end_barrier();
    for (;;) kv_switch(&self->stack, scheduler);
}
inline Warp& warp() { return warps[self->thread.x / 32]; }
inline unsigned lane() { return self->thread.x % 32; }
inline unsigned* in() { return warp().in[lane()]; }
inline unsigned* out() { return warp().out[lane()]; }
// The last of the 32 lanes computes for all of them.
template <class Compute> void together(Compute compute) {
    Warp& all = warp();
    if (++all.arrived < 32) return wait_for(all.round);
    compute(all);
    all.arrived = 0;
    all.round++;
}

// What nobody has written is NaN in every precision, and as an address odd; there is more of it after the end.
inline void allocate(size_t bytes) {
    const size_t words = (bytes + (1 << 17)) / 128 * 64;
    unsigned short* memory = (unsigned short*)aligned_alloc(128, 2 * words);
    for (size_t i = 0; i < words; i++) memory[i] = 0x7fc1;
    shared = (unsigned char*)memory;
    misaligned = 0;
}

inline void run_block(int threads, void (*entry)()) {
    static std::vector<char*> stacks;
    while ((int)stacks.size() < threads) stacks.push_back((char*)aligned_alloc(64, STACK_BYTES));
    body = entry;
    running = threads;
    block_size.x = threads;
    arrived = 0;
    warps.assign(threads / 32, Warp());
    fibers.assign(threads, Fiber());
    for (int i = 0; i < threads; i++) {
        void** top = (void**)(stacks[i] + STACK_BYTES - 64);
        *--top = nullptr;
        *--top = (void*)start;
        for (int saved = 0; saved < 6; saved++) *--top = nullptr;
        fibers[i].stack = top;
        fibers[i].thread.x = i;
    }
    for (bool has_moved = true; has_moved;) {
        has_moved = false;
        for (Fiber& fiber : fibers) {
            if (fiber.is_done || (fiber.awaited && *fiber.awaited == fiber.seen)) continue;
            fiber.awaited = nullptr;
            self = &fiber;
            has_moved = true;
            kv_switch(&scheduler, fiber.stack);
        }
    }
    if (running) { fprintf(stderr, "%d threads of a block wait for ever\n", running); abort(); }
}

// ---- numbers

inline float float_of(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline unsigned bits_of(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
inline float of_half(unsigned short x) { return _cvtsh_ss(x); }
inline unsigned short to_half(float x) { return _cvtss_sh(x, 0); }
inline float of_bf16(unsigned short x) { return float_of((unsigned)x << 16); }
inline unsigned short to_bf16(float x) { const unsigned bits = bits_of(x); return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16; }
inline unsigned halves(float low, float high) { return to_half(low) | (unsigned)to_half(high) << 16; }
inline unsigned multiply_halves(unsigned a, unsigned b) { return halves(of_half(a) * of_half(b), of_half(a >> 16) * of_half(b >> 16)); }
inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? 0.f : x; }
inline float exp2_(float x) { return flushed(exp2f(flushed(x))); }
// PRMT: where a selector's highest bit is set, the sign of its byte.
inline unsigned permute(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned which = selector >> 4 * i & 15, byte = bytes >> (which & 7) * 8 & 255;
        result |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}

// ---- what a warp does together

inline unsigned from_lane(unsigned x, unsigned source) {
    in()[0] = x;
    in()[1] = source;
    together([](Warp& all) { for (int l = 0; l < 32; l++) all.out[l][0] = all.in[all.in[l][1] & 31][0]; });
    return out()[0];
}
template <class Reduce> unsigned reduced(unsigned x, Reduce reduce) {
    in()[0] = x;
    together([reduce](Warp& all) {
        unsigned result = 0;
        for (int l = 0; l < 32; l++) result = reduce(result, all.in[l][0]);
        for (int l = 0; l < 32; l++) all.out[l][0] = result;
    });
    return out()[0];
}
inline unsigned largest_of_warp(unsigned x) { return reduced(x, [](unsigned a, unsigned b) { return a > b ? a : b; }); }
// MOVM: 8 rows of 8 halves, two in each lane.
inline unsigned transpose(unsigned x) {
    in()[0] = x;
    together([](Warp& all) {
        unsigned short at[8][8];
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 2; i++) at[l / 4][l % 4 * 2 + i] = (unsigned short)(all.in[l][0] >> 16 * i);
        for (int l = 0; l < 32; l++) all.out[l][0] = at[l % 4 * 2][l / 4] | (unsigned)at[l % 4 * 2 + 1][l / 4] << 16;
    });
    return out()[0];
}

// Operands of tensor cores: bytes, signed or not, and halves.
enum { SIGNED_BYTES, UNSIGNED_BYTES, HALVES, BF16 };
template <int KIND> double number(unsigned word, int i) {
    if (KIND == HALVES) return of_half((unsigned short)(word >> 16 * i));
    if (KIND == BF16) return of_bf16((unsigned short)(word >> 16 * i));
    return KIND == SIGNED_BYTES ? (int)(signed char)(word >> 8 * i) : (int)(word >> 8 * i & 255);
}
// d = c + a b: 16 rows, 8 columns, COLUMNS that are summed over, of which a word has 4 or 2.
template <int A_KIND, int B_KIND, int COLUMNS> void multiply(unsigned (&d)[4], const unsigned* a, const unsigned* b, const unsigned* c) {
    constexpr int PER = A_KIND == HALVES || A_KIND == BF16 ? 2 : 4, WORDS = COLUMNS / PER / 4;  // of b
    for (int i = 0; i < 2 * WORDS; i++) in()[i] = a[i];
    for (int i = 0; i < WORDS; i++) in()[4 + i] = b[i];
    for (int i = 0; i < 4; i++) in()[6 + i] = c[i];
    together([](Warp& all) {
        static double rows[16][COLUMNS], columns[8][COLUMNS];
        for (int l = 0; l < 32; l++)
            for (int w = 0; w < WORDS; w++)
                for (int i = 0; i < PER; i++) {
                    const int at = w * 4 * PER + l % 4 * PER + i;
                    for (int half = 0; half < 2; half++) rows[l / 4 + 8 * half][at] = number<A_KIND>(all.in[l][2 * w + half], i);
                    columns[l / 4][at] = number<B_KIND>(all.in[l][4 + w], i);
                }
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                double sum = 0;
                for (int at = 0; at < COLUMNS; at++) sum += rows[l / 4 + i / 2 * 8][at] * columns[l % 4 * 2 + i % 2][at];
                const unsigned before = all.in[l][6 + i];
                all.out[l][i] = PER == 4 ? before + (unsigned)(int)sum : bits_of((float)(float_of(before) + sum));
            }
    });
    for (int i = 0; i < 4; i++) d[i] = out()[i];
}

// ---- copies to shared memory

inline Copies& open_group() { if (self->groups.empty()) self->groups.emplace_back(); return self->groups.back(); }
inline void copy16(unsigned to, const void* from) { open_group().push_back({shared + to, from}); }
inline void commit() { open_group(); self->groups.emplace_back(); }
inline void wait_all_but(size_t count) {
    std::vector<Copies>& groups = self->groups;
    while (groups.size() > count + 1) {
        for (auto& [to, from] : groups.front()) memcpy(to, from, 16);
        groups.erase(groups.begin());
    }
}

}  // namespace cpu

// ---- CUDA's names

#define threadIdx (cpu::self->thread)
#define blockIdx (cpu::block)
#define gridDim (cpu::grid)
#define blockDim (cpu::block_size)
inline void __syncthreads() { cpu::barrier(); }
inline void __syncwarp() { cpu::together([](cpu::Warp&) {}); }
inline unsigned __float_as_uint(float x) { return cpu::bits_of(x); }
inline float __uint_as_float(unsigned x) { return cpu::float_of(x); }
inline int __float_as_int(float x) { return (int)cpu::bits_of(x); }
inline float __int_as_float(int x) { return cpu::float_of((unsigned)x); }
inline unsigned __float2uint_rn(float x) { return x > 0 ? (unsigned)nearbyintf(x) : 0; }
inline int __float2int_rn(float x) { return x != x ? 0 : x >= 2147483648.f ? INT32_MAX : x < -2147483648.f ? INT32_MIN : (int)nearbyintf(x); }
inline float __ll2float_rn(long long x) { return (float)x; }
inline int atomicOr(int* to, int bits) { const int before = *to; *to |= bits; return before; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return sqrt(a); }
inline float __double2float_rn(double a) { return (float)a; }
inline double __longlong_as_double(long long bits) { double x; memcpy(&x, &bits, 8); return x; }
inline long long __double_as_longlong(double x) { long long bits; memcpy(&bits, &x, 8); return bits; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) { return cpu::permute(a, b, selector & 0x7777); }
inline size_t __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - cpu::shared; }
template <class T> T __shfl_sync(unsigned, T x, int source, int width = 32) {
    unsigned words[sizeof(T) / 4];
    memcpy(words, &x, sizeof(T));
    for (unsigned& word : words) word = cpu::from_lane(word, (cpu::lane() & ~(width - 1)) | ((unsigned)source & (width - 1)));
    memcpy(&x, words, sizeof(T));
    return x;
}
template <class T> T __shfl_xor_sync(unsigned mask, T x, int bits) { return __shfl_sync(mask, x, (int)cpu::lane() ^ bits); }
template <class T> T __shfl_up_sync(unsigned mask, T x, int by) { const int lane = (int)cpu::lane(); return __shfl_sync(mask, x, lane >= by ? lane - by : lane); }
inline unsigned __ballot_sync(unsigned, bool x) { return cpu::reduced(x ? 1u << cpu::lane() : 0, [](unsigned a, unsigned b) { return a | b; }); }
inline bool __any_sync(unsigned, bool x) { return cpu::reduced(x, [](unsigned a, unsigned b) { return a | b; }); }
