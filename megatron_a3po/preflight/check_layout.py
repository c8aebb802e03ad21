"""Checks of the parallel layout against the ranks that torchrun started and against the model."""

import math
from collections.abc import Iterator

from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.config.schema import RunConfig
from megatron_a3po.preflight.architecture import Architecture
from megatron_a3po.preflight.memory import layers_of_stage

FP8_MULTIPLES = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
"""Recipe -> the number that must divide the tokens of a matrix product in FP8"""


def token_multiple(config: RunConfig) -> int:
    """Return the number that must divide the tokens of a microbatch on one context-parallel rank.

    Sequence parallelism cuts the tokens into `tensor` equal parts, which FP8 needs aligned. Context parallelism gives
    each rank two chunks of every sequence.
    """
    parallel = config.parallel
    cut = parallel.tensor * (FP8_MULTIPLES[config.fp8.recipe] if config.precision == "fp8" else 1)
    return math.lcm(cut, 2 if parallel.context > 1 else 1)


def rank_mistakes(config: RunConfig, world_size: int | None) -> Iterator[Mistake]:
    """Yield mistakes that do not depend on the model; `world_size` None: unknown."""
    parallel, tokens = config.parallel, config.actor.microbatch_tokens
    multiple = token_multiple(config)
    if tokens % multiple:
        causes = [f"parallel.tensor = {parallel.tensor}"] if parallel.tensor > 1 else []
        causes += [f"parallel.context = {parallel.context}"] if parallel.context > 1 else []
        causes += [f"fp8.recipe = {config.fp8.recipe}"] if config.precision == "fp8" else []
        yield Mistake(
            "actor.microbatch_tokens",
            tokens,
            f"must be a multiple of {multiple}, to which microbatches are padded for {', '.join(causes)}",
            f"use {-(-tokens // multiple) * multiple}",
            ("parallel.tensor", "parallel.context", "precision", "fp8.recipe"),
        )
    room, longest = tokens * parallel.context, config.rollout.max_new_tokens
    if config.actor.oversized == "error" and longest >= room:
        yield Mistake(
            "actor.microbatch_tokens",
            tokens,
            f"a response of rollout.max_new_tokens = {longest} does not fit a microbatch of {room} tokens "
            "(actor.microbatch_tokens x parallel.context) and would stop the run",
            "use at least the sum of the longest prompt and response, or set `actor.oversized: alone`",
            ("rollout.max_new_tokens", "parallel.context", "actor.oversized"),
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield Mistake(
            "parallel.virtual_pipeline",
            parallel.virtual_pipeline,
            "one pipeline stage has nothing to interleave",
            "use 1, or `parallel.pipeline` above 1",
            ("parallel.pipeline",),
        )
    if parallel.last_stage_layers is not None and (parallel.pipeline == 1 or parallel.virtual_pipeline > 1):
        one = "parallel.pipeline" if parallel.pipeline == 1 else "parallel.virtual_pipeline"
        yield Mistake(
            "parallel.last_stage_layers",
            parallel.last_stage_layers,
            "one pipeline stage has all layers" if parallel.pipeline == 1 else "interleaved stages have equal sizes",
            f"remove this key, or change `{one}`",
            (one,),
        )
    if world_size is not None:
        yield from _world(config, world_size)


def _world(config: RunConfig, world_size: int) -> Iterator[Mistake]:
    parallel = config.parallel
    tensor, pipeline, context = parallel.tensor, parallel.pipeline, parallel.context
    model = tensor * pipeline * context
    layout = ("parallel.tensor", "parallel.pipeline", "parallel.context")
    if world_size % model:
        yield Mistake(
            "parallel",
            f"tensor {tensor} x pipeline {pipeline} x context {context}",
            f"needs {model} ranks or a multiple, and there {'is' if world_size == 1 else 'are'} {world_size}",
            f"start `torchrun --nproc-per-node {model} -m megatron_a3po train ...`, or change the layout",
            layout,
        )
        return
    # Megatron builds expert-parallel groups from all ranks of one pipeline stage.
    if (world_size // pipeline) % parallel.expert:
        yield Mistake(
            "parallel.expert",
            parallel.expert,
            f"does not divide the {world_size // pipeline} ranks of a pipeline stage",
            f"use one of {_divisors(world_size // pipeline)}",
            ("parallel.pipeline",),
        )
    data = world_size // model
    trajectories = config.rollout.prompts_per_step * config.rollout.group_size // config.actor.minibatches
    if trajectories < data:
        part = "batch" if config.actor.minibatches == 1 else "minibatch"
        yield Mistake(
            "rollout.prompts_per_step",
            config.rollout.prompts_per_step,
            f"{trajectories} trajectories per {part} are too few for {data} data-parallel ranks",
            "use more prompts, or start fewer ranks",
            ("rollout.group_size", "actor.minibatches", *layout),
        )


def architecture_mistakes(config: RunConfig, architecture: Architecture) -> Iterator[Mistake]:
    """Yield mistakes in a layout that the sizes of the model do not allow."""
    yield from _tensor(config, architecture)
    yield from _pipeline(config, architecture)
    yield from _context(config, architecture)
    yield from _experts(config, architecture)
    if config.precision == "fp8":
        yield from _fp8(config, architecture)


def _tensor(config: RunConfig, architecture: Architecture) -> Iterator[Mistake]:
    tensor = config.parallel.tensor
    problems = _tensor_problems(tensor, architecture)
    if problems:
        fitting = [ranks for ranks in _divisors(architecture.num_heads) if not _tensor_problems(ranks, architecture)]
        for problem in problems:
            yield Mistake("parallel.tensor", tensor, problem, f"use one of {fitting}", ("model",))


def _tensor_problems(tensor: int, architecture: Architecture) -> list[str]:
    heads, kv_heads, experts = architecture.num_heads, architecture.num_kv_heads, architecture.experts
    problems = []
    if heads % tensor:
        problems.append(f"does not divide the model's {heads} attention heads")
    # With more ranks than key-value heads, several ranks compute the same key and value for different queries.
    elif kv_heads % tensor and tensor % kv_heads:
        problems.append(f"neither divides the model's {kv_heads} key-value heads nor is a multiple of them")
    # Megatron cuts the projection into equal rows regardless of heads, then gathers its output and selects heads.
    elif _qkv_rows(architecture) % tensor:
        problems.append(f"does not divide the {_qkv_rows(architecture)} rows of the model's queries, keys and values")
    if architecture.num_moe_layers < architecture.num_layers and architecture.intermediate_size % tensor:
        problems.append(f"does not divide the model's {architecture.intermediate_size} hidden units of the MLP")
    if experts and experts.shared_intermediate_size % tensor:
        problems.append(f"does not divide the {experts.shared_intermediate_size} hidden units of the shared experts")
    return problems


def _pipeline(config: RunConfig, architecture: Architecture) -> Iterator[Mistake]:
    layers, parallel = architecture.num_layers, config.parallel
    last, others = parallel.last_stage_layers, parallel.pipeline - 1
    if last is not None and others > 0:
        if last >= layers or (layers - last) % others:
            yield Mistake(
                "parallel.last_stage_layers",
                last,
                f"leaves {layers - last} of the model's {layers} layers to {others} other pipeline stages",
                f"use one of {[fitting for fitting in range(1, layers) if (layers - fitting) % others == 0]}",
                ("parallel.pipeline", "model"),
            )
    elif layers % parallel.pipeline:
        fitting = (layers - 1) % others + 1
        more = f", or `parallel.last_stage_layers: {fitting}`" if fitting < layers else ""
        yield Mistake(
            "parallel.pipeline",
            parallel.pipeline,
            f"does not divide the model's {layers} layers",
            f"use one of {_divisors(layers)}{more}",
            ("model",),
        )
    elif layers % (parallel.pipeline * parallel.virtual_pipeline):
        yield Mistake(
            "parallel.virtual_pipeline",
            parallel.virtual_pipeline,
            f"does not divide the {layers // parallel.pipeline} layers of a pipeline stage",
            f"use one of {_divisors(layers // parallel.pipeline)}",
            ("parallel.pipeline", "model"),
        )


def _context(config: RunConfig, architecture: Architecture) -> Iterator[Mistake]:
    if config.parallel.context > 1 and architecture.attention_sinks:
        yield Mistake(
            "parallel.context",
            config.parallel.context,
            f"{architecture.name} has attention sinks, for which there is no context parallelism",
            "use 1",
            ("model",),
        )


def _experts(config: RunConfig, architecture: Architecture) -> Iterator[Mistake]:
    ranks, experts = config.parallel.expert, architecture.experts
    if ranks > 1 and experts is None:
        yield Mistake("parallel.expert", ranks, f"{architecture.name} has no experts", "use 1", ("model",))
    elif experts and experts.num_experts % ranks:
        yield Mistake(
            "parallel.expert",
            ranks,
            f"does not divide the model's {experts.num_experts} experts",
            f"use one of {_divisors(experts.num_experts)}",
            ("model",),
        )


def _fp8(config: RunConfig, architecture: Architecture) -> Iterator[Mistake]:
    for key, index in (("bf16_layers_at_start", 0), ("bf16_layers_at_end", config.parallel.pipeline - 1)):
        stage = len(layers_of_stage(config.parallel, architecture, index))
        if getattr(config.fp8, key) > stage:
            yield Mistake(
                f"fp8.{key}",
                getattr(config.fp8, key),
                f"more than the {stage} layers of a pipeline stage; Megatron allows no more",
                f"use at most {stage}",
                ("parallel.pipeline", "model"),
            )
    multiple = 32 if config.fp8.recipe == "mxfp8" else 16  # Transformer Engine requires it of both sides of a weight
    for width, what in _widths(config.parallel.tensor, architecture):
        if width % multiple:
            yield Mistake(
                "precision",
                "fp8",
                f"fp8.recipe = {config.fp8.recipe} needs a multiple of {multiple} on a rank, which has {width} {what}",
                "use a smaller `parallel.tensor`, or `precision: bf16`"
                if config.parallel.tensor > 1
                else "use `precision: bf16`",
                ("parallel.tensor", "fp8.recipe", "model"),
            )


def _widths(tensor: int, architecture: Architecture) -> Iterator[tuple[int, str]]:
    """Yield the sizes of the weights of one tensor-parallel rank, with their names."""
    experts = architecture.experts
    yield architecture.hidden_size, "hidden units"
    if architecture.latent is None:
        yield architecture.num_heads * architecture.head_dim // tensor, "hidden units of the attention"
        yield _qkv_rows(architecture) // tensor, "rows of queries, keys and values"
    if architecture.num_moe_layers < architecture.num_layers:
        yield architecture.intermediate_size // tensor, "hidden units of the MLP"
    if experts:
        yield experts.intermediate_size, "hidden units of an expert"
        yield experts.shared_intermediate_size // tensor, "hidden units of the shared experts"


def _qkv_rows(architecture: Architecture) -> int:
    return (architecture.num_heads + 2 * architecture.num_kv_heads) * architecture.head_dim


def _divisors(count: int) -> list[int]:
    """Return the divisors up to 1,024, the largest number of ranks that a remedy names."""
    return [divisor for divisor in range(1, min(count, 1024) + 1) if count % divisor == 0]
