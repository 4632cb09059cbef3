"""A version of an engine in which plans cannot be served is refused before serving, with the reason."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from cli_cases import run_kvcal

from kvcal.commands import doctor as doctor_command
from kvcal.engines import support
from kvcal.engines.sglang import PLAN_VARIABLE, plugin
from kvcal.engines.support import TESTED, refusal, require_version
from kvcal.errors import UnsupportedModel, UsageError

LACKS = "lacks what the plug-in uses: No module named 'vllm'"


def installed(monkeypatch: pytest.MonkeyPatch, version: str, is_whole: bool = True) -> None:
    """vLLM of this version, which has all that the plug-in imports, or nothing."""
    monkeypatch.setattr(doctor_command, "_packages", lambda: iter(()))
    for module in (support, doctor_command.metadata):
        monkeypatch.setattr(module, "version", lambda name: version)
    for name in support.PLUGIN if is_whole else ():
        monkeypatch.setitem(sys.modules, f"kvcal.engines.vllm.{name}", ModuleType(name))


@pytest.mark.parametrize(
    ("version", "is_whole", "reason"),
    [("0.31.4", True, "version 0.31.4, expected 0.32.0 or newer"), ("0.33.0", False, f"version 0.33.0 {LACKS}")],
)
def test_what_cannot_serve_plans_is_refused(
    version: str, is_whole: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version, is_whole)
    assert refusal("vllm") == reason
    with pytest.raises(UnsupportedModel, match=f"plans cannot be served in vllm: {reason}") as refused:
        require_version("vllm")
    assert refused.value.exit_code == 4 and refused.value.hint == "tested versions: 0.32.0, 0.33.0"
    done = run_kvcal("doctor", "--engine", "vllm", "--json")
    found = {one["name"]: one for one in done.json["findings"]}["plans in vllm"]
    assert (done.code, found["status"], found["note"]) == (4, "refused", reason) and reason in done.err


@pytest.mark.parametrize(
    ("version", "note"), [("0.32.0+cpu", ""), ("0.40.0", "not tested; tested versions: 0.32.0, 0.33.0")]
)
def test_doctor_is_content_with_a_version_that_has_all_parts(
    version: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version)
    require_version("vllm")
    done = run_kvcal("doctor", "--engine", "vllm", "--json")
    found = {one["name"]: one for one in done.json["findings"]}["plans in vllm"]
    assert (done.code, found["status"], found["note"]) == (0, "ok", note)


def test_doctor_says_whether_prompts_and_answers_can_have_an_engine_each(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.33.0")

    def found() -> tuple[str, str]:
        findings = run_kvcal("doctor", "--engine", "vllm", "--json").json["findings"]
        one = {one["name"]: one for one in findings}["blocks of another vllm"]
        return one["status"], one["note"]

    assert found() == ("refused", f"version 0.33.0 {LACKS}")
    monkeypatch.setitem(sys.modules, "kvcal.engines.vllm.nixl", ModuleType("nixl"))
    assert found() == ("ok", "")
    version_of = doctor_command.metadata.version

    def without_nixl(name: str) -> str:
        if name == "nixl":
            raise doctor_command.metadata.PackageNotFoundError
        return version_of(name)

    monkeypatch.setattr(doctor_command.metadata, "version", without_nixl)
    assert found() == ("absent", "needed by kvcal serve-args --role: pip install nixl")


def test_an_engine_without_a_plug_in_is_a_wrong_argument() -> None:
    text = f"no plug-in for the engine 'vlm'; allowed: {', '.join(TESTED)}"
    with pytest.raises(UsageError, match=text):
        refusal("vlm")
    done = run_kvcal("doctor", "--engine", "vlm")
    assert done.code == 2 and text in done.err


@pytest.mark.parametrize("value", [None, ""])
def test_sglang_is_left_as_it_is_without_a_plan(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(PLAN_VARIABLE, value)
    monkeypatch.setitem(sys.modules, "sglang", None)  # its import fails
    plugin.register()
