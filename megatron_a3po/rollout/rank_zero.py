"""Build the parts of the rollout side, on rank 0 only, and run them in one event loop."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from megatron_a3po.config import RunConfig
from megatron_a3po.config.server_key import read_server_key
from megatron_a3po.errors import DataError, VersionError
from megatron_a3po.fleet.adopt_weights import adopt_weights
from megatron_a3po.fleet.client import SGLangClient, is_loopback
from megatron_a3po.fleet.event_loop import EventLoopThread
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.publication import Fleet
from megatron_a3po.prompts.load import load_prompts, load_tokenizer, longest_request
from megatron_a3po.rewards.worker_pool import RewardWorkers, worker_settings
from megatron_a3po.rollout.buffer import StalenessBuffer
from megatron_a3po.rollout.collector import RolloutCollector
from megatron_a3po.rollout.evaluator import EVALUATIONS, DatasetResult, Evaluator
from megatron_a3po.rollout.ledger import Ledger
from megatron_a3po.rollout.rewarder import Rewarder, Shaping
from megatron_a3po.rollout.sampler import Sampler, Sampling, stop_token_ids
from megatron_a3po.rollout.state import RolloutState
from megatron_a3po.runtime.logging import logger
from megatron_a3po.serving.local_server import LocalServer, server_arguments
from megatron_a3po.serving.registry import find_servers, read_registrations, servers_folder
from megatron_a3po.types import Trajectory

_CLOSE_SECONDS = 10.0
_ANSWER_SECONDS = 10.0


class RankZeroRollouts:
    """Prompts, servers, reward workers, collector and ledger of a run. A context manager.

    Entering starts the reward workers and, if the config asks for one, a local server, without waiting for either.
    """

    def __init__(self, config: RunConfig, *, data_folder: Path | None = None) -> None:
        """data_folder: where reading the datasets leaves its files; None: the folder of the run. Raises DataError."""
        self._config = config
        self._tokenizer = load_tokenizer(config.model)
        self._prompts = load_prompts(config, self._tokenizer, data_folder or config.run_dir)
        self.ledger = Ledger()
        self._stack = ExitStack()
        self._started = False
        self._server: LocalServer | None = None
        self._complete: Future[None] | None = None

    def __enter__(self) -> Self:
        config = self._config
        self._key = read_server_key(config.rollout.key_file)
        if config.rollout.servers == "local":
            log_file = config.run_dir / "logs" / "rollout_server.log"
            server = LocalServer(config.model, log_file, server_arguments(config.rollout), key=self._key)
            self._server = self._stack.enter_context(server)
        self._loop = EventLoopThread()
        self._stack.callback(self._loop.close)
        # Early, because a worker imports the reward function while everything else starts.
        self._workers = self._in_loop(lambda: RewardWorkers(worker_settings(config)))
        self._in_loop(self._workers.start)
        # With a timeout: nothing that hangs may keep the run from ending.
        self._stack.callback(lambda: self._loop.run(self._workers.close(), _CLOSE_SECONDS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def connect(self, say: Callable[[str], None]) -> Fleet:
        """Wait until all servers are ready; `say` reports progress. Raises RewardError, RolloutError."""
        self._loop.run(self._workers.raise_if_failed())
        urls = self._loop.run(self._find_servers(say))
        self._in_loop(lambda: self._build(urls))
        self._stack.callback(lambda: self._loop.run(self._close(), _CLOSE_SECONDS))
        log = f", log {self._server.log_file}" if self._server is not None else ""
        say(f"waiting for the rollout server{'s' * (len(urls) > 1)} at {', '.join(urls)}{log}")
        self._loop.run(self._pool.wait_ready(self._config.rollout.start_timeout_seconds))
        say("the rollout server is ready")
        self._loop.run(self._workers.ready())
        if self._key is None and (open_urls := [url for url in urls if not is_loopback(url)]):
            logger.warning(
                "without a key, everybody who reaches %s can read and replace the weights; start servers with a key, "
                "by tools/launch_rollout_servers.py",
                ", ".join(open_urls),
            )
        for server in self._pool.membership.members:
            if server.info is not None and not server.info.enable_priority_scheduling:
                logger.warning(
                    "%s runs without --enable-priority-scheduling: new responses overtake interrupted ones, and an "
                    "evaluation waits behind training; start it with this option",
                    server.url,
                )
        return Fleet(
            pool=self._pool,
            loop=self._loop,
            timeout_seconds=self._config.publish.timeout_seconds,
            find_urls=self._registered_urls if self._config.rollout.servers == "registered" else list,
        )

    def state(self) -> RolloutState:
        """Return all that `restore` needs."""
        return self._in_loop(lambda: replace(self._buffer.state(), prompts=self._prompts.fingerprint))

    def restore(self, state: RolloutState) -> None:
        """Continue from `state`. Raises DataError for other prompts, and ConfigError for another batch or staleness."""
        if state.prompts not in ("", self._prompts.fingerprint):
            raise DataError(
                "the training prompts are not those of the checkpoint, so its groups would get other prompts: restore "
                "the dataset and what decides which of its prompts are taken (`data`, the tokenizer, "
                "`actor.microbatch_tokens`), or start a new run (`run_dir=...`)"
            )
        self._in_loop(lambda: self._buffer.restore(state))

    def set_version(self, version: int) -> None:
        """Sample with this version from now on. The first call starts the collection. Raises VersionError."""
        if not self._started and version != self._buffer.version:
            raise VersionError(
                f"the trainer starts at weight version {version}, but the rollouts at {self._buffer.version}: a "
                "checkpoint is restored as a whole or not at all"
            )
        self._in_loop(lambda: self._collector.set_version(version))
        if not self._started:
            self._started = True
            self._in_loop(self._collector.start)

    def is_batch_complete(self, timeout_seconds: float) -> bool:
        """Wait for the next batch, no longer than `timeout_seconds`. Raises what ended the collection."""
        if self._complete is None:
            self._complete = self._loop.submit(self._collector.batch_complete())
        if not wait([self._complete], timeout_seconds).done:
            return False
        self._complete.result()
        return True

    def take_batch(self) -> list[Trajectory]:
        """Return the next batch, which is complete. Raises VersionError."""
        self._complete = None
        return self._in_loop(self._collector.take_batch)

    def sample_for_comparison(self, num_prompts: int, max_new_tokens: int) -> list[Trajectory]:
        """Sample the first held-out prompts on every server by the present version, without rewards."""
        sampled = self._sampler.sample_everywhere(self._prompts.held_out[:num_prompts], max_new_tokens)
        responses = self._loop.run(self._collector.or_failure(sampled))
        return [trajectory for item in responses for trajectory in item.trajectories]

    def evaluate(self, name: str, evaluated: str | None = None) -> list[DatasetResult]:
        """Evaluate the present weights on all evaluation datasets; see `Evaluator.evaluate`."""
        work = self._evaluator.evaluate(name, evaluated)
        return self._loop.run(self._collector.or_failure(work) if self._started else work)

    def adopt_weights(self) -> str:
        """Take over the weights that the servers hold, without publishing any; see `fleet.adopt_weights`."""
        return self._loop.run(adopt_weights(self._pool, self._config.model))

    def _in_loop[T](self, work: Callable[[], T]) -> T:
        """Call `work` in the event loop's thread, where groups move; none moves during the call."""

        async def call() -> T:
            return work()

        return self._loop.run(call())

    async def _find_servers(self, say: Callable[[str], None]) -> list[str]:
        if self._server is not None:
            return [self._server.url]
        rollout = self._config.rollout
        if rollout.servers != "registered":
            return list(rollout.servers)
        async with aiohttp.ClientSession() as session:
            return await find_servers(
                servers_folder(self._config.run_dir),
                rollout.num_servers,
                problem_of=lambda url: SGLangClient(url, session, _ANSWER_SECONDS, self._key).problem(),
                timeout_seconds=rollout.start_timeout_seconds,
                say=say,
            )

    def _registered_urls(self) -> list[str]:
        return [registration.url for registration in read_registrations(servers_folder(self._config.run_dir))]

    def _build(self, urls: list[str]) -> None:
        config, rollout = self._config, self._config.rollout
        rewarder = Rewarder(self._workers, shaping(config), max_failed_share=config.reward.max_failed_share)
        self._pool = ServerPool(
            urls,
            timeout_seconds=rollout.request_timeout_seconds,
            key=self._key,
            run=f"{config.run_dir.resolve()} (host {socket.gethostname()}, process {os.getpid()})",
            min_servers=config.publish.min_servers,
            pause_mode=config.publish.pause_mode,
            longest_request=longest_request(config, self._prompts),
            find_dead=self._server.describe_death if self._server is not None else lambda: None,
        )
        training, evaluation = _samplings(config)
        self._sampler = Sampler(
            self._pool,
            self._tokenizer,
            training,
            max_in_flight=rollout.max_concurrent_groups * rollout.group_size,
            stop_token_ids=stop_token_ids(config.model, self._tokenizer),
        )
        self._evaluator = Evaluator(
            self._prompts.evaluation, self._sampler, rewarder, evaluation, config.run_dir / EVALUATIONS
        )
        self._buffer = StalenessBuffer(
            groups_per_batch=rollout.prompts_per_step,
            max_staleness=config.max_staleness,
            num_batches=config.num_steps,
            ledger=self.ledger,
        )
        self._collector = RolloutCollector(
            self._buffer,
            lambda group_id: self._sampler.sample_group(self._prompts.training_prompt(group_id), group_id),
            rewarder.reward_group,
            self._pool.watch,
            max_concurrent_groups=rollout.max_concurrent_groups,
            max_failed_share=config.reward.max_failed_share,
        )

    async def _close(self) -> None:
        await self._collector.stop()
        self.ledger.drop_open("run_ended")
        await self._pool.close()


def shaping(config: RunConfig) -> Shaping:
    """Return the penalties of training."""
    return Shaping(
        max_new_tokens=config.rollout.max_new_tokens,
        format_penalty=config.reward.format_penalty,
        length_penalty=config.reward.length_penalty,
    )


def _samplings(config: RunConfig) -> tuple[Sampling, Sampling]:
    """Return how training and evaluations sample: an evaluation as training, unless `evaluation` says otherwise."""
    rollout, chosen = config.rollout, config.evaluation
    training = Sampling(
        num_samples=rollout.group_size, max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature
    )
    evaluation = Sampling(
        num_samples=chosen.num_samples,
        max_new_tokens=chosen.max_new_tokens or training.max_new_tokens,
        temperature=training.temperature if chosen.temperature is None else chosen.temperature,
    )
    return training, evaluation
