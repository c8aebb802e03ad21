"""What a training step refuses before its optimizer moves. Our own parts stand still here; Megatron is not run."""

import math
from typing import Any

import pytest
import torch

from megatron_a3po import cpu
from megatron_a3po.algorithm.diagnostics import Totals
from megatron_a3po.config import RunConfig
from megatron_a3po.errors import TrainingError
from megatron_a3po.runtime.timing import PhaseTimer
from tests.support.trajectories import make_trajectory

VERSION = 3


class Optimizer:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self) -> Any:
        from megatron_a3po.actor.optimizer import StepResult

        self.calls.append("step")
        return StepResult(1.0, 1e-3, True)

    def skip(self) -> Any:
        from megatron_a3po.actor.optimizer import StepResult

        self.calls.append("skip")
        return StepResult(0.0, 1e-3, False)

    def finish_parameter_gather(self) -> None:
        self.calls.append("finish")


class Objective:
    """The sums are the metrics."""

    def metrics(self, totals: Totals[float]) -> dict[str, float]:
        return dict(totals.sums)


def actor(*minibatches: tuple[float, float]) -> Any:
    """One whose minibatches have these (loss tokens, tokens that are not finite)."""
    cpu.install()
    from megatron_a3po.actor.actor import PolicyActor

    made: Any = object.__new__(PolicyActor)
    made._config = RunConfig.model_validate({"model": "m", "run_dir": "r", "num_steps": 1, "data": {"task": "t"}})
    made._timer, made.version = PhaseTimer(), VERSION
    made.optimizer, made.objective = Optimizer(), Objective()
    remaining = iter(minibatches)
    made._minibatches = lambda *_: [[] for _ in minibatches]
    made._with_forward_passes = lambda parts: parts
    names = ("loss_tokens", "nonfinite_tokens")
    made._forward_backward = lambda *_, **__: Totals(sums=dict(zip(names, next(remaining), strict=True)))
    return made


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_advantage_that_is_not_finite_is_refused_with_its_trajectory(value: float) -> None:
    made = actor((10, 0))
    with pytest.raises(TrainingError, match=r"task/0/1 is (nan|inf); look at the reward function"):
        made.train_step([make_trajectory([3, 3], 1)], torch.tensor([value]))
    assert made.optimizer.calls == [] and made.version == VERSION


def test_too_many_logprobs_that_are_not_finite_stop_the_run_before_the_step_of_their_minibatch() -> None:
    made = actor((1000, 10), (1000, 11))
    with pytest.raises(TrainingError, match=r"max_nonfinite_share = 1\.0%"):
        made.train_step([make_trajectory([0, 3])], torch.ones(1))
    assert made.optimizer.calls == ["step"] and made.version == VERSION


def test_a_minibatch_without_loss_tokens_is_skipped_and_counted() -> None:
    made = actor((10, 0), (0, 0), (5, 0))
    metrics = made.train_step([make_trajectory([0, 3])], torch.ones(1))

    assert made.optimizer.calls == ["step", "skip", "step", "finish"]
    assert metrics["skipped_steps"] == 1 and metrics["loss_tokens"] == 15 and made.version == VERSION + 1
