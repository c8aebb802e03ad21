"""From the configuration to the prompts of a run."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_a3po.config import Columns, DataConfig, RunConfig
from megatron_a3po.config.model_folder import read_model_config
from megatron_a3po.errors import ConfigError, DataError
from megatron_a3po.prompts.dataset import QUARANTINE, DatasetFiles, DatasetLimits, load_dataset, load_evaluation
from megatron_a3po.prompts.encoder import PromptEncoder
from megatron_a3po.prompts.prompts import Prompt, PromptSet
from megatron_a3po.prompts.rows import make_schema
from megatron_a3po.prompts.tasks import load_task
from megatron_a3po.runtime.logging import logger

_KEPT_BACK = 6
"""Positions that SGLang gives to no request"""


def load_prompts(config: RunConfig, tokenizer: Any, folder: Path) -> PromptSet:
    """The prompts of a task or of a dataset, and those of evaluations, all of which the model and the microbatches have
    room for. `folder`: gets the list of bad rows, and what knows the dataset again.

    Raises DataError.
    """
    described = read_model_config(config.model)
    prompts = _load(config, tokenizer, folder, described)
    prompts.evaluation = _with_room(config, prompts.evaluation, described)
    return prompts


def load_tokenizer(model: Path) -> Any:
    """Raises ConfigError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # of transformers, tokenizers, json and more
        problem = f"{model}: its tokenizer cannot be read ({type(error).__name__}: {error})"
        raise ConfigError(f"{problem}; copy or download its files again") from error


def try_datasets(config: RunConfig) -> Iterator[str]:
    """Read them and the tokenizer as a run will, and say what is there. Raises ConfigError, DataError.

    The list of bad rows, if there are any, stays for whoever repairs them.
    """
    folder = Path(tempfile.mkdtemp(prefix="a3po_datasets_"))
    try:
        prompts = load_prompts(config, load_tokenizer(config.model), folder)
    finally:
        if not (bad_rows := folder / QUARANTINE).exists():
            shutil.rmtree(folder)
    evaluated = "".join(f", {len(each):,} of {name}" for name, each in prompts.evaluation.items())
    yield f"prompts: {len(prompts):,} to train on{evaluated}"
    if bad_rows.exists():
        yield f"rows that cannot be used: {bad_rows}"


def _load(config: RunConfig, tokenizer: Any, folder: Path, described: dict[str, Any]) -> PromptSet:
    """All prompts that leave room for a response of training."""
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
    """`columns`, `instruction`: those of a dataset; None: those of the data that is trained on."""
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
    """Tokens of a prompt and its response, at most, in training and evaluation."""
    training = prompts.max_tokens + config.rollout.max_new_tokens
    response = config.evaluation.max_new_tokens or config.rollout.max_new_tokens
    evaluated = [len(prompt.token_ids) + response for each in prompts.evaluation.values() for prompt in each]
    return max(training, *evaluated)


def _longest_prompt(config: RunConfig, described: dict[str, Any]) -> int:
    """Longer ones would not leave room for a response."""
    limits = {
        "actor.microbatch_tokens": config.actor.microbatch_tokens,
    }
    if (positions := _positions(described)) is not None:
        limits["the model's positions (max_position_embeddings, less what servers keep back)"] = positions
    name, limit = min(limits.items(), key=lambda item: item[1])
    longest = limit - config.rollout.max_new_tokens
    if longest < 1:
        raise DataError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt in {name} = "
            f"{limit}; lower rollout.max_new_tokens, or raise the limit"
        )
    return min(longest, config.data.max_prompt_tokens or longest)


def _positions(described: dict[str, Any]) -> int | None:
    """What SGLang leaves of them to a prompt and its response; longer requests are refused, or cut."""
    found = described.get("max_position_embeddings")
    return found - _KEPT_BACK if found is not None else None


def _with_room(
    config: RunConfig, evaluation: Mapping[str, Sequence[Prompt]], described: dict[str, Any]
) -> Mapping[str, Sequence[Prompt]]:
    """Without the prompts that leave no room for a response of an evaluation, which a server refuses."""
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
