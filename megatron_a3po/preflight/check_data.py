"""Checks of the options of prompts, rewards and evaluation, without reading a dataset."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from megatron_a3po.config.data_schema import HELD_OUT, Columns, DataConfig
from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.config.schema import RunConfig

_TASK_KEYS = ("task_options", "size", "prompt_pattern")
_DATASET_KEYS = ("split", "columns", "max_bad_share")
_SCORERS = ("auto", "task", "math", "math_exact")
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def data_mistakes(config: RunConfig) -> Iterator[Mistake]:
    """Yield mistakes in the sections `data`, `reward` and `evaluation`."""
    yield from _origin(config.data)
    yield from _columns(config)
    yield from _evaluation(config)
    yield from _chat(config.data)
    yield from _scorer(config)
    yield from _shaping(config)


def _origin(data: DataConfig) -> Iterator[Mistake]:
    if data.task is None and data.path is None:
        remedy = "set `data.task` to a reasoning-gym task or `data.path` to a dataset"
        yield Mistake("data", None, "there are no prompts", remedy)
        return
    if data.task is not None and data.path is not None:
        remedy = "remove one of them, or set it to null where it comes from `base:`"
        yield Mistake("data.path", str(data.path), "data.task is set as well", remedy, ("data.task",))
        return
    unused, owner = (_TASK_KEYS, "data.task") if data.task is None else (_DATASET_KEYS, "data.path")
    for key in unused:
        if getattr(data, key) != DataConfig.model_fields[key].default:
            remedy = "remove this key, or set it to null where it comes from `base:`"
            yield Mistake(f"data.{key}", getattr(data, key), f"has no effect without `{owner}`", remedy)
    if data.path is not None:
        yield from _path("data.path", data.path)


def _path(key: str, path: Path) -> Iterator[Mistake]:
    if not path.exists():
        yield Mistake(
            key, str(path), "there is no such file or folder", "check the path, which starts in the working directory"
        )
    elif path.is_file() and path.suffix not in (".jsonl", ".json", ".parquet"):
        remedy = "convert it to JSON lines (.jsonl) or Parquet (.parquet)"
        yield Mistake(key, str(path), "neither a .jsonl nor a .parquet file", remedy)


def _columns(config: RunConfig) -> Iterator[Mistake]:
    for key, columns in _all_columns(config):
        if isinstance(columns, dict) and "prompt" not in columns:
            yield Mistake(key, columns, "does not name the column of the prompt", "add `prompt: COLUMN`")


def _all_columns(config: RunConfig) -> Iterator[tuple[str, Columns]]:
    """Yield every `columns` of the configuration with its key."""
    yield "data.columns", config.data.columns
    for name, dataset in config.evaluation.datasets.items():
        if dataset.columns is not None:
            yield f"evaluation.datasets.{name}.columns", dataset.columns


def _evaluation(config: RunConfig) -> Iterator[Mistake]:
    evaluation = config.evaluation
    if not config.data.num_held_out and not evaluation.datasets:
        problem, remedy = "there is nothing to evaluate on", "hold out some prompts, or set `evaluation.datasets`"
        yield Mistake("data.num_held_out", 0, problem, remedy, ("evaluation.datasets",))
    for name, dataset in evaluation.datasets.items():
        key = f"evaluation.datasets.{name}"
        if name == HELD_OUT or not _NAME.fullmatch(name):
            problem = (
                "this name is reserved for held-out prompts" if name == HELD_OUT else "not usable in names of files"
            )
            yield Mistake(key, name, problem, "use another name of letters, digits, `_`, `-` and `.`")
        yield from _path(f"{key}.path", dataset.path)
    if evaluation.datasets and _scorer_of(config) == "task":
        problem = "the scorer of a task cannot grade `evaluation.datasets`"
        yield Mistake("reward.scorer", config.reward.scorer, problem, "use `math` or package.module:function")
    if evaluation.temperature == 0 and evaluation.num_samples > 1:
        problem = "with evaluation.temperature = 0 all responses to a prompt are the same"
        remedy = "use 1, or a temperature above 0"
        yield Mistake("evaluation.num_samples", evaluation.num_samples, problem, remedy, ("evaluation.temperature",))


def _scorer_of(config: RunConfig) -> str:
    scorer = config.reward.scorer
    return scorer if scorer != "auto" else "task" if config.data.task is not None else "math"


def _chat(data: DataConfig) -> Iterator[Mistake]:
    for key in ("system_prompt", "enable_thinking"):
        if data.chat_template is False and getattr(data, key) is not None:
            problem, remedy = "needs the chat template", "remove this key, or data.chat_template = False"
            yield Mistake(f"data.{key}", getattr(data, key), problem, remedy, ("data.chat_template",))


def _scorer(config: RunConfig) -> Iterator[Mistake]:
    scorer = config.reward.scorer
    if scorer.startswith(("http://", "https://")):
        if not urlsplit(scorer).hostname:
            yield Mistake("reward.scorer", scorer, "not a URL", "use http://host:port/path")
    elif scorer == "task" and config.data.task is None:
        problem = "only a `data.task` has a scorer of its own"
        yield Mistake("reward.scorer", scorer, problem, "use `math`, or package.module:function", ("data.task",))
    elif _scorer_of(config) in ("math", "math_exact"):
        if config.data.path is not None or config.evaluation.datasets:
            yield from _answers(config, scorer)
    elif scorer not in _SCORERS and not _FUNCTION.fullmatch(scorer):
        near = difflib.get_close_matches(scorer, _SCORERS, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else f"use {', '.join(_SCORERS)}, module:function or http://..."
        yield Mistake("reward.scorer", scorer, "unknown", remedy)


def _answers(config: RunConfig, scorer: str) -> Iterator[Mistake]:
    for key, mapping in _all_columns(config):
        if isinstance(mapping, dict) and "prompt" in mapping and "answer" not in mapping:
            problem = f"does not name the column of the answer, which reward.scorer = {scorer} needs"
            yield Mistake(key, mapping, problem, "add `answer: COLUMN`", ("reward.scorer",))


def _shaping(config: RunConfig) -> Iterator[Mistake]:
    reward = config.reward
    if reward.format_pattern is not None:
        try:
            re.compile(reward.format_pattern)
        except re.error as error:
            problem = f"not a regular expression: {error}"
            yield Mistake("reward.format_pattern", reward.format_pattern, problem, "correct it")
        if reward.format_penalty == 0:
            problem, remedy = "has no effect without a penalty", "set `reward.format_penalty`, or remove this key"
            yield Mistake("reward.format_pattern", reward.format_pattern, problem, remedy, ("reward.format_penalty",))
    elif reward.format_penalty > 0:
        problem, remedy = "has no effect without a pattern", "set `reward.format_pattern`, or remove this key"
        yield Mistake("reward.format_penalty", reward.format_penalty, problem, remedy, ("reward.format_pattern",))
