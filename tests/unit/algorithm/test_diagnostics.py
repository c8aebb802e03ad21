"""Every metric of a training step against one line of double precision."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_a3po.algorithm.diagnostics import (
    MAXIMA,
    SUMS,
    Totals,
    as_numbers,
    combine_numbers,
    combine_tensors,
    summarize,
)
from megatron_a3po.algorithm.loss import LossOutput, a3po_loss

OPTIONS: dict[str, Any] = {
    "clip_epsilon_low": 0.2,
    "clip_epsilon_high": 0.3,
    "dual_clip": 1.5,
    "weight_cap": 2.0,
    "weight_cap_mode": "clamp",
}


def tokens(count: int = 400) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    b = -3 * torch.rand(count, generator=generator)
    theta = b + torch.randn(count, generator=generator)
    theta[:20:5] = math.nan
    b[1:20:5] = -math.inf
    return {
        "target_logprobs": theta,
        "behaviour_logprobs": b,
        "staleness": torch.randint(0, 5, (count,), generator=generator),
        "advantages": torch.randn(count, generator=generator),
        "loss_mask": torch.rand(count, generator=generator) < 0.7,
    }


def measured(data: dict[str, Any]) -> LossOutput:
    return a3po_loss(**data, **OPTIONS)


def test_every_metric_equals_its_definition_over_the_used_tokens() -> None:
    data = tokens()
    mask = data["loss_mask"]
    finite = data["target_logprobs"].isfinite() & data["behaviour_logprobs"].isfinite()
    theta, b, advantage = (
        data[name][mask & finite].double() for name in ("target_logprobs", "behaviour_logprobs", "advantages")
    )
    d = data["staleness"][mask & finite]
    beta = torch.tensor([1 / age if age else 0.0 for age in d.tolist()], dtype=torch.float64)
    rho = (theta - b).exp()
    w, r = rho ** (1 - beta), rho**beta
    surrogate = torch.minimum(r * advantage, r.clip(0.8, 1.3) * advantage)
    surrogate = torch.where(advantage < 0, surrogate.maximum(1.5 * advantage), surrogate)
    low, high = (advantage < 0) & (r < 0.8), (advantage > 0) & (r > 1.3)
    dual = (advantage < 0) & (r > 1.5)
    apart = (theta - b).abs()
    expected: dict[str, Any] = {
        "loss": -(w.clip(max=2.0) * surrogate).sum() / mask.sum(),
        "loss_tokens": mask.sum(),
        "nonfinite_tokens": (mask & ~finite).sum(),
        "clamped_tokens": 0.0,
        "fresh_tokens": (d == 0).sum(),
        "loss_staleness_mean": d.double().mean(),
        "importance_weight_mean": w.mean(),
        "capped_share": (w > 2.0).double().mean(),
        "ratio_mean": r.mean(),
        "clipped_low_share": low.double().mean(),
        "clipped_high_share": high.double().mean(),
        "dual_clipped_share": dual.double().mean(),
        "kl_k1": (b - theta).mean(),
        "kl_k3": (rho - 1 - rho.log()).mean(),
        "effective_sample_share": rho.sum() ** 2 / (rho**2).sum() / len(rho),
        "fresh_logprob_difference_mean": apart[d == 0].mean(),
        "clipped_share": (low | high | dual).double().mean(),
        "loss_staleness_max": d.max(),
        "importance_weight_max": w.max(),
        "ratio_max": r.max(),
        "fresh_logprob_difference_max": apart[d == 0].max(),
    }
    output = measured(data)
    metrics = summarize(as_numbers(output.totals))

    assert metrics == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)
    assert all(metrics[name] > 0 for name in metrics if name not in ("clamped_tokens", "kl_k1", "loss"))


def test_sums_add_up_and_maxima_combine_over_any_split_of_the_tokens() -> None:
    data = tokens()
    whole = measured(data)
    parts = [measured({name: tensor[part] for name, tensor in data.items()}) for part in SPLITS]

    for combined in (
        as_numbers(combine_tensors(part.totals for part in parts)),
        combine_numbers([as_numbers(part.totals) for part in parts]),
    ):
        sums, expected = dict(combined.sums), dict(as_numbers(whole.totals).sums)
        assert sums.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-6, abs=1e-6)  # the loss is float32
        assert sums == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert combined.maxima == as_numbers(whole.totals).maxima
    assert {value.dtype for value in [*whole.totals.sums.values(), *whole.totals.maxima.values()]} == {torch.float64}


SPLITS = [slice(0, 1), slice(1, 1), slice(1, 250), slice(250, 400)]


def test_every_total_has_a_name_that_all_ranks_know() -> None:
    totals = measured(tokens(3)).totals

    assert totals.sums.keys() == set(SUMS) and totals.maxima.keys() == set(MAXIMA)


def test_a_batch_without_loss_tokens_has_defined_metrics_and_no_effective_sample() -> None:
    metrics = summarize(Totals(sums=dict.fromkeys(SUMS, 0.0), maxima=dict.fromkeys(MAXIMA, 0.0)))

    assert math.isnan(metrics.pop("effective_sample_share"))
    assert set(metrics.values()) == {0.0}


def test_log_ratios_over_20_count_once_and_enter_the_ratio_cut() -> None:
    theta = torch.tensor([29.0, -31.0, 18.0])
    zeros, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    output = a3po_loss(theta, zeros, zeros.long(), zeros, mask, clip_epsilon_low=0.2, clip_epsilon_high=0.2)
    sums = as_numbers(output.totals).sums

    assert sums["clamped_tokens"] == 2
    assert sums["target_over_behaviour"] == pytest.approx(math.exp(20) + math.exp(-20) + math.exp(18))
    assert sums["kl_k1"] == pytest.approx(-20 + 20 - 18)
    k3 = (math.exp(20) - 21) + (math.exp(-20) + 19) + (math.exp(18) - 19)
    assert sums["kl_k3"] == pytest.approx(k3, rel=1e-12)


def test_one_token_of_no_probability_at_all_does_not_drown_the_divergence_of_the_others() -> None:
    b, theta, ones = torch.full((1000,), -1.0), torch.full((1000,), -1.1), torch.ones(1000)
    b[3] = torch.finfo(torch.float32).min  # what stands for minus infinity in some servers
    output = a3po_loss(theta, b, ones.long(), ones, ones.bool(), clip_epsilon_low=0.2, clip_epsilon_high=0.2)
    metrics = summarize(as_numbers(output.totals))

    assert metrics["clamped_tokens"] == 1
    assert metrics["kl_k1"] == pytest.approx((999 * 0.1 - 20) / 1000, rel=1e-6)
    assert 0 < metrics["kl_k3"] < math.exp(20) / 1000
