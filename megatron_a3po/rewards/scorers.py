"""Turn the name of a scorer into the function that scores the responses of a group."""

import asyncio
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_a3po.errors import RewardError
from megatron_a3po.rewards.math_grader import RIGHT, WRONG, grade_by_math, grade_by_text
from megatron_a3po.rewards.types import InvalidReward, Sample, Score, to_score

Scorer = Callable[[Sequence[Sample]], list[Score]]
KEY_VARIABLE = "A3PO_REWARD_KEY"
"""Environment variable with the key for a scoring server; the key is in no command line, run file or log"""
_HTTP_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """A reasoning-gym task, which has a scorer of its own."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerSpec:
    """Which scorer a worker makes."""

    scorer: str
    """task, math, math_exact, http://... or package.module:function"""
    task: TaskSpec | None = None
    format_pattern: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStart:
    """The first request to a worker. All others are lists of groups, each a list of samples."""

    spec: ScorerSpec
    memory_bytes: int | None
    python_path: list[str]


def make_scorer(spec: ScorerSpec) -> Scorer:
    """Resolve the name of a scorer; no other place does. Raises RewardError."""
    if spec.scorer == "task":
        if spec.task is None:
            raise RewardError(
                "reward.scorer = 'task': only prompts of `data.task` have a scorer of their own; use `math`"
            )
        return _per_sample(_of_task(spec.task))
    if spec.scorer == "math":
        return _per_sample(grade_by_math)
    if spec.scorer == "math_exact":
        return _per_sample(grade_by_text)
    runner = asyncio.Runner()  # one loop for all calls, so that a function may keep its connections
    if spec.scorer.startswith(("http://", "https://")):
        return _in_loop(runner, _http_scorer(spec.scorer))
    return _from_function(load_function(spec.scorer), spec.scorer, runner)


def task_scorer(task: TaskSpec) -> Callable[[str, Mapping[str, Any]], float]:
    """Return a function of a response and the task's entry: 1 if the task's own scorer gives exactly 1.0, else 0.

    Partial credit does not teach. The task's scorer adds it up in floats, where six sixths make 0.9999999999999999 for
    a wrong answer, so only exactly 1.0, as a Python float, is right.
    """
    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(task.name, size=1, seed=0, **task.options)

    return lambda response, entry: float(dataset.score_answer(response, entry=dict(entry)) == 1.0)


def _of_task(task: TaskSpec) -> Callable[[Sample], Score]:
    score_response = task_scorer(task)

    def score(sample: Sample) -> Score:
        value = score_response(sample.response, sample.row)
        return Score(value=value, reason=RIGHT if value == 1.0 else WRONG)

    return score


def load_function(name: str) -> Callable[..., Any]:
    """Import the function that `package.module:function` names. Raises RewardError."""
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"reward.scorer = {name!r} cannot be imported: {type(error).__name__}: {error}; the module must be in the "
            "folder where the run is started, on PYTHONPATH, or installed"
        ) from error
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        there = [key for key, value in getattr(found, "__dict__", {}).items() if inspect.isroutine(value)]
        raise RewardError(
            f"reward.scorer = {name!r}: {error}; name a function that is there ({', '.join(there) or 'there is none'})"
        ) from error
    if not callable(found):
        raise RewardError(f"reward.scorer = {name!r} is {type(found).__name__}, not a function; name a function")
    return found


def _from_function(function: Callable[..., Any], name: str, runner: asyncio.Runner) -> Scorer:
    """Wrap `def f(sample)`, which scores one response, or `def f(samples)`, which scores a group. Both may be async."""
    required = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required not in (["sample"], ["samples"]):
        raise RewardError(
            f"reward.scorer = {name!r} takes {required}; a function that rewards one response takes `sample`, and one "
            "that rewards all responses to a prompt takes `samples`"
        )
    is_async = inspect.iscoroutinefunction(function)
    if required == ["samples"]:
        return _in_loop(runner, function) if is_async else lambda samples: _group_scores(function(samples), samples)
    if is_async:

        async def all_at_once(samples: Sequence[Sample]) -> Any:
            return await asyncio.gather(*(function(sample) for sample in samples))

        return _in_loop(runner, all_at_once)
    return _per_sample(lambda sample: to_score(function(sample)))


def _per_sample(score: Callable[[Sample], Score]) -> Scorer:
    return lambda samples: [score(sample) for sample in samples]


def _in_loop(runner: asyncio.Runner, function: Callable[..., Any]) -> Scorer:
    return lambda samples: _group_scores(runner.run(function(samples)), samples)


def _group_scores(results: Any, samples: Sequence[Sample]) -> list[Score]:
    try:
        scores = list(results)
    except TypeError:
        raise InvalidReward(f"{results!r:.200} is not a list of rewards") from None
    if len(scores) != len(samples):
        raise InvalidReward(f"{len(scores)} rewards for {len(samples)} responses")
    return [to_score(score) for score in scores]


def _http_scorer(url: str) -> Callable[[Sequence[Sample]], Any]:
    """Return a function that POSTs `{"samples": [...]}` for a group.

    The answer is `{"scores": [number or {"score", "reason"}, ...]}`.
    """
    import aiohttp

    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"

    async def post(session: aiohttp.ClientSession, body: str) -> str:
        async with session.post(url, data=body, headers=headers) as response:
            text = await response.text()
            if response.status >= 500:
                raise aiohttp.ClientConnectionError(f"status {response.status}: {text[:300]}")
            if response.status != 200:
                raise RuntimeError(f"{url} answered {response.status}: {text[:300]}")
            return text

    async def score(samples: Sequence[Sample]) -> list[Any]:
        body = json.dumps({"samples": [asdict(sample) for sample in samples]}, default=str)
        # Without a timeout: the worker's deadline holds for all attempts together.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            for attempt in range(1, _HTTP_ATTEMPTS + 1):
                try:
                    return _parse_http(await post(session, body), url)
                except aiohttp.ClientError as error:
                    if attempt == _HTTP_ATTEMPTS:
                        raise RuntimeError(f"{url}: {error}") from error
                    await asyncio.sleep(0.5 * attempt)
        raise AssertionError("unreachable")

    return score


def _parse_http(text: str, url: str) -> list[Any]:
    try:
        scores = json.loads(text)["scores"]
        return [(item["score"], item.get("reason", "")) if isinstance(item, dict) else item for item in scores]
    except (ValueError, KeyError, TypeError):
        raise InvalidReward(f'{url} answered {text[:200]!r} instead of {{"scores": [...]}}') from None
