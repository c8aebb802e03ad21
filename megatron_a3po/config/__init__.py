"""Every option of a run, and how a file becomes one. Importing it loads no torch."""

from megatron_a3po.config.architecture import Architecture
from megatron_a3po.config.data_schema import (
    HELD_OUT,
    Columns,
    DataConfig,
    EvaluationConfig,
    EvaluationDataset,
    RewardConfig,
)
from megatron_a3po.config.estimate import MemoryEstimate, estimate_memory, memory_table
from megatron_a3po.config.families import read_architecture
from megatron_a3po.config.loading import known_keys, load_architecture, load_config, to_yaml
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
    "Architecture",
    "CheckpointConfig",
    "Columns",
    "DataConfig",
    "EvaluationConfig",
    "EvaluationDataset",
    "Fp8Config",
    "MemoryEstimate",
    "OptimizerConfig",
    "ParallelConfig",
    "PublishConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "estimate_memory",
    "known_keys",
    "load_architecture",
    "load_config",
    "memory_table",
    "read_architecture",
    "to_yaml",
]
