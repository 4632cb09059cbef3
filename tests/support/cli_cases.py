"""Shared by the command-line tests: a tiny model in a folder, a small recipe, and the command in this
process."""

import contextlib
import functools
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import typer
from tiny_models import TINY_MODELS, _build
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from kvcal import __main__ as cli

RECIPE = """
description = "a test"
[data]
source = "tasks"
num_samples = 2
seq_len = 256
[profile]
num_bits = [2, 4]
k_axes = ["channel"]
group_sizes = [32, 64]
kl_num_bits = [2]
kl_samples = 1
kl_tokens = 256
[cache]
num_sink_tokens = 2
k_recent_window = 8
v_recent_window = 8
[allocate]
same_bytes_as = "kivi-2"
batch = 2
context = 512
[evaluate]
against = ["16-bit", "kivi-2"]
tasks = ["chain"]
num_problems = 2
max_size = 20
max_hops = 4
max_new_tokens = 12
data = { source = "tasks", num_samples = 2, seq_len = 224, seed = 1 }
"""


# Made once: typer takes 15 ms to make the parsers of all commands, and does so at every call.
_command = functools.cache(typer.main.get_command)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The output of ``--json``."""
        return json.loads(self.out)


def save_llama(
    folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int = 0, dtype: torch.dtype = torch.bfloat16,
    num_layers: int = 2, head_dim: int = 16, **shape: int,
) -> Path:  # fmt: skip
    """A random Llama with the embedded tokenizer, and an embedding for each token unless told otherwise."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 0,
        "pad_token_id": 1, "num_hidden_layers": num_layers, "head_dim": head_dim,
    } | shape  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**shape)).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_family(folder: Path, tokenizer: PreTrainedTokenizerBase, family: str, context: int = 1024) -> Path:
    """The tiny model of another family, with the embedded tokenizer's words."""
    config = TINY_MODELS[family]().config
    config.update({"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1})
    config.update({"max_position_embeddings": context})
    _build(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def exit_code(*arguments: object) -> int:
    """Of the command in this process."""
    before, sys.argv = sys.argv, ["kvcal", *map(str, arguments)]
    try:
        with mock.patch.object(typer.main, "get_command", _command):
            cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def run_kvcal(*arguments: object) -> Outcome:
    """Run the command in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = exit_code(*arguments)
    return Outcome(code, out.getvalue(), err.getvalue())


def ran_well(*arguments: object) -> Outcome:
    """Run the command in this process; it must end well."""
    done = run_kvcal(*arguments)
    assert done.code == 0, done.err
    return done
