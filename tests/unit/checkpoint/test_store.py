"""Checkpoint folders: whole or not there, whatever ends the save; damage is found and named; the right ones stay."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_a3po.checkpoint.store import CheckpointStore, Finding, newest_valid, steps_to_delete, verdict
from megatron_a3po.errors import CheckpointError
from megatron_a3po.runtime.manifest import ContentError, FileRecord, UnreadableError, check, describe, read_manifest
from tests.support.own_process import CALLS, Killed, ending

NUM_RANKS = 3
FACTS = {"by_rank": {10: (1, 2), 9: 0.1}, "text": "ü", "none": None}


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of saves would wait for the disk; what is tested is that, and when, it is asked."""
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def make_store(root: Path, keep_last: int = 2, keep_every: int = 0) -> CheckpointStore:
    root.parent.mkdir(exist_ok=True)
    return CheckpointStore(root, keep_last=keep_last, keep_every=keep_every)


@pytest.fixture
def store(root: Path) -> CheckpointStore:
    return make_store(root)


def write_files(folder: Path, step: int) -> None:
    for rank in range(NUM_RANKS):
        (folder / f"__{rank}_0.distcp").write_bytes(f"weights of rank {rank} at step {step}".encode() * 9)
    (folder / ".metadata").write_bytes(b"names")
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "buffer.jsonl").write_bytes(b"{}\n")


def save(store: CheckpointStore, step: int) -> Path:
    folder = store.begin(step)
    with store.saving(step):
        write_files(folder, step)
        records = {k: v for rank in range(NUM_RANKS) for k, v in describe(folder, rank, NUM_RANKS).items()}
    return store.commit(step, records, FACTS)


def steps(store: CheckpointStore) -> list[int]:
    return [int(folder.name.removeprefix("step_")) for folder in store.candidates()]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_saved_checkpoint_is_valid_and_tells_its_step_and_facts(store: CheckpointStore, root: Path) -> None:
    folder = save(store, 20)

    assert names(root) == ["latest", "step_00000020"] and folder == root / "step_00000020"
    assert (root / "latest").read_text() == "step_00000020\n"
    manifest = check(folder)
    assert (manifest.step, manifest.facts) == (20, json.loads(json.dumps(FACTS)))
    assert list(manifest.files) == [".metadata", *(f"__{i}_0.distcp" for i in range(3)), "rollouts/buffer.jsonl"]
    choice = newest_valid(store.candidates())
    assert (choice.folder, choice.manifest, choice.rejected) == (folder, manifest, {})


