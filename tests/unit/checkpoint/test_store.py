"""Checkpoint folders: whole or not there, whatever ends the save; damage is found and named; the right ones stay."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_a3po.checkpoint.store import CheckpointStore, Finding, newest_valid, steps_to_delete, verdict
from megatron_a3po.errors import CheckpointError
from megatron_a3po.runtime.manifest import (
    ContentError,
    FileRecord,
    UnreadableError,
    check,
    describe,
    read_manifest,
    step_of,
)

NUM_RANKS = 3
FACTS = {"tensor": 2, "pipeline": 1}


class Killed(BaseException):
    """The process ends here: nothing of the code under test runs after it."""


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of saves would wait for the disk; what is tested is that, and when, it is asked."""

    def fsync(descriptor: int) -> None:
        os.fstat(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def make_store(root: Path, keep_last: int = 2, keep_every: int = 0) -> CheckpointStore:
    root.parent.mkdir(exist_ok=True)
    return CheckpointStore(root, keep_last=keep_last, keep_every=keep_every)


def write_files(folder: Path, step: int) -> None:
    for rank in range(NUM_RANKS):
        (folder / f"__{rank}_0.distcp").write_bytes(f"weights of rank {rank} at step {step}".encode() * 9)
    (folder / ".metadata").write_bytes(b"names")
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "buffer.jsonl").write_bytes(b"{}\n")


def save(store: CheckpointStore, step: int, facts: dict[str, Any] = FACTS) -> Path:
    folder = store.begin(step)
    with store.saving(step):
        write_files(folder, step)
        records = {k: v for rank in range(NUM_RANKS) for k, v in describe(folder, rank, NUM_RANKS).items()}
    return store.commit(step, records, facts)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_saved_checkpoint_is_valid_and_tells_its_step_and_facts(root: Path) -> None:
    store = make_store(root)
    folder = save(store, 20)

    assert names(root) == ["latest", "step_00000020"] and folder == root / "step_00000020"
    assert (root / "latest").read_text() == "step_00000020\n"
    manifest = check(folder)
    assert (manifest.step, manifest.facts) == (20, FACTS)
    assert list(manifest.files) == [".metadata", *(f"__{i}_0.distcp" for i in range(3)), "rollouts/buffer.jsonl"]
    choice = newest_valid(store.candidates())
    assert (choice.folder, choice.manifest, choice.rejected) == (folder, manifest, {})


def test_facts_are_read_as_json_makes_them(root: Path) -> None:
    folder = save(make_store(root), 20, {"by_rank": {10: (1, 2), 9: 0.1}, "text": "ü", "none": None})

    assert check(folder).facts == {"by_rank": {"10": [1, 2], "9": 0.1}, "text": "ü", "none": None}


def test_the_ranks_shares_are_disjoint_and_make_up_the_whole(tmp_path: Path) -> None:
    write_files(tmp_path, 1)
    shares = [describe(tmp_path, rank, 4) for rank in range(4)]

    assert sum(len(share) for share in shares) == 5
    assert {name: record for share in shares for name, record in share.items()} == describe(tmp_path)
    assert describe(tmp_path)[".metadata"] == FileRecord(
        5, "aeb24056810d3d1f1e8afee61a0bc0028556eb0fb49a215ae5eb1b970cad0315"
    )


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, at_call: int, error: BaseException) -> Iterator[list[str]]:
    """The call of that number to any of these functions raises instead; the list has the names of those called."""
    called: list[str] = []

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            called.append(function.__name__)
            if len(called) == at_call + 1:
                raise error
            return function(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
            patch.setattr(os, name, wrapped(getattr(os, name)))
        yield called


def number_of_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    store = make_store(folder / "checkpoints", keep_last=1)
    save(store, 10)
    (store.unfinished_folder(15)).mkdir()
    with failing(monkeypatch, -1, Killed()) as called:
        save(store, 20)
    assert set(called) == {"fsync", "rename", "replace", "mkdir", "rmdir", "unlink"}
    return len(called)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Killed()], ids=["full", "killed"])
