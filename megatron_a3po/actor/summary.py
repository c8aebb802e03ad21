"""What a run says about itself before it starts: layout, parameters, memory, kernels."""

from collections.abc import Iterator

from megatron_a3po.actor.fusions import Fusions
from megatron_a3po.config import Architecture, RunConfig, estimate_memory, memory_table
from megatron_a3po.config.estimate import (
    choose_output_layer,
    logits_bytes,
    rank_parameters,
    readable_bytes,
    readable_count,
)

_FACTORS = (("tensor", "TP"), ("pipeline", "PP"), ("context", "CP"))


def startup_summary(
    config: RunConfig, architecture: Architecture, fusions: Fusions, *, world_size: int
) -> Iterator[str]:
    """Lines for people, known before anything is built."""
    yield f"layout: {_layout(config, world_size)}"
    on_rank_0 = rank_parameters(config.parallel, architecture, stage=0).total
    counts = f"{readable_count(architecture.num_parameters)} parameters, {readable_count(on_rank_0)} on rank 0"
    yield f"model: {architecture.name}, {counts}; {_precision(config)}"
    yield from memory_table(estimate_memory(config, architecture, world_size))
    yield f"output layer: {_output_layer(config, architecture)}"
    yield from fusions.lines()
    yield f"communication: {_overlap(config, world_size)}"


def _layout(config: RunConfig, world_size: int) -> str:
    parallel = config.parallel
    factors = [f"{short}{getattr(parallel, axis)}" for axis, short in _FACTORS if getattr(parallel, axis) > 1]
    factors.append(f"DP{_data_ranks(config, world_size)}")
    more = []
    if parallel.tensor > 1:
        more.append("sequence parallel")
    if parallel.virtual_pipeline > 1:
        more.append(f"{parallel.virtual_pipeline} interleaved chunks per pipeline stage")
    if parallel.expert > 1:
        more.append(f"experts divided among {parallel.expert} ranks of a stage")
    ranks = f"{world_size} rank{'s' * (world_size > 1)} = {' x '.join(factors)}"
    return "; ".join([ranks, *more])


def _data_ranks(config: RunConfig, world_size: int) -> int:
    parallel = config.parallel
    return world_size // (parallel.tensor * parallel.pipeline * parallel.context)


def _precision(config: RunConfig) -> str:
    if config.precision != "fp8":
        return config.precision
    return f"fp8 {config.fp8.recipe}, weights in {'fp8' if config.fp8.parameters else 'bf16'}"


def _output_layer(config: RunConfig, architecture: Architecture) -> str:
    chosen = choose_output_layer(config, architecture)
    size = readable_bytes(logits_bytes(config, architecture))
    why = f"a microbatch's logits and their gradient would take {size}"
    return f"{chosen} ({why}{'' if config.actor.output_layer == 'auto' else '; the configuration asks for it'})"


def _overlap(config: RunConfig, world_size: int) -> str:
    if _data_ranks(config, world_size) * config.parallel.context == 1:
        return "no data-parallel or context-parallel ranks, so nothing to reduce or gather"
    if not config.parallel.overlap:
        return "not overlapped (parallel.overlap is false)"
    if config.actor.minibatches == 1:
        return "gradients are reduced during the backward pass; parameters are gathered at once, to be published"
    return "gradients are reduced during the backward pass, parameters gathered during the next forward pass"
