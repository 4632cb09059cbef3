"""The compiled operators that vLLM calls on a CPU and that its pure-Python build does not have, in torch, and
those with which it verifies drafts. It is a plug-in of vLLM's, so that every one of its processes has them.

KVCAL_TEST_PLAN_OF_RANK_1: the plan that rank 1 reads in place of the one that it is told. KVCAL_TEST_DENSE:
attention to sliding windows reads dense blocks alone, as vLLM's on a CPU does. KVCAL_TEST_OFFLOAD: blocks
that vLLM's connectors copy between a GPU and the host are copied in the CPU's memory. KVCAL_TEST_POISON: all
bytes of a block are 255, NaN, when it is handed out. KVCAL_TEST_STAGES: a later stage of a pipeline has room for
what comes from the one before, which vLLM's runner on a CPU has for compiled models alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

_LIBRARY: list[torch.library.Library] = []


def register() -> None:
    """Once a process."""
    if _LIBRARY:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    _LIBRARY.append(library)
    for schema, function in {
        "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
        "init_cpu_threads_env(str cores) -> str": lambda cores: "",
        "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
        "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor": _sampled,
        "get_scheduler_metadata(int reqs, int heads, int kv_heads, int dim, Tensor lengths, ScalarType dtype, "
        "Tensor starts, bool causal, int window, str isa, bool split, Tensor? dynamic, str cache) -> Tensor": (
            lambda *_: torch.empty(0)
        ),
        "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots, "
        "str isa, float k_scale, float v_scale, str cache) -> ()": _store,
        "cpu_attention_with_kv_cache(Tensor query, Tensor keys, Tensor values, Tensor(a!) output, Tensor starts, "
        "Tensor lengths, float scale, bool causal, Tensor? alibi, int window, Tensor table, float softcap, "
        "Tensor metadata, Tensor? sinks, Tensor? dynamic, float k_scale, float v_scale, str cache) -> ()": _attend,
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
        "Tensor(a!) slot_mapping, int block_size) -> ()": _slot_mapping,
        "causal_conv1d_update_cpu_vec(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, str? activation, "
        "Tensor? slots, Tensor? starts, int nobody) -> Tensor": _convolved,
    }.items():
        name = schema.split("(")[0]
        library.define(schema)
        library.impl(name, function, "CompositeExplicitAutograd")
    if "KVCAL_TEST_PLAN_OF_RANK_1" in os.environ:
        _read_other_plan()
    if "KVCAL_TEST_OFFLOAD" in os.environ:
        from vllm_copies import copy_on_a_cpu

        copy_on_a_cpu()
    if "KVCAL_TEST_POISON" in os.environ:
        _poison_new_blocks()
    if "KVCAL_TEST_STAGES" in os.environ:
        _take_from_earlier_stages()
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils import cpu_triton_utils
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    # The compiled attention reads dense blocks of multiples of 32 tokens; that of the tests reads what GPUs
    # read.
    if "KVCAL_TEST_DENSE" not in os.environ:
        CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: None)
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda spec=None: [MultipleOf(16)])
    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])  # or a KV connector takes one core of all
    cpu_triton_utils._compute_slot_mapping_kernel_impl = _slot_mapping_of_kernel
    cpu_triton_utils._rejection_greedy_sample_kernel_impl = _verify_greedily
    cpu_triton_utils._rejection_random_sample_kernel_impl = _verify_by_chance
    cpu_triton_utils._sample_recovered_tokens_kernel_impl = _recover
    cpu_triton_utils._expand_kernel_impl = _expand
    cpu_triton_utils._eagle_prepare_next_token_padded_kernel_impl = _last_of_drafts
    cpu_triton_utils._eagle_prepare_inputs_padded_kernel_impl = _to_draft_from
    cpu_triton_utils._eagle_step_slot_mapping_metadata_kernel_impl = _next_slots
    cpu_triton_utils._copy_and_expand_eagle_inputs_kernel_impl = _inputs_of_draft


def _read_other_plan() -> None:
    """As where two machines have different files of the same name."""
    from vllm.distributed import get_tensor_model_parallel_rank

    from kvcal.plan import plan

    load = plan.load_plan

    def load_plan(path: str) -> Any:
        return load(os.environ["KVCAL_TEST_PLAN_OF_RANK_1"] if get_tensor_model_parallel_rank() else path)

    plan.load_plan = load_plan


def _poison_new_blocks() -> None:
    """In a process that both schedules and computes."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.worker import gpu_model_runner

    allocate, get_new_blocks = gpu_model_runner.allocate_kv_cache, BlockPool.get_new_blocks
    memory: list[Tensor] = []

    def allocated(config: Any, *args: Any, **kwargs: Any) -> Any:
        found = allocate(config, *args, **kwargs)
        views = next(iter(found.values()))
        first = views if isinstance(views, Tensor) else views[0]
        memory[:] = [torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage()).view(config.num_blocks, -1)]
        return found

    def poisoned(self: Any, count: int) -> Any:
        blocks = get_new_blocks(self, count)
        for rows in memory:
            rows[[block.block_id for block in blocks]] = 255
        return blocks

    gpu_model_runner.allocate_kv_cache, BlockPool.get_new_blocks = allocated, poisoned


