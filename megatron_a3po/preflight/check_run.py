"""All checks of a configuration, and those across sections."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.config.schema import RunConfig
from megatron_a3po.config.server_key import find_key_mistake
from megatron_a3po.config.server_requirements import missing_in_place, problems_of_arguments
from megatron_a3po.preflight.check_algorithm import algorithm_mistakes
from megatron_a3po.preflight.check_data import data_mistakes
from megatron_a3po.preflight.check_layout import rank_mistakes
from megatron_a3po.preflight.check_model import model_mistakes
from megatron_a3po.preflight.check_precision import precision_mistakes


def find_mistakes(config: RunConfig, world_size: int | None) -> list[Mistake]:
    """Return every reason why a well-formed configuration cannot run on `world_size` ranks (None: unknown)."""
    return [
        *_device(config),
        *_servers(config),
        *_quarantine(config),
        *_delta(config),
        *data_mistakes(config),
        *_training(config),
        *algorithm_mistakes(config),
        *_optimizer(config),
        *_checkpoints(config),
        *precision_mistakes(config),
        *rank_mistakes(config, world_size),
        *model_mistakes(config),
    ]


def _device(config: RunConfig) -> Iterator[Mistake]:
    if config.device == "cuda" and config.rollout.servers == "local":
        yield Mistake(
            "rollout.servers",
            "local",
            "a run starts its own server only with `device: cpu`",
            "use `registered` and start servers on other GPUs with `tools/launch_rollout_servers.py`",
            ("device",),
        )
    if config.device == "cpu" and config.optimizer.offload:
        yield Mistake(
            "optimizer.offload",
            True,
            "with `device: cpu` the optimizer state is in host memory already",
            "remove this key",
            ("device",),
        )
    elif config.precision == "fp32" and config.optimizer.offload:
        yield Mistake(
            "optimizer.offload",
            True,
            "Megatron offloads float32 masters of bf16 weights and cannot offload float32 weights",
            "use `precision: bf16`, or remove this key",
            ("precision",),
        )


def _servers(config: RunConfig) -> Iterator[Mistake]:
    rollout = config.rollout
    for name, problem, remedy in problems_of_arguments(rollout.server_arguments):
        yield Mistake("rollout.server_arguments", name, problem, remedy)
    if rollout.servers != "registered" and rollout.num_servers > 1:
        yield Mistake(
            "rollout.num_servers",
            rollout.num_servers,
            "says for how many servers of `rollout.servers: registered` the run waits",
            "set that, or remove this key",
            ("rollout.servers",),
        )
    if rollout.key_file is not None and (mistake := find_key_mistake(rollout.key_file)) is not None:
        yield mistake
    if isinstance(rollout.servers, list):
        yield from _urls(rollout.servers)


def _urls(urls: list[str]) -> Iterator[Mistake]:
    if not urls:
        yield Mistake("rollout.servers", [], "no server", "use `local` or at least one http://host:port")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield Mistake("rollout.servers", url, "not a URL", "write http://host:port")
    plain = [url.rstrip("/").lower() for url in urls]
    for url in sorted({url for url in plain if plain.count(url) > 1}):
        yield Mistake("rollout.servers", url, "stands there twice", "name every server once")


def _quarantine(config: RunConfig) -> Iterator[Mistake]:
    servers = config.rollout.servers
    number = len(servers) if isinstance(servers, list) else config.rollout.num_servers
    least = config.publish.min_servers
    if least is not None and least > number:
        yield Mistake(
            "publish.min_servers",
            least,
            f"the run has {number} rollout server{'s' if number != 1 else ''}",
            f"use at most {number}, or remove this key",
            ("rollout.servers", "rollout.num_servers"),
        )
    if config.publish.pause_mode == "in_place" and isinstance(servers, str):
        for argument, problem in missing_in_place(config.rollout.server_arguments):
            remedy = f"add {argument} to `rollout.server_arguments`, or use `retract`"
            yield Mistake("publish.pause_mode", "in_place", problem, remedy, ("rollout.server_arguments",))


def _delta(config: RunConfig) -> Iterator[Mistake]:
    publish = config.publish
    if publish.delta_folder is None:
        return
    if publish.transport == "group" and not publish.fallback:
        yield Mistake(
            "publish.delta_folder",
            str(publish.delta_folder),
            "has no effect, because nothing is published through files",
            "use `publish.transport: disk`, or remove this key",
            ("publish.transport", "publish.fallback"),
        )
    if config.rollout.servers != "local" and not publish.delta_folder.is_absolute():
        yield Mistake(
            "publish.delta_folder",
            str(publish.delta_folder),
            "a relative path does not name the same folder on every machine",
            "use an absolute path such as /dev/shm/policy",
        )


def _training(config: RunConfig) -> Iterator[Mistake]:
    buffer, longest = config.algorithm.overlong_buffer_tokens, config.rollout.max_new_tokens
    if buffer > longest:
        yield Mistake(
            "algorithm.overlong_buffer_tokens",
            buffer,
            f"longer than the longest response, rollout.max_new_tokens = {longest}",
            f"use at most {longest}, or 0 for no penalty",
            ("rollout.max_new_tokens",),
        )
    if config.publish.max_logprob_difference is not None and config.publish.verify_prompts == 0:
        yield Mistake(
            "publish.max_logprob_difference",
            config.publish.max_logprob_difference,
            "has no effect with publish.verify_prompts = 0",
            "set `publish.verify_prompts` to a small number such as 4, or remove this key",
            ("publish.verify_prompts",),
        )
    groups, minibatches = config.rollout.prompts_per_step, config.actor.minibatches
    if groups % minibatches:
        yield Mistake(
            "actor.minibatches",
            minibatches,
            f"does not divide rollout.prompts_per_step = {groups}",
            f"use a divisor of {groups}, or {-(-groups // minibatches) * minibatches} prompts per step",
            ("rollout.prompts_per_step",),
        )
    if config.proximal == "reuse_target" and minibatches > 1:
        yield Mistake(
            "proximal",
            "reuse_target",
            f"bounds only the first of the {minibatches} optimizer steps on a batch",
            "use `recompute` or `loglinear`, or `actor.minibatches: 1`",
            ("actor.minibatches",),
        )


def _checkpoints(config: RunConfig) -> Iterator[Mistake]:
    every, keep = config.checkpoint.every_steps, config.checkpoint.keep_every
    if keep > 0 and (every == 0 or keep % every):
        yield Mistake(
            "checkpoint.keep_every",
            keep,
            f"not a multiple of checkpoint.every_steps = {every}" if every else "checkpoint.every_steps = 0 saves none",
            f"use a multiple of {every}, or 0" if every else "set `checkpoint.every_steps`, or use 0",
            ("checkpoint.every_steps",),
        )


def _optimizer(config: RunConfig) -> Iterator[Mistake]:
    optimizer, steps = config.optimizer, config.num_steps * config.actor.minibatches
    if optimizer.warmup_steps > steps:
        yield Mistake(
            "optimizer.warmup_steps",
            optimizer.warmup_steps,
            f"the run ends after {steps} optimizer steps (num_steps x actor.minibatches), "
            "before the learning rate reaches its maximum",
            f"use at most {steps}",
            ("num_steps", "actor.minibatches"),
        )
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield Mistake(
            "optimizer.min_learning_rate",
            optimizer.min_learning_rate,
            f"above optimizer.learning_rate = {optimizer.learning_rate}",
            f"use at most {optimizer.learning_rate}",
            ("optimizer.learning_rate",),
        )
    elif optimizer.min_learning_rate > 0 and optimizer.schedule == "constant":
        yield Mistake(
            "optimizer.min_learning_rate",
            optimizer.min_learning_rate,
            "has no effect with optimizer.schedule = constant",
            "set `optimizer.schedule` to linear or cosine, or remove this key",
            ("optimizer.schedule",),
        )
