// One decoding step of a sliding-window layer: see kvcal/kernels/ops.py. No macros: a token is so many words of 16
// bytes, whatever its dtype.

#include "follow.cuh"

enum { THREADS = 32 };
enum { NO_ROOM = 2 };  // a bit of `error`, as in common.cuh

// Grid (n heads, B rows, 2 sides), 32 threads. Sizes and strides in words.
//   k_new, v_new          [B, n, words], by strides
//   k_leaving, v_leaving  [B, n, words]
//   k_ring, v_ring        [B, n, ring_tokens, words]
//   lengths [B] int32: tokens before this step; error int32: gets NO_ROOM where there are max_tokens already
extern "C" __global__ void __launch_bounds__(THREADS) append_window(
    const uint4* k_new, long long k_row_stride, long long k_head_stride, const uint4* v_new, long long v_row_stride,
    long long v_head_stride, uint4* k_leaving, uint4* k_ring, uint4* v_leaving, uint4* v_ring, const int* lengths,
    long long ring_tokens, long long words, long long max_tokens, int* error) {
    kv_let_next_start();
    const bool is_key = blockIdx.z == 0;
    const long long head = blockIdx.x, row = blockIdx.y, of_head = row * gridDim.x + head;
    const long long tokens = lengths[row];
    const uint4* incoming =
        is_key ? k_new + row * k_row_stride + head * k_head_stride : v_new + row * v_row_stride + head * v_head_stride;
    uint4* leaving = (is_key ? k_leaving : v_leaving) + of_head * words;
    uint4* place = (is_key ? k_ring : v_ring) + (of_head * ring_tokens + tokens % ring_tokens) * words;
    for (int word = threadIdx.x; word < words; word += THREADS) {
        const uint4 token = incoming[word];
        leaving[word] = tokens < ring_tokens ? token : place[word];
        place[word] = token;
    }
    if (tokens >= max_tokens && threadIdx.x == 0) {
        atomicOr(error, NO_ROOM);
    }
}
