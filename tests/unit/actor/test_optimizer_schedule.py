"""The learning rate of every optimizer step against a closed form."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_a3po import cpu
from megatron_a3po.config import OptimizerConfig

PEAK, LOWEST = 3e-6, 2e-7


def settings(schedule: str, warmup_steps: int, lowest: float) -> OptimizerConfig:
    values = {"learning_rate": PEAK, "schedule": schedule, "warmup_steps": warmup_steps, "weight_decay": 0.1}
    return OptimizerConfig.model_validate(values | {"min_learning_rate": lowest})


def learning_rates(config: OptimizerConfig, num_steps: int) -> list[float]:
    """Of each optimizer step, as the parameter groups have it: the schedule moves before the step."""
    cpu.install()
    from megatron_a3po.actor.optimizer import build_schedule

    optimizer: Any = SimpleNamespace(param_groups=[{"lr": None}, {"lr": None}])
    schedule = build_schedule(optimizer, config, num_steps)
    rates = []
    for _ in range(num_steps):
        schedule.step(1)
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first == second == schedule.get_lr({})
        assert optimizer.param_groups[0]["weight_decay"] == config.weight_decay
        rates.append(first)
    return rates


def closed_form(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """`step` counts from 1. The one after the last would be at the lowest rate, and no other."""
    warmup, peak, lowest = config.warmup_steps, config.learning_rate, config.min_learning_rate
    if step <= warmup:
        return peak * step / warmup
    gone = (step - warmup) / (num_steps + 1 - warmup)
    left = {"constant": 1.0, "linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2}[config.schedule]
    return lowest + left * (peak - lowest)


@pytest.mark.parametrize("num_steps", [5, 8, 60])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
@pytest.mark.parametrize(
    ("schedule", "lowest"),
    [("constant", 0.0), ("linear", 0.0), ("linear", LOWEST), ("cosine", 0.0), ("cosine", LOWEST)],
)
def test_every_step_has_the_rate_of_the_closed_form(
    schedule: str, lowest: float, warmup_steps: int, num_steps: int
) -> None:
    config = settings(schedule, warmup_steps, lowest)
    expected = [closed_form(config, step, num_steps) for step in range(1, num_steps + 1)]
    assert learning_rates(config, num_steps) == pytest.approx(expected, rel=1e-12, abs=1e-20)
