"""What a run says about itself before it starts: layout, parameters, memory, kernels."""

from collections.abc import Iterator

from megatron_a3po.actor.fusions import Fusions
from megatron_a3po.config import Architecture, RunConfig, estimate_memory, memory_table
from megatron_a3po.config.estimate import logits_bytes, readable_bytes, readable_count

_AXES = (("tensor", "TP"), ("pipeline", "PP"), ("virtual_pipeline", "VPP"), ("context", "CP"), ("expert", "EP"))


def startup_summary(
    config: RunConfig, architecture: Architecture, fusions: Fusions, *, world_size: int, num_parameters: int
) -> Iterator[str]:
    """Lines for people. `num_parameters`: on this rank, as counted in the model."""
    yield f"layout: {world_size} ranks = {' x '.join(_layout(config, world_size))}"
    parameters = (
        f"{readable_count(architecture.num_parameters)} parameters, {readable_count(num_parameters)} on this rank"
    )
    yield f"model: {architecture.name}, {parameters}; {_precision(config)}"
    estimate = estimate_memory(config, architecture, world_size)
    yield from memory_table(estimate)
    size = readable_bytes(logits_bytes(config, architecture))
    why = "large for a rank" if estimate.output_layer == "fused" else "small enough to keep"
    if config.actor.output_layer != "auto":
        why = "but the configuration decides"
    logits = f"a microbatch's logits and their gradient: {size}, {why}"
    yield f"output layer: {estimate.output_layer} ({logits})"
    yield from fusions.lines()
    yield f"communication: {_overlap(config)}"


def _layout(config: RunConfig, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    for axis, short in _AXES:
        size = getattr(parallel, axis)
        if size > 1 and axis not in ("virtual_pipeline", "expert"):
            yield f"{short}{size}" + (" (with sequence parallelism)" if axis == "tensor" else "")
    yield f"DP{world_size // (parallel.tensor * parallel.pipeline * parallel.context)}"
    if parallel.virtual_pipeline > 1:
        yield f"{parallel.virtual_pipeline} chunks per stage"
    if parallel.expert > 1:
        yield f"experts over {parallel.expert} of them"


def _precision(config: RunConfig) -> str:
    if config.precision != "fp8":
        return config.precision
    return f"fp8 {config.fp8.recipe}, weights in {'fp8' if config.fp8.parameters else 'bf16'}"


def _overlap(config: RunConfig) -> str:
    if not config.parallel.overlap:
        return "not overlapped (parallel.overlap is false)"
    if config.actor.minibatches == 1:
        return "gradients are reduced during the backward pass; parameters are gathered at once, to be published"
    return "gradients are reduced during the backward pass, parameters gathered during the next forward pass"
