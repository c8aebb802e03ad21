"""Read rows of JSONL files, Parquet files and folders of Hugging Face `datasets` in order, in bounded memory."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_a3po.errors import DataError
from megatron_a3po.prompts.rows import BadRow, RowProblem

if TYPE_CHECKING:
    import pyarrow

_BATCH_ROWS = 1024
MAX_LINE_BYTES = 16 * 1024 * 1024
_DICT_FILE, _STATE_FILE = "dataset_dict.json", "state.json"
_SHARD = re.compile(r"(.+?)-\d+-of-\d+")
_SPLITS = {"train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """One row as it is in its file."""

    file: str
    number: int
    """Number of the line or the row in its file, from 1"""
    content: dict[str, Any] | RowProblem
    raw: Any
    """The content for the list of rejected rows"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A dataset on the disk."""

    size: int
    unit: str
    """The unit of `size`: B, or row"""
    rows: Callable[[], Iterator[tuple[SourceRow, int]]]
    """Yields each row and how much of `size` it takes."""


def open_source(path: Path, split: str | None = None) -> Source:
    """Open a dataset. `split` chooses one of several. Raises DataError if there is no dataset."""
    try:
        if path.is_dir():
            return _open_folder(path, split)
        if path.suffix in (".jsonl", ".json"):
            return _jsonl([path])
        if path.suffix == ".parquet":
            return _parquet([path])
    except (OSError, ValueError, ImportError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(f"data.path = {path} cannot be read: {error}; copy or convert it again") from error
    raise DataError(
        f"data.path = {path}: not a .jsonl or .parquet file, nor a folder that datasets' save_to_disk wrote; convert it"
    )


def _open_folder(path: Path, split: str | None) -> Source:
    if (path / _DICT_FILE).exists() or (path / _STATE_FILE).exists():
        return _saved_to_disk(path, split)
    for suffix, open_files in ((".parquet", _parquet), (".jsonl", _jsonl)):
        files = sorted(path.rglob(f"*{suffix}"))
        chosen = [file for file in files if split is None or split in _names(file.relative_to(path))]
        if chosen := chosen or (files if split == path.name else []):
            _check_one_split(chosen, path, split)
            return open_files(chosen)
        if files:
            names = ", ".join(str(file.relative_to(path)) for file in files[:5])
            raise DataError(f"data.split = {split}: none of {names} in {path} is of this split; name another")
    raise DataError(
        f"data.path = {path}: no *.parquet, no *.jsonl and no dataset of save_to_disk in this folder; check the path"
    )


def _names(file: Path) -> tuple[str, ...]:
    """Return the names of splits that a file may belong to, as on the Hugging Face hub: by its name or its folder."""
    return file.stem, file.name.split("-")[0], file.parent.name


def _check_one_split(files: list[Path], path: Path, split: str | None) -> None:
    """Raise DataError for files of several splits or, if `split` is None, of several configurations."""
    of_file = {file: _split_of(file.relative_to(path)) for file in files}
    if not any(of_file.values()):
        return  # parts of one dataset with any names
    found: dict[tuple[str, str], str] = {}
    for file, name in of_file.items():
        parts = file.relative_to(path).parent.parts
        configuration = "" if split else "".join(f"{part}/" for part in parts if part not in (name, "data"))
        found[configuration, name] = configuration + (name if name and name in _names(file) else file.stem)
    if len(found) > 1:
        raise DataError(
            f"data.split = {split}: {path} has the splits {', '.join(sorted(found.values()))}; name one in data.split, "
            "or its folder or file in data.path"
        )


def _split_of(file: Path) -> str:
    """Return the split that the name of a file tells, or an empty string."""
    if match := _SHARD.fullmatch(file.stem):
        return match[1]
    words = (*re.split("[^a-z]+", file.stem.lower()), file.parent.name)
    return next((word for word in words if word in _SPLITS), "")


def _jsonl(files: list[Path]) -> Source:
    def rows() -> Iterator[tuple[SourceRow, int]]:
        for path in files:
            with path.open("rb") as file:
                for number, (line, num_bytes) in enumerate(_lines(file), 1):
                    row = SourceRow(file=path.name, number=number, content=_parse_line(line), raw=line)
                    yield row, num_bytes

    return Source(size=sum(file.stat().st_size for file in files), unit="B", rows=rows)


def _lines(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield each line, cut to `MAX_LINE_BYTES`, and its full length."""
    while line := file.readline(MAX_LINE_BYTES):
        num_bytes = len(line)
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            num_bytes += len(rest)
        yield line, num_bytes


def _parse_line(line: bytes) -> dict[str, Any] | RowProblem:
    if len(line) >= MAX_LINE_BYTES:
        return RowProblem(BadRow.TOO_LONG, f"{MAX_LINE_BYTES} bytes or more")
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return RowProblem(BadRow.INVALID_UTF8, str(error))
    if not text.strip():
        return RowProblem(BadRow.EMPTY, "an empty line")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowProblem(BadRow.BROKEN_JSON, str(error))
    if not isinstance(content, dict):
        return RowProblem(BadRow.WRONG_TYPE, f"the line holds {type(content).__name__}, not an object")
    return content


def _parquet(files: list[Path]) -> Source:
    import pyarrow.parquet as parquet

    def rows() -> Iterator[tuple[SourceRow, int]]:
        for path in files:
            number = 0
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    for content in _arrow_rows(batch):
                        number += 1
                        yield SourceRow(file=path.name, number=number, content=content, raw=content), 1

    return Source(size=sum(parquet.read_metadata(file).num_rows for file in files), unit="row", rows=rows)


def _saved_to_disk(path: Path, split: str | None) -> Source:
    import datasets

    dataset = datasets.load_from_disk(str(path))
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            known = ", ".join(dataset)
            raise DataError(f"data.split = {split}: {path} has the splits {known}; name one of them")
        dataset = dataset[split]
    name, dataset = path.name, dataset.with_format("arrow")

    def rows() -> Iterator[tuple[SourceRow, int]]:
        number = 0
        for table in dataset.iter(batch_size=_BATCH_ROWS):
            for content in _arrow_rows(table):
                number += 1
                yield SourceRow(file=name, number=number, content=content, raw=content), 1

    return Source(size=len(dataset), unit="row", rows=rows)


def _arrow_rows(table: "pyarrow.Table | pyarrow.RecordBatch") -> list[dict[str, Any] | RowProblem]:
    try:
        rows: list[dict[str, Any] | RowProblem] = list(table.to_pylist())
    except UnicodeDecodeError:  # Arrow accepts any bytes as text
        rows = [_arrow_row(table.slice(index, 1)) for index in range(table.num_rows)]
    return rows


def _arrow_row(row: "pyarrow.Table | pyarrow.RecordBatch") -> dict[str, Any] | RowProblem:
    try:
        content: dict[str, Any] = row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowProblem(BadRow.INVALID_UTF8, str(error))
    return content
