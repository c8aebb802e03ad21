"""Everything of the rollouts that only rank 0 has."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from transformers import AutoTokenizer

from megatron_a3po.config import RunConfig
from megatron_a3po.data.buffer import StalenessBuffer
from megatron_a3po.data.ledger import Ledger
from megatron_a3po.data.rollout_state import RolloutState
from megatron_a3po.errors import VersionError
from megatron_a3po.rollout.collector import RolloutCollector
from megatron_a3po.rollout.control import ServerControl
from megatron_a3po.rollout.event_loop import EventLoopThread
from megatron_a3po.rollout.pool import ServerPool
from megatron_a3po.rollout.prompt_loading import load_prompts
from megatron_a3po.rollout.reward_settings import pool_settings, shaping
from megatron_a3po.rollout.rewarder import Rewarder
from megatron_a3po.rollout.rewards.pool import RewardPool
from megatron_a3po.rollout.sampler import Sampler
from megatron_a3po.rollout.servers import LocalServer
from megatron_a3po.runtime.logging import logger
from megatron_a3po.types import Trajectory

_CLOSE_SECONDS = 10.0
_HEARTBEAT_SECONDS = 20.0


class RankZeroRollouts:
    """The rollouts where they are made: prompts, servers, collector, ledger. A context manager."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._tokenizer = AutoTokenizer.from_pretrained(config.model)
        self._prompts = load_prompts(config, self._tokenizer)
        self.ledger = Ledger()
        self._stack = ExitStack()
        self._started = False
        self._server_log: Path | None = None
        self._complete: Future[None] | None = None

    def __enter__(self) -> Self:
        config = self._config
        urls, server = config.rollout.servers, None
        if urls == "local":
            self._server_log = config.run_dir / "logs" / "rollout_server.log"
            server = self._stack.enter_context(
                LocalServer(config.model, self._server_log, config.rollout.server_arguments)
            )
            urls = [server.url]
        self._loop = EventLoopThread()
        self._stack.callback(self._loop.close)
        self._loop.run(self._build(urls, server))
        # With a timeout: nothing that hangs may keep the run from ending.
        self._stack.callback(lambda: self._loop.run(self._close(), _CLOSE_SECONDS))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def connect(self, say: Callable[[str], None]) -> ServerControl:
        urls = ", ".join(client.url for client in self._pool.clients)
        say(f"waiting for the rollout server at {urls}" + (f", log {self._server_log}" if self._server_log else ""))
        ready = self._loop.submit(self._pool.wait_ready(self._config.rollout.start_timeout_seconds))
        while not wait([ready], timeout=_HEARTBEAT_SECONDS).done:
            say("still waiting for the rollout server")
        ready.result()
        say("the rollout server is ready")
        self._loop.run(self._reward_pool.raise_if_failed())
        for server in self._pool.states.members:
            if server.info is not None and not server.info.enable_priority_scheduling:
                logger.warning(
                    "%s runs without --enable-priority-scheduling: interrupted responses are overtaken by new ones, "
                    "and evaluation waits behind training",
                    server.url,
                )
        return ServerControl(pool=self._pool, loop=self._loop, timeout_seconds=self._config.publish.timeout_seconds)

    def state(self) -> RolloutState:
        return self._loop.run(self._state())

    def restore(self, state: RolloutState) -> None:
        self._loop.run(self._restore(state))

    def set_version(self, version: int) -> None:
        self._loop.run(self._set_version(version))

    def is_batch_complete(self, timeout_seconds: float) -> bool:
        """Waits so long for it. Raises what ended the collection."""
        if self._complete is None:
            self._complete = self._loop.submit(self._collector.batch_complete())
        if not wait([self._complete], timeout_seconds).done:
            return False
        self._complete.result()
        return True

    def take_batch(self) -> list[Trajectory]:
        self._complete = None
        return self._loop.run(self._collector.take_batch())

    def sample_held_out(self, num_prompts: int, max_new_tokens: int | None = None) -> list[Trajectory]:
        """Whole responses are rewarded; those of `max_new_tokens` are for something else, and have NaN instead."""
        return self._loop.run(self._collector.or_failure(self._sample_held_out(num_prompts, max_new_tokens)))

    async def _sample_held_out(self, num_prompts: int, max_new_tokens: int | None) -> list[Trajectory]:
        responses = await self._sampler.sample_each(self._prompts.held_out[:num_prompts], max_new_tokens)
        if max_new_tokens is None:
            return await self._rewarder.score_each(responses)
        return [trajectory for item in responses for trajectory in item.trajectories]

    async def _build(self, urls: list[str], server: LocalServer | None) -> None:
        config, rollout = self._config, self._config.rollout
        # First, since its worker imports the reward function while everything else starts.
        self._reward_pool = RewardPool(pool_settings(config))
        self._reward_pool.start()
        self._rewarder = Rewarder(self._reward_pool, shaping(config), max_failed_share=config.reward.max_failed_share)
        self._pool = ServerPool(
            urls,
            timeout_seconds=rollout.request_timeout_seconds,
            min_servers=config.publish.min_servers,
            pause_mode=config.publish.pause_mode,
            find_dead=server.describe_death if server is not None else lambda: None,
        )
        self._sampler = Sampler(
            self._pool,
            self._tokenizer,
            group_size=rollout.group_size,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
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
            self._rewarder.reward_group,
            self._pool.watch,
            max_concurrent_groups=rollout.max_concurrent_groups,
            max_failed_share=config.reward.max_failed_share,
        )

    # Both in the loop's thread and without an await: no group moves meanwhile.
    async def _state(self) -> RolloutState:
        return self._buffer.state()

    async def _restore(self, state: RolloutState) -> None:
        self._buffer.restore(state)

    async def _set_version(self, version: int) -> None:
        if not self._started and version != self._buffer.version:
            raise VersionError(
                f"the trainer starts at weight version {version}, but the rollouts at {self._buffer.version}: a "
                "checkpoint is restored as a whole or not at all"
            )
        self._collector.set_version(version)
        if not self._started:
            self._started = True
            self._collector.start()

    async def _close(self) -> None:
        await self._collector.stop()
        self.ledger.drop_open("run_ended")
        await self._reward_pool.close()
        await self._pool.close()
