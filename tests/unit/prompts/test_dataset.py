"""Datasets on the disk: every format gives the same prompts, bad rows are rejected, and nothing leaks or moves."""

import json
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_a3po.errors import DataError
from megatron_a3po.prompts.dataset import DatasetFiles, DatasetLimits, load_dataset, load_evaluation
from megatron_a3po.prompts.encoder import PromptEncoder
from megatron_a3po.prompts.prompts import PromptSet
from tests.unit.prompts.conftest import ByteTokenizer

ROWS = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "level": i % 3} for i in range(20)]
LIMITS: dict[str, Any] = {"max_prompt_tokens": 100, "vocab_size": 256, "max_bad_share": 0.0}
COLUMNS = {"prompt": "prompt", "answer": "answer", "level": "level"}


Load = Callable[..., PromptSet]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Each row as JSON, or as the bytes that it is."""
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    return path


def dataset_files(path: Path, **changes: Any) -> DatasetFiles:
    settings: dict[str, Any] = {"columns": COLUMNS, "encoder": PromptEncoder(ByteTokenizer())}
    return DatasetFiles(path=path, **(settings | changes))


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(path: Path, evaluation: Mapping[str, DatasetFiles] | None = None, **changes: Any) -> PromptSet:
        of_files = {name: changes.pop(name) for name in ("split", "columns", "encoder") if name in changes}
        run_dir = changes.pop("run_dir", tmp_path / "run")
        run_dir.mkdir(exist_ok=True)
        limits = LIMITS | {name: changes.pop(name) for name in LIMITS.keys() & changes.keys()}
        settings: dict[str, Any] = {"num_held_out": 4, "seed": 7, "order_seed": 0, "limits": DatasetLimits(**limits)}
        return load_dataset(dataset_files(path, **of_files), evaluation or {}, run_dir=run_dir, **(settings | changes))

    return load


def stream(prompts: PromptSet, count: int | None = None) -> list[str]:
    return [bytes(prompts.training_prompt(i).token_ids).decode() for i in range(count or len(prompts))]


def rejected(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "quarantine.jsonl").read_text().splitlines()]


def saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def saved_with_splits(path: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets

    other = datasets.Dataset.from_list([{"prompt": "other", "answer": "1", "level": 0}])
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows), "test": other}).save_to_disk(str(path))
    return path


def parquet_shards(path: Path, rows: list[dict[str, Any]]) -> Path:
    (path / "data").mkdir(parents=True)
    for index, part in enumerate((rows[:8], rows[8:])):
        write_parquet(path / "data" / f"train-0000{index}-of-00002.parquet", part)
    write_parquet(path / "data" / "test-00000-of-00001.parquet", [{"prompt": "other", "answer": "1", "level": 0}])
    return path


@pytest.mark.parametrize(
    ("write", "name", "split"),
    [
        (write_parquet, "data.parquet", None),
        (saved, "data", None),
        (saved_with_splits, "data", "train"),
        (parquet_shards, "data", "train"),
    ],
)
def test_every_format_gives_the_same_prompts_in_the_same_order(
    load: Load, tmp_path: Path, write: Callable[..., Path], name: str, split: str | None
) -> None:
    expected = load(write_jsonl(tmp_path / "data.jsonl", ROWS))

    given = load(write(tmp_path / name, ROWS), split=split, run_dir=tmp_path / "other")

    assert stream(given) == stream(expected)
    assert given.held_out[0].row == expected.held_out[0].row
    assert [prompt.token_ids for prompt in given.held_out] == [prompt.token_ids for prompt in expected.held_out]


def test_a_prompt_has_its_answer_and_the_other_columns_that_were_named(load: Load, tmp_path: Path) -> None:
    prompt = load(write_jsonl(tmp_path / "sums.jsonl", ROWS)).training_prompt(0)

    row = ROWS[int(prompt.prompt_id.removeprefix("sums/")) - 1]
    assert (prompt.question, prompt.answer, prompt.row) == (row["prompt"], row["answer"], {"level": row["level"]})


def test_the_held_out_prompts_are_drawn_by_seed_and_never_trained_on(load: Load, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ROWS)
    first, again, other = load(path), load(path), load(path, seed=8, run_dir=tmp_path / "other")

    held_out = [prompt.question for prompt in first.held_out]
    assert len(held_out) == 4 and set(held_out) | set(stream(first)) == {row["prompt"] for row in ROWS}
    assert set(held_out).isdisjoint(stream(first, 3 * len(first)))
    assert stream(again, 40) == stream(first, 40)
    assert [prompt.question for prompt in other.held_out] != held_out


def test_prompts_of_evaluation_datasets_are_left_out_of_training(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ROWS)
    problems = [{"problem": "What is 3 + 3?", "solution": 6}, {"problem": "What is 1 + 2?", "solution": 3}]
    sums = write_parquet(tmp_path / "test.parquet", problems)
    words = write_jsonl(tmp_path / "words.jsonl", [{"prompt": f"word {i}", "answer": i, "level": 0} for i in range(9)])
    boxed = PromptEncoder(ByteTokenizer(), instruction="Box it.")
    evaluation = {
        "sums": dataset_files(sums, columns={"prompt": "problem", "answer": "solution"}, encoder=boxed),
        "words": dataset_files(words, num_prompts=3),
    }

    prompts = load(path, evaluation)

    assert list(prompts.evaluation) == ["held_out", "sums", "words"]
    assert [(prompt.question, prompt.answer, bytes(prompt.token_ids)) for prompt in prompts.evaluation["sums"]] == [
        ("What is 3 + 3?", 6, b"What is 3 + 3?\n\nBox it."),
        ("What is 1 + 2?", 3, b"What is 1 + 2?\n\nBox it."),
    ]
    chosen = [prompt.question for prompt in prompts.evaluation["words"]]
    assert len(chosen) == 3 and chosen == sorted(chosen) and all(text.startswith("word ") for text in chosen)
    held_out = {prompt.question for prompt in prompts.held_out}
    assert set(stream(prompts)) == {row["prompt"] for row in ROWS} - held_out - {"What is 3 + 3?"}
    assert ("1 prompts of sums are left out" in caplog.text) is ("What is 3 + 3?" not in held_out)
    alone = load_evaluation(evaluation, run_dir=tmp_path / "run", seed=7, limits=DatasetLimits(**LIMITS))
    assert alone == {name: prompts.evaluation[name] for name in evaluation}


def test_without_held_out_prompts_everything_is_trained_on(load: Load, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ROWS)
    words = write_jsonl(tmp_path / "words.jsonl", [{"prompt": "word", "answer": 1, "level": 0}])
    prompts = load(path, {"words": dataset_files(words)}, num_held_out=0)
    assert len(prompts) == len(ROWS) and [prompt.question for prompt in prompts.held_out] == ["word"]
    with pytest.raises(DataError, match=r"data\.path.*evaluation\.datasets"):
        load(path, {"same": dataset_files(path)}, num_held_out=0, run_dir=tmp_path / "other")


def test_repeated_rows_and_long_prompts_are_counted_and_left_out(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "megatron_a3po")
    long = [{"prompt": letter * length, "answer": "1", "level": 0} for letter, length in (("x", 100), ("y", 101))]

    prompts = load(write_jsonl(tmp_path / "data.jsonl", [*ROWS * 10, *long]))

    assert "x" * 100 in {*stream(prompts), *(prompt.question for prompt in prompts.held_out)}
    assert len(prompts) + len(prompts.held_out) == 21
    assert "202 rows, 21 prompts; left out: 180 repeats, 1 of over 100 tokens, 0 rejected" in caplog.text
    assert not (tmp_path / "run" / "quarantine.jsonl").exists()


REST = {"answer": "1", "level": 0}
BAD: list[tuple[Any, str]] = [
    *((row, "broken_json") for row in (b'{"prompt": "half', b"NULL", b"[" * 100_000)),
    (b'{"prompt": "\xff\xfe", "answer": "1", "level": 0}', "invalid_utf8"),
    (b'{"prompt": "\\ud800", "answer": "1", "level": 0}', "invalid_utf8"),
    *((row, "wrong_type") for row in (b"[1, 2]", b'"text"')),
    *(({"prompt": prompt, **REST}, "wrong_type") for prompt in (3, {"text": "x"}, [{"role": "user"}], [1, "2"])),
    *((row, "missing_column") for row in ({"prompt": "x", "level": 0}, {"question": "x", **REST})),
    (b"", "empty"),
    *(({"prompt": prompt, **REST}, "empty") for prompt in ("", " \n", None, [], [{"role": "user", "content": " "}])),
    *(({"prompt": "x", "answer": answer, "level": 0}, "empty") for answer in ("", None)),
    *(({"prompt": [65, token], **REST}, "token_outside_vocabulary") for token in (256, -1)),
    ({"prompt": "What is 3 + 3?", "answer": "7", "level": 0}, "contradiction"),
]


def test_bad_rows_are_rejected_with_their_places_and_reasons(load: Load, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [*ROWS, *(row for row, _ in BAD), {"prompt": "last", **REST}])

    prompts = load(path, max_bad_share=0.6)

    assert len(prompts) + len(prompts.held_out) == len(ROWS) + 1
    entries = rejected(tmp_path / "run")
    assert [(entry["source"], entry["line"], entry["reason"]) for entry in entries] == [
        ("data.jsonl", number, reason) for number, (_, reason) in enumerate(BAD, len(ROWS) + 1)
    ]
    assert all(len(entry["row"]) <= 2000 and entry["detail"] for entry in entries)
    with pytest.raises(DataError, match=rf"{len(BAD)} rejected .*contradiction.*data\.max_bad_share"):
        load(path, max_bad_share=0.5, run_dir=tmp_path / "other")


def test_an_id_that_was_used_for_another_prompt_is_bad(load: Load, tmp_path: Path) -> None:
    rows: list[Any] = [{"id": f"a{i}", **row} for i, row in enumerate(ROWS)]
    rows += [rows[3], {"id": "a3", "prompt": "new", "answer": "1", "level": 0}]
    rows += [{"id": True, "prompt": "newer", "answer": "1", "level": 0}, {"id": "", **ROWS[0]}]

    prompts = load(write_jsonl(tmp_path / "data.jsonl", rows), columns={**COLUMNS, "id": "id"}, max_bad_share=0.2)

    assert {prompt.prompt_id for prompt in prompts.held_out} < {f"data/a{i}" for i in range(20)}
    entries = {entry["line"]: entry for entry in rejected(tmp_path / "run")}
    reasons = {line: entry["reason"] for line, entry in entries.items()}
    assert reasons == {22: "duplicate_id", 23: "wrong_type", 24: "wrong_type"}
    assert "the id of line 4" in entries[22]["detail"] and "data/a3" in entries[22]["detail"]


def test_invalid_text_in_parquet_costs_its_row_only(load: Load, tmp_path: Path) -> None:
    text = pyarrow.array([row["prompt"].encode() for row in ROWS[:5]] + [b"\xff\xfe"]).view(pyarrow.string())
    table = pyarrow.table({"prompt": text, "answer": ["1"] * 6, "level": [0] * 6})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")

    assert len(load(tmp_path / "data.parquet", max_bad_share=0.5, num_held_out=1)) == 4
    (entry,) = rejected(tmp_path / "run")
    assert (entry["line"], entry["reason"]) == (6, "invalid_utf8")


def test_a_line_without_end_is_bad_and_the_next_one_is_read(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_a3po.prompts.files.MAX_LINE_BYTES", 100)
    long = {"prompt": "x" * 350, "answer": "1", "level": 0}

    prompts = load(write_jsonl(tmp_path / "data.jsonl", [*ROWS, long, {**ROWS[0], "prompt": "y"}]), max_bad_share=0.1)

    assert len(prompts) + len(prompts.held_out) == 21
    assert [entry["reason"] for entry in rejected(tmp_path / "run")] == ["line_too_long"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "0 rows, 0 prompts"),
        ([{"prompt": "x" * 101, "answer": "1", "level": 0}], "1 of over 100 tokens"),
        (ROWS[:4], r"4 prompts.* data\.num_held_out = 4"),
    ],
)
def test_an_empty_dataset_is_an_error(load: Load, tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(write_jsonl(tmp_path / "data.jsonl", rows))


@pytest.mark.parametrize(
    ("write", "split", "message"),
    [
        (lambda path: path.mkdir(), None, r"data\.path"),
        (lambda path: path.write_bytes(b"PAR1"), None, r"data\.path"),
        (lambda path: (path.mkdir(), (path / "data.parquet").write_bytes(b"PAR1 and no more")), None, r"data\.path"),
        (lambda path: saved_with_splits(path, ROWS), "dev", r"data\.split = dev.* train, test"),
        (lambda path: saved_with_splits(path, ROWS), None, r"data\.split = None.* train, test"),
        (lambda path: parquet_shards(path, ROWS), "dev", r"data\.split = dev.* data/test-00000"),
    ],
)
def test_what_is_no_dataset_is_an_error_that_says_what_is_there(
    load: Load, tmp_path: Path, write: Callable[..., Any], split: str | None, message: str
) -> None:
    write(tmp_path / "data")
    with pytest.raises(DataError, match=message):
        load(tmp_path / "data", split=split)


def shards(*splits: str) -> list[str]:
    return [f"{split}-00000-of-00001.jsonl" for split in splits]


@pytest.mark.parametrize(
    ("names", "split", "splits"),
    [
        (["train.jsonl", "test.jsonl"], None, "test, train"),
        (shards("data/train", "data/test"), None, "test, train"),
        (["train/0000.jsonl", "test/0000.jsonl"], None, "test, train"),
        (["sums_train.jsonl", "sums_test.jsonl"], None, "sums_test, sums_train"),
        (shards("train_sft", "train_gen"), None, "train_gen, train_sft"),
        (["train.jsonl", "extra.jsonl"], None, "extra, train"),
        (shards("main/train", "socratic/train"), None, "main/train, socratic/train"),
        (["main/train/0000.jsonl", "socratic/train/0000.jsonl"], None, "main/train, socratic/train"),
        (shards("main/train", "main/test"), "main", "test, train"),
    ],
)
def test_splits_are_not_mixed(load: Load, tmp_path: Path, names: list[str], split: str | None, splits: str) -> None:
    write_folder(tmp_path / "data", names)
    with pytest.raises(DataError, match=rf"data\.split = {split}: .* {splits};"):
        load(tmp_path / "data", split=split, num_held_out=1)


@pytest.mark.parametrize(
    ("names", "split", "num_files"),
    [
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"], None, 2),
        (["train/0000.jsonl", "train/0001.jsonl"], None, 2),
        (["train_1.jsonl", "train_2.jsonl"], None, 2),
        (["a.jsonl", "b/c.jsonl"], None, 2),
        (["train.jsonl", "test.jsonl"], "test", 1),
        (["0000.jsonl", "0001.jsonl"], "test", 2),
        (shards("algebra/train", "geometry/train"), "train", 2),
    ],
)
def test_all_files_of_a_split_are_read(
    load: Load, tmp_path: Path, names: list[str], split: str | None, num_files: int
) -> None:
    write_folder(tmp_path / "test", names)  # a folder that is called as a split is
    assert len(load(tmp_path / "test", split=split, num_held_out=0)) == 2 * num_files


def write_folder(path: Path, names: list[str]) -> None:
    """Two rows of its own in each file."""
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path / name, [{"prompt": f"{name} {i}", "answer": "1", "level": 0} for i in range(2)])


def test_the_fingerprint_is_that_of_the_training_prompts_and_their_answers(load: Load, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ROWS)
    prompts = load(path)
    again = load(path)
    assert (stream(again, 50), again.fingerprint) == (stream(prompts, 50), prompts.fingerprint)

    expected = stream(prompts)
    path.write_bytes(b"")
    assert stream(prompts) == expected, "a dataset that changes under a run changes nothing"
    changed = [
        load(write_jsonl(path, rows)).fingerprint
        for rows in ([*ROWS[:3], {**ROWS[3], "answer": "7"}, *ROWS[4:]], ROWS[:-1], [ROWS[1], ROWS[0], *ROWS[2:]])
    ]
    assert len({prompts.fingerprint, *changed}) == 4


GSM8K = {"question": "Natalia sold 48 and 1,000 clips. How many?", "answer": "48+1000=<<48+1000=1048>>1048\n#### 1,048"}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve: 2+2. Answer: $Answer", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}


@pytest.mark.parametrize(
    ("schema", "row", "expected"),
    [
        ("gsm8k", GSM8K, ("data/2", GSM8K["question"], "1048")),
        ("dapo_math", DAPO, ("data/9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079", "Solve: 2+2. Answer: $Answer", "4")),
    ],
)
def test_the_schemas_of_gsm8k_and_dapo_math_are_known(
    load: Load, tmp_path: Path, schema: str, row: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    other = json.loads(json.dumps(row).replace("48", "5").replace("2+2", "3+3").replace("9a9b", "0000"))
    path = write_parquet(tmp_path / "data.parquet", [other, row, row])

    prompts = load(path, columns=schema, num_held_out=1)

    everything = [*prompts.held_out, prompts.training_prompt(0)]
    assert expected in [(prompt.prompt_id, prompt.question, prompt.answer) for prompt in everything]


def test_a_gsm8k_solution_without_an_answer_is_bad(load: Load, tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": f"... #### {i}"} for i in range(9)] + [{"question": "q", "answer": "9"}]
    load(write_jsonl(tmp_path / "data.jsonl", rows), columns="gsm8k", max_bad_share=0.1)

    (entry,) = rejected(tmp_path / "run")
    assert entry["reason"] == "wrong_type" and "####" in entry["detail"]


def test_the_rows_of_a_large_dataset_are_not_in_memory(load: Load, tmp_path: Path) -> None:
    """tools/benchmark_dataset.py has the figures for a million."""
    small, large = (peak_bytes_of_loading(load, tmp_path / str(rows), rows) for rows in (1024, 4096))

    # Whatever does not grow with the dataset is in both. A row has 2,000 bytes.
    assert large - small < (4096 - 1024) * 400


def peak_bytes_of_loading(load: Load, folder: Path, rows: int) -> int:
    folder.mkdir()
    content = [{"prompt": f"prompt {i}", "answer": "", "level": f"{i:02000}"} for i in range(rows)]
    path = write_jsonl(folder / "data.jsonl", content)
    tracemalloc.start()
    try:
        load(path, run_dir=folder / "run", columns={"prompt": "prompt", "level": "level"})
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
