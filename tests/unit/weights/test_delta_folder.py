"""Folders on rollout machines that are made of what has changed, against the bytes that were published."""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_a3po.errors import ConfigError, PublishError
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.runtime.files import write_durably
from megatron_a3po.runtime.waiting import Clock
from megatron_a3po.weights.transports.delta import folder as delta_folder
from megatron_a3po.weights.transports.delta import followers as delta_followers
from megatron_a3po.weights.transports.delta.encoding import Delta, as_words
from megatron_a3po.weights.transports.delta.folder import MODEL, PUBLISHED, Published, make_local_folder
from megatron_a3po.weights.transports.delta.followers import follow, wait_for_followers
from megatron_a3po.weights.transports.delta.writer import OwnedShard, Written
from megatron_a3po.weights.wait_times import WaitTimes
from tests.support.deadlines import scaled
from tests.support.receiver import FORKED
from tests.unit.weights.conftest import contents, following
from tests.unit.weights.test_delta import changed, random_bytes

BF16 = (
    TensorSpec(name="w", dtype=torch.bfloat16, shape=(300, 7)),
    TensorSpec(name="norm", dtype=torch.bfloat16, shape=(129,)),
)
FP8 = (
    TensorSpec(name="q.weight_scale_inv", dtype=torch.float32, shape=(1, 3)),
    TensorSpec(name="q_norm", dtype=torch.bfloat16, shape=(129,)),
    TensorSpec(name="q.weight", dtype=torch.float8_e4m3fn, shape=(5, 257)),
)
SHARDS = (BF16, FP8)
NUM_WORDS = [300 * 7 + 129, 12 + 258 + 5 * 257]


class Run:
    """What owners and rank 0 do for a shard in bf16 and one in FP8, which publishes version 1 at once."""

    def __init__(self, folder: Path, start: str = "start_00000000") -> None:
        self.folder, self.start, self.local = folder / "published", folder / "published" / start, folder / "local"
        (self.start / MODEL).mkdir(parents=True)
        (self.start / MODEL / "config.json").write_text("{}")
        self._owned = [OwnedShard(f"model-{number}.safetensors", tensors) for number, tensors in enumerate(SHARDS)]
        self.buffers = [random_bytes(sum(spec.nbytes for spec in tensors), seed=7) for tensors in SHARDS]
        self.version = 0
        self.written = self.publish()

    def publish(self, *densities: float) -> list[Written]:
        """A version in which these shares of the shards' words have changed."""
        self.version += 1
        for number, density in enumerate(densities):
            words = as_words(self.buffers[number], SHARDS[number])
            self.buffers[number] = changed(words, density, seed=self.version).view(torch.uint8)
        written = [owned.write(self.start, buffer) for owned, buffer in zip(self._owned, self.buffers, strict=True)]
        shards = tuple(each.shard for each in written)
        self.published = Published(version=self.version, start=self.start.name, shards=shards)
        write_durably(self.folder / PUBLISHED, self.published.model_dump_json())
        return written

    def make(self, local: Path | None = None, *, of_changes: bool = False) -> Path:
        """Make the folder of the last version, which must hold what was published. of_changes: without whole files."""
        hidden = [path.rename(f"{path}.hidden") for path in self.start.glob("*.whole.safetensors") if of_changes]
        target = make_local_folder(self.folder, local or self.local, self.published)
        for path in hidden:
            path.rename(path.with_suffix(""))
        assert contents(target) == self.expected()
        return target

    def kinds(self) -> list[list[str]]:
        """Of every shard: what its files are."""
        return [[file.split(".")[-2] for file in shard.files] for shard in self.published.shards]

    def expected(self) -> dict[str, bytes]:
        return {
            spec.name: part.numpy().tobytes()
            for tensors, buffer in zip(SHARDS, self.buffers, strict=True)
            for spec, part in zip(tensors, buffer.split([spec.nbytes for spec in tensors]), strict=True)
        }


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_versions_in_a_row_are_made_of_what_has_changed_and_nothing_else(run: Run) -> None:
    run.make()
    for density in (0.02, 0.0, 0.1, 0.001):
        written = run.publish(density, density)
        target = run.make(of_changes=True)
        assert target.name.startswith(f"version_0000000{run.version}_")
        assert [path.name for path in run.local.iterdir()] == [target.name]
        assert [each.num_compared for each in written] == NUM_WORDS
        found = [each.num_changed / size for each, size in zip(written, NUM_WORDS, strict=True)]
        assert found == pytest.approx([density] * 2, abs=0.03)
        assert all((each.nbytes > 0) == (each.num_changed > 0) for each in written)


