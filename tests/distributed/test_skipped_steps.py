"""A gradient that is not finite on one rank: every rank skips the step, and training goes on as if it had not been."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.distributed.parity import WORLD_SIZE, Case, configuration
from tests.support.deadlines import scaled

pytestmark = pytest.mark.distributed

BAD_RANK = 2
NUM_STEPS, MAX_SKIPPED_STEPS = 8, 1
FIRST_VERSION = 3

LAYOUTS = {
    "DP4": Case(family="qwen3_tied"),
    "TP2 PP2": Case(family="qwen3_tied", parallel={"tensor": 2, "pipeline": 2}),
    "EP2 CP2": Case(family="qwen3_moe", parallel={"expert": 2, "context": 2}),
}
BAD_VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
SINGLE = [("DP4", "nan"), ("DP4", "inf"), ("TP2 PP2", "-inf"), ("EP2 CP2", "nan")]
MINIBATCHES = [("DP4", 0), ("DP4", 1), ("TP2 PP2", 0)]
"""layout, and which of the two minibatches is bad"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By scenario, what each rank saw."""
    folder = tmp_path_factory.mktemp("skipped")
    output = run_ranks(_run_scenarios, WORLD_SIZE, str(folder), timeout_seconds=240)
    return {
        name: seen for line in output.splitlines() if line.startswith("{") for name, seen in json.loads(line).items()
    }


def single(results: dict[str, list[dict[str, Any]]], layout: str, value: str) -> list[dict[str, Any]]:
    seen = results[f"{layout} {value}"]
    assert len(seen) == WORLD_SIZE
    return seen


