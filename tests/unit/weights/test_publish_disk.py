"""Weights through files, by choice or after the update group has failed; and threads that fill and send."""

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_a3po.errors import PublishError
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.weights.double_buffer import DoubleBuffer
from megatron_a3po.weights.plan import Bucket
from megatron_a3po.weights.publisher import WeightPublisher
from megatron_a3po.weights.transports.disk import DiskTransport, FileSettings
from tests.support.deadlines import scaled
from tests.support.publishing import (
    CONTINUE,
    FROM_DISK,
    UPDATE,
    OneRank,
    fleet_of,
    make_publisher,
    serve,
    some_tensors,
    world,
)
from tests.support.receiver import Receiver
from tests.support.scripted_server import refuse

pytestmark = pytest.mark.usefixtures("default_group")

STEPS = ["/pause_generation", "/update_weight_version", FROM_DISK, "/weights_checker", CONTINUE]


def through_disk(
    source: OneRank, fleet: Fleet, model: Path, *, after_group: bool = False, num_buffers: int = 2
) -> WeightPublisher:
    folder = model.parent / "published"
    settings = FileSettings(folder=folder, model=model, pause_first=after_group, timeout_seconds=scaled(20.0))
    disk = DiskTransport(source.plan, fleet, settings)
    if after_group:
        return make_publisher(source, fleet, scaled(20.0), fallback=disk)
    return WeightPublisher(source, disk, fleet, world(), timer=PhaseTimer(), num_buffers=num_buffers)