def test_a_bucket_goes_whole_where_most_of_it_has_changed_and_as_changes_where_not(run: Run) -> None:
    first, second = run.publish(1.0, 0.01)
    assert run.kinds() == [["whole"], ["whole", "delta"]]
    assert first.num_changed == NUM_WORDS[0]
    assert first.nbytes > 300 * 7 * 2 and second.nbytes < 1000
    run.make()
    run.publish(0.01, 1.0)
    assert run.kinds() == [["whole", "delta"], ["whole"]]
    run.make()


def test_the_whole_shard_is_written_anew_before_its_changes_are_larger(run: Run) -> None:
    run.make()
    for _ in range(12):
        run.publish(0.15, 0.15)
        for shard, tensors in zip(run.published.shards, SHARDS, strict=True):
            assert sum(change.nbytes for change in shard.changes) <= sum(spec.nbytes for spec in tensors)
        run.make(of_changes=True)  # whoever holds the version before needs the last change only
        run.make(run.local.with_name(f"newcomer{run.version}"))
    assert len(list(run.start.glob("*.whole.safetensors"))) > 4


def test_changes_in_a_row_cost_no_more_than_whole_shards(run: Run) -> None:
    whole = sum(each.nbytes for each in run.written)
    for density in (0.1, 0.3, 0.5):
        written = [run.publish(density, density) for _ in range(12)]
        assert sum(each.nbytes for shards in written for each in shards) < 12 * whole * 1.05


def test_versions_that_were_missed_are_caught_up_with_also_where_weights_come_back_to_former_ones(run: Run) -> None:
    run.make()
    run.publish(0.02, 0.02)
    run.publish(0.02, 0.0)
    first = [buffer.clone() for buffer in run.buffers]
    run.publish(0.02, 0.02)
    run.make(of_changes=True)

    second, run.buffers = run.buffers, first
    run.publish()
    run.buffers = second
    run.publish()
    run.make(of_changes=True)


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a weight": lambda folder: flip_bit(folder / "model-0.safetensors", -5),
    "a length": lambda folder: flip_bit(folder / "model-0.safetensors", 3),
    "a header": lambda folder: flip_bit(folder / "model-1.safetensors", 30),
    "an empty file": lambda folder: (folder / "model-0.safetensors").write_bytes(b""),
    "no file": lambda folder: (folder / "model-1.safetensors").unlink(),
    "another file": lambda folder: shutil.copyfile(folder / "model-1.safetensors", folder / "model-0.safetensors"),
    "half a record": lambda folder: (folder / f".{PUBLISHED}").write_text("{"),
    "no record": lambda folder: (folder / f".{PUBLISHED}").unlink(),
    "no folder": shutil.rmtree,
}


@pytest.mark.parametrize("density", [0.0, 0.02])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_not_what_the_changes_are_for_is_healed_by_whole_shards(
    run: Run, damage: str, density: float, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](run.make())
    run.publish(density, density)
    run.make()
    assert len(list(run.local.iterdir())) == 1
    assert ("damaged; the whole shard is copied" in caplog.text) == (" record" not in damage and damage != "no folder")


