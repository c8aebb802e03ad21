"""Every option of a run. Importing it loads no torch."""

from megatron_a3po.config.data_schema import (
    HELD_OUT,
    Columns,
    DataConfig,
    EvaluationConfig,
    EvaluationDataset,
    RewardConfig,
)
from megatron_a3po.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    CheckpointConfig,
    Fp8Config,
    OptimizerConfig,
    ParallelConfig,
    PublishConfig,
    RolloutConfig,
    RunConfig,
)

__all__ = [
    "HELD_OUT",
    "ActorConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Columns",
    "DataConfig",
    "EvaluationConfig",
    "EvaluationDataset",
    "Fp8Config",
    "OptimizerConfig",
    "ParallelConfig",
    "PublishConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
]
