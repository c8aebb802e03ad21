"""Two real SGLang servers: one is refused, killed and restarted with old weights while weights are published."""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.event_loop import EventLoopThread
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.rollout.sampler import Responses, Sampler, Sampling
from megatron_a3po.serving.local_server import LocalServer
from megatron_a3po.types import Trajectory
from megatron_a3po.weights.publisher import WeightPublisher
from tests.e2e.conftest import SERVER_START_SECONDS
from tests.e2e.runs import get, post, wait_until
from tests.support.deadlines import scaled
from tests.support.publishing import OneRank, make_publisher

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

PUBLISH_SECONDS = scaled(90.0)
IN_PLACE = ("--disable-radix-cache", "--disable-overlap-schedule")
TEMPERATURE, LENGTH, NUM_LONG = 4.0, 220, 12
"""Hot, so that responses rarely end before they are long."""


class Control(Fleet):
    """Before the servers are told of the k-th bucket of a publication, from 1, `before[k]` happens, once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before: dict[int, Callable[[], object]] = {}
        self._told = 0

    def begin(self, version: int) -> None:
        self._told = 0
        super().begin(version)

    def update(self, body: dict[str, Any], timeout_seconds: float) -> Future[Any]:
        self._told += 1
        self.before.pop(self._told, lambda: None)()
        return super().update(body, timeout_seconds)


class Weights(OneRank):
    """Those of a folder, a little larger with every version."""

    def __init__(self, model: Path) -> None:
        self.version = 0
        self._start = load_file(model / "model.safetensors")
        super().__init__(lambda: list(self.of(self.version).items()), 60_000)

    def of(self, version: int) -> dict[str, Tensor]:
        return {name: tensor.float() * (1 + 0.02 * version) for name, tensor in self._start.items()}


def _num_running(url: str) -> int:
    status, body = get(f"{url}/v1/loads?include=core")
    assert status == 200, body
    return sum(load["num_running_reqs"] for load in json.loads(body)["loads"])


class Run:
    """A trainer of one rank without training."""

    def __init__(self, model: Path, urls: list[str], pause_mode: str, name: str | None = None) -> None:
        async def build() -> ServerPool:
            return ServerPool(urls, timeout_seconds=scaled(120.0), run=name, min_servers=1, pause_mode=pause_mode)

        self.model, self.weights, self.loop = model, Weights(model), EventLoopThread()
        self.pool = self.loop.run(build())
        self.loop.run(self.pool.wait_ready(scaled(60.0)), scaled(90.0))
        self.watch = self.loop.submit(self.pool.watch())
        self.fleet = Control(self.pool, self.loop, timeout_seconds=scaled(30.0))
        self.publisher: WeightPublisher = make_publisher(self.weights, self.fleet, scaled(30.0))
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.prompt = Prompt(prompt_id="p", token_ids=tuple(tokenizer.encode("Spell this word backward: sun")))
        self.sampler = Sampler(
            self.pool,
            tokenizer,
            Sampling(num_samples=4, max_new_tokens=LENGTH, temperature=TEMPERATURE),
            max_in_flight=1000,
        )

    def publish(self, version: int) -> dict[str, float]:
        self.weights.version = version
        start = time.monotonic()
        metrics = self.publisher.publish(version)
        assert time.monotonic() - start < PUBLISH_SECONDS
        return metrics

    def sample(self, number: int = 8) -> list[Future[Responses]]:
        return [self.loop.submit(self.sampler.sample_group(self.prompt, -1)) for _ in range(number)]

    def start_sampling(self) -> list[Future[Responses]]:
        """Returns when every server is at work on it. They run 16 requests at once, and these are many more."""
        sampling = self.sample(NUM_LONG)
        urls = [server.url for server in self.pool.membership.members]
        wait_until(lambda: all(map(_num_running, urls)), 60.0)
        return sampling

    def quarantined(self) -> list[str]:
        return [server.url for server in self.pool.membership.quarantined]

    def check(self, futures: list[Future[Responses]], versions: set[int]) -> list[Trajectory]:
        """Every token is of one of the versions, and its log-prob is Hugging Face's by the weights of that version."""
        found = [trajectory for future in futures for trajectory in future.result(scaled(120.0)).trajectories]
        assert {int(version) for item in found for version in item.weight_versions} == versions
        expected = {version: self._logprobs(version, found) for version in versions}
        for number, item in enumerate(found):
            theirs = [expected[int(version)][number][place] for place, version in enumerate(item.weight_versions)]
            torch.testing.assert_close(torch.stack(theirs), item.behaviour_logprobs, rtol=0, atol=2e-4)
        return found

    def _logprobs(self, version: int, trajectories: list[Trajectory]) -> list[Tensor]:
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        model.load_state_dict(self.weights.of(version), strict=False)
        result = []
        for item in trajectories:
            with torch.no_grad():
                logits = model(item.token_ids[None]).logits[0, item.prompt_length - 1 : -1]
            chosen = item.token_ids[item.prompt_length :, None]
            result.append((logits / TEMPERATURE).log_softmax(-1).gather(-1, chosen)[:, 0])
        return result

    def close(self) -> None:
        self.publisher.__exit__(None, None, None)
        self.watch.cancel()
        self.loop.run(self.pool.close(), scaled(10.0))
        self.loop.close()


