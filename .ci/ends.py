"""Environments of both ends of the ranges that pyproject.toml allows: ``newest`` releases, or ``oldest``, its floors.

    python .ci/ends.py newest|oldest        makes or updates it, and prints its interpreter

pip resolves what a user's ``pip install`` would, without our lock: the requirements of the package and its extras. The
environment lies in a folder of caches, and has the packages of this interpreter after its own on its path: installed is
only what differs, and torch is not downloaded again. ``KVCAL_TORCH=2.15.0`` installs that version, of several GB. Exit
code 69: the package index cannot be reached.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = "compile,cuda,gguf,lm-eval"
UNREACHABLE = 69  # EX_UNAVAILABLE


def floors() -> list[str]:
    """``name==lowest version`` of every requirement of the package and of the extras; torch is chosen apart."""
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for extra in EXTRAS.split(",") for text in extras[extra])]
    wanted = [Requirement(text) for text in texts]
    found = {f"{one.name}=={part.version}" for one in wanted for part in one.specifier if part.operator == ">="}
    return sorted(one for one in found if not one.startswith("torch=="))


def main(end: str) -> int:
    folder = CACHES / f"kvcal-{end}-py{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        [site] = folder.glob("lib/python*/site-packages")
        base, libraries = Path(sysconfig.get_path("purelib")), site / "nvidia"
        (site / "base.pth").write_text(f"{base}\n")
        if libraries.is_symlink():
            libraries.unlink()
        torch = os.environ.get("KVCAL_TORCH") or version("torch").partition("+")[0]
        versions = ["--upgrade", "--upgrade-strategy", "eager"] if end == "newest" else floors()
        package = ["--no-build-isolation", "--editable", f"{ROOT}[{EXTRAS}]"]
        code = subprocess.run(
            [*pip, "install", "-q", *versions, f"torch=={torch}", *package], stdout=sys.stderr
        ).returncode
        if not libraries.exists():  # NVRTC is looked for in the environment's own folder alone
            libraries.symlink_to(base / "nvidia")
    if code == 0:
        print(python)
    elif subprocess.run([*pip, "index", "versions", "pip"], capture_output=True).returncode:
        print(f"{end}: skipped, the package index cannot be reached", file=sys.stderr)
        return UNREACHABLE
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
