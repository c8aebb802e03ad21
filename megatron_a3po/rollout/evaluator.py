"""Evaluate the present weights: sample every prompt of every evaluation dataset, score and summarise."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_a3po.algorithm.accuracy import confidence_interval, pass_at_k
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.rollout.rewarder import Rewarder
from megatron_a3po.rollout.sampler import Responses, Sampler, Sampling
from megatron_a3po.runtime.files import write_durably
from megatron_a3po.runtime.logging import logger
from megatron_a3po.runtime.waiting import REAL, Clock, Wait
from megatron_a3po.types import FinishReason

EVALUATIONS = "evaluations"
"""Folder in the run's folder"""
SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetResult:
    """The results on one dataset, as in `summary.json`. Intervals are of 95 %, see `algorithm.accuracy`."""

    dataset: str
    num_prompts: int
    num_without_reward: int
    """Prompts that the scorer failed for; nothing else counts them."""
    num_samples: int
    """k: responses per prompt"""
    average: float
    """avg@k: mean reward"""
    average_interval: tuple[float, float]
    pass_at: dict[int, float]
    """pass@j for j = 1, 2, 4, ... k; a response passes with a reward of at least 1"""
    pass_at_k_interval: tuple[float, float]
    response_tokens: float
    """Mean length"""
    truncated_share: float
    """Share of responses that ended at the limit of new tokens"""
    weight_versions: tuple[int, ...]
    """The versions that sampled the responses"""
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Return the metrics `eval/<dataset>/...`."""
        low, high = self.average_interval
        values = {"average": self.average, "average_low": low, "average_high": high}
        if self.num_samples > 1:
            values[f"pass_at_{self.num_samples}"] = self.pass_at[self.num_samples]
        values |= {"response_tokens": self.response_tokens, "truncated_share": self.truncated_share}
        return {f"eval/{self.dataset}/{name}": value for name, value in values.items()}

    def __str__(self) -> str:
        k, (low, high) = self.num_samples, self.average_interval
        text = f"{self.dataset}: avg@{k} {self.average:.3f} ({low:.3f} to {high:.3f})"
        if k > 1:
            low, high = self.pass_at_k_interval
            text += f", pass@{k} {self.pass_at[k]:.3f} ({low:.3f} to {high:.3f})"
        without = f" ({self.num_without_reward} more without a reward)" if self.num_without_reward else ""
        return (
            f"{text}, {self.num_prompts} prompts{without}, {self.truncated_share:.1%} truncated, {self.seconds:.0f} s"
        )


class Evaluator:
    """Sample every prompt of every evaluation dataset, and write down each response."""

    def __init__(
        self,
        datasets: Mapping[str, Sequence[Prompt]],
        sampler: Sampler,
        rewarder: Rewarder,
        sampling: Sampling,
        folder: Path,
        clock: Clock = REAL,
    ) -> None:
        """folder: gets a folder for each evaluation."""
        self._datasets = datasets
        self._sampler = sampler
        self._rewarder = rewarder
        self._sampling = sampling
        self._folder = folder
        self._clock = clock

    async def evaluate(self, name: str, evaluated: str | None = None) -> list[DatasetResult]:
        """Return the results. Write `folder/name/samples.jsonl`, and `summary.json` when all is done.

        evaluated: what `summary.json` says was evaluated; None: the weight version. Raises RolloutError, RewardError.
        """
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMMARY).unlink(missing_ok=True)
        results = []
        with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
            for dataset, prompts in self._datasets.items():
                start = time.monotonic()
                report = _progress(dataset, len(prompts) * self._sampling.num_samples, self._clock)
                sampled = await self._sampler.sample_each(prompts, self._sampling, report)
                scored = await self._rewarder.score_each(sampled)
                for responses in scored:
                    file.writelines(json.dumps(record) + "\n" for record in _records(dataset, responses))
                results.append(_summarize(dataset, len(prompts), scored, time.monotonic() - start))
        summary = {
            "evaluated": evaluated or f"version {_versions(results)}",
            "sampling": asdict(self._sampling),
            "datasets": [asdict(result) for result in results],
        }
        write_durably(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        return results


def _progress(dataset: str, number: int, clock: Clock) -> Callable[[int], None]:
    """Return a function that counts responses and now and then logs their number."""
    done, wait = 0, Wait(None, clock)

    def add(more: int) -> None:
        nonlocal done
        done += more
        if done < number and wait.is_reminder_due:
            logger.info("evaluating %s: %d of %d responses", dataset, done, number)

    return add


def _records(dataset: str, responses: Responses) -> list[dict[str, Any]]:
    prompt = responses.prompt
    return [
        {
            "dataset": dataset,
            "prompt_id": prompt.prompt_id,
            "sample": index,
            "question": prompt.question,
            "answer": prompt.answer,
            "response": text,
            "reward": trajectory.reward,
            "reward_reason": trajectory.reward_reason,
            "num_tokens": trajectory.response_length,
            "finish_reason": trajectory.finish_reason,
            "weight_versions": sorted(set(trajectory.weight_versions.tolist())),
        }
        for index, (trajectory, text) in enumerate(zip(responses.trajectories, responses.texts, strict=True))
    ]


def _summarize(dataset: str, num_prompts: int, scored: Sequence[Responses], seconds: float) -> DatasetResult:
    k = len(scored[0].trajectories)
    rewards = [[trajectory.reward for trajectory in item.trajectories] for item in scored]
    averages = [sum(values) / k for values in rewards]
    num_right = [sum(value >= 1.0 for value in values) for values in rewards]
    passes = {j: [pass_at_k(right, k, j) for right in num_right] for j in (*_powers_of_two_below(k), k)}
    trajectories = [trajectory for item in scored for trajectory in item.trajectories]
    versions = {version for trajectory in trajectories for version in trajectory.weight_versions.tolist()}
    return DatasetResult(
        dataset=dataset,
        num_prompts=len(scored),
        num_without_reward=num_prompts - len(scored),
        num_samples=k,
        average=sum(averages) / len(scored),
        average_interval=confidence_interval(averages),
        pass_at={j: sum(values) / len(scored) for j, values in passes.items()},
        pass_at_k_interval=confidence_interval(passes[k]),
        response_tokens=sum(trajectory.response_length for trajectory in trajectories) / len(trajectories),
        truncated_share=sum(item.finish_reason is FinishReason.LENGTH for item in trajectories) / len(trajectories),
        weight_versions=tuple(sorted(versions)),
        seconds=seconds,
    )


def _versions(results: Sequence[DatasetResult]) -> str:
    return ", ".join(map(str, sorted({version for result in results for version in result.weight_versions})))


def _powers_of_two_below(number: int) -> list[int]:
    return [1 << exponent for exponent in range((number - 1).bit_length())]
