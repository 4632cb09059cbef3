"""Shared by all tests: the embedded tokenizer, a folder of caches, and scripts of lab/."""

import os

# Before the libraries read it: a test that would need the hub fails at once instead of waiting for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import runpy  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import AutoTokenizer, PreTrainedTokenizerBase  # noqa: E402

from kvcal.embedded import model_folder  # noqa: E402

KERNELS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvcal-tests" / "kernels"
KEPT_SECONDS = 7 * 24 * 3600


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_folder())


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tests' own cache folder. Compiled kernels outlast the tests: the name of each is the digest of all
    that it depends on, and compiling them takes minutes."""
    home = tmp_path_factory.mktemp("cache")
    KERNELS.mkdir(parents=True, exist_ok=True)
    for file in KERNELS.iterdir():
        with suppress(FileNotFoundError):  # another worker's
            if time.time() - file.stat().st_mtime > KEPT_SECONDS:
                file.unlink()
    (home / "kvcal").mkdir()
    (home / "kvcal" / "kernels").symlink_to(KERNELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        yield home


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def lab_script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The names of a script of lab/, by its own name; with words, after it has run as a command of them."""
    lab = Path(__file__).parents[1] / "lab"

    def run(name: str, *words: object) -> dict[str, Any]:
        monkeypatch.syspath_prepend(lab)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        return runpy.run_path(str(lab / f"{name}.py"), run_name="__main__" if words else None)

    return run
