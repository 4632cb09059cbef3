"""Ways to store keys and values: what each of them needs, and which places do not serve it.

A layout or a transform declares its way in its own file, and a layer of a plan has one or more
(``LayerPlan.ways``). What caches and engines refuse, what ``kvcal doctor`` prints and the table of
docs/engines.md are read from these declarations, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Where plans are served: a cache that grows, one of fixed size (and its kernels), the engines, which run the
# kernels, too; and with drafts that are verified and taken back.
Place = Literal["dynamic", "static", "vllm", "sglang", "drafts"]
Engine = Literal["vllm", "sglang"]
PLACES: dict[Place, str] = {
    "dynamic": "`PlanCache`",
    "static": "static caches",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "drafts": "drafts",
}
# Places that serve with the kernels of static caches, and so refuse what these do.
OF_KERNELS: tuple[Engine, ...] = ("vllm", "sglang")


@dataclass(frozen=True, eq=False)
class Way:
    """``name``: what is stored so, for people. ``needs``: what packing a page reads besides its tokens:
    "queries", "text" (calibration), "RoPE" (its angles) or "neighbours" (other layers). ``refused``: why a
    place does not serve it; engines refuse what static caches do, unless an empty reason says otherwise."""

    name: str
    needs: tuple[Literal["queries", "text", "RoPE", "neighbours"], ...] = ()
    refused: Mapping[Place, str] = field(default_factory=dict)

    def reason(self, place: Place) -> str | None:
        """Why ``place`` does not serve it; None where it does."""
        kept_by_engines = place in OF_KERNELS and place not in self.refused
        return self.refused.get("static" if kept_by_engines else place) or None


NO_KERNELS = "no kernel reads them as they are stored"
RAW_PAGES = Way("pages of 16 bits")
UNIFORM_PAGES = Way("uniform pages")

# Of a whole layer, by its geometry.
LATENTS = Way(
    "latents (multi-head latent attention)",
    refused={"static": "they are expanded in torch, and the kernels read keys of heads"},
)
SLIDING_WINDOW = Way("a sliding window", refused={"drafts": "it has no room for drafts in a static cache"})
STATE = Way("a state")
STATE_BESIDES = Way(
    "a state besides keys and values",
    refused={"static": "steps store keys and values alone", "vllm": "", "sglang": "it was not tried"},
)
GEOMETRIES = (LATENTS, SLIDING_WINDOW, STATE, STATE_BESIDES)
