"""Plans of repositories on the Hugging Face hub: which file is asked for, and what an error says."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from evaluation_cases import make_plan, tiny
from huggingface_hub.errors import LocalEntryNotFoundError

from kvcal import load_plan, save_plan
from kvcal.errors import ArtifactError, UsageError


def test_a_plan_of_a_repository_at_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, asked = make_plan(tiny()), []
    save_plan(plan, tmp_path / "plan.safetensors")

    def download(repository: str, name: str, *, revision: str | None, library_name: str) -> str:
        asked.append((repository, name, revision))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load_plan("me/plans", revision="small") == plan == load_plan("me/plans")
    assert asked == [("me/plans", "plan.safetensors", "small"), ("me/plans", "plan.safetensors", None)]


def test_what_cannot_be_downloaded_is_told_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="plan me/none at revision 'main': ") as refused:
        load_plan("me/none")
    assert refused.value.hint and isinstance(refused.value.__cause__, LocalEntryNotFoundError)
    with pytest.raises(UsageError, match="Cannot have"):
        load_plan("me/a..b")


def test_files_are_not_asked_for(tmp_path: Path) -> None:
    for name in (str(tmp_path), "none.safetensors", "folder/none.safetensors"):
        with pytest.raises(UsageError, match="a file has none"):
            load_plan(name, revision="main")
    with pytest.raises(ArtifactError, match="does not exist"):
        load_plan(Path("me/plans"))
