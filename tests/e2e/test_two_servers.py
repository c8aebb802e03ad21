"""A run with two rollout servers, of which one is killed: the other one is enough."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from megatron_a3po.fleet.event_loop import EventLoopThread
from tests.distributed.launch import forking_program
from tests.e2e.runs import metrics, train_in_forks, wait_until
from tests.support.deadlines import scaled
from tests.support.receiver import start_receiver
from tests.support.scripted_rollouts import DeterministicServer, make_model, scripted_server, settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_STEPS, GROUPS = 20, 4


@contextmanager
def mortal_server() -> Iterator[tuple[DeterministicServer, Callable[[], None]]]:
    """A server and what kills it, with the process that receives its weights."""
    loop = EventLoopThread()
    with start_receiver() as receiver:
        server = DeterministicServer(version="0", receiver=receiver)
        loop.run(server.__aenter__(), scaled(10.0))

        def kill() -> None:
            receiver.kill()
            loop.run(server.__aexit__(), scaled(10.0))

        yield server, kill
    loop.close()


def test_a_run_whose_second_server_is_killed_goes_on_with_the_first_to_its_end(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "config.yaml"
    with scripted_server() as first, mortal_server() as (second, kill):
        config = settings(
            make_model(tmp_path / "model"),
            run,
            first.url,
            num_steps=NUM_STEPS,
            rollout={"servers": [first.url, second.url], "prompts_per_step": GROUPS},
            parallel={"tensor": 2, "pipeline": 1},
            publish={"min_servers": 1},
            checkpoint={"every_steps": 0},
        )
        file.write_text(yaml.safe_dump(config))
        forking_program()
        with ThreadPoolExecutor() as threads:
            training = threads.submit(
                train_in_forks, ranks=2, log=tmp_path / "output.log", timeout_seconds=300.0, config=str(file)
            )
            wait_until(lambda: len(metrics(run)) > 2, 200.0, lambda: training.result()[1] if training.done() else None)
            asked = len(second.bodies("/generate"))
            kill()
            code, output = training.result(scaled(300.0))
        sampled = [len(server.bodies("/generate")) for server in (first, second)]

    assert code == 0, output
    assert f"{second.url} is in quarantine, 1 of 2 rollout servers are left" in _everything_said(run, output)
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    assert [row["weight_version"] for row in rows[1:]] == list(range(1, NUM_STEPS + 1))
    healthy = [row["servers_healthy"] for row in rows]
    assert healthy[:2] == [2, 2] and healthy[-1] == 1 and sorted(healthy, reverse=True) == healthy
    assert asked > 0 and sampled[0] > sampled[1]
    assert first.version.startswith(f"{NUM_STEPS} of {run}")
    ledger = json.loads((run / "summary.json").read_text())["ledger"]
    assert ledger["issued"] == ledger["consumed"] == NUM_STEPS * GROUPS
    assert ledger["dropped"] == ledger["in_flight"] == ledger["buffered"] == 0


def _everything_said(run: Path, output: str) -> str:
    return output + "".join(path.read_text(errors="replace") for path in (run / "logs").rglob("*") if path.is_file())
