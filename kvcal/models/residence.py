"""How many decoder layers of a model stay on a device of so many bytes, and how many take turns there.

It is decided from shapes, before anything runs. Two places come first, so that a layer arrives while another computes;
then half of what is left holds layers that stay. The other half is for activations, whose size follows from batches:
they should have as much room as weights, since a larger batch loads every layer for more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcal.errors import UsageError
from kvcal.quantities import format_bytes

PREFETCHING = 2  # places
# Tokens of a sequence that memory must at least hold, where the caller names none.
NUM_TOKENS = 2048


@dataclass(frozen=True)
class Shapes:
    """What decides how many layers fit a device, in bytes. ``fixed``: of all that is never streamed; ``layer``: of the
    largest layer's matrices; and of a token: ``activations`` of a layer with a graph, ``scores`` for each token that it
    may attend to, its ``hidden`` state, and its ``logits`` with their fp32 copies and gradients. ``num_tokens``: of a
    sequence."""

    num_layers: int
    num_tokens: int
    fixed: int
    layer: int
    activations: int
    scores: int
    hidden: int
    logits: int

    def running(self, num_tokens: int) -> int:
        """Bytes of one sequence in a layer, with a graph: activations, its input and output, and their gradients."""
        return num_tokens * (self.activations + num_tokens * self.scores + 4 * self.hidden)

    @property
    def working(self) -> int:
        """Bytes that one sequence takes at most beside the weights."""
        return max(self.running(self.num_tokens), self.num_tokens * (self.logits + 2 * self.hidden))

    @property
    def least(self) -> int:
        """Bytes of memory that hold one layer, and a sequence in it."""
        return self.fixed + self.layer + self.working


@dataclass(frozen=True)
class Residence:
    """How a model's layers share ``memory`` bytes of a device. The first ``num_kept`` layers stay there; the others
    take turns in ``num_places`` places."""

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
    """The layers that ``memory`` bytes hold: two places if they fit, so that loading is hidden; half of what is left
    then is for layers that stay, half for activations.

    Raises UsageError where not one layer fits, with the least memory that would do.
    """
    if memory < shapes.least:
        raise UsageError(
            f"--memory {format_bytes(memory)} holds not one of {shapes.num_layers} layers: {shapes.least} bytes are "
            f"needed: {format_bytes(shapes.fixed)} of embeddings, head and norms, {format_bytes(shapes.layer)} of a "
            f"layer, {format_bytes(shapes.working)} of activations of one sequence",
            hint=f"give --memory {shapes.least}B or more, or shorter sequences",
        )
    room = memory - shapes.fixed - shapes.working
    if room // shapes.layer >= shapes.num_layers:
        return Residence(memory, shapes, shapes.num_layers, 0)
    num_places = min(PREFETCHING, room // shapes.layer)
    spare = memory - shapes.fixed - num_places * shapes.layer
    num_kept = min(spare // 2, spare - shapes.working) // shapes.layer
    return Residence(memory, shapes, min(num_kept, shapes.num_layers - num_places), num_places)
