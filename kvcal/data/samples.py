"""The model's own samples as calibration text: what its cache will hold most of is what it writes itself.

A row of a sample starts with a short opening of our own, of one of the kinds of text, and goes on at temperature 1.
Where the model ends its text, the next opening of the kind follows, so that a row always has its full length. The loss
mask covers what the model wrote. LLM-QAT (arXiv 2305.17888) calibrates on such data; here openings of every kind take
the place of its random first tokens.

Openings are dealt to the pools by their content, so that two pools never hold the same row. Each row has its own seed:
of its uniform numbers, one a token (inverse of the cumulative distribution), and of its openings. Rows are sampled in
batches of ``BATCH``; finished batches are kept in the folder, where a second stage, or the next run, reads them.
Left out: other temperatures, and a padded prefill, which would save a few steps of some hundreds.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvcal.artifact import Artifact, differing_input, read, sha256_json, write
from kvcal.data.pools import Purpose, pool_of
from kvcal.distributed import map_over_ranks
from kvcal.errors import ArtifactError, NonFiniteActivations
from kvcal.lazy_torch import Tensor, torch
from kvcal.models.cache_argument import given_cache, with_cache
from kvcal.progress import Reporter, Silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 16
KIND, SCHEMA = "samples", 1
# fmt: off
_SUBJECTS = ["rivers", "bread", "bridges", "bees", "maps", "winter", "clocks", "an old lighthouse", "salt", "trains",
             "mountains", "a small harbour", "music", "paper", "the night sky", "gardens"]
# How a text of a kind begins, and how one asks for it.
OPENINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prose": (("The history of {} ", "A short essay on {}.\n\n", "Chapter 1\n\nIt was late when she thought of {}",
               "Few things are as misunderstood as {}. "),
              ("Write a long essay on {}.", "Tell me a story in which {} matters.", "What should I know about {}?")),
    "code": (('"""A module about {}."""\n\nimport ', "// A small program about {}\n#include <", "# {}\n\nclass ",
              "def main():\n    # {}\n"),
             ("Write a Python program about {}, with comments.", "Design the classes of a game about {} in C++.",
              "Write tests for a library about {}.")),
    "math": (("Problem about {}. ", "\\begin{{lemma}}\n% {}\nLet ", "Question: A shop that sells things about {} ",
              "Theorem ({}). Suppose that "),
             ("Solve a hard word problem about {}, step by step.", "Prove a lemma that is named after {}.",
              "Pose three exam questions with numbers about {}, and solve them.")),
    "dialogue": (("User: Tell me about {}.\nAssistant: ", '"What do you know about {}?" he asked.\n',
                  "A: I have a question about {}.\nB: "),
                 ("I would like to talk about {}.", "Help me to plan a weekend about {}.",
                  "Give me ten tips about {}, please.")),
    "reasoning": (("Let us think step by step about {}. First, ", "To decide about {}, we list the facts.\n1. ",
                   "<think>\nThe question is about {}. "),
                  ("Think step by step: how would you count all {} in the world?",
                   "Make a puzzle about {} with five clues, and reason until it is solved.",
                   "Weigh what speaks for and against {}, point by point, and check yourself.")),
}
# fmt: on
OPENINGS_SHA256 = sha256_json([_SUBJECTS, OPENINGS])


def openings(kind: str, purpose: Purpose, seed: str, is_chat: bool) -> Iterator[str]:
    """Openings of a pool without end: texts that begin, or with ``is_chat`` what a user asks."""
    rng = random.Random(f"openings:{seed}")
    while True:
        text = rng.choice(OPENINGS[kind][is_chat]).format(rng.choice(_SUBJECTS)).rstrip(" ")  # a word takes its space
        if pool_of(text) == purpose:
            yield text


def sample(
    model: PreTrainedModel,
    openings: Sequence[Iterator[Sequence[int]]],
    draws_BT: Tensor,
    end_ids: Collection[int],
    reporter: Reporter,
) -> tuple[Tensor, Tensor]:
    """(token ids int64 [B, T], which of them the model wrote, bool [B, T]). ``openings``: of each row, token ids;
    ``draws_BT``: uniform numbers in [0, 1), fp64; ``end_ids``: tokens that end a text.

    Raises:
        NonFiniteActivations: the model's logits are not finite.
    """
    num_rows, length = draws_BT.shape
    tokens_BT = torch.empty(num_rows, length, dtype=torch.int64)
    written_BT = torch.zeros(num_rows, length, dtype=torch.bool)
    waiting = [deque(next(row)) for row in openings]
    cache = next_B = None
    for t in range(length):
        if t % BATCH == 0:
            reporter(t, length, f"samples: {num_rows} texts of {length} tokens")
        for row, queue in enumerate(waiting):
            written_BT[row, t] = not queue
            token = queue.popleft() if queue else int(next_B[row])  # type: ignore[index]
            tokens_BT[row, t] = token
            if not queue and token in end_ids and bool(written_BT[row, t]):
                queue.extend(next(openings[row]))
        if t + 1 < length:
            ids_B1 = tokens_BT[:, t : t + 1].to(model.device)
            with torch.no_grad():
                output = model(input_ids=ids_B1, use_cache=True, **with_cache(model, cache))
            cache = given_cache(output)
            cumulative_BV = output.logits[:, -1].double().softmax(-1).cumsum(-1)
            if not bool(torch.isfinite(cumulative_BV[:, -1]).all()):
                raise NonFiniteActivations(f"sampling: the model's logits are not finite at token {t}")
            drawn_B1 = draws_BT[:, t + 1 : t + 2].to(model.device) * cumulative_BV[:, -1:]
            next_B = torch.searchsorted(cumulative_BV, drawn_B1, right=True).squeeze(1)
            next_B = next_B.clamp(max=cumulative_BV.shape[1] - 1).cpu()
    reporter(length, length, f"samples: {num_rows} texts of {length} tokens")
    return tokens_BT, written_BT


def draws(seeds: Sequence[str], length: int) -> Tensor:
    """Uniform numbers of each seed, fp64 [B, T], the same in every process."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") >> 1
        )
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


