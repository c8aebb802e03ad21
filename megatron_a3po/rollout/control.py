"""What the weight publisher needs of the rollout servers, callable from the trainer's thread."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from megatron_a3po.errors import RolloutError
from megatron_a3po.rollout.event_loop import EventLoopThread
from megatron_a3po.rollout.pool import ServerPool
from megatron_a3po.rollout.protocol import ServerInfo, WeightChecksums, parse_answer
from megatron_a3po.runtime.logging import logger


@dataclass(frozen=True, slots=True)
class ServerControl:
    """Control calls to every server at once. Each raises RolloutError on the first server that refuses.

    The order of one publication, observed on SGLang 0.5.23: pause, begin, update for every bucket, end, resume.
    """

    pool: ServerPool
    loop: EventLoopThread
    servers: tuple[ServerInfo, ...]
    timeout_seconds: float
    """for one control call"""

    @property
    def urls(self) -> list[str]:
        return [client.url for client in self.pool.clients]

    @property
    def served(self) -> list[tuple[str, str, str | None]]:
        """URL, folder of the model and quantisation of every server, as it says itself."""
        return [
            (url, server.model_path, server.quantization) for url, server in zip(self.urls, self.servers, strict=True)
        ]

    @property
    def group_world_size(self) -> int:
        """The trainer's sender and every rank of every server."""
        return 1 + sum(server.tp_size for server in self.servers)

    def create_group(self, name: str, address: str, port: int, backend: str, timeout_seconds: float) -> Future[Any]:
        """Returns at once; the servers answer when all ranks have joined."""
        offset, bodies = 1, []
        for server in self.servers:
            bodies.append(
                {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": offset,
                    "world_size": self.group_world_size,
                    "group_name": name,
                    "backend": backend,
                }
            )
            offset += server.tp_size
        return self.loop.submit(self.pool.post_to_all("/init_weights_update_group", bodies, timeout_seconds))

    def destroy_group(self, name: str) -> Future[Any]:
        """Returns at once: all ranks, the trainer's too, should leave together."""
        return self.loop.submit(self.pool.post_to_all("/destroy_weights_update_group", {"group_name": name}))

    def forget_group(self, name: str) -> None:
        """Leave a group that a run which died may have left at a server."""
        try:
            self._post("/destroy_weights_update_group", {"group_name": name})
        except RolloutError as error:
            # 400 is the answer where there is no such group.
            logger.debug("no group to forget: %s", error)

    def pause(self) -> None:
        """Running requests go back to the queue, keep their tokens, and go on with the new weights after `resume`."""
        self._post("/pause_generation", {"mode": "retract"})

    def begin(self) -> None:
        self._post("/begin_weight_update", {})

    def update(self, body: dict[str, Any], timeout_seconds: float) -> Future[None]:
        """Announce one bucket; the result comes when every server has received and loaded it."""
        return self.loop.submit(self._update(body, timeout_seconds))

    def update_from_disk(self, folder: str, version: str, timeout_seconds: float) -> None:
        """Have every server read the weights in `folder`, forget what it has cached, and take on the version."""
        # The format is named, since a server may have been started without weights.
        body = {"model_path": folder, "weight_version": version, "flush_cache": True, "load_format": "auto"}
        answers = self.loop.run(self.pool.post_to_all("/update_weights_from_disk", body, timeout_seconds))
        self._refuse_failure(answers, f"did not load {folder}")

    def end(self) -> None:
        self._post("/end_weight_update", {})

    def resume(self) -> None:
        self._post("/continue_generation", {})

    def checksums(self) -> list[list[dict[str, str]]]:
        """Of every server, of every rank: the checksums of the weights that it holds, by name."""
        answers = self.loop.run(self.pool.post_to_all("/weights_checker", {"action": "checksum"}))
        parsed = [
            parse_answer(WeightChecksums, answer, f"{url}/weights_checker")
            for url, answer in zip(self.urls, answers, strict=True)
        ]
        return [[rank.checksums for rank in server.ranks] for server in parsed]

    def _post(self, path: str, body: dict[str, Any]) -> None:
        self.loop.run(self.pool.post_to_all(path, body, self.timeout_seconds))

    async def _update(self, body: dict[str, Any], timeout_seconds: float) -> None:
        answers = await self.pool.post_to_all("/update_weights_from_distributed", body, timeout_seconds)
        self._refuse_failure(answers, "did not load a weight bucket")

    def _refuse_failure(self, answers: list[Any], what: str) -> None:
        for url, answer in zip(self.urls, answers, strict=True):
            if not (isinstance(answer, dict) and answer.get("success")):
                raise RolloutError(f"{url} {what}: {answer}")
