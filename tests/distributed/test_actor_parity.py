"""Training steps of the real actor against plain PyTorch on the Hugging Face model: loss, gradients, weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.tiny_qwen3 import VOCAB_SIZE, save_random_qwen3

pytestmark = pytest.mark.distributed

LEARNING_RATE = 2e-4
ADAM_EPSILON = 1e-3
"""Large, so that an update is a smooth function of the gradient; at 1e-8 it is the sign of rounding errors."""
EPSILON = 0.2
CAP = 2.0
ENTROPY, KL = 0.01, 0.1
"""Coefficients, in the cases with the fused output layer"""


@pytest.mark.parametrize(
    ("tensor", "pipeline", "proximal", "output_layer", "microbatch_tokens"),
    [
        (2, 2, "loglinear", "logits", [512, 100, 32]),
        (2, 2, "recompute", "fused", [100, 32]),
        (2, 1, "loglinear", "fused", [100, 32]),  # with two data-parallel ranks
    ],
)
def test_steps_equal_hugging_face_and_adamw(
    tmp_path: Path, tensor: int, pipeline: int, proximal: str, output_layer: str, microbatch_tokens: list[int]
) -> None:
    save_random_qwen3(tmp_path)
    arguments = (
        json.dumps({"tensor": tensor, "pipeline": pipeline}),
        json.dumps(microbatch_tokens),
        proximal,
        output_layer,
    )
    output = run_ranks(_compare_steps, 4, str(tmp_path), *arguments, timeout_seconds=150)
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(results) == len(microbatch_tokens)
    assert len({result["num_microbatches"] for result in results}) == len(results), "the splits should differ"
    for result in results:
        assert max(result["loss"], result["entropy"], result["kl"]) <= 1e-5
        assert result["gradient_norm"] <= 1e-5
        assert result["gradients"] <= 1e-5
        assert result["weights"] <= 1e-6
        assert result["clipped"] > 0
        assert result["capped"] > 0


def _compare_steps(folder: str, parallel: str, microbatch_tokens: str, proximal: str, output_layer: str) -> None:
    """One step per bound on the microbatches, each at another version; prints the largest differences as JSON."""
    import copy

    import torch
    import torch.distributed as dist
    from transformers import Qwen3ForCausalLM

    from megatron_a3po.actor import build_actor
    from megatron_a3po.config import RunConfig
    from megatron_a3po.parallel.layout import RankInfo, init_distributed
    from megatron_a3po.runtime.timing import PhaseTimer
    from megatron_a3po.weights.gather import gather_hf_tensors

    entropy, kl = (ENTROPY, KL) if output_layer == "fused" else (0.0, 0.0)
    settings: dict[str, Any] = {
        "model": folder,
        "run_dir": folder,
        "num_steps": 1,
        "proximal": proximal,
        "device": "cpu",
        "precision": "fp32",
        "data": {"task": "spell_backward"},
        "parallel": json.loads(parallel),
        "optimizer": {"learning_rate": LEARNING_RATE, "adam_eps": ADAM_EPSILON},
        "algorithm": {"clip_epsilon_low": EPSILON, "clip_epsilon_high": EPSILON, "weight_cap": CAP}
        | {"entropy_coefficient": entropy, "kl_coefficient": kl},
        "actor": {"microbatch_tokens": 512, "output_layer": output_layer},
    }
    config = RunConfig.model_validate(settings)
    init_distributed(RankInfo.from_environment(), "cpu", 60.0)
    actor = build_actor(config, device=torch.device("cpu"), timer=PhaseTimer())
    reference = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = copy.deepcopy(reference).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), eps=ADAM_EPSILON, weight_decay=0.0
    )

    def gather() -> dict[str, torch.Tensor]:
        return dict(gather_hf_tensors(actor.model.chunks, actor.model.bridge, actor.model.vocab_size))

    gradients: dict[str, torch.Tensor] = {}
    step = actor.optimizer.step

    def step_after_reading_gradients() -> Any:
        if actor.model.groups.dp.size() == 1:  # else each rank holds its own shard of the reduced gradient only
            gradients.update(_gradients_in_hugging_face_layout(actor.model.chunks, gather))
        return step()

    actor.optimizer.step = step_after_reading_gradients
    actor.version = 3
    for number, bound in enumerate(json.loads(microbatch_tokens)):
        settings["actor"]["microbatch_tokens"] = bound
        actor._config = RunConfig.model_validate(settings)
        batch, advantages = _random_batch(number, actor.version, reference)
        loss, terms = _plain_loss(batch, advantages, actor.version, reference, start, proximal)
        optimizer.zero_grad()
        (loss - entropy * terms["entropy"] + kl * terms["kl_to_reference"]).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
        expected_gradients = {name: p.grad.clone() for name, p in reference.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()

        metrics = actor.train_step(batch, advantages)
        weights = gather()
        expected_weights = {name: p.detach() for name, p in reference.named_parameters()}
        assert weights.keys() == expected_weights.keys()
        result = {
            "loss": abs(metrics["loss"] - loss.item()),
            "entropy": abs(metrics["entropy"] - terms["entropy"].item()),
            "kl": abs(metrics["kl_to_reference"] - (terms["kl_to_reference"].item() if kl else 0.0)),
            "gradient_norm": abs(metrics["gradient_norm"] - norm.item()),
            "gradients": max(
                ((gradients[name] - expected_gradients[name]).abs().max().item() for name in gradients), default=0.0
            ),
            "weights": max((weights[name] - expected_weights[name]).abs().max().item() for name in weights),
            "clipped": metrics["clipped_share"] if proximal == "loglinear" else 1.0,
            "capped": metrics["capped_share"],
            "num_microbatches": metrics["num_microbatches"],
        }
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def _random_batch(seed: int, version: int, reference: Any) -> tuple[list[Any], Any]:
    """Ragged trajectories whose behaviour log-probs are the model's own with noise, per-token versions up to 3 old."""
    import torch

    from megatron_a3po.types import FinishReason, Trajectory

    generator = torch.Generator().manual_seed(seed)
    batch = []
    for number in range(32):
        prompt_length, response_length = torch.randint(3, 14, (2,), generator=generator).tolist()
        # Without token 0: Hugging Face drops the gradient of the padding token's embedding.
        ids = torch.randint(1, VOCAB_SIZE, (prompt_length + response_length,), generator=generator)
        with torch.no_grad():
            logprobs = _plain_logprobs(ids, prompt_length, reference)
        batch.append(
            Trajectory(
                prompt_id=str(number),
                group_id=number // 4,
                token_ids=ids,
                prompt_length=prompt_length,
                behaviour_logprobs=logprobs + 0.7 * torch.randn(response_length, generator=generator),
                weight_versions=torch.randint(version - 3, version + 1, (response_length,), generator=generator),
                reward=0.0,
                finish_reason=FinishReason.STOP,
            )
        )
    return batch, torch.randn(len(batch), generator=generator)


