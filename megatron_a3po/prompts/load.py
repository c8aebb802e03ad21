"""Load the prompts that the configuration of a run names."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_a3po.config import Columns, DataConfig, RunConfig
from megatron_a3po.config.model_folder import read_model_config
from megatron_a3po.errors import ConfigError, DataError
from megatron_a3po.prompts.dataset import REJECTED_ROWS, DatasetFiles, DatasetLimits, load_dataset, load_evaluation
from megatron_a3po.prompts.encoder import PromptEncoder
from megatron_a3po.prompts.prompts import Prompt, PromptSet
from megatron_a3po.prompts.rows import make_schema
from megatron_a3po.prompts.tasks import load_task
from megatron_a3po.runtime.logging import logger

_KEPT_BACK = 6
"""Positions of the model that SGLang does not give to requests"""


def load_prompts(config: RunConfig, tokenizer: Any, folder: Path) -> PromptSet:
    """Load the prompts of training and evaluations. Prompts without room for a response are left out.

    folder: gets the list of rejected rows and a copy of the dataset. Raises DataError.
    """
    described = read_model_config(config.model)
    prompts = _load(config, tokenizer, folder, described)
    prompts.evaluation = _with_room(config, prompts.evaluation, described)
    return prompts


def load_tokenizer(model: Path) -> Any:
    """Load the tokenizer of a model's folder. Raises ConfigError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # from transformers, tokenizers, json and more
        problem = f"{model}: its tokenizer cannot be read ({type(error).__name__}: {error})"
        raise ConfigError(f"{problem}; copy or download its files again") from error


def try_datasets(config: RunConfig) -> Iterator[str]:
    """Read the datasets and the tokenizer as a run does, and yield lines that describe them.

    The list of rejected rows stays, if there are any. Raises ConfigError, DataError.
    """
    folder = Path(tempfile.mkdtemp(prefix="a3po_datasets_"))
    try:
        prompts = load_prompts(config, load_tokenizer(config.model), folder)
    finally:
        if not (rejected := folder / REJECTED_ROWS).exists():
            shutil.rmtree(folder)
    evaluated = "".join(f", {len(each):,} of {name}" for name, each in prompts.evaluation.items())
    yield f"prompts: {len(prompts):,} to train on{evaluated}"
    if rejected.exists():
        yield f"rejected rows: {rejected}"


def _load(config: RunConfig, tokenizer: Any, folder: Path, described: dict[str, Any]) -> PromptSet:
    """Load all prompts that leave room for a response of training."""
    data = config.data
    limits = DatasetLimits(
        max_prompt_tokens=_longest_prompt(config, described),
        vocab_size=described["vocab_size"],
        max_bad_share=data.max_bad_share,
    )
    evaluation = _evaluation_files(config, tokenizer)
    if data.task is not None:
        return load_task(
            task=data.task,
            task_options=data.task_options,
            size=data.size,
            seed=data.seed,
            prompt_pattern=data.prompt_pattern,
            num_held_out=data.num_held_out,
            evaluation=load_evaluation(evaluation, run_dir=folder, seed=data.seed, limits=limits),
            encoder=make_encoder(data, tokenizer),
            order_seed=config.seed,
            max_prompt_tokens=limits.max_prompt_tokens,
            vocab_size=limits.vocab_size,
        )
    assert data.path is not None
    encoder = make_encoder(data, tokenizer)
    return load_dataset(
        DatasetFiles(path=data.path, split=data.split, columns=data.columns, encoder=encoder),
        evaluation,
        run_dir=folder,
        num_held_out=data.num_held_out,
        seed=data.seed,
        order_seed=config.seed,
        limits=limits,
    )


def make_encoder(
    data: DataConfig, tokenizer: Any, columns: Columns | None = None, instruction: str | None = None
) -> PromptEncoder:
    """Return an encoder. `columns` and `instruction` are a dataset's; None: those of the training data."""
    if instruction is None:
        instruction = data.instruction
    if instruction is None:
        has_columns = data.path is not None or columns is not None
        instruction = make_schema(columns or data.columns).instruction if has_columns else ""
    return PromptEncoder(
        tokenizer,
        chat_template=data.chat_template,
        system_prompt=data.system_prompt,
        enable_thinking=data.enable_thinking,
        instruction=instruction,
    )


def _evaluation_files(config: RunConfig, tokenizer: Any) -> dict[str, DatasetFiles]:
    return {
        name: DatasetFiles(
            path=dataset.path,
            split=dataset.split,
            columns=config.data.columns if dataset.columns is None else dataset.columns,
            encoder=make_encoder(config.data, tokenizer, dataset.columns, dataset.instruction),
            num_prompts=dataset.num_prompts,
        )
        for name, dataset in config.evaluation.datasets.items()
    }


def longest_request(config: RunConfig, prompts: PromptSet) -> int:
    """Return the most tokens of a prompt and its response together, in training and evaluation."""
    training = prompts.max_tokens + config.rollout.max_new_tokens
    response = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
    evaluated = [len(prompt.token_ids) + response for each in prompts.evaluation.values() for prompt in each]
    return max(training, *evaluated)


def _longest_prompt(config: RunConfig, described: dict[str, Any]) -> int:
    """Return the most tokens that leave room for a response. Raises DataError."""
    limits = {"actor.microbatch_tokens": config.actor.microbatch_tokens}
    if (positions := _positions(described)) is not None:
        limits["the model's positions (max_position_embeddings, less those that servers keep)"] = positions
    name, limit = min(limits.items(), key=lambda item: item[1])
    longest = limit - config.rollout.max_new_tokens
    if longest < 1:
        raise DataError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt in {name} = "
            f"{limit}; lower rollout.max_new_tokens, or raise the limit"
        )
    return min(longest, config.data.max_prompt_tokens or longest)


def _positions(described: dict[str, Any]) -> int | None:
    """Return how many positions SGLang has for a prompt and its response: it refuses or cuts longer requests."""
    found = described.get("max_position_embeddings")
    return found - _KEPT_BACK if found is not None else None


def _with_room(
    config: RunConfig, evaluation: Mapping[str, Sequence[Prompt]], described: dict[str, Any]
) -> Mapping[str, Sequence[Prompt]]:
    """Leave out prompts without room for a response of an evaluation, which a server would refuse."""
    positions, tokens = _positions(described), config.evaluation.max_new_tokens
    if positions is None or tokens is None:
        return evaluation
    found = {}
    for name, prompts in evaluation.items():
        found[name] = [prompt for prompt in prompts if len(prompt.token_ids) + tokens <= positions]
        problem = f"{len(prompts) - len(found[name])} of {len(prompts)} prompts of the evaluation {name} leave no room "
        problem += f"for evaluation.max_new_tokens = {tokens} in the {positions} positions that the model has for them"
        if not found[name]:
            raise DataError(f"{problem}; lower evaluation.max_new_tokens")
        if len(found[name]) < len(prompts):
            logger.warning("%s, and are left out", problem)
    return found
