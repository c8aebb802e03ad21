"""Plain PyTorch training of a Hugging Face model: what the actor is compared with."""

import copy
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_a3po.config import RunConfig
from megatron_a3po.types import FinishReason, Trajectory

METRICS = ("loss", "entropy", "kl_to_reference", "proximal_error")
"""What `PlainTrainer` computes of the actor's metrics, beside the norm of the gradient."""


def random_batch(
    seed: int, version: int, model: Any, *, vocab_size: int, num_groups: int = 8, longest: int = 14
) -> list[Trajectory]:
    """Ragged trajectories whose behaviour log-probs are the model's own with noise, per-token versions up to 3 old."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for number in range(4 * num_groups):
        prompt_length, response_length = torch.randint(3, longest, (2,), generator=generator).tolist()
        batch.append(
            Trajectory(
                prompt_id=str(number),
                group_id=number // 4,
                # Without token 0: Hugging Face drops the gradient of the padding token's embedding.
                token_ids=torch.randint(1, vocab_size, (prompt_length + response_length,), generator=generator),
                prompt_length=prompt_length,
                behaviour_logprobs=0.7 * torch.randn(response_length, generator=generator),
                weight_versions=torch.randint(version - 3, version + 1, (response_length,), generator=generator),
                reward=0.0,
                finish_reason=FinishReason.STOP,
            )
        )
    with torch.no_grad():
        found = response_logprobs(batch, model)
    return [
        dataclasses.replace(item, behaviour_logprobs=logprobs + item.behaviour_logprobs)
        for item, (logprobs, _) in zip(batch, found, strict=True)
    ]


def response_logprobs(batch: Sequence[Trajectory], model: Any, temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    """(log-probs of the response tokens, entropies) of each trajectory, both [response]"""
    # Nothing before a token depends on what is put behind it.
    ids = torch.nn.utils.rnn.pad_sequence([item.token_ids for item in batch], batch_first=True, padding_value=1)
    log_p = (model(ids[:, :-1]).logits.float() / temperature).log_softmax(-1)
    chosen, entropy = log_p.gather(-1, ids[:, 1:, None])[:, :, 0], -(log_p.exp() * log_p).sum(-1)
    places = [slice(item.prompt_length - 1, len(item.token_ids) - 1) for item in batch]
    return [(chosen[row, place], entropy[row, place]) for row, place in enumerate(places)]


class PlainTrainer:
    """One optimizer step per minibatch of whole groups, by the formulas of the paper, on one process."""

    def __init__(self, model: Any, config: RunConfig) -> None:
        self.model = model
        self.start = copy.deepcopy(model).requires_grad_(False)
        self.config = config
        self.steps = 0
        settings = config.optimizer
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
        )

    @classmethod
    def from_folder(cls, folder: Path, config: RunConfig) -> Self:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return cls(model.eval(), config)

    def train_step(self, batch: Sequence[Trajectory], advantages: Tensor, version: int) -> dict[str, float]:
        """Metrics by the actor's names. The gradient of the last minibatch stays in the model, as it was unclipped."""
        totals = dict.fromkeys(METRICS, 0.0)
        tokens, norms = 0, []
        with torch.no_grad():
            before = self._logprobs(batch, self.model)
            start = self._logprobs(batch, self.start)
        for number, part in enumerate(_minibatches(batch, self.config.actor.minibatches)):
            now = self._logprobs([batch[index] for index in part], self.model)
            terms = [
                self._terms(
                    batch[index],
                    float(advantages[index]),
                    theta,
                    entropy,
                    before=before[index][0],
                    start=start[index][0],
                    version=version,
                    fresh=min(number, 1),
                )
                for index, (theta, entropy) in zip(part, now, strict=True)
            ]
            count = sum(len(batch[index].behaviour_logprobs) for index in part)
            sums = {name: sum(term[name] for term in terms) for name in totals}
            algorithm = self.config.algorithm
            objective = sums["loss"] - algorithm.entropy_coefficient * sums["entropy"]
            objective = (objective + algorithm.kl_coefficient * sums["kl_to_reference"]) / count
            self.optimizer.zero_grad()
            objective.backward()
            norms.append(self._step())
            totals = {name: totals[name] + float(sums[name].detach()) for name in totals}
            tokens += count
        return {name: value / tokens for name, value in totals.items()} | {"gradient_norm": max(norms)}

    def _terms(
        self,
        item: Trajectory,
        advantage: float,
        theta: Tensor,
        entropy: Tensor,
        *,
        before: Tensor,
        start: Tensor,
        version: int,
        fresh: int,
    ) -> dict[str, Tensor]:
        """Sums over the response tokens of one trajectory."""
        algorithm = self.config.algorithm
        b, d = item.behaviour_logprobs, version - item.weight_versions
        d = torch.where(d == 0, fresh, d).float()
        beta = torch.where(d > 0, 1 / d, 0.0)
        p = before if self.config.proximal == "recompute" else (beta * b + (1 - beta) * theta).detach()
        log_w, log_r = p - b, theta - p
        if algorithm.ratio_level == "sequence":
            log_w, log_r = log_w.mean().expand_as(b), log_r.mean().expand_as(b)
        w, r = log_w.exp(), log_r.exp()
        if algorithm.weight_cap is not None:
            w = torch.where(w > algorithm.weight_cap, 0.0, w)
        low, high = 1 - algorithm.clip_epsilon_low, 1 + algorithm.clip_epsilon_high
        log_rho = start - theta
        return {
            "loss": -(w * torch.minimum(r * advantage, r.clamp(low, high) * advantage)).sum(),
            "entropy": entropy.sum(),
            "kl_to_reference": (log_rho.exp() - 1 - log_rho).sum() if algorithm.kl_coefficient else torch.zeros(()),
            "proximal_error": (p - before).abs().sum() if algorithm.compare_with_recompute else torch.zeros(()),
        }

    def _logprobs(self, batch: Sequence[Trajectory], model: Any) -> list[tuple[Tensor, Tensor]]:
        return response_logprobs(batch, model, self.config.rollout.temperature)

    def _learning_rate(self) -> float:
        """Of the coming step: linear up to the peak, then linear towards the minimum one step after the last."""
        settings, last = self.config.optimizer, self.config.num_steps * self.config.actor.minibatches
        self.steps += 1
        if self.steps <= settings.warmup_steps:
            return settings.learning_rate * self.steps / settings.warmup_steps
        if settings.schedule == "constant":
            return settings.learning_rate
        assert settings.schedule == "linear"
        left = (last + 1 - self.steps) / (last + 1 - settings.warmup_steps)
        return settings.min_learning_rate + left * (settings.learning_rate - settings.min_learning_rate)

    def _step(self) -> float:
        learning_rate = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        parameters = list(self.model.parameters())
        gradients = [parameter.grad.clone() if parameter.grad is not None else None for parameter in parameters]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.optimizer.clip_grad_norm)
        self.optimizer.step()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return float(norm)


def _minibatches(batch: Sequence[Trajectory], count: int) -> Iterator[list[int]]:
    groups = sorted({item.group_id for item in batch})
    size = len(groups) // count
    for number in range(count):
        chosen = groups[number * size : (number + 1) * size]
        yield [index for index, item in enumerate(batch) if item.group_id in chosen]


def checkpoint_tensors(model: Any, *, gradients: bool = False) -> dict[str, Tensor]:
    """The weights, or their gradients, under the names that a Hugging Face checkpoint gives them."""
    if gradients:
        shown = copy.deepcopy(model)
        for copied, original in zip(shown.parameters(), model.parameters(), strict=True):
            copied.data = torch.zeros_like(original) if original.grad is None else original.grad.clone()
        model = shown
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor.clone() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}
