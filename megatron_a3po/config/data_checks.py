"""Checks of the prompts' and the rewards' options. No torch, and nothing of a dataset is read."""

import difflib
import re
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_a3po.config.data_schema import DataConfig
from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.config.schema import RunConfig

_TASK_KEYS = ("task_options", "size", "prompt_pattern")
_DATASET_KEYS = ("split", "columns", "held_out_path", "held_out_split", "held_out_columns", "max_bad_share")
_SCORERS = ("auto", "task", "math", "math_exact")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def data_mistakes(config: RunConfig) -> Iterator[Mistake]:
    yield from _origin(config.data)
    yield from _columns(config.data)
    yield from _chat(config.data)
    yield from _scorer(config)
    yield from _shaping(config)


def _origin(data: DataConfig) -> Iterator[Mistake]:
    if data.task is None and data.path is None:
        remedy = "give `data.task: NAME` of a reasoning-gym task, or `data.path: FILE` of a dataset"
        yield Mistake("data", None, "there are no prompts", remedy)
        return
    if data.task is not None and data.path is not None:
        remedy = "remove one of them"
        yield Mistake("data.path", str(data.path), "there is data.task as well", remedy, ("data.task",))
        return
    unused, owner = (_TASK_KEYS, "data.task") if data.task is None else (_DATASET_KEYS, "data.path")
    for key in unused:
        if getattr(data, key) != DataConfig.model_fields[key].default:
            yield Mistake(f"data.{key}", getattr(data, key), f"does nothing without `{owner}`", "remove this key")
    if data.path is not None:
        yield from _path("data.path", data.path)
    if data.held_out_path is not None:
        yield from _path("data.held_out_path", data.held_out_path)
    if data.path is not None and data.held_out_split is not None and data.held_out_path is None and data.split is None:
        problem = "without data.split these prompts would be trained on, too"
        yield Mistake("data.held_out_split", data.held_out_split, problem, "name the other part as `data.split`")


def _path(key: str, path: Path) -> Iterator[Mistake]:
    if not path.exists():
        yield Mistake(key, str(path), "there is no such file or folder", "check the path; it starts where the run does")
    elif path.is_file() and path.suffix not in (".jsonl", ".json", ".parquet"):
        remedy = "convert it to JSON lines (.jsonl) or Parquet (.parquet)"
        yield Mistake(key, str(path), "neither .jsonl nor .parquet", remedy)


def _columns(data: DataConfig) -> Iterator[Mistake]:
    for key, columns in (("data.columns", data.columns), ("data.held_out_columns", data.held_out_columns)):
        if isinstance(columns, dict) and "prompt" not in columns:
            yield Mistake(key, columns, "no column is the prompt", "add `prompt: COLUMN`")
    if data.held_out_columns is not None and data.held_out_path is None and data.held_out_split is None:
        remedy = "give `data.held_out_path`, or remove this key"
        yield Mistake("data.held_out_columns", data.held_out_columns, "there is no such dataset", remedy)


def _chat(data: DataConfig) -> Iterator[Mistake]:
    for key in ("system_prompt", "enable_thinking"):
        if data.chat_template is False and getattr(data, key) is not None:
            problem, remedy = "needs the chat template", "remove this key, or `data.chat_template: false`"
            yield Mistake(f"data.{key}", getattr(data, key), problem, remedy, ("data.chat_template",))


def _scorer(config: RunConfig) -> Iterator[Mistake]:
    scorer = config.reward.scorer
    if scorer.startswith(("http://", "https://")):
        if not urlsplit(scorer).hostname:
            yield Mistake("reward.scorer", scorer, "not a URL", "write http://host:port/path")
    elif scorer == "task" and config.data.task is None:
        problem = "only prompts of `data.task` have a scorer of their own"
        yield Mistake("reward.scorer", scorer, problem, "use `math`, or package.module:function", ("data.task",))
    elif scorer in ("math", "math_exact") or (scorer == "auto" and config.data.task is None):
        if config.data.path is not None:
            yield from _answers(config.data, scorer)
    elif _FUNCTION.fullmatch(scorer):
        package = scorer.split(":")[0].split(".")[0]
        # Without importing it: that may take long, and is the workers' business.
        if PathFinder.find_spec(package) is None:
            remedy = "start the run in the folder that holds it, or set PYTHONPATH"
            yield Mistake("reward.scorer", scorer, f"there is no module {package!r}", remedy)
    elif scorer not in _SCORERS:
        near = difflib.get_close_matches(scorer, _SCORERS, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else f"use {', '.join(_SCORERS)}, module:function or http://..."
        yield Mistake("reward.scorer", scorer, "unknown", remedy)


def _answers(data: DataConfig, scorer: str) -> Iterator[Mistake]:
    columns: tuple[tuple[str, Any], ...] = (
        ("data.columns", data.columns),
        ("data.held_out_columns", data.held_out_columns),
    )
    for key, mapping in columns:
        if isinstance(mapping, dict) and "prompt" in mapping and "answer" not in mapping:
            problem = f"no column is the answer that reward.scorer = {scorer} compares with"
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
            problem, remedy = "costs nothing", "set `reward.format_penalty`, or remove this key"
            yield Mistake("reward.format_pattern", reward.format_pattern, problem, remedy, ("reward.format_penalty",))
    elif reward.format_penalty > 0:
        problem, remedy = "there is no format", "give `reward.format_pattern`, or remove this key"
        yield Mistake("reward.format_penalty", reward.format_penalty, problem, remedy, ("reward.format_pattern",))
