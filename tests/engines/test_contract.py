"""What an installed engine lacks is named, and refused before serving."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from cli_cases import run_kvcal

from kvcal.commands import doctor as doctor_command
from kvcal.engines import contract
from kvcal.engines.contract import CONTRACTS, Contract, Part, missing_parts, require_parts
from kvcal.engines.sglang import PLAN_VARIABLE, plugin
from kvcal.errors import UnsupportedModel, UsageError

OURS = "kvcal.engines.block"
GOOD = Part(OURS, "BlockLayout.offset", ("side",))
MISSING = {
    "module": (Part("kvcal.engines.nothing", "Attention"), "kvcal.engines.nothing.Attention (No module named"),
    "class": (Part(OURS, "Attention"), f"{OURS}.Attention (module"),
    "method": (Part(OURS, "BlockLayout.offsets"), f"{OURS}.BlockLayout.offsets (type object"),
    "parameter": (Part(OURS, "BlockLayout.offset", ("side", "row")), "BlockLayout.offset without the parameter row"),
    "field": (Part(OURS, "BlockLayout", fields=("layer", "kind")), "BlockLayout without the field kind"),
}


def installed(monkeypatch: pytest.MonkeyPatch, version: str, *parts: Part) -> None:
    """An engine of this version, whose contract is these parts of kvcal's own."""
    for module in (contract, doctor_command):
        monkeypatch.setattr(module, "version", lambda name: version)
    monkeypatch.setitem(CONTRACTS, "vllm", Contract("0.32.0", ("0.32.0",), parts))


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, text = MISSING[name]
    installed(monkeypatch, "0.33.0", GOOD, part)
    (found,) = missing_parts("vllm")
    assert text in found
    with pytest.raises(UnsupportedModel, match="vllm 0.33.0, which lacks") as refused:
        require_parts("vllm")
    assert refused.value.exit_code == 4


def test_nothing_is_missing_of_fields_methods_and_what_init_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Part("kvcal.engines.step", "PagedStep", ("shard",), ("scratch", "bind"))
    installed(monkeypatch, "0.32.0+cpu", GOOD, Part(OURS, "BlockLayout", fields=("layer", "block_bytes")), step)
    assert missing_parts("vllm") == []
    require_parts("vllm")


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.31.4", GOOD)
    assert missing_parts("vllm") == ["version 0.31.4, expected 0.32.0 or newer"]


def test_every_part_of_the_contract_names_a_module_of_the_engine() -> None:
    for engine, given in CONTRACTS.items():
        assert all(part.module.split(".")[0] == engine for part in given.parts)
        assert len(set(given.parts)) == len(given.parts) and given.oldest == given.tried[0]
    assert dataclasses.is_dataclass(Part)


def test_doctor_names_what_the_engine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.33.0", *(part for part, _ in MISSING.values()))
    monkeypatch.setattr(doctor_command, "_packages", lambda: iter(()))
    done = run_kvcal("doctor", "--engine", "vllm", "--json")
    found = {one["name"]: one for one in done.json["findings"]}["plans in vllm"]
    assert done.code == 4 and found["status"] == "refused"
    assert all(text in found["note"] and text in done.err for _, text in MISSING.values())


def test_doctor_is_content_with_an_engine_that_has_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "_packages", lambda: iter(()))
    for version, note in (("0.32.0+cpu", ""), ("0.40.0", "all parts are there; tried versions: 0.32.0")):
        installed(monkeypatch, version, GOOD)
        done = run_kvcal("doctor", "--engine", "vllm", "--json")
        found = {one["name"]: one for one in done.json["findings"]}["plans in vllm"]
        assert (done.code, found["status"], found["note"]) == (0, "ok", note)


@pytest.mark.parametrize(("engine", "text"), [("vlm", "no plug-in for the engine 'vlm'; allowed: vllm, sglang")])
def test_an_engine_without_a_plug_in_is_a_wrong_argument(engine: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        missing_parts(engine)
    done = run_kvcal("doctor", "--engine", engine)
    assert done.code == 2 and text in done.err


@pytest.mark.parametrize("value", [None, ""])
def test_sglang_is_left_as_it_is_without_a_plan(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(PLAN_VARIABLE, value)
    monkeypatch.setitem(sys.modules, "sglang", None)  # its import fails
    plugin.register()
