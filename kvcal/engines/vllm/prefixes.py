"""After which blocks vLLM lets a request begin, where a process has a plan: whole pages that are packed
already.

    pages    that a step fills are shared from the next step on. The windows of requests that
             begin are decoded before a step of decodes alone, which may be a CUDA graph; the page is packed
             within it
    loads    from the host's memory end with a page. Of a prompt of whole pages vLLM would take all but the last token
             from there, whose page's other tokens no ring has

vLLM's own methods decide both, in the process of its scheduler.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvcal.kernels.choice import MAX_STEP_TOKENS
from kvcal.pages.layout_protocol import PAGE_TOKENS

# Looked up with the import, so that a version without them is refused.
SHARE, LOADABLE = FullAttentionManager.cache_blocks, OffloadingConnector._max_loadable_tokens


@functools.cache
def begin_after_packed_pages() -> None:
    """Wrap both methods, once a process."""
    FullAttentionManager.cache_blocks = share
    OffloadingConnector._max_loadable_tokens = loadable


@functools.wraps(SHARE)
def share(self: Any, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
    """Blocks of the first ``num_tokens`` of a request, those of the step included that is scheduled."""
    computed = request.num_computed_tokens
    if computed < num_tokens <= computed + MAX_STEP_TOKENS:
        num_tokens = computed
    SHARE(self, request, num_tokens, *args, **kwargs)


@functools.wraps(LOADABLE)
def loadable(self: Any, request: Any, num_computed_tokens: int) -> int:
    """Tokens that a request may get from the host after ``num_computed_tokens``: all but those from its last
    on."""
    bound = LOADABLE(self, request, num_computed_tokens)
    most = max(0, (request.num_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS - num_computed_tokens)
    return most if bound is None else min(most, bound)
