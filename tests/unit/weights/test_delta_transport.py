"""Versions as changes from a publisher to scripted servers, against what the published tensors were."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.publisher import WeightPublisher
from megatron_a3po.weights.transports.delta.folder import PUBLISHED, described_by
from megatron_a3po.weights.transports.delta.transport import DeltaTransport
from megatron_a3po.weights.transports.disk import FileSettings
from tests.support.deadlines import scaled
from tests.support.publishing import FROM_DISK, OneRank, fleet_of, serve, world
from tests.support.scripted_server import ScriptedServer, refuse
from tests.unit.weights.conftest import contents, following

pytestmark = pytest.mark.usefixtures("default_group")


@dataclass
class Setting:
    """A publisher whose weights a test changes."""

    publisher: WeightPublisher
    servers: list[ScriptedServer]
    weights: dict[str, Tensor]
    folder: Path
    local: Path
    failing: set[int]
    """numbers of buckets that cannot be collected"""

    def change(self, *places: int) -> None:
        for tensor in self.weights.values():
            tensor.view(torch.int16)[list(places)] += 1

    def server_folder(self) -> Path:
        """Where the servers were told to read, which only rank 0 or a follower may have made."""
        return Path(self.servers[0].bodies(FROM_DISK)[-1]["model_path"])

    def check(self) -> None:
        found = contents(self.server_folder())
        assert found == {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in self.weights.items()}

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("start_*/*.safetensors"))


def versions_in(local: Path) -> list[str]:
    return [path.name for path in local.iterdir() if path.name != "delta.lock"]


@contextmanager
def publishing(model: Path, *, followed: bool = False, number: int = 1) -> Iterator[Setting]:
    """Publish through changes to so many servers."""
    weights = {f"t{number}": torch.randn(3000).bfloat16() for number in range(3)}
    source = OneRank(lambda: list(weights.items()), 6000)
    folder, local = model.parent / "published", model.parent / "local"
    settings = FileSettings(folder=folder, model=model, timeout_seconds=scaled(20.0))
    with serve(*[None] * number) as servers, fleet_of(*(server.url for server in servers), min_servers=1) as fleet:
        transport = DeltaTransport(source.plan, fleet, settings, local=local, followed=followed)
        with WeightPublisher(source, transport, fleet, world(), timer=PhaseTimer()) as publisher:
            yield Setting(publisher, servers, weights, folder, local, source.failing)


def test_servers_read_folders_that_are_made_of_few_written_bytes(model: Path) -> None:
    with publishing(model) as setting:
        metrics = [setting.publisher.publish(0)]
        setting.check()
        for version in range(1, 4):
            setting.change(5, 600, version)
            metrics.append(setting.publisher.publish(version))
            setting.check()
            assert versions_in(setting.local) == [setting.server_folder().name]
        assert setting.servers[0].version == "3"
        files = setting.files()
    names = {path.name for path in setting.server_folder().iterdir()}
    assert names > {"config.json", "tokenizer.json", "model.safetensors.index.json", "model-00003-of-00003.safetensors"}
    assert "publish_density" not in metrics[0] and metrics[0]["publish_written_bytes"] > 18000
    for each in metrics[1:]:
        assert each["publish_density"] == 3 / 3000
        # Three words, twelve counts of blocks, and a header.
        assert each["publish_written_bytes"] < 3 * (3 * 3 + 12 * 2 + 300)
        assert each["published_bytes"] == 18000
    kinds = [name.split(".")[1:3] for name in files if name.startswith("model-00001")]
    assert kinds == [["0", "whole"], ["1", "delta"], ["2", "delta"], ["3", "delta"]]


def test_nothing_stays_of_earlier_versions_and_starts_that_the_last_one_does_not_need(model: Path) -> None:
    for _ in range(2):
        with publishing(model) as setting:
            for version in range(3):
                for tensor in setting.weights.values():
                    tensor.add_(1.0)
                setting.publisher.publish(version)
                setting.check()
            assert [name.split(".", 1)[1] for name in setting.files()] == ["2.whole.safetensors"] * 3
            assert len(list(setting.folder.glob("start_*"))) == 1
            assert len(versions_in(setting.local)) == 1


@pytest.mark.parametrize("shared", ["published", "local"])
def test_a_second_run_on_a_folder_of_the_first_is_refused_and_removes_nothing(model: Path, shared: str) -> None:
    key = {"published": "publish.folder", "local": "publish.delta_folder"}[shared]
    other = model.parent / "other"
    other.mkdir()
    shutil.copytree(model, other / "model")
    (other / shared).symlink_to(model.parent / shared)
    with publishing(model) as first, publishing(other / "model") as second:
        first.publisher.publish(0)
        refused = rf"{key} = {other / shared}: .*{os.getpid()}.*{key}="
        with pytest.raises(PublishError, match=refused):
            second.publisher.publish(0)
        assert "/pause_generation" not in second.servers[0].paths()
        first.check()
        first.change(1)
        first.publisher.publish(1)
        first.check()


def test_a_version_that_failed_half_written_is_made_up_for_by_the_next(model: Path) -> None:
    with publishing(model) as setting:
        setting.publisher.publish(0)
        first = (setting.folder / PUBLISHED).read_bytes()
        setting.change(7)
        setting.failing.add(2)
        with pytest.raises(PublishError, match="w is not finite"):
            setting.publisher.publish(1)
        assert (setting.folder / PUBLISHED).read_bytes() == first
        setting.failing.clear()
        setting.change(7, 8)
        metrics = setting.publisher.publish(1)
        setting.check()
        assert all("whole" not in name for name in setting.files() if ".0." not in name)
    assert metrics["publish_written_bytes"] < 3000


def test_a_version_that_one_server_refuses_is_the_same_folder_for_the_others(model: Path) -> None:
    with publishing(model, number=2) as setting:
        setting.publisher.publish(0)
        setting.change(1)
        setting.servers[1].script(FROM_DISK, refuse(400, "no such folder"))
        setting.publisher.publish(1)
        setting.check()
        paths = [body["model_path"] for body in setting.servers[0].bodies(FROM_DISK)]
        assert len(set(paths[1:])) == 1 and setting.servers[0].version == "1"


def test_a_run_with_followers_makes_no_folder_itself_and_waits_for_theirs(model: Path) -> None:
    with publishing(model, followed=True) as setting, following(setting.folder, setting.local):
        for version in range(3):
            setting.publisher.publish(version)
            setting.check()
            setting.change(version)


def test_the_precision_of_a_server_is_known_by_its_version_though_its_folder_is_elsewhere(model: Path) -> None:
    with publishing(model) as setting:
        setting.publisher.publish(0)
        told = setting.server_folder()
        here = described_by(told, setting.folder, setting.local)
        assert here != told and json.loads((here / "config.json").read_text())["model_type"] == "qwen3"
        assert described_by(model, setting.folder, setting.local) == model
        assert described_by(told, setting.folder, None) == told
        assert described_by(told, model, setting.local) == told
