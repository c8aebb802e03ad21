"""Evaluation of what servers hold: whole versions only, and nobody's random weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.adopt_weights import adopt_weights
from megatron_a3po.fleet.publication import Fleet
from tests.support.publishing import CONTINUE, fleet_of, serve
from tests.support.scripted_server import REQUEST, ScriptedServer, answer

MODEL = Path("models/x")


@contextmanager
def connected(*servers: ScriptedServer) -> Iterator[Fleet]:
    for server in servers:
        server.script("/server_info", answer({"model_path": str(MODEL), "enable_priority_scheduling": True}))
    with fleet_of(*(server.url for server in servers)) as fleet:
        fleet.loop.run(fleet.pool.wait_ready(5.0), 10.0)
        yield fleet


def publish(fleet: Fleet, version: int) -> None:
    fleet.pause()
    fleet.begin(version)
    for body in ({}, {"weight_version": str(version)}):
        fleet.update(body, 5.0).result(5.0)
    fleet.end()
    fleet.confirm(version)
    fleet.resume()


def adopt(fleet: Fleet, model: Path = MODEL) -> str:
    return fleet.loop.run(adopt_weights(fleet.pool, model), 10.0)


def sampled(fleet: Fleet) -> set[str]:
    (response,) = fleet.loop.run(fleet.pool.generate(REQUEST), 10.0)
    return {span.version for span in response.meta_info.weight_versions}


def test_a_server_whose_trainer_was_killed_between_buckets_is_not_sampled_from_until_a_run_has_published_to_it() -> (
    None
):
    with serve(None) as (server,):
        with fleet_of(server.url) as killed:  # it has no lease, as if that had ended
            publish(killed, 5)
            killed.pause()
            killed.begin(6)
            killed.update({}, 5.0).result(5.0)
            continued = server.paths().count(CONTINUE)
            message = rf"{server.url}.*'unfinished 6'.*restart the server"
            with connected(server) as evaluation, pytest.raises(RolloutError, match=message):
                adopt(evaluation)
            assert server.paths().count(CONTINUE) == continued and "/generate" not in dict(server.calls)

        with connected(server) as training:
            assert server.paths().count(CONTINUE) == continued
            publish(training, 0)
            assert sampled(training) == {"0"}
        with connected(server) as evaluation:
            assert adopt(evaluation) == str(MODEL) and sampled(evaluation) == {"0"}


def test_before_a_server_reads_files_its_label_says_that_their_version_is_unfinished() -> None:
    with serve(None) as (server,), fleet_of(server.url) as fleet:
        publish(fleet, 5)
        fleet.update_from_disk("folder", "6", 5.0)
        labels = [body["new_version"] for body in server.bodies("/update_weight_version")]
        assert labels == ["unfinished 5", "unfinished 6"] and server.version == "6"
        paths = server.paths()
        assert paths[-2:] == ["/update_weight_version", "/update_weights_from_disk"]


def test_random_weights_that_nobody_has_published_to_are_no_model() -> None:
    with serve(None) as (server,), connected(server) as fleet:
        server.load_format = "dummy"
        with pytest.raises(RolloutError, match=rf"{server.url}.*let a training run publish"):
            adopt(fleet)
        assert server.version == "default" and fleet.counts()["servers_healthy"] == 0
        # An update group brings weights, and leaves the format as it was.
        publish(fleet, 3)
        assert adopt(fleet) == "version 3"


def test_another_folder_than_the_servers_were_started_from_is_not_evaluated_by_them(tmp_path: Path) -> None:
    served, trained, link = tmp_path / "served", tmp_path / "trained", tmp_path / "link"
    link.symlink_to(served)
    with serve(None) as (server,), connected(server) as fleet:
        server.script("/server_info", answer({"model_path": str(served), "enable_priority_scheduling": True}))
        fleet.loop.run(fleet.pool.for_each(fleet.pool.describe), 10.0)
        refusal = rf"{server.url}.*'{served}'.*'{trained}'.*model={trained}.*evaluate model={served}"
        with pytest.raises(RolloutError, match=refusal):
            adopt(fleet, trained)
        assert fleet.counts()["servers_healthy"] == 0 and server.version == "default"

        assert adopt(fleet, link) == str(link) and sampled(fleet) == {"0"}
        with pytest.raises(RolloutError, match=refusal):  # the evaluation has given it a label
            adopt(fleet, trained)
        publish(fleet, 4)
        assert adopt(fleet, trained) == "version 4"


def test_servers_with_different_versions_are_no_model() -> None:
    with serve(None, None) as servers, connected(*servers) as fleet:
        publish(fleet, 3)
        servers[1].version = "4"
        with pytest.raises(RolloutError, match=f"{servers[0].url}: 3, {servers[1].url}: 4"):
            adopt(fleet)
