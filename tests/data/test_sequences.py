"""Token sequences: every kind of source, packing, masks, determinism, streaming, and each way to be wrong."""

import gzip
import json
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from kvcal.data import installed, sources
from kvcal.data.pools import PURPOSES
from kvcal.data.sequences import DataSpec, TokenDataset, encode_problem, load_sequences, prefix_ids
from kvcal.data.sources import Source
from kvcal.data.tasks import problems
from kvcal.embedded import model_folder
from kvcal.errors import UsageError

EOS = 0
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def words(num_words: int, first: int = 0) -> str:
    """Text of distinct numbers, ten a line."""
    numbers = [str(i) for i in range(first, first + num_words)]
    return "".join(" ".join(numbers[i : i + 10]) + "\n" for i in range(0, num_words, 10))


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def check_invariants(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    dataset = load_sequences(spec, tokenizer, 4096)
    assert len(dataset.sequences) == len(dataset.loss_masks) == spec.num_samples
    for tokens_T, mask_T in zip(dataset.sequences, dataset.loss_masks, strict=True):
        assert tokens_T.dtype == torch.int64 and mask_T.dtype == torch.bool
        assert tokens_T.shape == mask_T.shape and 2 <= tokens_T.numel() <= spec.seq_len
        assert tokens_T[0] == EOS and not mask_T[0] and mask_T.any()
    assert dataset.num_tokens == sum(len(s) for s in dataset.sequences)
    assert dataset.fingerprint == load_sequences(spec, tokenizer, 4096).fingerprint
    assert "/" not in dataset.description


@pytest.mark.parametrize("source", ["tasks", "tasks:chain"])
def test_tasks(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    check_invariants(DataSpec(source, num_samples=3, seq_len=1200, seed=3), tokenizer)


def test_a_task_sequence_is_the_training_document(tokenizer: PreTrainedTokenizerBase) -> None:
    """<eos> prompt <think> reasoning </think> Answer <eos>, tokenized as a whole, masked up to <think>."""
    dataset = load_sequences(DataSpec("tasks:times", num_samples=5, seq_len=4096), tokenizer)
    for tokens_T, mask_T in zip(dataset.sequences, dataset.loss_masks, strict=True):
        text = tokenizer.decode(tokens_T)
        assert text.startswith("<eos>Times. ") and text.endswith("\n<eos>")
        document = text.removeprefix("<eos>").removesuffix("<eos>")
        assert tokens_T.tolist() == [EOS, *tokenizer(document)["input_ids"], EOS]
        assert tokenizer.decode(tokens_T[~mask_T]).endswith("<think>\n")
        assert tokenizer.decode(tokens_T[mask_T]).startswith("row ")


def test_an_evaluation_prompt_starts_with_eos_and_ends_with_think(tokenizer: PreTrainedTokenizerBase) -> None:
    for task in ("ledger", "chain", "times"):
        problem = problems(task, 1, seed=0)[0]
        tokens_T = encode_problem(problem, tokenizer)
        assert tokens_T.dtype == torch.int64 and tokens_T.dim() == 1
        assert tokenizer.decode(tokens_T) == f"<eos>{problem.prompt}<think>\n"
        assert tokens_T.tolist() == [EOS, *tokenizer(problem.text)["input_ids"][: len(tokens_T) - 1]]


def test_a_text_file_is_dealt_in_pieces_that_grow(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A pool's windows together are its pieces, each after the separator; all pieces are the file."""
    text = "".join(f"line {i} of the file\n" for i in range(3000))
    (tmp_path / "a.txt").write_text(text)
    pieces = {
        purpose: [item.text for item in sources.read_source(Source(str(tmp_path / "a.txt")), 0, purpose)]  # type: ignore[union-attr]
        for purpose in PURPOSES
    }
    in_turn = [piece for round_ in zip_longest(*pieces.values()) for piece in round_ if piece]
    assert sorted(line for piece in in_turn for line in piece.splitlines()) == sorted(text.splitlines())
    for purpose, own in pieces.items():
        assert [len(piece) >> 10 for piece in own[:4]] == [1, 2, 4, 8]
        tokens = [token for piece in own for token in [*tokenizer(piece)["input_ids"], EOS]]
        spec = DataSpec(str(tmp_path / "a.txt"), num_samples=len(tokens) // 99, seq_len=100)
        dataset = load_sequences(spec, tokenizer, None, purpose)
        joined = torch.cat([tokens_T[1:] for tokens_T in dataset.sequences]).tolist()
        assert joined == tokens[: len(joined)]
        assert all(mask_T.tolist() == [False] + [True] * 99 for mask_T in dataset.loss_masks)


def marked(num_marks: int, first: int = 0) -> str:
    """Text in which every mark stands once."""
    return "".join(f"mark {i:06d} and some words to fill the line\n" for i in range(first, num_marks))


def load_any(spec: DataSpec, tokenizer: PreTrainedTokenizerBase) -> TokenDataset:
    """The sequences of the first pool that holds enough: a file of one record has only one."""
    refused = None
    for purpose in PURPOSES:
        try:
            return load_sequences(spec, tokenizer, None, purpose)
        except UsageError as error:
            if "in the pool" not in error.message:
                raise
            refused = error
    assert refused is not None
    raise refused


@pytest.mark.parametrize("name", ["a.json", "a.parquet", "a.txt.gz", "a.jsonl.gz"])
def test_the_same_text_gives_the_same_tokens_from_every_format(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    import datasets

    text = words(20_000)  # longer than what a table's document is cut at
    assert len(text) > sources.LONG_CHARS
    reference = tmp_path / "reference.txt"
    reference.write_text(text)
    path = tmp_path / name
    line = json.dumps({"text": text}) + "\n"
    if name == "a.parquet":
        datasets.Dataset.from_dict({"text": [text]}).to_parquet(str(path))
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress((text if "txt" in name else line).encode()))
    else:
        path.write_text(text if "txt" in name else line)
    spec = DataSpec(str(path), num_samples=4, seq_len=128)
    expected = load_sequences(replace(spec, source=str(reference)), tokenizer)
    assert load_sequences(spec, tokenizer).fingerprint == expected.fingerprint


def test_a_folder_mixes_its_files_and_ignores_what_is_no_data(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    names = [f"person {number:02d}" for number in range(sources.MAX_OPEN_FILES + 4)]
    for name in names:
        (tmp_path / f"{name}.txt").write_text(f"this is the long story of {name} and nobody else\n" * 200)
    (tmp_path / "README.md").write_text("about the books")
    (tmp_path / "COPYING").write_text("a licence")
    (tmp_path / ".hidden.txt").write_text("hidden")
    spec = DataSpec(str(tmp_path), num_samples=60, seq_len=128)
    dataset = load_sequences(spec, tokenizer)
    text = "".join(tokenizer.decode(tokens_T) for tokens_T in dataset.sequences)
    assert sum(f"story of {name}" in text for name in names) > sources.MAX_OPEN_FILES
    assert "about" not in text and "licence" not in text and "hidden" not in text
    check_invariants(spec, tokenizer)


def test_named_columns(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    records = [{"text": "wrong", "body": f"right {i}", "problem": f"p{i}", "solution": f"s{i}"} for i in range(99)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    packed = load_sequences(DataSpec(f"{source},columns=body", num_samples=2, seq_len=32), tokenizer)
    assert all("right" in tokenizer.decode(tokens_T) for tokens_T in packed.sequences)
    pairs = load_sequences(DataSpec(f"{source},columns=problem+solution", num_samples=9), tokenizer)
    for tokens_T, mask_T in zip(pairs.sequences, pairs.loss_masks, strict=True):
        number = tokenizer.decode(tokens_T).split("\n")[0].removeprefix("<eos>p")
        assert tokenizer.decode(tokens_T[mask_T]) == f"s{number}<eos>"


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    tokenizer.chat_template = template
    return tokenizer


def one_chat(folder: Path, messages: list[dict[str, str]], template: str = TEMPLATE) -> tuple[str, str]:
    """The text of a chat, and the part of it that is in the loss."""
    tokenizer = chat_tokenizer(template)
    source = write_jsonl(folder / "chat.jsonl", [{"messages": messages}])
    data = load_any(DataSpec(source, num_samples=1, seq_len=64), tokenizer)
    return tokenizer.decode(data.sequences[0]), tokenizer.decode(data.sequences[0][data.loss_masks[0]])


def test_chat_messages_go_through_the_template(tmp_path: Path) -> None:
    """All that the assistant says is in the loss; all text, where it is silent or the template rewrites."""
    user, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    asked, answered = "<user>hi</user>\n", "<assistant>hello</assistant>\n"
    said = answered.removeprefix("<assistant>")
    assert one_chat(tmp_path, [user, reply]) == (asked + answered, said)
    assert one_chat(tmp_path, [user, reply] * 2 + [user]) == ((asked + answered) * 2 + asked, said * 2)
    assert one_chat(tmp_path, [user]) == (asked, asked.removeprefix("<"))
    rewriting = "{{ messages | length }}" + TEMPLATE
    whole, target = one_chat(tmp_path, [user, reply] * 2, rewriting)
    assert whole == "4" + (asked + answered) * 2 and target == whole[1:]


def test_chats_ask_for_docstrings_and_for_code() -> None:
    found = list(islice(installed.installed_chats(), 12))
    for talk in found:
        assert [one["role"] for one in talk] == ["user", "assistant"] * (len(talk) // 2)
        assert talk[0]["content"].startswith(("What is `def ", "What is `class ", "What is `async def "))
        assert all("def " in one["content"] or "class " in one["content"] for one in talk[3::4])
    assert sum(len(talk) > 2 for talk in found) >= 6
    data = load_sequences(DataSpec("python:chat", 2, 512, min_len=64), chat_tokenizer())
    assert data.kinds == ("python:chat",) * 2
    assert all(8 < mask.sum() < mask.numel() for mask in data.loss_masks)  # the assistant's words alone


def test_a_form_feed_moves_no_line_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own lines end at newlines alone."""
    doc = "Adds one to x, whatever x is, and gives the sum back to the caller, who asked for it."
    code = "\x0c\ndef first(x):\n    return x\n\n" + f'def second(x):\n    """{doc}"""\n    return x + 1\n'
    monkeypatch.setattr(installed, "_code", lambda name, package, pool: iter([code]))
    [talk] = installed._chats("p", None, None)
    assert [message["content"] for message in talk] == ["What is `def second(x)` for?", doc]


def test_records_are_cut_at_seq_len_and_skipped_when_nothing_is_left_to_predict(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    records = [{"question": "q " * n, "answer": "a " * 40} for n in (*range(100, 130), 5)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    dataset = load_any(DataSpec(source, num_samples=1, seq_len=30), tokenizer)
    assert dataset.sequences[0].numel() == 30 and "a" in tokenizer.decode(dataset.sequences[0])
    with pytest.raises(UsageError, match="holds [01] sequences"):
        load_any(DataSpec(source, num_samples=2, seq_len=30), tokenizer)


def test_short_sequences_are_passed_over(tokenizer: PreTrainedTokenizerBase) -> None:
    long = load_sequences(DataSpec(num_samples=4, seq_len=2048, min_len=1500), tokenizer)
    assert all(1500 <= tokens_T.numel() <= 2048 for tokens_T in long.sequences)
    assert long.description == "tasks (pool fit): 4 sequences of 1500 to 2048 tokens, seed 0"
    equal = load_sequences(DataSpec("tasks:ledger", num_samples=2, seq_len=1500, min_len=1500), tokenizer)
    assert equal.num_tokens == 3000 and "2 sequences of 1500 tokens" in equal.description
    with pytest.raises(UsageError) as caught:
        load_sequences(DataSpec("tasks:times", num_samples=1, seq_len=4000, min_len=3000), tokenizer)
    assert_says(caught.value, ["seq_len = 4000 and min_len = 3000", "lower num_samples"])
    with pytest.raises(UsageError) as caught:
        load_sequences(DataSpec("tasks:ledger", num_samples=1, seq_len=8), tokenizer)
    assert_says(caught.value, ["raise seq_len where replies begin after it"])


def test_the_opening_tokens_are_the_tokenizers_own() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = chat_tokenizer()
    assert prefix_ids(tokenizer) == []  # its bos, which it does not add itself, begins no conversation
    for template in (None, "{{ bos_token }}" + TEMPLATE, "{{ raise_exception('no chat') }}"):
        tokenizer.chat_template = template
        assert prefix_ids(tokenizer) == [EOS]
    own = TemplateProcessing(single="<pad> <eos> $A <eos>", special_tokens=[("<pad>", 1), ("<eos>", 0)])
    tokenizer.backend_tokenizer.post_processor = own
    assert prefix_ids(tokenizer) == [1, 0]
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = tokenizer.bos_token = None
    assert prefix_ids(tokenizer) == []


def test_the_fingerprint_is_the_same_in_every_process_and_place(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Golden values: neither the folder's path nor the order in which its files were made may enter."""
    prints, descriptions = [], []
    for place, indices in (("one", [0, 1, 2, 3, 4, 5]), ("two", [4, 2, 0, 5, 3, 1])):
        folder = tmp_path / place / "data"
        folder.mkdir(parents=True)
        for i in indices:
            (folder / f"{i}.txt").write_text(words(400, first=1000 * i))
        dataset = load_sequences(DataSpec(str(folder), num_samples=4, seq_len=100, seed=5), tokenizer)
        prints.append(dataset.fingerprint)
        descriptions.append(dataset.description)
    assert prints == ["68bf35fcaf607831399d64d9b850b9d0608185e825bd257a210092b1478feeae"] * 2
    assert descriptions == ["data (pool fit): 4 sequences of at most 100 tokens, seed 5"] * 2
    tasks = load_sequences(DataSpec("tasks", num_samples=4, seq_len=512, seed=5), tokenizer)
    assert tasks.fingerprint == "330d4008020fc30e8fdbe4111c7bbef765cc2ad4f2a55daef75f8038108e25b2"


def test_only_what_is_needed_is_read(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 samples of 100 tokens from 20,000 lines: the stream is left after the pool's 16 windows."""
    (tmp_path / "a.txt").write_text(words(200_000))
    num_read = 0
    stream = sources._stream

    def counting(kind: str, file: Path) -> Any:
        nonlocal num_read
        for record in stream(kind, file):
            num_read += 1
            yield record

    monkeypatch.setattr(sources, "_stream", counting)
    load_sequences(DataSpec(str(tmp_path / "a.txt"), num_samples=4, seq_len=100), tokenizer)
    assert 0 < num_read < 1000


def test_an_impossible_spec_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        DataSpec(min_len=1025)
    assert_says(caught.value, ["min_len = 1025", "1024"])


def assert_says(error: UsageError, words_expected: list[str]) -> None:
    said = f"{error.message} hint: {error.hint}"
    assert error.hint
    for word in words_expected:
        assert word in said, said


BAD_SOURCES: dict[str, tuple[bytes | None, str, list[str]]] = {
    "missing.txt": (None, "", ["no such file"]),
    "table.csv": (b"a,b\n", "", ["'.csv'", ".jsonl", ".parquet"]),
    "empty.txt": (b"", "", ["is empty"]),
    "blank.jsonl": (b"\n\n", "", ["blank.jsonl"]),
    "broken.jsonl": (b'{"text": "a"}\n{"text"\n', "", ["cannot be read as json", "broken.jsonl"]),
    "latin1.txt": (b"caf\xe9\n", "", ["cannot be read as text", "utf-8"]),
    "columns.jsonl": (b'{"body": "x", "id": 1}\n', "", ["messages, text", "body, id"]),
    "unknown.jsonl": (b'{"body": "x", "id": 1}\n', ",columns=txt", ["'txt'", "body, id"]),
    "number.jsonl": (b'{"text": 5}\n', "", ["record 0", "int"]),
    "split.txt": (b"x", ",split=test", ["split", "'test'", "hub"]),
    "chat.jsonl": (b'{"messages": [{"role": "user", "content": "hi"}]}\n', "", ["no chat template"]),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_a_bad_source_is_named_with_what_is_allowed(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    content, option, words_expected = BAD_SOURCES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    spec = DataSpec(f"{tmp_path / name}{option}", num_samples=2, seq_len=64)
    with pytest.raises(UsageError) as caught:
        load_any(spec, tokenizer)
    assert_says(caught.value, [*words_expected, name])


def test_a_folder_without_data_or_with_mixed_data_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "table.csv").write_text("a,b\n")
    with pytest.raises(UsageError, match="no supported file"):
        load_sequences(DataSpec(str(tmp_path)), tokenizer)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(UsageError, match="1 json, 1 text"):
        load_sequences(DataSpec(str(tmp_path)), tokenizer)


def test_seq_len_beyond_the_context_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    load_sequences(DataSpec(num_samples=1, seq_len=4096), tokenizer, max_context=4096)
    with pytest.raises(UsageError) as caught:
        load_sequences(DataSpec(num_samples=1, seq_len=4097), tokenizer, max_context=4096)
    assert_says(caught.value, ["seq_len = 4097", "--seq-len 4096"])


def test_a_chat_template_that_refuses_names_the_record(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(UsageError) as caught:
        load_any(DataSpec(source), chat_tokenizer("{{ raise_exception('no user first') }}"))
    assert_says(caught.value, ["record 0", "no user first"])


def test_a_hub_id_that_cannot_be_reached_is_a_usage_error(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UsageError) as caught:
        load_sequences(DataSpec("nobody/no-such-data"), tokenizer)
    assert_says(caught.value, ["nobody/no-such-data", "no file or folder", "network"])