def assert_holds(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == dict(weights).keys()
    for name, tensor in weights:
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype


def test_every_server_is_told_of_a_folder_with_the_models_tensors_and_only_the_last_one_is_kept(model: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in some_tensors()}
    source = OneRank(lambda: list(weights.items()), 120)
    with serve(None, None) as servers, fleet_of(*(server.url for server in servers)) as fleet:
        with through_disk(source, fleet, model) as publisher:
            for version in range(3):
                for tensor in weights.values():
                    tensor.fill_(version)
                publisher.publish(version)
        bodies = [server.bodies(FROM_DISK) for server in servers]
        paths = servers[0].paths()

    folder = model.parent / "published" / "version_00000002"
    assert bodies[0] == bodies[1]
    told = {"model_path": str(folder), "weight_version": "2", "flush_cache": True, "load_format": "auto"}
    assert bodies[0][-1] == told
    assert [server.version for server in servers] == ["2", "2"]
    assert paths == STEPS * 3
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, "publish.lock"}
    assert {path.name for path in folder.iterdir()} > {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert_holds(folder, weights.items())


@pytest.mark.parametrize("after_group", [False, True])
def test_a_server_that_cannot_read_the_folder_is_an_error_with_its_words_and_those_of_a_group_that_failed_before(
    model: Path, first_receiver: Receiver, after_group: bool
) -> None:
    with serve(first_receiver) as (server,), fleet_of(server.url) as fleet:
        server.script(UPDATE, refuse(400, "partially updated"))
        server.script(FROM_DISK, refuse(400, "no such folder"))
        words = "partially updated.*" if after_group else ""
        with (
            pytest.raises(PublishError, match=rf"(?s)version 0.*{words}{server.url}.*no such folder"),
            through_disk(OneRank(some_tensors, 1000), fleet, model, after_group=after_group) as publisher,
        ):
            publisher.publish(0)
        assert CONTINUE not in server.paths()


def test_a_second_run_on_the_folder_is_refused_until_the_first_has_ended(model: Path) -> None:
    with serve(None, None) as servers, fleet_of(servers[0].url) as ours, fleet_of(servers[1].url) as others:
        with through_disk(OneRank(some_tensors, 1000), ours, model) as first:
            first.publish(7)
            second = through_disk(OneRank(some_tensors, 1000), others, model)
            with pytest.raises(PublishError, match=r"publish\.folder = .*/published: .*publish\.folder="):
                second.publish(0)
            assert_holds(model.parent / "published" / "version_00000007", some_tensors())
        assert second.publish(0)["published_bytes"] > 0


def test_after_a_failed_group_weights_go_through_files_and_stay_there(
    model: Path, first_receiver: Receiver, second_receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = some_tensors()
    source = OneRank(lambda: tensors, 120)
    with serve(first_receiver, second_receiver) as servers, fleet_of(*(server.url for server in servers)) as fleet:
        servers[1].script(UPDATE, refuse(400, "partially updated"), calls=range(2, 3))
        with through_disk(source, fleet, model, after_group=True) as publisher:
            publisher.publish(0)
            publisher.publish(1)
        paths = servers[0].paths()
    assert [server.version for server in servers] == ["1", "1"]
    assert len(servers[0].bodies(UPDATE)) == 2
    ended = paths.index("/end_weight_update")
    assert paths[ended:] == ["/end_weight_update", "/pause_generation", *STEPS, *STEPS]
    assert_holds(model.parent / "published" / "version_00000001", tensors)
    assert "partially updated" in caplog.text and str(model.parent / "published") in caplog.text


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_weights_that_cannot_be_converted_are_an_error_and_the_rest_is_collected(model: Path, num_buffers: int) -> None:
    source = OneRank(lambda: [(f"t{number}", torch.ones(4)) for number in range(6)], 16)
    source.failing.add(1)
    with serve(None) as (server,), fleet_of(server.url) as fleet:
        with pytest.raises(PublishError, match="w is not finite"):
            through_disk(source, fleet, model, num_buffers=num_buffers).publish(0)
        assert source.filled == list(range(6))
        assert FROM_DISK not in server.paths() and "/pause_generation" not in server.paths()


def test_an_owner_that_does_not_get_on_is_an_error_that_names_it_and_the_bucket(model: Path) -> None:
    class Stuck(OneRank):
        def fill(self, bucket: Bucket, buffer: Tensor | None) -> None:
            super().fill(bucket, buffer)
            if bucket.number == 1:
                assert has_stopped.wait(60.0)

    has_stopped = threading.Event()
    source = Stuck(lambda: [(f"t{number}", torch.ones(4)) for number in range(3)], 16)
    with serve(None) as (server,), fleet_of(server.url) as fleet:
        folder = model.parent / "published"
        seconds = scaled(0.3)
        disk = DiskTransport(source.plan, fleet, FileSettings(folder=folder, model=model, timeout_seconds=seconds))
        deliver = disk.deliver

        def deliver_until_it_stops(*arguments: Any) -> None:
            try:
                deliver(*arguments)
            finally:
                has_stopped.set()

        disk.deliver = deliver_until_it_stops  # type: ignore[method-assign]
        with pytest.raises(PublishError, match=rf"rank 0.* t1 .*{folder}.* {seconds:g} s"):
            WeightPublisher(source, disk, fleet, world(), timer=PhaseTimer()).publish(0)
        assert FROM_DISK not in server.paths()


def fill(pipeline: DoubleBuffer, buckets: Iterator[Bucket]) -> None:
    for bucket in buckets:
        buffer = pipeline.take_buffer()
        assert buffer is not None
        buffer.fill_(bucket.number)
        pipeline.put(bucket, buffer)


def test_a_bucket_is_filled_while_the_one_before_is_sent_and_a_third_waits() -> None:
    source = OneRank(lambda: [(f"t{number}", torch.ones(4)) for number in range(4)], 16)
    sending, may_end = threading.Semaphore(0), threading.Semaphore(0)
    sent: list[int] = []

    def send(bucket: Bucket, buffer: Tensor) -> None:
        sending.release()
        assert may_end.acquire(timeout=60.0)
        assert set(buffer.tolist()) == {bucket.number}
        sent.append(bucket.number)

    pipeline = DoubleBuffer(send, 16, torch.device("cpu"), num_buffers=2)
    buckets = iter(source.plan.buckets)
    fill(pipeline, (next(buckets) for _ in range(2)))  # does not wait for anything to be sent
    assert sending.acquire(timeout=60.0)
    third = threading.Thread(target=fill, args=(pipeline, buckets))
    third.start()
    assert sent == [] and third.is_alive()
    for _ in range(4):
        may_end.release()
    third.join(60.0)
    pipeline.finish()

    assert sent == [0, 1, 2, 3]