def test_a_save_that_ends_at_any_call_leaves_valid_checkpoints_only_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    chosen: list[int] = []
    messages: list[tuple[str, str]] = []
    without_message: set[str] = set()
    for call in range(number_of_calls(tmp_path / "count", monkeypatch)):
        root = tmp_path / f"at_{call}" / "checkpoints"
        store = make_store(root, keep_last=1)
        save(store, 10)
        store.unfinished_folder(15).mkdir()  # of an earlier save that was killed
        with failing(monkeypatch, call, error) as called:
            try:
                save(store, 20)
                without_message.add(called[call])
            except CheckpointError as seen:
                messages.append((str(seen), store.candidates()[0].name))
            except Killed:
                pass

        choice = newest_valid(store.candidates())
        assert choice.manifest is not None and choice.rejected == {}
        chosen.append(choice.manifest.step)
        for folder in store.candidates():
            check(folder)
        save(store, 30)
        assert names(root) == ["latest", "step_00000030"]
    assert set(chosen) == {10, 20}
    for message, newest in messages:
        assert all(text in message for text in ("step 20", "No space left", f"{newest} was saved whole", "keep_last"))
    if isinstance(error, Killed):
        assert chosen == sorted(chosen) and not messages and not without_message
    else:
        # Clearing away old folders is tried again at the next save; the folder of all checkpoints is there already.
        assert without_message == {"unlink", "rmdir", "mkdir"}


def test_everything_is_on_the_disk_before_the_folder_gets_its_name_and_that_before_anything_is_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(root, keep_last=1)
    save(store, 10)
    events: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor: int) -> None:
        events.append(("fsync", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), root)))
        real["fsync"](descriptor)

    def renaming(name: str) -> Callable[[Path, Path], None]:
        def rename(source: Path, target: Path) -> None:
            events.append(("rename", os.path.relpath(target, root)))
            real[name](source, target)

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renaming("rename"))
    monkeypatch.setattr(os, "replace", renaming("replace"))
    unfinished = os.path.relpath(store.unfinished_folder(20), root)
    folder = save(store, 20)

    named = events.index(("rename", folder.name))
    before, after = events[:named], events[named + 1 :]
    files = [".metadata", "__0_0.distcp", "rollouts/buffer.jsonl", ".manifest.json.unfinished"]
    assert all(("fsync", f"{unfinished}/{name}") in before for name in [*files, "rollouts"])
    assert before.index(("rename", f"{unfinished}/manifest.json")) < len(before) - 1
    assert before[-2:] == [("fsync", unfinished), ("fsync", f"{unfinished}/rollouts")]
    assert ("fsync", "..") in before, "the name `checkpoints` itself"
    assert after == [
        ("fsync", "."),
        ("fsync", ".latest.unfinished"),
        ("rename", "latest"),
        ("fsync", "."),
        ("rename", ".step_00000010.deleted"),
        ("fsync", "."),
    ]


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "__1_0.distcp").read_bytes())
    content[17] ^= 4
    (folder / "__1_0.distcp").write_bytes(content)


def other_step(folder: Path) -> None:
    folder.rename(folder.with_name("step_00000099"))


def edit_manifest(folder: Path, **values: Any) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(content | values))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "__1_0.distcp has other content": flip_a_bit,
    "__1_0.distcp has 7 bytes instead of 252": lambda folder: os.truncate(folder / "__1_0.distcp", 7),
    "__1_0.distcp is missing": lambda folder: (folder / "__1_0.distcp").unlink(),
    "rollouts/buffer.jsonl is missing": lambda folder: shutil.rmtree(folder / "rollouts"),
    "__1_0.distcp is missing; and 2 files more": lambda folder: (
        shutil.rmtree(folder / "rollouts"),
        [path.unlink() for path in folder.iterdir() if path.name != "manifest.json"],
    ),
    "manifest.json is missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json is damaged": lambda folder: os.truncate(folder / "manifest.json", 100),
    "damaged (its own checksum differs)": lambda folder: edit_manifest(folder, step=21),
    "manifest.json is that of step 20": other_step,
    "manifest.json is missing, so": lambda folder: [
        (folder / "manifest.json").unlink(),
        (folder / "manifest.json").mkdir(),
    ],
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named_and_the_newest_whole_checkpoint_is_found_whatever_latest_says(
    root: Path, message: str
) -> None:
    store = make_store(root)
    older = save(store, 10)
    DAMAGE[message](save(store, 20))
    (root / "latest").write_bytes(b"\x00\xff")

    choice = newest_valid(store.candidates())
    assert choice.folder == older and choice.manifest == check(older)
    [(folder, reason)] = choice.rejected.items()
    assert message in reason and str(folder) in reason and "resume" in reason