def _plain_log_softmax(ids: Any, prompt_length: int, model: Any) -> Any:
    return model(ids[None, :-1]).logits[0, prompt_length - 1 :].log_softmax(-1)


def _plain_logprobs(ids: Any, prompt_length: int, model: Any) -> Any:
    return _plain_log_softmax(ids, prompt_length, model).gather(-1, ids[prompt_length:, None])[:, 0]


def _plain_loss(
    batch: list[Any], advantages: Any, version: int, model: Any, start: Any, proximal: str
) -> tuple[Any, dict[str, Any]]:
    """The policy loss, and the mean entropy and KL to the starting policy, all over the loss tokens."""
    import torch

    total, entropy, kl, num_tokens = torch.zeros(()), torch.zeros(()), torch.zeros(()), 0
    for trajectory, advantage in zip(batch, advantages, strict=True):
        ids, length = trajectory.token_ids, trajectory.prompt_length
        log_p = _plain_log_softmax(ids, length, model)
        theta = log_p.gather(-1, ids[length:, None])[:, 0]
        b = trajectory.behaviour_logprobs
        d = (version - trajectory.weight_versions).float()
        beta = torch.where(d > 0, 1 / d, 0.0) if proximal == "loglinear" else torch.zeros_like(d)
        p = (beta * b + (1 - beta) * theta).detach()
        w, r = (p - b).exp(), (theta - p).exp()
        w = torch.where(w > CAP, 0.0, w)
        total = total - (w * torch.minimum(r * advantage, r.clamp(1 - EPSILON, 1 + EPSILON) * advantage)).sum()
        entropy = entropy - (log_p.exp() * log_p).sum()
        log_rho = _plain_logprobs(ids, length, start) - theta
        kl = kl + (log_rho.exp() - 1 - log_rho).sum()
        num_tokens += len(b)
    return total / num_tokens, {"entropy": entropy / num_tokens, "kl_to_reference": kl / num_tokens}


def _gradients_in_hugging_face_layout(chunks: list[Any], gather: Any) -> dict[str, Any]:
    """Read the gradients where the weights are, so that they are gathered and named like weights."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    kept = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = gather()
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data.copy_(data)
    return gradients