def test_a_damaged_change_is_an_error_that_names_the_shard_and_never_a_version(run: Run) -> None:
    run.make()
    run.publish(0.02, 0.02)
    (delta,) = run.start.glob("model-0.*.delta.safetensors")
    flip_bit(delta, -1)
    with pytest.raises(PublishError, match=r"model-0\.safetensors"):
        run.make()
    assert not list(run.local.glob("version_*"))
    flip_bit(delta, -1)
    run.make()


def test_another_start_of_the_run_has_another_folder_for_the_same_version_and_what_is_not_ours_stays(run: Run) -> None:
    (run.local / "version_1").mkdir(parents=True)
    (run.local / "notes.txt").write_text("mine")
    former = run.make()
    again = Run(run.folder.parent, "start_11111111")
    (again.start / MODEL / "config.json").write_text('{"rope_theta": 1}')
    target = again.make()
    assert target.name != former.name and target.name[:16] == former.name[:16]
    assert {path.name for path in run.local.iterdir()} == {target.name, "version_1", "notes.txt"}
    assert "rope_theta" in (target / "config.json").read_text()


def test_an_owner_whose_files_are_gone_writes_the_whole_shard(run: Run) -> None:
    for path in run.start.glob("model-0.*"):
        path.unlink()
    first, _ = run.publish(0.01, 0.01)
    assert run.kinds() == [["whole"], ["whole", "delta"]]
    assert first.num_compared == 0
    run.make()


EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.copyfile", "shutil.rmtree", "applied"}