def failing_reads(monkeypatch: pytest.MonkeyPatch, name: str, error: OSError) -> None:
    for method in ("open", "stat"):
        original = getattr(Path, method)

        def fail(path: Path, *arguments: Any, original: Any = original, **keywords: Any) -> Any:
            if path.name == name:
                raise error
            return original(path, *arguments, **keywords)

        monkeypatch.setattr(Path, method, fail)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["step_00000020", "manifest.json", "__1_0.distcp"])
def test_what_cannot_be_read_now_is_not_passed_over_for_an_older_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    store = make_store(root)
    save(store, 10)
    candidates = [save(store, 20), *store.candidates()]
    failing_reads(monkeypatch, name, OSError(number, os.strerror(number)))

    with pytest.raises(UnreadableError, match=rf"{name}.*: cannot be read .*{os.strerror(number)}.*mounted"):
        newest_valid(candidates)
    if name == "step_00000020":
        with pytest.raises(UnreadableError, match=r"checkpoints: cannot be read .*mounted"):
            store.candidates()


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(root: Path) -> None:
    store = make_store(root)
    save(store, 10)
    edit_manifest(save(store, 20), format=2)

    with pytest.raises(UnreadableError, match=r"has format 2, and .* reads up to 1; resume with the version"):
        newest_valid(store.candidates())


def findings(folders: list[Path]) -> list[Finding]:
    """Of one rank on each node, which see these folders as the same one."""
    found = []
    for rank, folder in enumerate(folders):
        error = None
        try:
            check(folder, rank, len(folders))
        except CheckpointError as raised:
            error = raised
        found.append(Finding.of(error, rank))
    return found


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_that_some_nodes_do_not_see_is_a_filesystem_that_is_not_the_same(
    root: Path, tmp_path: Path, damage: str
) -> None:
    folder = save(make_store(root), 20)
    other = shutil.copytree(folder, tmp_path / "other_node" / folder.name)
    assert verdict(findings([folder, other, folder])) is None
    DAMAGE[damage](other)
    partly, wholly = verdict(findings([folder, other, folder])), verdict(findings([other] * NUM_RANKS))

    assert wholly is not None and type(wholly) is CheckpointError
    if DAMAGE[damage] is not flip_a_bit:  # which only the rank finds that reads it
        assert isinstance(partly, UnreadableError) and re.search(r"rank 1 on .* other ranks see", str(partly))


def test_what_one_rank_cannot_read_stops_all_whatever_the_others_found() -> None:
    errors = [CheckpointError("gone"), UnreadableError("__3.distcp: cannot be read"), ContentError("other content")]
    verdicts = [
        verdict([Finding.of(error, rank) for rank, error in enumerate(order)]) for order in permutations(errors)
    ]

    assert {type(it) for it in verdicts} == {UnreadableError}
    assert all(re.match(r"rank [012] on \S+: __3.distcp: cannot be read", str(it)) for it in verdicts)


def test_every_damaged_byte_of_a_manifest_is_noticed(root: Path) -> None:
    folder = save(make_store(root), 20)
    content = (folder / "manifest.json").read_bytes()
    with (folder / "manifest.json").open("r+b", buffering=0) as file:
        for position, byte in enumerate(content):
            os.pwrite(file.fileno(), bytes([byte ^ (1 << position % 8)]), position)
            with pytest.raises(CheckpointError):
                read_manifest(folder)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert read_manifest(folder).step == 20


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"null", b'{"format": true}', b'{"format": "1"}'])
def test_what_is_no_manifest_is_an_error_with_a_remedy(root: Path, content: bytes) -> None:
    folder = save(make_store(root), 20)
    (folder / "manifest.json").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"damaged .*resume from another"):
        check(folder)


def test_a_file_that_the_manifest_does_not_know_is_no_damage(root: Path) -> None:
    folder = save(make_store(root), 20)
    (folder / "notes.txt").write_text("the good one")

    assert check(folder).step == 20


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        check(tmp_path / "step_00000020")


def test_a_damaged_file_is_found_by_the_rank_that_has_it_and_a_missing_one_by_all(root: Path) -> None:
    folder = save(make_store(root), 20)
    flip_a_bit(folder)

    def ranks_that_refuse() -> list[int]:
        refusing = []
        for rank in range(NUM_RANKS):
            try:
                check(folder, rank, NUM_RANKS)
            except CheckpointError:
                refusing.append(rank)
        return refusing

    assert ranks_that_refuse() == [2]
    (folder / "__0_0.distcp").unlink()
    assert ranks_that_refuse() == [0, 1, 2]


def test_a_checkpoint_can_be_copied_elsewhere_under_any_name(root: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(save(make_store(root), 20), tmp_path / "good_one"))

    assert check(copy).step == 20