# Rows by model and what was asked: one process samples no text twice, whatever its folders.
_sampled: WeakKeyDictionary[PreTrainedModel, dict[str, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Sampler:
    """A model that samples, and where finished rows are kept. ``identity``: JSON that tells the model and its
    arithmetic; ``folder``: of the artifacts, None to keep them in memory alone."""

    model: PreTrainedModel
    identity: dict[str, Any]
    folder: Path | None = None
    reporter: Reporter = field(default_factory=Silent)

    def rows(
        self,
        asked: dict[str, Any],
        openings: Sequence[Iterator[Sequence[int]]],
        seeds: Sequence[str],
        length: int,
        end_ids: Collection[int],
    ) -> tuple[Tensor, Tensor]:
        """(ids int64 [N, T], written by the model, bool [N, T]) of N = len(seeds) rows. ``asked``: JSON that tells them
        from others, without the model, seeds and length.

        Raises:
            ArtifactError: the folder's file of these rows is corrupt.
        """
        inputs = {**self.identity, **asked, "openings": OPENINGS_SHA256, "seeds": list(seeds), "seq_len": length}
        digest = sha256_json(inputs)
        known = _sampled.setdefault(self.model, {})
        if digest in known:
            return known[digest]
        path = None if self.folder is None else self.folder / f"samples-{digest[:12]}.safetensors"
        tokens_NT = torch.empty(0, length, dtype=torch.int64)
        written_NT = torch.empty(0, length, dtype=torch.bool)
        if path is not None and path.exists():
            tokens_NT, written_NT = _load(path, inputs)

        def batch(first: int) -> tuple[Tensor, Tensor]:
            part = slice(first, first + BATCH)
            return sample(self.model, openings[part], draws(seeds[part], length), end_ids, self.reporter)

        for tokens, written in map_over_ranks(range(len(tokens_NT), len(seeds), BATCH), batch):
            tokens_NT = torch.cat([tokens_NT, tokens])
            written_NT = torch.cat([written_NT, written])
            if path is not None:
                write(path, Artifact(KIND, SCHEMA, inputs, {}, {"tokens": tokens_NT, "written": written_NT}))
        known[digest] = tokens_NT, written_NT
        return known[digest]


def _load(path: Path, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Finished rows. ArtifactError for a file that is corrupt, or not of these inputs."""
    found = read(path, KIND, SCHEMA)
    tokens_NT, written_NT = (found.tensors.get(name, torch.empty(0)) for name in ("tokens", "written"))
    num_rows, length = len(inputs["seeds"]), inputs["seq_len"]
    is_whole = len(tokens_NT) == num_rows or len(tokens_NT) % BATCH == 0
    is_sound = tokens_NT.dim() == 2 and tokens_NT.shape == written_NT.shape and tokens_NT.shape[1] == length
    is_sound &= tokens_NT.dtype == torch.int64 and written_NT.dtype == torch.bool and bool((tokens_NT >= 0).all())
    difference = differing_input(inputs, found.inputs)
    if difference or len(found.tensors) != 2 or not (is_sound and is_whole and len(tokens_NT) <= num_rows):
        reason = difference or f"tensors { ({name: tuple(x.shape) for name, x in found.tensors.items()}) }"
        raise ArtifactError(f"{path} does not hold the samples that its name says: {reason}", "delete the file")
    return tokens_NT, written_NT
