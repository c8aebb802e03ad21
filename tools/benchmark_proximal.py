"""Compare the time of a training step of A-3PO and of decoupled PPO, which has an extra forward pass.

    python tools/benchmark_proximal.py [--repeats 7] [--threads 1] [--output FILE.json]

The two objectives take turns on one actor (Megatron-Core, one rank) with a random Qwen3, the same batch, and a learning
rate that leaves the weights unchanged. Results are ratios of interleaved steps.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_a3po.actor import build_actor
from megatron_a3po.config import RunConfig
from megatron_a3po.parallel.layout import RankInfo, init_distributed
from megatron_a3po.runtime.timing import PhaseTimer
from megatron_a3po.types import FinishReason, Trajectory

NOISE_LIMIT = 0.15
METHODS = ("loglinear", "recompute")
VOCABULARY = 4096


def save_random_model(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def run_config(folder: Path, proximal: str) -> RunConfig:
    settings: dict[str, Any] = {
        "model": str(folder),
        "run_dir": str(folder),
        "num_steps": 1,
        "proximal": proximal,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "precision": "bf16" if torch.cuda.is_available() else "fp32",
        "data": {"task": "spell_backward"},
        "actor": {"microbatch_tokens": 2048},
        "optimizer": {"learning_rate": 1e-12},
    }
    return RunConfig.model_validate(settings)


def random_batch(num_trajectories: int, version: int) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)
    batch = []
    for number in range(num_trajectories):
        prompt_length, response_length = torch.randint(32, 160, (2,), generator=generator).tolist()
        batch.append(
            Trajectory(
                prompt_id=str(number),
                group_id=number // 8,
                token_ids=torch.randint(1, VOCABULARY, (prompt_length + response_length,), generator=generator),
                prompt_length=prompt_length,
                behaviour_logprobs=-5 - torch.rand(response_length, generator=generator),
                weight_versions=torch.randint(version - 3, version + 1, (response_length,), generator=generator),
                reward=0.0,
                finish_reason=FinishReason.STOP,
            )
        )
    return batch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    with tempfile.TemporaryDirectory() as name:
        save_random_model(Path(name))
        configs = {method: run_config(Path(name), method) for method in METHODS}
        device = torch.device(configs["loglinear"].device)
        init_distributed(RankInfo.from_environment(), configs["loglinear"].device, 600.0)
        timer = PhaseTimer()
        actor = build_actor(configs["loglinear"], device=device, timer=timer)

    from megatron_a3po.algorithm.objective import Objective

    objectives = {method: Objective(**config.objective_options()) for method, config in configs.items()}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    shares: dict[str, list[float]] = {method: [] for method in METHODS}
    for repeat in range(arguments.repeats + 1):
        for method in METHODS:
            actor.version = 3
            actor.objective = objectives[method]
            metrics = actor.train_step(random_batch(arguments.trajectories, 3), torch.ones(arguments.trajectories))
            step = timer.take()["train"]
            if repeat > 0:  # the first round warms up
                seconds[method].append(step)
                shares[method].append(metrics["proximal_seconds"] / step)

    ratio = statistics.median(a / b for a, b in zip(seconds["loglinear"], seconds["recompute"], strict=True))
    results: dict[str, Any] = {"loglinear_over_recompute": ratio}
    print(f"{'':12}{'seconds / step':>16}{'spread':>9}{'proximal share':>17}")
    for method in METHODS:
        median = statistics.median(seconds[method])
        spread = (max(seconds[method]) - min(seconds[method])) / median
        share = statistics.median(shares[method])
        results[method] = {"seconds": median, "spread": spread, "proximal_share": share}
        print(f"{method:12}{median:16.3f}{spread:9.0%}{share:17.3%}")
    print(f"A-3PO takes {ratio:.2f} of the step with recompute (median of {arguments.repeats} interleaved pairs)")
    if any(results[method]["spread"] > NOISE_LIMIT for method in METHODS):
        print(f"noisy: times spread by more than {NOISE_LIMIT:.0%}; repeat on a quiet machine")
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