class Servers:
    def __init__(self, model: Path, folder: Path, stack: ExitStack) -> None:
        self.model, self.folder, self._stack = model, folder, stack
        self.both = [self.start(number) for number in range(2)]
        for server in self.both:
            self.wait(server)

    def start(self, number: int, *arguments: str, port: int | None = None) -> LocalServer:
        options = [*(IN_PLACE if number == 1 else ()), *arguments]
        server = LocalServer(self.model, self.folder / f"server{number}.log", options, port=port)
        return self._stack.enter_context(server)

    def wait(self, server: LocalServer) -> None:
        wait_until(lambda: get(f"{server.url}/ready")[0] == 200, SERVER_START_SECONDS, server.describe_death)

    def kill(self) -> None:
        os.killpg(self.both[1].process_id, signal.SIGKILL)

    def restart(self, weight_version: int) -> None:
        """At the same address, with the weights of its folder under the label of other ones."""
        self.both[1] = self.start(1, "--weight-version", str(weight_version), port=self.both[1].port)
        self.wait(self.both[1])


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        # A TCPStore asks the resolver for the name of each client, for its log: 5 s where no resolver answers.
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=scaled(60))
        )
        yield Servers(model, tmp_path_factory.mktemp("servers"), stack)
        dist.destroy_process_group()


def test_a_server_that_refuses_is_killed_and_restarted_is_left_out_until_it_holds_the_present_version(
    servers: Servers,
) -> None:
    first, second = (server.url for server in servers.both)
    run = Run(servers.model, [first, second], "retract")
    run.publish(0)
    sampling = run.start_sampling()
    run.publish(1)
    run.check(run.sample(), {1})
    assert run.quarantined() == []
    run.check(sampling, {0, 1})

    # Its session is closed by somebody else: it refuses the second bucket, which the other one awaits.
    run.fleet.before[2] = lambda: post(f"{second}/end_weight_update", {})
    metrics = run.publish(2)
    assert (run.quarantined(), metrics["servers_healthy"]) == ([second], 1)
    run.check(run.sample(), {2})
    metrics = run.publish(3)
    assert (run.quarantined(), metrics["server_resyncs"]) == ([], 1)
    run.check(run.sample(), {3})

    # Killed in the middle of an update, while it samples.
    sampling = run.sample()
    run.fleet.before[3] = servers.kill
    metrics = run.publish(4)
    assert (run.quarantined(), metrics["servers_healthy"]) == ([second], 1)
    assert len([future.result(scaled(120.0)) for future in sampling]) == 8
    run.check(run.sample(), {4})

    # Back, with old weights under the label of the present version.
    servers.restart(weight_version=4)
    run.check(run.sample(), {4})
    assert run.quarantined() == [second]
    run.publish(5)
    assert run.quarantined() == [second], "it failed twice in a row, which costs it a turn"
    metrics = run.publish(6)
    assert (run.quarantined(), metrics["server_resyncs"]) == ([], 2)
    run.check(run.sample(), {6})
    assert not run.watch.done()
    run.close()


