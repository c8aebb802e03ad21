"""From the configuration to the prompts of a run."""

from typing import Any

from megatron_a3po.config import DataConfig, RunConfig
from megatron_a3po.config.model_files import read_model_config
from megatron_a3po.data.dataset import DatasetFiles, load_dataset
from megatron_a3po.data.prompts import PromptSet
from megatron_a3po.data.questions import PromptEncoder
from megatron_a3po.data.rows import make_schema
from megatron_a3po.data.tasks import load_task
from megatron_a3po.errors import DataError


def load_prompts(config: RunConfig, tokenizer: Any) -> PromptSet:
    """The prompts of a task or of a dataset, all of which the model and the microbatches have room for.

    Raises DataError.
    """
    data = config.data
    described = read_model_config(config.model)
    longest = _longest_prompt(config, described)
    if data.task is not None:
        prompts = load_task(
            task=data.task,
            task_options=data.task_options,
            size=data.size,
            seed=data.seed,
            prompt_pattern=data.prompt_pattern,
            num_held_out=data.num_held_out,
            encoder=make_encoder(data, tokenizer),
            order_seed=config.seed,
            max_prompt_tokens=longest,
            vocab_size=described["vocab_size"],
        )
    else:
        prompts = load_dataset(
            *dataset_files(data),
            run_dir=config.run_dir,
            encoder=make_encoder(data, tokenizer),
            num_held_out=data.num_held_out,
            seed=data.seed,
            order_seed=config.seed,
            max_prompt_tokens=longest,
            vocab_size=described["vocab_size"],
            max_bad_share=data.max_bad_share,
        )
    return prompts


def make_encoder(data: DataConfig, tokenizer: Any) -> PromptEncoder:
    instruction = data.instruction
    if instruction is None:
        instruction = make_schema(data.columns).instruction if data.path is not None else ""
    return PromptEncoder(
        tokenizer,
        chat_template=data.chat_template,
        system_prompt=data.system_prompt,
        enable_thinking=data.enable_thinking,
        instruction=instruction,
    )


def dataset_files(data: DataConfig) -> tuple[DatasetFiles, DatasetFiles | None]:
    """What is trained on, and what is sampled in evaluations if that is something else."""
    assert data.path is not None
    training = DatasetFiles(path=data.path, split=data.split, columns=data.columns)
    if data.held_out_path is None and data.held_out_split is None:
        return training, None
    columns = data.columns if data.held_out_columns is None else data.held_out_columns
    path = data.held_out_path or data.path
    return training, DatasetFiles(path=path, split=data.held_out_split, columns=columns)


def _longest_prompt(config: RunConfig, described: dict[str, Any]) -> int:
    """Longer ones would not leave room for a response."""
    limits = {
        "actor.microbatch_tokens": config.actor.microbatch_tokens,
        "the model's max_position_embeddings": described.get("max_position_embeddings", config.actor.microbatch_tokens),
    }
    name, limit = min(limits.items(), key=lambda item: item[1])
    longest = limit - config.rollout.max_new_tokens
    if longest < 1:
        raise DataError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt in {name} = "
            f"{limit}; lower rollout.max_new_tokens, or raise the limit"
        )
    return min(longest, config.data.max_prompt_tokens or longest)
