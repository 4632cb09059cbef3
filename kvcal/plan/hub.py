"""Plans on the Hugging Face hub: a repository with plan.safetensors and its card, README.md.

Nothing but these two files is sent, and the plan alone is fetched; ``load_plan`` then reads it as any other file:
safetensors and JSON, with a digest. A commit's id pins the plan for good, a branch's or tag's name only until it moves;
without a network, a branch is what was last downloaded of it.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvcal.errors import UsageError

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