def test_the_ranks_shares_are_disjoint_and_make_up_the_whole(tmp_path: Path) -> None:
    write_files(tmp_path, 1)
    shares = [describe(tmp_path, rank, 4) for rank in range(4)]

    assert sum(len(share) for share in shares) == 5
    assert {name: record for share in shares for name, record in share.items()} == describe(tmp_path)
    assert describe(tmp_path)[".metadata"] == FileRecord(
        5, "aeb24056810d3d1f1e8afee61a0bc0028556eb0fb49a215ae5eb1b970cad0315"
    )


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None], ids=["full", "killed"])
def test_a_save_that_ends_at_any_call_leaves_valid_checkpoints_only_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    chosen: list[int] = []
    messages: list[tuple[str, str]] = []
    without_message: set[str] = set()
    is_whole = False
    while not is_whole:
        root = tmp_path / f"at_{len(chosen)}" / "checkpoints"
        store = make_store(root, keep_last=1)
        save(store, 10)
        store.unfinished_folder(15).mkdir()  # of an earlier save that was killed
        with ending(monkeypatch, len(chosen), error) as called:
            try:
                save(store, 20)
                without_message |= set(called[len(chosen) :][:1])
            except CheckpointError as seen:
                messages.append((str(seen), store.candidates()[0].name))
            except Killed:
                pass

        choice = newest_valid(store.candidates())
        assert choice.manifest is not None and choice.rejected == {}
        is_whole = len(called) <= len(chosen)
        chosen.append(choice.manifest.step)
        for folder in store.candidates():
            check(folder)
        save(store, 30)
        assert names(root) == ["latest", "step_00000030"]
    assert set(called) == set(CALLS)
    assert set(chosen) == {10, 20}
    for message, newest in messages:
        assert all(text in message for text in ("step 20", "No space left", f"{newest} was saved whole", "keep_last"))
    if error is None:
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

    def recorded(name: str) -> Callable[..., None]:
        real = getattr(os, name)

        def call(*arguments: Any) -> None:
            path = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else arguments[1]
            events.append(("fsync" if name == "fsync" else "rename", os.path.relpath(path, root)))
            real(*arguments)

        return call

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, recorded(name))
    unfinished = os.path.relpath(store.unfinished_folder(20), root)
    folder = save(store, 20)

    named = events.index(("rename", folder.name))
    before, after = events[:named], events[named + 1 :]
    files = [".metadata", "__0_0.distcp", "rollouts/buffer.jsonl", ".manifest.json.unfinished"]
    assert all(("fsync", f"{unfinished}/{name}") in before for name in [*files, "rollouts"])
    assert ("rename", f"{unfinished}/manifest.json") in before[:-2]
    assert before[-2:] == [("fsync", unfinished), ("fsync", f"{unfinished}/rollouts")]
    assert ("fsync", "..") in before, "the name `checkpoints` itself"
    latest = [("fsync", "."), ("fsync", ".latest.unfinished"), ("rename", "latest")]
    assert after == [*latest, ("fsync", "."), ("rename", ".step_00000010.deleted"), ("fsync", ".")]


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "__1_0.distcp").read_bytes())
    content[17] ^= 4
    (folder / "__1_0.distcp").write_bytes(content)


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
    "manifest.json is that of step 20": lambda folder: folder.rename(folder.with_name("step_00000099")),
    "manifest.json is missing, so": lambda folder: (
        (folder / "manifest.json").unlink(),
        (folder / "manifest.json").mkdir(),
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named_and_the_newest_whole_checkpoint_is_found_whatever_latest_says(
    store: CheckpointStore, root: Path, message: str
) -> None:
    older = save(store, 10)
    DAMAGE[message](save(store, 20))
    (root / "latest").write_bytes(b"\x00\xff")

    choice = newest_valid(store.candidates())
    assert choice.folder == older and choice.manifest == check(older)
    [(folder, reason)] = choice.rejected.items()
    assert message in reason and str(folder) in reason and "resume" in reason


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["step_00000020", "manifest.json", "__1_0.distcp"])
def test_what_cannot_be_read_now_is_not_passed_over_for_an_older_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    save(store, 10)
    candidates = [save(store, 20), *store.candidates()]
    for method in ("open", "stat"):
        original = getattr(Path, method)

        def fail(path: Path, *arguments: Any, original: Any = original, **keywords: Any) -> Any:
            if path.name == name:
                raise OSError(number, os.strerror(number))
            return original(path, *arguments, **keywords)

        monkeypatch.setattr(Path, method, fail)

    with pytest.raises(UnreadableError, match=rf"{name}.*: cannot be read .*{os.strerror(number)}.*mounted"):
        newest_valid(candidates)
    if name == "step_00000020":
        with pytest.raises(UnreadableError, match=r"checkpoints: cannot be read .*mounted"):
            store.candidates()


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(store: CheckpointStore) -> None:
    save(store, 10)
    edit_manifest(save(store, 20), format=2)

    with pytest.raises(UnreadableError, match=r"has format 2, and .* reads up to 1; resume with the version"):
        newest_valid(store.candidates())


def findings(folders: list[Path]) -> list[Finding]:
    """Of one rank on each node, which see these folders as the same one."""
    found = []
    for rank, folder in enumerate(folders):
        try:
            check(folder, rank, len(folders))
            found.append(Finding.of(None, rank))
        except CheckpointError as error:
            found.append(Finding.of(error, rank))
    return found


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_that_some_nodes_do_not_see_is_a_filesystem_that_is_not_the_same(
    store: CheckpointStore, tmp_path: Path, damage: str
) -> None:
    folder = save(store, 20)
    other = shutil.copytree(folder, tmp_path / "other_node" / folder.name)
    assert verdict(findings([folder, other, folder])) is None
    DAMAGE[damage](other)
    partly, wholly = verdict(findings([folder, other, folder])), verdict(findings([other] * NUM_RANKS))

    assert wholly is not None and type(wholly) is CheckpointError
    kinds = [found.kind for found in findings([other] * NUM_RANKS)]
    if DAMAGE[damage] is flip_a_bit:  # which only the rank finds that reads it
        assert kinds == ["valid", "valid", "content"]
    else:
        assert kinds == ["common"] * NUM_RANKS
        assert isinstance(partly, UnreadableError) and re.search(r"rank 1 on .* other ranks see", str(partly))


