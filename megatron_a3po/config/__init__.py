"""Every option of a run, and how a file becomes one. Importing it loads no torch."""

from megatron_a3po.config.loading import known_keys, load_config, to_yaml
from megatron_a3po.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    EvaluationConfig,
    Fp8Config,
    OptimizerConfig,
    ParallelConfig,
    PublishConfig,
    RolloutConfig,
    RunConfig,
)

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "DataConfig",
    "EvaluationConfig",
    "Fp8Config",
    "OptimizerConfig",
    "ParallelConfig",
    "PublishConfig",
    "RolloutConfig",
    "RunConfig",
    "known_keys",
    "load_config",
    "to_yaml",
]