def _take_from_earlier_stages() -> None:
    from vllm.distributed import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load_model = CPUModelRunner.load_model

    def loaded(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    CPUModelRunner.load_model = loaded


def _slot_mapping_of_kernel(*args: object) -> None:
    """In place of the Triton kernel, by position: 0.32 hands over its arguments in the order of the kernel,
    and its own replacement expects the block size one place earlier."""
    starts, positions, table, _, *others = args[2:]
    if isinstance(others[0], Tensor):
        slots, block_size = others[:2]
    else:
        block_size, slots = others[:2]
    _slot_mapping(starts, positions, table, slots, block_size)  # type: ignore[arg-type]


def _sampled(logits: Tensor, seeds: Tensor) -> Tensor:
    """A token of every row [B, vocabulary], by noise of the row's seed."""
    generators = (torch.Generator().manual_seed(seed) for seed in seeds.tolist())
    noise = [torch.empty_like(row).exponential_(generator=own) for row, own in zip(logits, generators, strict=True)]
    return (logits.softmax(-1) / torch.stack(noise)).argmax(-1)


def _slot_mapping(starts: Tensor, positions: Tensor, table: Tensor, slots: Tensor, block_size: int) -> None:
    """The slot of every token; in a table that is too narrow (rings), one that nobody reads."""
    counts = starts[1:] - starts[:-1]
    row = torch.repeat_interleave(torch.arange(len(counts)), counts.long())
    at = positions[: len(row)]
    blocks = table[row, (at // block_size).clamp(max=table.shape[1] - 1)]
    slots[: len(row)] = blocks.long() * block_size + at % block_size
    slots[len(row) :] = -1


def _store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *_: Any) -> None:
    """Tokens [T, N, D] to their slots in blocks [blocks, N, tokens, D]; none where a slot is negative."""
    block_tokens = keys.shape[2]
    taken = slots[: len(key)] >= 0
    blocks, places = slots[: len(key)][taken] // block_tokens, slots[: len(key)][taken] % block_tokens
    keys[blocks, :, places], values[blocks, :, places] = key[taken], value[taken]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, output: Tensor, starts: Tensor, lengths: Tensor, scale: float,
    causal: bool, alibi: None, window: int, table: Tensor, softcap: float, metadata: Tensor, sinks: Tensor | None,
    *_: Any,
) -> None:  # fmt: skip
    """Of each request from its new tokens' queries [T, H, D] to the last ``window`` tokens up to each one's
    own, or to all where it is not positive."""
    tokens, window = keys.shape[2], window if window > 0 else 2**30
    for row, own in enumerate(_of_requests(starts[1:])):
        length = int(lengths[row])
        first = max(0, length - (own.stop - own.start) - window + 1) // tokens  # blocks before are others' by now
        blocks = table[row, first : -(-length // tokens)].long()
        k, v = (x[blocks].transpose(0, 1).flatten(1, 2)[:, : length - first * tokens] for x in (keys, values))
        q = query[own].transpose(0, 1).unflatten(0, (len(k), -1))  # [N, G, t, D]
        scores = q @ k.unsqueeze(1).mT * scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        ages = torch.arange(length - q.shape[2], length).unsqueeze(1) - torch.arange(first * tokens, length)
        scores = scores.masked_fill((ages < 0) | (ages >= window), -torch.inf)
        if sinks is not None:
            added = sinks.view(len(k), -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, added], dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        output[own] = (weights @ v.unsqueeze(1)).flatten(0, 1).transpose(0, 1).to(output.dtype)


# ---- drafts: those of request r end before ``ends[r]``; arguments are those of vLLM's Triton kernels, in their order


def _verify_greedily(
    out: Tensor, ends: Tensor, drafts: Tensor, best: Tensor, bonus: Tensor, is_greedy: Tensor | None, *_: Any,
    **constants: Any,
) -> None:  # fmt: skip
    for row, own in enumerate(_of_requests(ends)):
        if is_greedy is None or is_greedy[row]:
            _accept(out[row], drafts[own], best[own], drafts[own] == best[own], bonus[row])


def _verify_by_chance(
    out: Tensor, ends: Tensor, drafts: Tensor, draft_probs: None, probs: Tensor, bonus: Tensor, recovered: Tensor,
    chances: Tensor, is_greedy: Tensor, *_: Any, **constants: Any,
) -> None:  # fmt: skip
    accepted = probs.gather(1, drafts.long().unsqueeze(1)).squeeze(1) >= chances
    for row, own in enumerate(_of_requests(ends)):
        if not is_greedy[row]:
            _accept(out[row], drafts[own], recovered[own], accepted[own], bonus[row])


def _accept(out: Tensor, drafts: Tensor, others: Tensor, accepted: Tensor, bonus: Tensor) -> None:
    """Drafts up to the first that is not accepted, with the other token there; after all, the bonus."""
    right = int(accepted.int().cumprod(0).sum())
    out[:right] = drafts[:right]
    out[right] = others[right] if right < len(drafts) else bonus.squeeze()


def _recover(
    out: Tensor, ends: Tensor, drafts: Tensor, draft_probs: None, probs: Tensor, noise: Tensor, *_: Any,
    **constants: Any,
) -> None:  # fmt: skip
    """Tokens in the place of drafts, by the request's noise."""
    left = probs.scatter(1, drafts.long().unsqueeze(1), 0.0)
    for row, own in enumerate(_of_requests(ends)):
        out[own] = (left[own] * noise[row]).argmax(-1).to(out.dtype)


def _expand(out: Tensor, given: Tensor, ends: Tensor, replaced: int, by: int, *_: Any, **constants: Any) -> None:
    """A number of every request, for each of its drafts."""
    for value, own in zip(given, _of_requests(ends), strict=True):
        out[own] = by if value == replaced else value


# ---- a model that drafts


def _last_of_drafts(
    sampled: Tensor, discarded: Tensor, backup: Tensor, following: Tensor, counts: Tensor, vocabulary: int, *_: Any,
    **constants: Any,
) -> None:  # fmt: skip
    """The last token that every request got, of sampled [B, S], and how many it got; -1 where one was not."""
    for row, tokens in enumerate(sampled):
        valid = tokens[(tokens != -1) & (tokens < vocabulary)]
        count = 0 if discarded[row] else len(valid)
        counts[row] = count
        following[row] = valid[-1] if count else backup[row]


def _to_draft_from(
    ends: Tensor, counts: Tensor, starts: Tensor, places: Tensor, rejected: Tensor, requests: int, *_: Any
) -> None:
    """The place of the token that every request drafts from, and its rejected drafts."""
    for row, own in enumerate(_of_requests(ends[:requests])):
        drafts = own.stop - own.start
        rejected[row] = drafts + 1 - counts[row] if drafts else 0
        places[row] = starts[row + 1] - 1 - rejected[row]


def _next_slots(
    positions: Tensor, table: Tensor, stride: int, lengths: Tensor, clamped: Tensor, slots: Tensor, block_size: int,
    max_tokens: int, width: int, padding: int, *_: Any,
) -> None:  # fmt: skip
    """Of the next draft of every request."""
    rows = len(positions)
    following = positions + 1
    is_beyond = following >= max_tokens
    at = following.masked_fill(is_beyond, 0)
    blocks = table[torch.arange(rows), (at // block_size).clamp(max=width - 1).long()]
    clamped[:rows] = at
    slots[rows:] = padding
    slots[:rows] = (blocks.long() * block_size + at % block_size).masked_fill(is_beyond, padding).to(slots.dtype)
    lengths[:rows] = (lengths[:rows] + 1).masked_fill(is_beyond, 1).clamp(max=max_tokens)


def _inputs_of_draft(
    tokens: Tensor, positions: Tensor, following: Tensor, out: Tensor, out_positions: Tensor, is_rejected: Tensor,
    is_masked: Tensor, new: Tensor, mapping: Tensor, starts: Tensor, ends: Tensor, padding: int, masked: int,
    total: int, slots: int, shift: bool, *_: Any, **constants: Any,
) -> None:  # fmt: skip
    """Of a draft model, which gets the tokens of the model and one more, not shifted, with a slot a request."""
    assert slots == 1 and not shift
    for row in range(len(ends)):
        first, end, stop = int(starts[row]), int(ends[row]) + 1, int(starts[row + 1])
        to, count = first + row, end - first
        size = stop - first + 1
        out[to : to + count], out[to + count], out[to + count + 1 : to + size] = (
            tokens[first:end],
            following[row],
            padding,
        )
        out_positions[to : to + size] = int(positions[first]) + torch.arange(size)
        out_positions[to + count + 1 : to + size] = 0
        is_rejected[to : to + size] = torch.arange(size) > count
        is_masked[to : to + size] = False
        new[row] = to + count


# ---- states


def _convolved(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, slots: Tensor, *_: Any
) -> Tensor:
    """A token of every request, x [B, channels], which joins those in ``state`` [slots, channels, tokens]."""
    window = torch.cat([state[slots.long()], x.unsqueeze(2)], dim=2)[:, :, -weight.shape[1] :]
    state[slots.long()] = window[:, :, 1:]
    out = (window * weight).sum(-1) + (0.0 if bias is None else bias)
    return torch.nn.functional.silu(out) if activation else out


def _of_requests(ends: Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(first, stop) for first, stop in zip([0, *stops], stops, strict=False)]