@pytest.mark.parametrize(("layout", "value"), SINGLE)
def test_every_rank_skips_the_step_and_keeps_its_weights_bit_for_bit(
    layout: str, value: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    for rank in single(results, layout, value):
        assert rank["weights_unchanged"]
        assert rank["skipped_steps"] == [0, 1, 0, 1]
        assert [math.isfinite(norm) for norm in rank["gradient_norms"]] == [True, False, True, False]


@pytest.mark.parametrize(("layout", "value"), SINGLE)
def test_the_version_and_the_schedule_move_on_with_a_skipped_step(
    layout: str, value: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    peak = 2e-4
    for rank in single(results, layout, value):
        assert rank["versions"] == [FIRST_VERSION + number for number in (1, 2, 3, 4)]
        assert rank["learning_rates"] == pytest.approx([peak * (1 - step / (NUM_STEPS + 1)) for step in (1, 2, 3, 4)])


@pytest.mark.parametrize(("layout", "value"), SINGLE)
def test_the_next_good_step_is_that_of_a_run_which_never_saw_the_bad_batch(
    layout: str, value: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    for rank in single(results, layout, value):
        assert rank["weights_moved"] and rank["equals_run_without_bad_batch"]


@pytest.mark.parametrize(("layout", "value"), SINGLE)
def test_too_many_skipped_steps_in_a_row_end_the_run_on_every_rank_with_the_last_good_weights(
    layout: str, value: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    # The fourth step was skipped as the second one was; the good one between them started the count anew.
    for rank in single(results, layout, value):
        assert f"{MAX_SKIPPED_STEPS + 1} optimizer steps in a row" in rank["error"]
        assert f"optimizer.max_skipped_steps = {MAX_SKIPPED_STEPS}" in rank["error"]
        assert rank["weights_unchanged_after_error"] and rank["version_after_error"] == rank["versions"][-1]


@pytest.mark.parametrize(("layout", "bad"), MINIBATCHES)
def test_one_of_two_minibatches_is_skipped_alone(
    layout: str, bad: int, results: dict[str, list[dict[str, Any]]]
) -> None:
    for rank in results[f"{layout} minibatch {bad}"]:
        assert rank["skipped_steps"] == [1, 0] and rank["version"] == FIRST_VERSION + 2
        assert rank["equals_run_without_bad_minibatch"] and rank["weights_moved"]


def _run_scenarios(folder: str) -> None:
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
    batches: dict[str, list[Any]] = {}
    for family in sorted({case.family for case in LAYOUTS.values()}):
        plain = None
        if info.rank == 0:
            from transformers import AutoModelForCausalLM

            save_tiny_model(family, Path(folder) / family)
            plain = AutoModelForCausalLM.from_pretrained(Path(folder) / family, dtype=torch.float32).eval()
        batches[family] = [
            broadcast_trajectories(
                random_batch(number, FIRST_VERSION + number, plain, vocab_size=VOCAB_SIZE, num_groups=2)
                if plain
                else None
            )
            for number in range(5)
        ]

    def report(name: str, seen: dict[str, Any]) -> None:
        everyone: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, seen)
        if info.rank == 0:
            print(json.dumps({name: everyone}), flush=True)

    for layout, value in SINGLE:
        case = LAYOUTS[layout]
        report(f"{layout} {value}", _bad_batches(case, Path(folder), BAD_VALUES[value], batches[case.family]))
    for layout, bad in MINIBATCHES:
        case = LAYOUTS[layout]
        report(f"{layout} minibatch {bad}", _bad_minibatch(case, Path(folder), bad, batches[case.family]))
    dist.destroy_process_group()


def _bad_batches(case: Case, folder: Path, value: float, batches: list[Any]) -> dict[str, Any]:
    """Batches 0 and 2 are good, 1, 3 and 4 are bad; and a second run that trains on the good ones alone."""
    import torch.distributed as dist

    from megatron_a3po.errors import TrainingError

    actor, bad_steps = _actor(case, folder), (1, 3, 4)
    step, number = actor.optimizer.step, 0

    def step_with_some_bad() -> Any:
        if number in bad_steps and dist.get_rank() == BAD_RANK:
            _spoil_gradient(actor, value)
        return step()

    actor.optimizer.step = step_with_some_bad
    metrics, versions, weights = [], [], [_weights(actor)]
    for number in range(4):
        metrics.append(actor.train_step(batches[number], _advantages(batches[number])))
        versions.append(actor.version)
        weights.append(_weights(actor))
    number, error = 4, ""
    try:
        actor.train_step(batches[4], _advantages(batches[4]))
    except TrainingError as raised:
        error = str(raised)
    last_weights, last_version = _weights(actor), actor.version
    _end(actor)

    other = _actor(case, folder)
    other.train_step(batches[0], _advantages(batches[0]))
    other.optimizer.schedule.step(1)
    other.version += 1
    other.train_step(batches[2], _advantages(batches[2]))
    without_bad_batch = _weights(other)
    _end(other)
    return {
        "skipped_steps": [entry["skipped_steps"] for entry in metrics],
        "gradient_norms": [entry["gradient_norm"] for entry in metrics],
        "learning_rates": [entry["learning_rate"] for entry in metrics],
        "versions": versions,
        "weights_unchanged": _equal(weights[1], weights[2]) and _equal(weights[3], weights[4]),
        "weights_moved": not _equal(weights[0], weights[1]) and not _equal(weights[2], weights[3]),
        "equals_run_without_bad_batch": _equal(weights[3], without_bad_batch),
        "error": error,
        "weights_unchanged_after_error": _equal(weights[4], last_weights),
        "version_after_error": last_version,
    }


def _bad_minibatch(case: Case, folder: Path, bad: int, batches: list[Any]) -> dict[str, Any]:
    """Two batches of two minibatches; one minibatch of the first batch is bad, and in a second run makes no step."""
    import torch.distributed as dist

    ends = []
    for without_bad_minibatch in (False, True):
        actor = _actor(case, folder, minibatches=2)
        start, step, steps = _weights(actor), actor.optimizer.step, iter(range(4))

        def step_with_one_bad(
            actor: Any = actor, step: Any = step, steps: Any = steps, skip: bool = without_bad_minibatch
        ) -> Any:
            if next(steps) == bad:
                if skip:
                    return actor.optimizer.skip()
                if dist.get_rank() == BAD_RANK:
                    _spoil_gradient(actor, math.nan)
            return step()

        actor.optimizer.step = step_with_one_bad
        skipped = [actor.train_step(batch, _advantages(batch))["skipped_steps"] for batch in (batches[0], batches[1])]
        ends.append(_weights(actor))
        version = actor.version
        _end(actor)
    return {
        "skipped_steps": skipped,
        "version": version,
        "weights_moved": not _equal(start, ends[0]),
        "equals_run_without_bad_minibatch": _equal(*ends),
    }


def _actor(case: Case, folder: Path, *, minibatches: int = 1) -> Any:
    import torch

    from megatron_a3po.actor import build_actor
    from megatron_a3po.runtime.timing import PhaseTimer

    optimizer = {"schedule": "linear", "max_skipped_steps": MAX_SKIPPED_STEPS}
    settings = {"num_steps": NUM_STEPS, "optimizer": optimizer, "actor": {"minibatches": minibatches}}
    config = configuration(Case(family=case.family, parallel=case.parallel, settings=settings), folder / case.family)
    actor = build_actor(config, device=torch.device("cpu"), timer=PhaseTimer())
    actor.version = FIRST_VERSION
    return actor


def _end(actor: Any) -> None:
    end_model_parallel()


def _spoil_gradient(actor: Any, value: float) -> None:
    """One number of this rank's own part of the reduced gradient, which no other rank reads.

    Of a parameter that counts for the norm here: copies, as of norms under tensor parallelism, count on one rank.
    """
    actor.optimizer.megatron.prepare_grads()
    gradients = [
        gradient
        for optimizer in actor.optimizer.megatron.chained_optimizers
        for gradient in optimizer.get_grads_for_grad_norm()
    ]
    max(gradients, key=lambda gradient: gradient.numel()).view(-1)[-1] = value


def _advantages(batch: list[Any]) -> Any:
    import torch

    return torch.randn(len(batch), generator=torch.Generator().manual_seed(0))


def _weights(actor: Any) -> list[Any]:
    """Of this rank, as they are."""
    return [parameter.detach().clone() for chunk in actor.model.chunks for parameter in chunk.parameters()]


def _equal(one: list[Any], other: list[Any]) -> bool:
    import torch

    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