def test_what_one_rank_cannot_read_stops_all_whatever_the_others_found() -> None:
    errors = [CheckpointError("gone"), UnreadableError("__3.distcp: cannot be read"), ContentError("other content")]
    for order in permutations(errors):
        found = verdict([Finding.of(error, rank) for rank, error in enumerate(order)])
        assert isinstance(found, UnreadableError)
        assert re.match(r"rank [012] on \S+: __3.distcp: cannot be read", str(found))


def test_every_damaged_byte_of_a_manifest_is_noticed(store: CheckpointStore) -> None:
    folder = save(store, 20)
    content = (folder / "manifest.json").read_bytes()
    with (folder / "manifest.json").open("r+b", buffering=0) as file:
        for position, byte in enumerate(content):
            os.pwrite(file.fileno(), bytes([byte ^ (1 << position % 8)]), position)
            with pytest.raises(CheckpointError):
                read_manifest(folder)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert read_manifest(folder).step == 20


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"null", b'{"format": true}', b'{"format": "1"}'])
def test_what_is_no_manifest_is_an_error_with_a_remedy(store: CheckpointStore, root: Path, content: bytes) -> None:
    folder = save(store, 20)
    (folder / "manifest.json").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"damaged .*resume from another"):
        check(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        check(root / "step_00000030")


def test_a_checkpoint_can_be_copied_under_any_name_and_get_other_files(store: CheckpointStore, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(save(store, 20), tmp_path / "good_one"))
    (copy / "notes.txt").write_text("the good one")

    assert check(copy).step == 20


def test_folders_with_a_checkpoints_name_are_candidates_newest_first(store: CheckpointStore, root: Path) -> None:
    assert store.candidates() == []
    others = ["step_9", "step_000000011", ".step_00000012.unfinished", "step_00000013.set_aside", "old"]
    for name in ("step_00000009", "step_123456789", "step_00000010", *others):
        (root / name).mkdir(parents=True)
    (root / "step_00000014").write_text("a file")

    assert steps(store) == [123456789, 10, 9]
    assert set(newest_valid(store.candidates()).rejected) == set(store.candidates())


def test_files_that_no_rank_described_or_that_changed_since_are_refused(store: CheckpointStore) -> None:
    folder = store.begin(20)
    with pytest.raises(CheckpointError, match="files in all: 0"):
        store.commit(20, {}, FACTS)
    write_files(folder, 20)
    records = describe(folder)

    some = {name: record for name, record in records.items() if name != ".metadata"}
    with pytest.raises(CheckpointError, match=r"no rank .*'\.metadata'"):
        store.commit(20, some, FACTS)
    with pytest.raises(CheckpointError, match=r"there.*'more'"):
        store.commit(20, records | {"more": FileRecord(0, "")}, FACTS)
    (folder / ".metadata").write_bytes(b"names of")
    with pytest.raises(CheckpointError, match=r"\.metadata has 8 bytes instead of 5"):
        store.commit(20, records, FACTS)
    assert store.candidates() == []


def test_too_little_space_is_an_error_before_anything_is_written(store: CheckpointStore, root: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1,000,000,000,000,000,000 bytes .* free; .* no other checkpoint"):
        store.ensure_space(10**18)
    assert not root.exists()
    save(store, 10)
    with pytest.raises(CheckpointError, match=r"step_00000010 was saved whole and can be resumed; free space"):
        store.begin(20, needed_bytes=10**18)
    assert names(root) == ["latest", "step_00000010"]
    store.ensure_space(1)


def test_a_killed_save_gives_its_space_back_before_the_next_one_asks_for_space(
    store: CheckpointStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert steps(store) == [10, 0]
    assert len(store.set_aside_after(-1)) == 2 and store.candidates() == [] and store.set_aside_after(-1) == []


def test_the_newest_and_the_multiples_stay(root: Path) -> None:
    store = make_store(root, keep_last=2, keep_every=20)
    for step in range(5, 60, 5):
        save(store, step)

    assert steps(store) == [55, 50, 40, 20]
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