def test_aborted_responses_are_continued_with_the_new_weights(servers: Servers) -> None:
    run = Run(servers.model, [server.url for server in servers.both], "abort")
    run.publish(0)
    sampling = run.start_sampling()
    run.publish(1)
    found = run.check(sampling, {0, 1})
    assert any(item.weight_versions.unique().numel() > 1 for item in found)
    assert all(item.response_length == LENGTH or str(item.finish_reason) == "stop" for item in found)
    run.close()


def test_in_place_each_token_has_the_version_that_sampled_it_though_keys_and_values_are_old(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(servers.model, [servers.both[1].url], "in_place")
    run.publish(0)
    sampling = run.start_sampling()
    zero_norm = run.weights.of(1) | {"model.norm.weight": torch.zeros_like(run.weights.of(1)["model.norm.weight"])}
    with monkeypatch.context() as patch:
        patch.setattr(run.weights, "of", lambda _: zero_norm)
        run.publish(1)
    found = [trajectory for future in sampling for trajectory in future.result(scaled(120.0)).trajectories]
    versions = torch.cat([item.weight_versions for item in found])
    logprobs = torch.cat([item.behaviour_logprobs for item in found])
    assert set(versions.tolist()) == {0, 1}
    # The second version gives every token the same chance, whatever it has seen.
    is_uniform = (logprobs + math.log(zero_norm["model.embed_tokens.weight"].shape[0])).abs() < 1e-5
    assert is_uniform[versions == 1].all() and is_uniform[versions == 0].float().mean() < 0.01
    run.publish(2)
    run.check(run.sample(), {2})
    run.close()


def test_a_server_whose_requests_keep_it_from_flushing_is_left_out_and_comes_back(servers: Servers) -> None:
    urls = [server.url for server in servers.both]
    run = Run(servers.model, urls, "retract")
    run.publish(0)

    def pause_one_in_place() -> None:
        modes = {urls[0]: "retract", urls[1]: "in_place"}
        run.loop.run(
            run.pool.for_each(lambda s: run.pool.post(s, "/pause_generation", {"mode": modes[s.url]})), scaled(10.0)
        )

    sampling, version = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.fleet, "pause", pause_one_in_place)
        while not run.quarantined() and version < 6:  # its requests may have ended meanwhile
            sampling += run.start_sampling()
            version += 1
            run.publish(version)
    (out,) = run.pool.membership.quarantined
    assert out.url == urls[1] and "6 times in a row" in str(out.error)
    assert len([future.result(scaled(120.0)) for future in sampling]) == NUM_LONG * version
    assert run.publish(version + 1)["server_resyncs"] == 1
    run.check(run.sample(), {version + 1})
    run.close()


def test_a_second_run_is_refused_while_the_first_lives_and_has_the_server_when_it_was_killed(servers: Servers) -> None:
    url = servers.both[0].url
    first = Run(servers.model, [url], "retract", "/runs/first (host a, process 1)")
    first.publish(17)
    sampling = first.sample()
    with pytest.raises(RolloutError, match=rf"{url}: another run.*version 17 of /runs/first \(host a, process 1\)"):
        Run(servers.model, [url], "retract", "/runs/second (host b, process 2)")
    assert len([future.result(scaled(120.0)) for future in sampling]) == 8
    assert first.quarantined() == [] and not first.watch.done()

    async def die() -> None:
        renewal = first.pool.membership.servers[0].lease._renewal
        assert renewal is not None
        renewal.cancel()

    first.loop.run(die(), scaled(5.0))
    first.watch.cancel()
    second = Run(servers.model, [url], "retract", "/runs/second (host b, process 2)")
    second.publish(17)
    assert len([future.result(scaled(120.0)) for future in second.sample()]) == 8
    assert second.quarantined() == []
    # The first goes on to sample there: the version has the same number, and is not its own.
    with pytest.raises(RolloutError, match="17 of /runs/second"):
        first.sample(1)[0].result(scaled(60.0))
    for run in (first, second):
        run.close()