def test_only_folders_with_a_checkpoints_name_are_candidates_newest_step_first(root: Path) -> None:
    store = make_store(root)
    assert store.candidates() == []
    for name in ("step_00000009", "step_123456789", "step_00000010"):
        (root / name).mkdir(parents=True)
    for name in ("step_9", "step_000000011", ".step_00000012.unfinished", "step_00000013.set_aside", "old"):
        (root / name).mkdir()
    (root / "step_00000014").write_text("a file")

    assert [step_of(path) for path in store.candidates()] == [123456789, 10, 9]
    assert set(newest_valid(store.candidates()).rejected) == set(store.candidates())


def test_files_that_no_rank_described_or_that_changed_since_are_refused(root: Path) -> None:
    store = make_store(root)
    folder = store.begin(20)
    with pytest.raises(CheckpointError, match="files in all: 0"):
        store.commit(20, {}, FACTS)
    write_files(folder, 20)
    records = describe(folder)

    with pytest.raises(CheckpointError, match=r"no rank described: \['\.metadata'\]"):
        store.commit(20, {name: record for name, record in records.items() if name != ".metadata"}, FACTS)
    with pytest.raises(CheckpointError, match=r"not there: \['more'\]"):
        store.commit(20, records | {"more": FileRecord(0, "")}, FACTS)
    with (folder / ".metadata").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"\.metadata has 9 bytes instead of 5"):
        store.commit(20, records, FACTS)
    assert store.candidates() == []


def test_too_little_space_is_an_error_before_anything_is_written(root: Path) -> None:
    store = make_store(root)
    with pytest.raises(CheckpointError, match=r"1,000,000,000,000,000,000 bytes .* free; .* no other checkpoint"):
        store.ensure_space(10**18)
    assert not root.exists()
    save(store, 10)
    with pytest.raises(CheckpointError, match=r"step_00000010 was saved whole and can be resumed; free space"):
        store.begin(20, needed_bytes=10**18)
    assert names(root) == ["latest", "step_00000010"]
    store.ensure_space(1)


def test_a_killed_save_gives_its_space_back_before_the_next_one_asks_for_space(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(root)
    write_files(store.begin(10), 10)
    seen: list[list[str]] = []
    monkeypatch.setattr(store, "ensure_space", lambda _: seen.append(names(root)))
    folder = store.begin(20)

    assert seen == [[]] and list(folder.iterdir()) == [] and names(root) == [folder.name]


def test_checkpoints_that_the_run_does_not_continue_are_set_aside_before_it_saves(root: Path) -> None:
    store = make_store(root, keep_last=9)
    for step in (0, 10, 20, 30):
        save(store, step)
    for step in (10, 15, 20):
        with pytest.raises(CheckpointError, match=r"step_00000030, step_00000020.*saved already"):
            store.begin(step)

    assert [path.name for path in store.set_aside_after(10)] == ["step_00000030.set_aside", "step_00000020.set_aside"]
    save(store, 20)
    assert [path.name for path in store.set_aside_after(10)] == ["step_00000020.set_aside.2"]
    assert [step_of(path) for path in store.candidates()] == [10, 0]
    assert len(store.set_aside_after(-1)) == 2 and store.candidates() == [] and store.set_aside_after(-1) == []


def test_the_newest_and_the_multiples_stay(root: Path) -> None:
    store = make_store(root, keep_last=2, keep_every=20)
    for step in range(5, 60, 5):
        save(store, step)

    assert [step_of(path) for path in store.candidates()] == [55, 50, 40, 20]
    assert names(root) == ["latest", *sorted(path.name for path in store.candidates())]


@given(steps=st.sets(st.integers(0, 200)), keep_last=st.integers(1, 5), keep_every=st.integers(0, 30))
def test_retention_keeps_what_it_promises_and_nothing_else(steps: set[int], keep_last: int, keep_every: int) -> None:
    deleted = steps_to_delete(steps, keep_last=keep_last, keep_every=keep_every)
    kept = steps - set(deleted)

    assert deleted == sorted(set(deleted) & steps)
    assert kept >= set(sorted(steps)[-keep_last:])
    for step in steps:
        is_multiple = keep_every > 0 and step % keep_every == 0
        num_newer = sum(other > step for other in steps)
        assert (step in kept) == (is_multiple or num_newer < keep_last)
    assert steps_to_delete(kept, keep_last=keep_last, keep_every=keep_every) == []
