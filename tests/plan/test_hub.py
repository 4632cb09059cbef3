"""Plans on a hub: the real client against a server on the loopback. Pushed with a card, pinned by commit, refused with
a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from cli_cases import ran_well, run_kvcal
from evaluation_cases import make_plan, tiny
from hub_server import Hub, hub_server
from report_cases import UNIFORM, row

from kvcal import load_plan, save_plan
from kvcal.errors import ArtifactError, UsageError
from kvcal.plan.plan import Plan, Workload, plan_bytes
from kvcal.stages.evaluate import Evaluation, save_evaluation

PROVENANCE = {"recipe": "a|b <i>`c`\nd", "seed": 0, "libraries": {"torch": "2"}, "texts": ["x"] * 9}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server() as (address, served):
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", address)
        url = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + url[url.index("/{repo_id}") :])
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_none")
        yield served


@pytest.fixture(scope="module")
def plan() -> Plan:
    return replace(make_plan(tiny()), provenance=PROVENANCE)


def test_a_plan_comes_back_as_it_was_pinned_by_its_commit(hub: Hub, plan: Plan) -> None:
    first = plan.push_to_hub("me/plans")
    changed = replace(plan, workload=Workload(3, 700))
    second = changed.push_to_hub("me/plans", message="Another workload")
    assert first != second and re.fullmatch("[0-9a-f]{40}", first)
    assert plan_bytes(load_plan("me/plans", revision=first)) == plan_bytes(plan)
    assert plan_bytes(load_plan("me/plans", second)) == plan_bytes(changed) == plan_bytes(load_plan("me/plans"))
    third = plan.push_to_hub("me/plans", branch="small")
    assert load_plan("me/plans", "small") == plan == load_plan("me/plans", third)
    assert load_plan("me/plans", "main") == changed
    assert sorted(hub.commits["me/plans"][third]) == ["README.md", "plan.safetensors"]


def test_what_was_downloaded_is_read_without_the_hub(hub: Hub, plan: Plan) -> None:
    commit = plan.push_to_hub("me/plans")
    load_plan("me/plans", commit)
    asked = len(hub.asked)
    assert load_plan("me/plans", commit) == plan and len(hub.asked) == asked


def test_the_card_tells_size_measurements_and_provenance(hub: Hub, plan: Plan) -> None:
    named = replace(plan, model=replace(plan.model, id="owner/model"))
    measured = [("plan", ["16-bit", "plan"]), ("KL to 16 bits", ["0", "0.02 ± 0.01"])]
    commit = named.push_to_hub("me/plans", measured=measured)
    card = hub.commits["me/plans"][commit]["README.md"].decode()
    header, body = card.split("---\n")[1:]
    fields = dict(line.split(": ", 1) for line in header.splitlines())
    assert json.loads(fields["base_model"]) == "owner/model" and "kv-cache" in json.loads(fields["tags"])
    assert f"({plan.predicted_bytes} bytes)" in body and f"| {plan.bits_per_value():.3f} |" in body
    assert plan.sha256 not in body and named.sha256 in body
    assert "| plan | KL to 16 bits |\n| --- | --- |\n| 16-bit | 0 |\n| plan | 0.02 ± 0.01 |" in body
    assert "| recipe | a\\|b &lt;i&gt;&#96;c&#96; d |" in body
    assert "| libraries.torch | 2 |" in body and "| texts | 9 items |" in body
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in rows)  # two columns each
    commit = plan.push_to_hub("me/plain")
    plain = hub.commits["me/plain"][commit]["README.md"].decode()
    assert "base_model" not in plain and "Nothing was measured" in plain


def test_errors_name_the_repository_the_revision_and_the_mend(
    hub: Hub, plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = plan.push_to_hub("me/plans")
    hub.create("me/empty")
    refused = {
        ("me/none", None): "no repository on the hub",
        ("me/plans", "f" * 40): "at revision 'ffffffffffffffffffffffffffffffffffffffff': the repository has no such",
        ("me/empty", None): "the repository has no plan.safetensors",
        ("me/a..b", None): "Cannot have",
        (str(tmp_path), "main"): "a file has none",
        ("none.safetensors", "main"): "a file has none",
    }
    for (name, revision), reason in refused.items():
        with pytest.raises(UsageError, match=reason) as error:
            load_plan(name, revision=revision)
        assert error.value.hint
    for name, reason in (("plans", "expected owner/name"), ("others/plans", "403")):
        with pytest.raises(UsageError, match=reason):
            plan.push_to_hub(name)
    hub.commit("me/empty", "main", {"plan.safetensors": b"\x80\x04K\x01."})  # a pickle is not read
    with pytest.raises(ArtifactError):
        load_plan("me/empty")
    with pytest.raises(ArtifactError, match="does not exist"):
        load_plan(Path("me/plans"))
    with monkeypatch.context() as nobody_listens:
        nobody_listens.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(UsageError, match="plan to me/plans: .*refused"):
            plan.push_to_hub("me/plans")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for revision in (None, commit):  # pushed, and never downloaded
        with pytest.raises(UsageError, match="the hub cannot be asked"):
            load_plan("me/plans", revision)
    with pytest.raises(UsageError, match="plan to me/plans: .*offline"):
        plan.push_to_hub("me/plans")


def test_the_command_pushes_what_was_measured(hub: Hub, plan: Plan, tmp_path: Path) -> None:
    path, evaluation = tmp_path / "plan.safetensors", tmp_path / "evaluation.json"
    save_plan(plan, path)
    measured = replace(row("mine", UNIFORM, 0.125, None), plan_sha256=plan.sha256)
    save_evaluation(Evaluation({}, "texts", "0" * 64, 0, (measured,)), evaluation)
    commit = ran_well("push", path, "me/plans", "--evaluation", evaluation, "--json").json["commit"]
    assert "| mine |" in hub.commits["me/plans"][commit]["README.md"].decode()
    assert load_plan("me/plans", commit) == plan
    save_evaluation(Evaluation({}, "texts", "0" * 64, 0, (replace(measured, plan_sha256="1" * 64),)), evaluation)
    done = run_kvcal("push", path, "me/plans", "--evaluation", evaluation)
    assert done.code == 2 and "has no row of" in done.err and "kvcal eval" in done.err
