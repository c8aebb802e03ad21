"""A run described in words, from its configuration and the sizes of its model."""

from collections.abc import Iterator

from megatron_a3po.config.schema import RunConfig
from megatron_a3po.preflight.architecture import Architecture
from megatron_a3po.preflight.check_algorithm import idle_keys
from megatron_a3po.preflight.memory import (
    estimate_memory,
    memory_table,
    rank_parameters,
    readable_bytes,
    readable_count,
)

_FACTORS = (("tensor", "TP"), ("pipeline", "PP"), ("context", "CP"))


def describe_training(config: RunConfig, architecture: Architecture, world_size: int) -> Iterator[str]:
    """Yield lines on layout, parameters and memory of the training ranks."""
    yield f"layout: {_layout(config, world_size)}"
    on_rank_0 = rank_parameters(config.parallel, architecture, stage=0).total
    counts = f"{readable_count(architecture.num_parameters)} parameters, {readable_count(on_rank_0)} on rank 0"
    yield f"model: {architecture.name}, {counts}; {_precision(config)}"
    yield from memory_table(estimate_memory(config, architecture, world_size))


def describe_run(config: RunConfig, architecture: Architecture, world_size: int) -> Iterator[str]:
    """Yield also lines on the servers, the size of a step, the objective and the output."""
    yield from describe_training(config, architecture, world_size)
    yield from _servers(config, architecture)
    rollout, algorithm, steps = config.rollout, config.algorithm, config.actor.minibatches
    yield (
        f"a step: {rollout.prompts_per_step} prompts x {rollout.group_size} responses of at most "
        f"{rollout.max_new_tokens:,} tokens at temperature {rollout.temperature:g}; {steps} optimizer "
        f"step{'s' * (steps > 1)} of at most {config.optimizer.learning_rate:g}"
    )
    yield (
        f"objective: {config.proximal}, {algorithm.advantage} advantages, clip {algorithm.clip_epsilon_low:g} / "
        f"{algorithm.clip_epsilon_high:g}, tokens at most {config.max_staleness} versions old"
    )
    yield from idle_keys(config)
    prompts = str(config.data.path) if config.data.path is not None else f"task {config.data.task}"
    evaluated = [*(["held-out prompts"] if config.data.num_held_out else []), *config.evaluation.datasets]
    yield f"prompts: {prompts}; evaluated on {', '.join(evaluated)}, {config.evaluation.num_samples} responses each"
    yield f"run: {config.num_steps} steps, in {config.run_dir}"


def data_parallel_ranks(config: RunConfig, world_size: int) -> int:
    """Return the number of data-parallel ranks."""
    parallel = config.parallel
    return world_size // (parallel.tensor * parallel.pipeline * parallel.context)


def num_servers(config: RunConfig) -> int:
    """Return the number of rollout servers that the run uses or waits for."""
    servers, number = config.rollout.servers, config.rollout.num_servers
    return len(servers) if isinstance(servers, list) else number if servers == "registered" else 1


def _servers(config: RunConfig, architecture: Architecture) -> Iterator[str]:
    number, tensor = num_servers(config), config.rollout.server_tensor_parallel
    where = config.rollout.servers if isinstance(config.rollout.servers, str) else ", ".join(config.rollout.servers)
    name, nbytes = ("float32", 4) if config.precision == "fp32" else ("bf16", 2)
    weights = readable_bytes(architecture.num_parameters * nbytes // tensor)
    servers = f"{number} server{'s' * (number > 1)} ({where})"
    yield f"rollouts: {servers} x TP{tensor}, {weights} of {name} weights on each rank"


def _layout(config: RunConfig, world_size: int) -> str:
    parallel = config.parallel
    factors = [f"{short}{getattr(parallel, axis)}" for axis, short in _FACTORS if getattr(parallel, axis) > 1]
    factors.append(f"DP{data_parallel_ranks(config, world_size)}")
    more = []
    if parallel.tensor > 1:
        more.append("sequence parallel")
    if parallel.virtual_pipeline > 1:
        more.append(f"{parallel.virtual_pipeline} interleaved chunks per pipeline stage")
    if parallel.expert > 1:
        more.append(f"experts divided among {parallel.expert} ranks of a stage")
    ranks = f"{world_size} rank{'s' * (world_size > 1)} = {' x '.join(factors)}"
    return "; ".join([ranks, *more])


def _precision(config: RunConfig) -> str:
    if config.precision != "fp8":
        return config.precision
    return f"fp8 {config.fp8.recipe}, weights in {'fp8' if config.fp8.parameters else 'bf16'}"