def kill_before_every_step(folder: Path, original: Path, copies: Path, published: Published, report: Path) -> None:
    """Make folder number k of `copies` the version, and be killed before step k; until there is no such step."""
    left: int | None = None
    apply_delta = delta_folder.apply_delta

    def step(event: str, _: object = ()) -> None:
        """Count each of the events; what lies between two of them is not divided."""
        nonlocal left
        if left is not None and event in EVENTS:
            left -= 1
            if left < 0:
                os._exit(9)

    def in_halves(delta: Delta, buffer: Tensor) -> None:
        result = buffer.clone()
        apply_delta(delta, result)
        for half in (slice(len(buffer) // 2), slice(len(buffer) // 2, None)):
            buffer[half] = result[half]
            step("applied")

    delta_folder.apply_delta = in_halves
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # a killed process needs none, and each takes long
    sys.addaudithook(step)
    codes: list[int] = []
    while not codes or codes[-1] == 9:
        local = copies / str(len(codes))
        shutil.copytree(original, local)
        process = os.fork()
        if process == 0:
            left = len(codes)
            make_local_folder(folder, local, published)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    report.write_text(json.dumps(codes))


def test_killed_anywhere_it_leaves_whole_versions_and_the_next_start_makes_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    former, before = run.make(tmp_path / "original"), run.expected()
    run.publish(0.05, 0.05)
    copies, report = tmp_path / "copies", tmp_path / "report"
    arguments = (run.folder, former.parent, copies, run.published, report)
    process = FORKED.Process(target=kill_before_every_step, args=arguments)
    process.start()
    process.join(scaled(120.0))
    process.kill()
    codes = json.loads(report.read_text())
    assert codes[-1] == 0 and set(codes[:-1]) == {9} and len(codes) > 20
    seen = set()
    for number in range(len(codes)):
        folders = list((copies / str(number)).glob("version_*"))
        assert len(folders) <= 1
        for folder in folders:
            seen.add(folder.name)
            assert contents(folder) == (before if folder.name == former.name else run.expected()), number
        target = run.make(copies / str(number))
        assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert seen == {former.name, run.published.folder_name}


def test_a_folder_has_one_follower_at_a_time(run: Run) -> None:
    follow_here = partial(follow, run.folder, run.local)
    with pytest.raises(ConfigError, match=rf"publish\.delta_folder = {run.local}: "):
        follow_here("node1", lambda: bool(follow_here("node2", lambda: False)))
    assert not list((run.folder / "followers").glob("*"))
    follow_here("node2", lambda: False)


def test_a_run_waits_for_its_followers_and_forgets_one_that_does_not_come(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PublishError, match=r"tools/apply_weight_delta\.py"):
        wait_for_followers(run.folder, run.published, 0.0)
    with following(run.folder, run.local):
        wait_for_followers(run.folder, run.published, 30.0)
        for _ in range(3):
            run.publish(0.02, 0.02)
            wait_for_followers(run.folder, run.published, 30.0)
            assert contents(run.local / run.published.folder_name) == run.expected()
        assert "did not hold" not in caplog.text
        (run.folder / "followers" / "node2").write_text("")
        wait_for_followers(run.folder, run.published, 0.2)
        assert "node2 did not hold weight version 4" in caplog.text and "node1" not in caplog.text
        wait_for_followers(run.folder, run.published, 30.0)
    assert not list((run.folder / "followers").iterdir())


class Follower:
    """Time that passes only while the follower sleeps, and when it tried to make a version."""

    def __init__(self, run: Run, log: pytest.LogCaptureFixture) -> None:
        self._run, self._log = run, log
        self.now = 1000.0
        self.attempts: list[float] = []
        self.times = WaitTimes(clock=Clock(now=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def make(self, folder: Path, local: Path, published: Published) -> Path:
        self.attempts.append(self.now)
        return make_local_folder(folder, local, published)

    def follow(self, keep_on: Callable[[], bool]) -> list[str]:
        """Return the errors that are told."""
        follow(self._run.folder, self._run.local, "node1", keep_on, self.times)
        return [record.getMessage() for record in self._log.records if record.levelname == "ERROR"]


@pytest.fixture
def follower(run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Follower:
    follower = Follower(run, caplog)
    monkeypatch.setattr(delta_followers, "make_local_folder", follower.make)
    return follower


def test_a_follower_outlives_storage_that_is_away_and_asks_ever_more_rarely(run: Run, follower: Follower) -> None:
    whole, *_ = sorted(run.start.glob("*.whole.safetensors"))
    away = whole.rename(f"{whole}.away")

    def keep_on() -> bool:
        if follower.now > 1100.0 and not whole.exists():
            away.rename(whole)
        return follower.now < 1200.0

    (failure,) = follower.follow(keep_on)
    pauses = [round(after - before) for before, after in itertools.pairwise(follower.attempts)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert [contents(folder) for folder in run.local.glob("version_*")] == [run.expected()]
    assert whole.name in failure and str(run.folder) in failure and str(run.local) in failure


def test_a_follower_that_fails_with_a_version_makes_the_next_one_at_once(run: Run, follower: Follower) -> None:
    run.publish(0.02, 0.02)
    (delta,) = run.start.glob("model-0.*.delta.safetensors")
    flip_bit(delta, -1)

    def keep_on() -> bool:
        if follower.now > 1050.0 and run.version == 2:
            run.publish(1.0, 0.02)
            follower.attempts = [follower.now]
        return follower.now < 1100.0

    (failure,) = follower.follow(keep_on)
    assert len(follower.attempts) == 2 and follower.attempts[1] == follower.attempts[0]
    assert [contents(folder) for folder in run.local.glob("version_00000003_*")] == [run.expected()]
    assert "model-0.safetensors" in failure and "restart the run" in failure


def test_a_follower_says_which_folder_it_holds_when_the_shared_storage_is_back(run: Run, follower: Follower) -> None:
    followers, held = run.folder / "followers", []
    followers.write_text("in the way")

    def keep_on() -> bool:
        if follower.now > 1005.0 and followers.is_file():
            followers.unlink()
        held.extend(path.read_text() for path in followers.glob("node1"))
        return not held and follower.now < 1100.0

    follower.follow(keep_on)
    assert held == [run.published.folder_name] and len(follower.attempts) == 1
