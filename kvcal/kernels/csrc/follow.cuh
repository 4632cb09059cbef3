// Kernels of a step that overlap: the blocks of the next one come while the last of this one are at work, and what they
// do before they wait is hidden ("programmatic dependent launch", compute capability 9.0 and later; nothing before).
//
// `enter`, `append`, `decode` and `leave` are launched to follow (kvcal/kernels/compile.py). Each waits on every path that lets it
// end, since whoever follows it waits for it alone. `enter` reads nothing but matrices before it waits, `append`
// nothing but factors and signs, and lengths to guess from. Both wait before they let the next one start. So `decode` may read what was there before the step, such as lengths, before it
// waits for all else; and `leave` its matrix.

#define KV_INLINE __device__ __forceinline__

KV_INLINE void kv_let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// All that earlier kernels wrote is there.
KV_INLINE void kv_wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
