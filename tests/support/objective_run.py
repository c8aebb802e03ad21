"""What the tests of the objective share: a packed batch with every optional field, and a run of the objective on it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron_a3po.algorithm.diagnostics import Totals, as_numbers
from megatron_a3po.algorithm.objective import Objective
from megatron_a3po.batching.packing import pack
from megatron_a3po.config import RunConfig
from megatron_a3po.types import Alignment, FinishReason, Microbatch, Trajectory

VERSION = 7
SHAPES = [(3, 6), (1, 1), (2, 11), (4, 3), (1, 9)]
METHODS = ["loglinear", "linear", "recompute", "reuse_target", "behaviour"]
EVERYTHING: dict[str, Any] = {
    "entropy_coefficient": 0.3,
    "kl_coefficient": 0.2,
    "compare_with_recompute": True,
    "dual_clip": 2.0,
    "weight_cap": 1.5,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    loss: Tensor
    on_logprobs: Tensor
    on_entropy: Tensor | None
    report: Totals[float]
    metrics: dict[str, float]


def objective(proximal: str, **algorithm: Any) -> Objective:
    described = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"task": "t"}, "proximal": proximal}
    return Objective(**RunConfig.model_validate(described | {"algorithm": algorithm}).objective_options())


def trajectories() -> list[Trajectory]:
    generator = torch.Generator().manual_seed(31)
    return [
        Trajectory(
            prompt_id=f"p{number}",
            group_id=number,
            token_ids=torch.randint(0, 50, (prompt + response,), generator=generator),
            prompt_length=prompt,
            behaviour_logprobs=-3 * torch.rand(response, generator=generator),
            weight_versions=torch.randint(VERSION - 4, VERSION + 1, (response,), generator=generator),
            reward=0.0,
            finish_reason=FinishReason.STOP,
        )
        for number, (prompt, response) in enumerate(SHAPES)
    ]


ADVANTAGES = torch.tensor([1.5, -0.7, -1.2, 0.4, 0.9])


def batch(multiple_of: int = 8) -> tuple[Microbatch, Tensor, Tensor]:
    """(microbatch with every optional field, log-probs, entropy); random numbers also where the mask is false."""
    microbatch = pack(
        trajectories(), ADVANTAGES, alignment=Alignment(rank_multiple=multiple_of), device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(32)
    noise, more, still_more, entropy = torch.randn(4, len(microbatch.labels), generator=generator)
    theta = microbatch.behaviour_logprobs + 0.5 * noise
    fields = {"recomputed_logprobs": theta + 0.2 * more, "reference_logprobs": theta + 0.7 * still_more}
    return dataclasses.replace(microbatch, **fields), theta, entropy.abs()


def run(loss: Objective, microbatch: Microbatch, logprobs: Tensor, entropy: Tensor) -> Result:
    leaves = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
    value, report = loss(*leaves, microbatch, VERSION)
    on_logprobs, on_entropy = torch.autograd.grad(value, leaves, allow_unused=True)
    assert on_logprobs is not None
    return Result(
        loss=value.detach(),
        on_logprobs=on_logprobs,
        on_entropy=on_entropy,
        report=as_numbers(report),
        metrics=loss.metrics(as_numbers(report)),
    )


def without(microbatch: Microbatch, *fields: str) -> Microbatch:
    nothing: dict[str, Any] = dict.fromkeys(fields)
    return dataclasses.replace(microbatch, **nothing)
