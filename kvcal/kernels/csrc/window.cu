// One decoding step of a sliding-window layer: see kvcal/kernels/ops.py. No macros: a token is so many words of 16
// bytes, whatever its dtype.

#include "follow.cuh"

enum { THREADS = 32 };
enum { NO_ROOM = 2 };  // a bit of `error`, as in common.cuh

// Grid (n heads, B rows, 2 sides), 32 threads. Sizes and strides in words.
//   k_new, v_new          [B, n, words], by strides
//   k_leaving, v_leaving  [rows, n, words], rows by strides
//   k_ring, v_ring        [rows, n, ring_tokens, words], alike
//   lengths [B] int32: tokens before this step; rows [B] int32: each sequence's row of what is stored, or 0: in their
//   order; error int32: gets NO_ROOM where there are max_tokens already
extern "C" __global__ void __launch_bounds__(THREADS) append_window(
    const uint4* k_new, long long k_row_stride, long long k_head_stride, const uint4* v_new, long long v_row_stride,
    long long v_head_stride, uint4* k_leaving, long long k_leaving_stride, uint4* k_ring, long long k_ring_stride,
    uint4* v_leaving, long long v_leaving_stride, uint4* v_ring, long long v_ring_stride, const int* lengths,
    const int* rows, long long ring_tokens, long long words, long long max_tokens, int* error) {
    kv_let_next_start();
    const bool is_key = blockIdx.z == 0;
    const long long head = blockIdx.x, sequence = blockIdx.y, row = rows ? rows[sequence] : sequence;
    const long long tokens = lengths[sequence];
    const uint4* incoming = is_key ? k_new + sequence * k_row_stride + head * k_head_stride
                                   : v_new + sequence * v_row_stride + head * v_head_stride;
    uint4* leaving = (is_key ? k_leaving + row * k_leaving_stride : v_leaving + row * v_leaving_stride) + head * words;
    uint4* place = (is_key ? k_ring + row * k_ring_stride : v_ring + row * v_ring_stride) +
                   (head * ring_tokens + tokens % ring_tokens) * words;
    for (int word = threadIdx.x; word < words; word += THREADS) {
        const uint4 token = incoming[word];
        leaving[word] = tokens < ring_tokens ? token : place[word];
        place[word] = token;
    }
    if (tokens >= max_tokens && threadIdx.x == 0) {
        atomicOr(error, NO_ROOM);
    }
}
