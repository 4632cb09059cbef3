"""Documents that look up: what they hold, and that they share nothing with what is measured."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from kvcal.data import lookup_tasks, lookups, tasks, word_problems
from kvcal.data.lookups import document, lookup_documents
from kvcal.data.pools import PURPOSES, data_inputs, require_unseen, with_calibration
from kvcal.data.sequences import DataSpec, load_sequences

LAB = Path(__file__).parents[2] / "lab"
WORDS = re.compile(r"[a-z]{3,}")


def drawn(count: int) -> list[tuple[str, str]]:
    """Of each document what is given, and what is in the loss."""
    rng = random.Random(0)
    found = [document(rng).spans for _ in range(count)]
    return [tuple("".join(text for text, marked in spans if marked == of) for of in (False, True)) for spans in found]  # type: ignore[misc]


def test_what_is_in_the_loss_stands_before_it() -> None:
    for given, asked in drawn(100):
        marks = re.findall(r"[A-Z]{2}-\d{5}", asked) or re.findall(r"\b[0-9a-f]{4}\b|[a-z]+/[a-z]+", asked)
        assert marks and set(marks) <= set(re.findall(r"[A-Z]{2}-\d{5}|\b[0-9a-f]{4}\b|[a-z]+/[a-z]+", given))


MARK = re.compile(r"[A-Z]{2}-\d{5}")


def test_a_sheet_shows_its_second_form_and_has_its_records_again_in_some_order() -> None:
    orders = set()
    for given, asked in (one for one in drawn(200) if one[0].startswith(tuple(lookups.TITLES))):
        marks = MARK.findall(given + asked)
        first, second = marks[: len(marks) // 2], marks[len(marks) // 2 :]
        assert len(MARK.findall(asked)) == len(first) - lookups.GIVEN and sorted(first) == sorted(second)
        if len(first) > 8:
            kinds = {"same": first, "reversed": first[::-1], "sorted": sorted(first)}
            orders.add(next((kind for kind, order in kinds.items() if order == second), "another"))
    assert orders == {"same", "reversed", "sorted", "another"}


def test_every_form_has_every_value_and_sheets_have_all_forms_and_fields() -> None:
    record = {"id": "BB-10000", "part": "zinc clamp", "hour": "07h30"}
    assert all(value in form(record) for form in lookups.FORMS.values() for value in record.values())
    texts = [given + asked for given, asked in drawn(200)]
    for sign in ("[[entry]]", "- id: ", "<entry ", "<e><id>", "<tr><td>", r" \\", "INSERT INTO", "Entry(", "Its id is"):
        assert any(sign in text for text in texts), sign
    assert {len(re.findall(r"; its ", line)) for text in texts for line in text.splitlines() if "Its id" in line} == {
        2, 3, 4, 5
    }  # fmt: skip
    assert len({len(text) // 1000 for text in texts}) > 4


def test_copies_of_a_listing_are_in_the_loss_and_uses_of_a_glossary_are_in_another_order() -> None:
    moved = []
    for given, asked in drawn(200):
        assert "Copy" not in given
        terms, uses = re.findall(r"^(\w+) stands for", given, re.M), re.findall(r"^The (\w+), which", asked, re.M)
        assert sorted(terms) == sorted(uses)
        moved.append(terms != uses)
    assert sum(moved) > 20


def test_no_form_list_of_words_or_number_is_shared_with_what_is_measured() -> None:
    ours = set(WORDS.findall(" ".join([*lookups.MATERIALS, *lookups.OBJECTS, *lookups.STATES, *lookups.SYLLABLES])))
    lists = [lookup_tasks.COLOURS, lookup_tasks.ANIMALS, lookup_tasks.CITIES, lookup_tasks.GOODS]
    lists += [word_problems.PEOPLE, word_problems.DAYS, tasks.NAMES]
    lab = re.findall(r"^[A-Z]+ = [\[(](.+?)[\])]$", (LAB / "dialogues.py").read_text(), re.MULTILINE | re.DOTALL)
    measured = {word for words in lists for word in WORDS.findall(" ".join(words).lower())}
    measured |= {word for words in lab for quoted in re.findall(r'"([^"]+)"', words) for word in WORDS.findall(quoted)}
    assert "crow" in measured and "carpenter" in measured
    assert not ours & measured
    for given, asked in drawn(50):
        for line in (given + asked).splitlines():
            with pytest.raises(json.JSONDecodeError):
                json.loads(line + " ")
            assert "?" not in line


def test_windows_begin_with_a_document_and_pools_share_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    spec = DataSpec("lookups", 6, 1024, seed=3, min_len=1024)
    found = {purpose: load_sequences(spec, tokenizer, None, purpose) for purpose in PURPOSES}
    again = load_sequences(spec, tokenizer)
    assert again.fingerprint == found["fit"].fingerprint
    starts = (*lookups.TITLES, "Listing", "Terms")
    for data in found.values():
        for tokens_T, mask_T in zip(data.sequences, data.loss_masks, strict=True):
            assert len(tokens_T) == 1024 and 0.05 < float(mask_T.float().mean()) < 0.9
            assert tokenizer.decode(tokens_T, skip_special_tokens=True).lstrip().startswith(starts)
    made_from = with_calibration({}, {"profile": data_inputs(found["fit"])["data.record"]})
    for purpose in PURPOSES[1:]:
        require_unseen(made_from, found[purpose])


def test_a_purpose_draws_its_own_documents() -> None:
    fit, report = ([one.spans for one in lookup_documents(20, 0, purpose)] for purpose in ("fit", "report"))
    assert not set(fit) & set(report)
    assert fit == [one.spans for one in lookup_documents(20, 0, "fit")]
    assert not set(fit) & {one.spans for one in lookup_documents(20, 1, "fit")}
