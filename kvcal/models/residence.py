"""Residence: the decoder layers of a model that stay on a device of so many bytes, and those that take turns
there.

It is decided from shapes, before anything runs. Two places come first, so that a layer arrives while another
computes; then the activations of a large batch, since half of it would load every layer twice as often; then
layers that stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcal.errors import UsageError
from kvcal.quantities import format_bytes

PREFETCHING = 2  # places
# Tokens of a sequence that memory must at least hold, where the caller names none.
NUM_TOKENS = 2048
# Tokens of a batch that stages run at once, if memory lets them.
BATCH_TOKENS = 16384
# Logits whose fp32 copies a loss holds at once.
MAX_LOGITS = 1 << 27


@dataclass(frozen=True)
class Shapes:
    """Sizes in bytes that decide how many layers fit. ``fixed``: of all that is never streamed; ``layer``: of
    the largest layer's matrices; and of a token: ``activations`` of a layer with a graph, ``scores`` for each
    token that it may attend to, its ``hidden`` state, and its ``logits``. ``num_tokens``: of a sequence;
    ``vocab_size``: logits of a token."""

    num_layers: int
    num_tokens: int
    fixed: int
    layer: int
    activations: int
    scores: int
    hidden: int
    logits: int
    vocab_size: int

    def working(self, num_tokens: int) -> int:
        """Bytes of so many tokens besides the weights: in a layer, with its input and output, and the
        gradients of all; or after the last layer, with logits, their gradients, and as much as three fp32
        copies in the loss."""
        in_layer = num_tokens * (self.activations + self.num_tokens * self.scores + 4 * self.hidden)
        at_head = num_tokens * 2 * (self.logits + self.hidden) + 3 * 4 * min(num_tokens * self.vocab_size, MAX_LOGITS)
        return max(in_layer, at_head)

    def waiting(self, num_tokens: int) -> int:
        """Bytes of so many tokens while another batch is in a layer: their hidden states there, and gradients
        of these and of the logits."""
        return num_tokens * (self.logits + 2 * self.hidden)

    @property
    def least(self) -> int:
        """Bytes of memory that hold one layer, and a sequence in it."""
        return self.fixed + self.layer + self.working(self.num_tokens)


@dataclass(frozen=True)
class Residence:
    """The shares of a model's layers in ``memory`` bytes of a device. The first ``num_kept`` layers stay
    there; others take turns in ``num_places`` places."""

    memory: int
    shapes: Shapes
    num_kept: int
    num_places: int

    @property
    def working(self) -> int:
        """Bytes that are left for activations."""
        return self.memory - self.shapes.fixed - (self.num_kept + self.num_places) * self.shapes.layer

    def __str__(self) -> str:
        shapes, others = self.shapes, self.shapes.num_layers - self.num_kept
        places = f"the other {others} take turns in {self.num_places} places" if others else "no other is streamed"
        return (
            f"memory: {self.num_kept} of {shapes.num_layers} layers of {format_bytes(shapes.layer)} stay on the device,"
            f" {places}; {format_bytes(self.working)} of {format_bytes(self.memory)} are left for activations"
        )


def residence(shapes: Shapes, memory: int) -> Residence:
    """The layers that ``memory`` bytes hold: all, or two places (one where no second fits), and as many that
    stay as leave room for a batch.

    Raises UsageError where not one layer fits, with the least memory that would do.
    """
    sequence = shapes.working(shapes.num_tokens)
    if memory < shapes.least:
        raise UsageError(
            f"--memory {format_bytes(memory)} holds not one of {shapes.num_layers} layers: {shapes.least} bytes are "
            f"needed: {format_bytes(shapes.fixed)} of embeddings, head and norms, {format_bytes(shapes.layer)} of a "
            f"layer, {format_bytes(sequence)} of activations of one sequence",
            hint=f"give --memory {shapes.least}B or more, or shorter sequences",
        )
    num_layers = (memory - shapes.fixed - sequence) // shapes.layer
    if num_layers >= shapes.num_layers:
        return Residence(memory, shapes, shapes.num_layers, 0)
    num_places = min(PREFETCHING, num_layers)
    batch = shapes.working(max(BATCH_TOKENS, shapes.num_tokens))
    num_kept = (memory - shapes.fixed - batch) // shapes.layer - num_places
    return Residence(memory, shapes, max(0, num_kept), num_places)
