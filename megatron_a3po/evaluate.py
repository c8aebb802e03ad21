"""Evaluate a model folder, or the weights that running servers hold, without training."""

from megatron_a3po.config import RunConfig
from megatron_a3po.config.model_folder import has_megatron_weights
from megatron_a3po.errors import ConfigError
from megatron_a3po.rollout.evaluator import EVALUATIONS, SUMMARY, DatasetResult
from megatron_a3po.rollout.rank_zero import RankZeroRollouts
from megatron_a3po.runtime.logging import logger


def evaluate(config: RunConfig, name: str) -> list[DatasetResult]:
    """Sample and score the prompts of all evaluation datasets, as an evaluation during training does.

    Responses and results are written to `config.run_dir/evaluations/name`. Raises ConfigError if that folder has
    results already or local servers cannot read the model, and DataError, RolloutError or RewardError.
    """
    if config.rollout.servers == "local" and has_megatron_weights(config.model):
        raise ConfigError(
            f"model = {str(config.model)!r}: servers read no Megatron folders; give the Hugging Face folder, which "
            "tools/convert_megatron_to_hf.py makes of it"
        )
    folder = config.run_dir / EVALUATIONS / name
    if (folder / SUMMARY).exists():
        raise ConfigError(f"{folder} holds an evaluation already; choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    with RankZeroRollouts(config, data_folder=folder) as rollouts:
        rollouts.connect(logger.info)
        evaluated = rollouts.adopt_weights()
        logger.info("evaluating %s", evaluated)
        return rollouts.evaluate(name, evaluated)
