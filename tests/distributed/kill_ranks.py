"""Ranks of whole runs that kill themselves at a chosen place.

The product knows nothing of it: functions of it are wrapped here.
"""

import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from tests.support.deadlines import scaled

DEADLINE_SECONDS = scaled(100.0)
NOW = SimpleNamespace(training=0, saving=0, publishing=-1, training_begins={3: threading.Event(), 4: threading.Event()})
"""Steps that this rank trains and saves, the version that it publishes."""
KILLED_STEP, KILLED_SAVE = 3, 2


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def wrap(
    owner: Any, name: str, *, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> None:
    """`before` gets the arguments, `after` the result."""
    original = getattr(owner, name)

    @functools.wraps(original)  # Megatron looks at the signature
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments, **options)
        result = original(*arguments, **options)
        if after is not None:
            after(result)
        return result

    setattr(owner, name, wrapped)


def die_in_forward() -> None:
    from megatron.core.transformer.transformer_block import TransformerBlock

    wrap(TransformerBlock, "forward", after=lambda _: NOW.training == KILLED_STEP and die())


def die_in_backward() -> None:
    from megatron.core.transformer.transformer_block import TransformerBlock

    def when_its_gradient_comes(output: Any) -> None:
        if NOW.training == KILLED_STEP and output.requires_grad:
            output.register_hook(lambda _: die())

    wrap(TransformerBlock, "forward", after=when_its_gradient_comes)


def die_in_optimizer() -> None:
    """The masters have moved, the weights have not."""
    from torch.optim import AdamW

    wrap(AdamW, "step", after=lambda _: NOW.training == KILLED_STEP and die())


def die_in_publish() -> None:
    from megatron_a3po.fleet.publication import Fleet

    wrap(Fleet, "update", after=lambda _: NOW.publishing == KILLED_STEP and die())


def die_before_publish() -> None:
    from megatron_a3po.weights.publisher import WeightPublisher

    wrap(WeightPublisher, "publish", before=lambda _, version: version == KILLED_STEP and die())


def die_before_begin() -> None:
    from megatron_a3po.checkpoint.store import CheckpointStore

    wrap(CheckpointStore, "begin", before=lambda *_: NOW.saving == KILLED_SAVE and die())


def die_in_shard() -> None:
    """Some tensors of the file are written, and the others are not."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    written = []

    def count(_: Any) -> None:
        written.append(NOW.saving)
        if written.count(KILLED_SAVE) == 5:
            die()

    wrap(filesystem_async, "_write_item", after=count)


def die_in_background() -> None:
    """While the main thread trains the next step."""
    while_saving(lambda: NOW.training_begins[KILLED_SAVE + 1].wait(DEADLINE_SECONDS) and die())


def write_slowly() -> None:
    """No tensor of the save gets to the disk before the main thread trains the step after the next."""
    while_saving(lambda: NOW.training_begins[KILLED_SAVE + 2].wait(DEADLINE_SECONDS))


def while_saving(work: Callable[[], Any]) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def before(*arguments: Any, **_: Any) -> None:
        # Not by NOW.saving, which belongs to the main thread: the save before may still be going on.
        (file,) = [str(argument.name) for argument in arguments if isinstance(argument, io.BufferedWriter)]
        if f"{KILLED_SAVE:08d}" in file:
            work()

    wrap(filesystem_async, "_write_item", before=before)


def die_after_shards() -> None:
    from megatron_a3po.actor.megatron_state import TrainingStateSave

    wrap(TrainingStateSave, "finish", before=lambda _: NOW.saving == KILLED_SAVE and die())


def die_before_manifest() -> None:
    from megatron_a3po.checkpoint import store as checkpoints

    wrap(checkpoints, "write_manifest", before=lambda *_: NOW.saving == KILLED_SAVE and die())


def die_before_rename() -> None:
    from megatron_a3po.checkpoint import store as checkpoints

    wrap(checkpoints, "write_manifest", after=lambda _: NOW.saving == KILLED_SAVE and die())


def die_before_latest() -> None:
    from megatron_a3po.checkpoint import store as checkpoints

    wrap(checkpoints, "write_durably", before=lambda *_: NOW.saving == KILLED_SAVE and die())


def die_in_retention() -> None:
    """The doomed checkpoint has lost its name, and its files are still there."""
    from megatron_a3po.checkpoint import store as checkpoints

    def is_doomed(path: Path, **_: Any) -> None:
        if path.name.endswith(".deleted") and NOW.saving == KILLED_SAVE:
            die()

    wrap(checkpoints.shutil, "rmtree", before=is_doomed)


def observe(run_dir: Path) -> None:
    """Know where the rank is, reward responses by a hash instead of their sense, and note what is trained on."""
    import torch

    from megatron_a3po.actor.actor import PolicyActor
    from megatron_a3po.checkpoint.manager import CheckpointManager
    from megatron_a3po.rollout.buffer import StalenessBuffer
    from megatron_a3po.weights.publisher import WeightPublisher

    def begin_training(actor: Any, batch: list[Any], advantages: Any) -> None:
        NOW.training = actor.version + 1
        NOW.training_begins.get(NOW.training, threading.Event()).set()
        torch.rand(1)  # the model has no dropout: nothing else would move the random state
        if os.environ["RANK"] == "0":
            with (run_dir / "batches.jsonl").open("a") as file:
                file.write(json.dumps({"step": NOW.training, "digest": digest(batch, advantages)}) + "\n")

    wrap(PolicyActor, "train_step", before=begin_training, after=lambda _: setattr(NOW, "training", 0))
    wrap(CheckpointManager, "save", before=lambda _, step, *__, **___: setattr(NOW, "saving", step))
    wrap(WeightPublisher, "publish", before=lambda _, version: setattr(NOW, "publishing", version))
    add = StalenessBuffer.add
    StalenessBuffer.add = lambda buffer, group: add(buffer, rewarded(group))  # type: ignore[method-assign]


def rewarded(group: Any) -> Any:
    """Made-up tokens are right answers to nothing, and a group without a difference teaches nothing."""
    rewards = [float(zlib.crc32(item.token_ids.numpy().tobytes()) % 2) for item in group.trajectories]
    trajectories = [
        dataclasses.replace(item, reward=reward) for item, reward in zip(group.trajectories, rewards, strict=True)
    ]
    return dataclasses.replace(group, trajectories=tuple(trajectories))


def digest(batch: list[Any], advantages: Any) -> str:
    seen = hashlib.sha256(advantages.numpy().tobytes())
    for trajectory in batch:
        for tensor in (trajectory.token_ids, trajectory.behaviour_logprobs, trajectory.weight_versions):
            seen.update(tensor.numpy().tobytes())
        seen.update(f"{trajectory.prompt_id} {trajectory.group_id} {trajectory.reward}".encode())
    return seen.hexdigest()


def run_rank(config: str, fault: str, ranks: str) -> None:
    """Train with a configuration in JSON. `fault`: the function here that kills these ranks, a list in JSON."""
    from megatron_a3po.config import RunConfig

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    validated = RunConfig.model_validate(json.loads(config))
    observe(validated.run_dir)
    if int(os.environ["RANK"]) in json.loads(ranks):
        globals()[fault]()
    from megatron_a3po.train import train

    train(validated)
