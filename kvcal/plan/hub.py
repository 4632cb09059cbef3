"""Plans on the Hugging Face hub: a repository with plan.safetensors and its card, README.md, which says what the plan
is, how it is loaded, what it takes, what was measured and where it came from.

Nothing but these two files is sent, and the plan alone is fetched; ``load_plan`` then reads it as any other file:
safetensors and JSON, with a digest. A commit's id pins the plan for good, a branch's or tag's name only until it moves;
without a network, a branch is what was last downloaded of it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcal.errors import UsageError
from kvcal.plan.layer import LayerPlan
from kvcal.plan.page_format import SIDES
from kvcal.quantities import format_bytes
from kvcal.strict import flat

PLAN_FILE, CARD_FILE = "plan.safetensors", "README.md"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NETWORK_HINT = "check the name, the network, and HF_TOKEN for a private repository"


def is_hub_id(text: str | Path) -> bool:
    """Whether ``text`` is a repository, owner/name: a file's path is a Path, or exists, or ends in .safetensors."""
    is_name = isinstance(text, str) and _REPOSITORY.fullmatch(text) is not None
    return is_name and not str(text).endswith(".safetensors") and not Path(text).exists()


def fetch(repository: str, revision: str | None) -> Path:
    """The plan file of a repository in the hub's local cache, downloaded unless it is there.

    Raises:
        UsageError: no such repository, revision or file, or the hub cannot be asked.
    """
    from huggingface_hub import errors, hf_hub_download

    place = f"{repository} at revision {revision!r}" if revision else repository
    try:
        return Path(hf_hub_download(repository, PLAN_FILE, revision=revision, library_name="kvcal"))
    except errors.RevisionNotFoundError as error:
        hint = "give a branch, a tag or a commit's id, as push_to_hub returned it"
        raise UsageError(f"plan {place}: the repository has no such revision", hint) from error
    except errors.RepositoryNotFoundError as error:
        reason = "there is no such file here, and no repository on the hub that may be read"
        raise UsageError(f"plan {place}: {reason}", NETWORK_HINT) from error
    except errors.LocalEntryNotFoundError as error:
        reason = "the hub cannot be asked, and the plan was not downloaded before"
        raise UsageError(f"plan {place}: {reason}", NETWORK_HINT) from error
    except errors.EntryNotFoundError as error:
        raise UsageError(f"plan {place}: the repository has no {PLAN_FILE}", "push one with push_to_hub") from error
    except (errors.HTTPError, OSError, ValueError) as error:
        raise UsageError(f"plan {place}: {_first_line(error)}", NETWORK_HINT) from error


def push(repository: str, plan: bytes, card: str, branch: str | None, private: bool, message: str) -> str:
    """The id of one new commit with both files, in a repository that is made if needed.

    Raises:
        UsageError: the name is none, the hub cannot be asked, or it does not let this user write there.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, errors

    if not _REPOSITORY.fullmatch(repository):
        raise UsageError(f"repository {repository!r}: expected owner/name", "such as user/model-2.5-bits")
    files = {PLAN_FILE: plan, CARD_FILE: card.encode()}
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    hub = HfApi(library_name="kvcal")
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        if branch is not None:
            hub.create_branch(repository, branch=branch, exist_ok=True)
        commit = hub.create_commit(repository, operations, commit_message=message, revision=branch)
    except (errors.HTTPError, OSError, ValueError) as error:
        raise UsageError(f"plan to {repository}: {_first_line(error)}", NETWORK_HINT) from error
    return str(commit.oid)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Headers and cells, as kvcal.stages.evaluate.table_columns makes them.
Columns = Sequence[tuple[str, Sequence[str]]]


def plan_card(repository: str, record: Mapping[str, Any], layers: Sequence[LayerPlan], sizes: Mapping[str, Any],
              measured: Columns) -> str:  # fmt: skip
    """README.md, in Markdown. ``record``: the plan's JSON; ``sizes``: its ``total_bytes``, ``raw_bytes`` (of 16 bits),
    ``bits_per_value`` and ``sha256``; ``measured``: a table of an evaluation, empty for none."""
    model, workload = record["model"], record["workload"]
    header = {"library_name": "kvcal", "tags": ["kv-cache", "quantization", model["model_type"]]}
    if model["id"].count("/") == 1:
        header["base_model"] = model["id"]
    place = f"batch {workload['batch']} x {workload['context']} tokens"
    facts = {
        "model": f"{model['id']} ({model['model_type']}, cache in {record['cache_dtype']})",
        "weights sha256": model["weights_sha256"],
        f"cache at {place}": f"{format_bytes(sizes['total_bytes'])} ({sizes['total_bytes']} bytes)",
        "at 16 bits": f"{format_bytes(sizes['raw_bytes'])}, {sizes['raw_bytes'] / sizes['total_bytes']:.2f}x",
        "bits per cached value, everything included": f"{sizes['bits_per_value']:.3f}",
        "code bits, keys and values of each layer": _code_bits(layers),
        "plan sha256, without provenance": sizes["sha256"],
    }
    parts = [
        "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in header.items()) + "---",
        f"# A KV-cache quantization plan for {_plain(model['id'])}",
        f"Made by kvcal. A plan says how each layer's keys and values are stored; it holds no weights. At {place}, the "
        "cache takes exactly the bytes below.",
        "```python\nfrom kvcal import PlanCache, load_plan\n\n"
        f'plan = load_plan("{repository}", revision="...")  # a commit\'s id pins it\n'
        "cache = PlanCache(plan, model.config)\nmodel.generate(**inputs, past_key_values=cache)\n```",
        "## Size\n\n" + _table(["", "value"], facts.items()),
    ]
    if measured:
        headers, cells = zip(*measured, strict=True)
        note = "Through the packed cache; ± standard errors."
        parts.append(f"## Measured\n\n{note}\n\n" + _table(headers, zip(*cells, strict=True)))
    else:
        parts.append("## Measured\n\nNothing was measured for this card.")
    parts.append("## Provenance\n\n" + _table(["", "value"], _provenance(record["provenance"])))
    return "\n\n".join(parts) + "\n"


def _code_bits(layers: Sequence[LayerPlan]) -> str:
    """Such as "4/2 2/2": K/V, and where heads differ, "4,2/2"."""

    def of(layer: LayerPlan) -> str:
        if not layer.is_paged:
            return "bounded"
        sides = ([fmt.num_bits for fmt in layer.formats(side)] for side in SIDES)
        return "/".join(",".join(map(str, bits if len(set(bits)) > 1 else bits[:1])) for bits in sides)

    return " ".join(of(layer) for layer in layers)


def _provenance(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Dotted names and texts; of a list of more than eight items, their number."""
    for name, value in sorted(flat("", provenance).items()):
        if isinstance(value, list) and len(value) > 8:
            yield name, f"{len(value)} items"
        else:
            yield name, value if isinstance(value, str) else json.dumps(value)


def _table(headers: Sequence[str], rows: Any) -> str:
    lines = [headers, ["---"] * len(headers), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown shows as it stands, in one line."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("`", "&#96;")
