"""The gradient of the same 16 ragged sequences, however they are split into ranks, microbatches and packs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.distributed.parity import WORLD_SIZE, Case, configuration, reduced_gradients
from tests.support.deadlines import scaled

pytestmark = pytest.mark.distributed

LIMIT = 1e-6
NUM_GROUPS = 4
"""of four sequences"""
EVERYTHING, ONE_EACH = 512, 2
"""Tokens of a microbatch that hold all sequences, and none: then each has a microbatch to itself"""

LAYOUTS: dict[str, dict[str, Any]] = {
    "PP4": {"pipeline": 4},
    "TP2 PP2": {"tensor": 2, "pipeline": 2},
    "PP2 DP2": {"pipeline": 2},
    "TP2 DP2": {"tensor": 2},
    "CP2 DP2": {"context": 2},
    "DP4": {},
    "DP4 without overlap": {"overlap": False},
}
TOKENS: dict[str, list[int]] = {name: [EVERYTHING, ONE_EACH] for name in LAYOUTS} | {
    "PP4": [EVERYTHING, 128, 32, ONE_EACH],
    "DP4": [EVERYTHING, 32, ONE_EACH],
}
SPLITS = [(name, tokens) for name in LAYOUTS for tokens in TOKENS[name]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("invariance")
    output = run_ranks(_run_splits, WORLD_SIZE, str(folder), timeout_seconds=240)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {split: line for split, line in zip(SPLITS, lines, strict=True)}


@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
def test_gradients_of_a_split_equal_those_of_one_microbatch_on_one_pipeline(
    split: tuple[str, int], results: dict[tuple[str, int], dict[str, Any]]
) -> None:
    assert results[split]["difference"] <= LIMIT
    assert results[split]["loss"] == pytest.approx(results[SPLITS[0]]["loss"], abs=LIMIT)


def test_the_splits_differ_and_the_gradient_is_far_above_the_limit(
    results: dict[tuple[str, int], dict[str, Any]],
) -> None:
    assert {result["loss_tokens"] for result in results.values()} == {results[SPLITS[0]]["loss_tokens"]}
    numbers = {split: result["num_microbatches"] for split, result in results.items()}
    for (name, tokens), number in numbers.items():
        data_ranks = int(name.split("DP")[1][0]) if "DP" in name else 1
        if tokens == ONE_EACH:
            assert number * data_ranks == 4 * NUM_GROUPS
        else:
            assert (number == 1) == (tokens == EVERYTHING)
    assert results[SPLITS[0]]["largest"] >= 1e5 * LIMIT


def _run_splits(folder: str) -> None:
    import torch
    import torch.distributed as dist

    from megatron_a3po import cpu
    from megatron_a3po.parallel.broadcast import broadcast_trajectories
    from megatron_a3po.parallel.layout import RankInfo, init_distributed
    from tests.distributed.plain_training import random_batch
    from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model

    cpu.install()
    torch.set_num_threads(1)
    info = RankInfo.from_environment()
    init_distributed(info, "cpu", scaled(60.0))
    model = Path(folder) / "qwen3"
    batch = None
    if info.rank == 0:
        from transformers import AutoModelForCausalLM

        save_tiny_model("qwen3", model)
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        batch = random_batch(0, 3, plain, vocab_size=VOCAB_SIZE, num_groups=NUM_GROUPS)
    trajectories = broadcast_trajectories(batch)
    first: dict[str, Any] = {}
    for name, tokens in SPLITS:
        gradients, metrics = _train(model, LAYOUTS[name], tokens, trajectories)
        first = first or gradients
        assert gradients.keys() == first.keys()
        if info.rank == 0:
            result = {
                "difference": max(float((gradients[name] - first[name]).abs().max()) for name in first),
                "largest": max(float(gradient.abs().max()) for gradient in gradients.values()),
                **{key: metrics[key] for key in ("loss", "loss_tokens", "num_microbatches")},
            }
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def _train(
    model: Path, parallel: dict[str, Any], tokens: int, trajectories: list[Any]
) -> tuple[dict[str, Any], dict[str, float]]:
    """One training step of a new actor: the reduced gradients under their Hugging Face names, and the metrics."""
    import torch

    from megatron_a3po.actor import build_actor
    from megatron_a3po.runtime.timing import PhaseTimer

    actor_settings = {"microbatch_tokens": tokens, "oversized": "alone"}
    case = Case(family="qwen3", parallel=parallel, settings={"actor": actor_settings})
    actor = build_actor(configuration(case, model), device=torch.device("cpu"), timer=PhaseTimer())
    actor.version = 3
    gradients: dict[str, Any] = {}
    step = actor.optimizer.step

    def step_after_reading_gradients() -> Any:
        gradients.update(reduced_gradients(actor))
        return step()

    actor.optimizer.step = step_after_reading_gradients  # type: ignore[method-assign]
    advantages = torch.randn(len(trajectories), generator=torch.Generator().manual_seed(0))
    metrics = actor.train_step(trajectories, advantages)
    end_model_parallel()
    return gradients, metrics
