"""Summarise a run before it starts: layout, parameters, memory, kernels."""

from collections.abc import Iterator

from megatron_a3po.actor.fusions import Fusions
from megatron_a3po.config import RunConfig
from megatron_a3po.preflight.architecture import Architecture
from megatron_a3po.preflight.check_algorithm import idle_keys
from megatron_a3po.preflight.describe import data_parallel_ranks, describe_training
from megatron_a3po.preflight.memory import choose_output_layer, logits_bytes, readable_bytes


def startup_summary(
    config: RunConfig, architecture: Architecture, fusions: Fusions, *, world_size: int
) -> Iterator[str]:
    """Yield lines for people. Nothing needs to be built for them."""
    yield from describe_training(config, architecture, world_size)
    yield f"output layer: {_output_layer(config, architecture)}"
    yield from fusions.lines()
    yield f"communication: {_overlap(config, world_size)}"
    yield from idle_keys(config)


def _output_layer(config: RunConfig, architecture: Architecture) -> str:
    chosen = choose_output_layer(config, architecture)
    size = readable_bytes(logits_bytes(config, architecture))
    why = f"a microbatch's logits and their gradient would take {size}"
    return f"{chosen} ({why}{'' if config.actor.output_layer == 'auto' else '; the configuration asks for it'})"


def _overlap(config: RunConfig, world_size: int) -> str:
    if data_parallel_ranks(config, world_size) * config.parallel.context == 1:
        return "no data-parallel or context-parallel ranks, so nothing to reduce or gather"
    if not config.parallel.overlap:
        return "not overlapped (parallel.overlap is false)"
    if config.actor.minibatches == 1:
        return "gradients are reduced during the backward pass; parameters are gathered at once, to be published"
    return "gradients are reduced during the backward pass, parameters gathered during the next forward pass"
