"""How much memory a training rank needs, from the configuration and the model's sizes alone."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_a3po.config.schema import ParallelConfig, RunConfig
from megatron_a3po.preflight.activations import layer_activation_bytes
from megatron_a3po.preflight.architecture import Architecture

VOCAB_MULTIPLE = 64
"""The vocabulary of every tensor-parallel rank is padded to a multiple of this; on one rank it is not padded."""
LARGE_LOGITS_BYTES = 1 << 30
"""Of the logits and their gradient: above it, `actor.output_layer: auto` is fused."""
TILE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Float32 logits that the log-probs are computed from at a time."""
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Parameters that one rank of a pipeline stage holds."""

    dense: int
    experts: int
    matrices: int
    """those of `dense` that Transformer Engine multiplies in FP8, where the precision is that"""

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on the device of one rank of a pipeline stage.

    Left out: the CUDA context and loaded kernels (1 to 2 GiB), buffers of NCCL, of pipeline communication and of
    publication (a few of `publish.bucket_bytes`), temporary tensors of the layer at work, the reload of a reference
    policy, fragmentation of the allocator, a microbatch longer than `actor.microbatch_tokens`, and experts that see
    more than their share of the tokens. Activations are counted in the precision of the weights: with FP8, which keeps
    some of them in one byte, that is too many.
    """

    stage: int
    parameters: RankParameters
    output_layer: Literal["fused", "logits"]
    """The last stage's"""
    microbatches_in_flight: float
    """Whole forward passes of the stage whose activations wait for their backward pass"""
    weights: int
    gradients: int
    optimizer: int
    """Masters and moments; 0 where they are kept in host memory"""
    activations: int
    logits: int
    """What the output layer needs beside its weight: the logits and their gradient, or tiles of them and sums"""
    host: int
    """In host memory: the optimizer's state and gradients if it is offloaded, and the weights of a reference policy"""
    saving: int
    """On the device while a checkpoint is made, between steps, on the fullest rank at that time; no part of `total`"""
    saving_host: int
    """In host memory while a checkpoint is made or loaded, beside `host`: masters and moments of all parameters of a
    rank, not of its shard of them alone. Left out: up to two copies of one of the three in passing."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def estimate_memory(config: RunConfig, architecture: Architecture, world_size: int) -> MemoryEstimate:
    """Of the fullest rank. `config` must fit the model and `world_size`, as the checks of `load_config` find."""
    pipeline = config.parallel.pipeline
    stages = [_estimate_stage(config, architecture, world_size, stage) for stage in range(pipeline)]
    fullest = max(stages, key=lambda it: it.total)
    saving, host = max(it.saving for it in stages), max(it.saving_host for it in stages)
    return replace(fullest, saving=saving, saving_host=host)


def rank_parameters(parallel: ParallelConfig, architecture: Architecture, stage: int) -> RankParameters:
    """Of one rank of pipeline stage `stage`; the stage's ranks hold equal numbers."""
    tensor, last = parallel.tensor, parallel.pipeline - 1
    layers = [architecture.layer_parameters(index) for index in layers_of_stage(parallel, architecture, stage)]
    matrices = sum(layer.sharded for layer in layers) // tensor
    dense = matrices + sum(layer.replicated for layer in layers)
    table = padded_vocab_size(parallel, architecture) // tensor * architecture.hidden_size
    if stage == 0:
        dense += table
    if stage == last:
        # Tied to an embedding on another stage, the output layer has a copy of it.
        dense += architecture.hidden_size + (table if last > 0 or not architecture.tied_embeddings else 0)
    experts = sum(layer.experts for layer in layers) // parallel.expert
    return RankParameters(dense=dense, experts=experts, matrices=matrices)


def padded_vocab_size(parallel: ParallelConfig, architecture: Architecture) -> int:
    """Over all tensor-parallel ranks."""
    multiple = VOCAB_MULTIPLE * parallel.tensor if parallel.tensor > 1 else 1
    return -(-architecture.vocab_size // multiple) * multiple


def logits_bytes(config: RunConfig, architecture: Architecture) -> int:
    """The logits of a full microbatch and their gradient, on one rank of the last stage."""
    columns = padded_vocab_size(config.parallel, architecture) // config.parallel.tensor
    return 2 * config.actor.microbatch_tokens * columns * _item_bytes(config)


def choose_output_layer(config: RunConfig, architecture: Architecture) -> Literal["fused", "logits"]:
    """What `actor.output_layer` says; auto avoids large logits."""
    wanted = config.actor.output_layer
    if wanted != "auto":
        return wanted
    return "fused" if logits_bytes(config, architecture) > LARGE_LOGITS_BYTES else "logits"


def memory_table(estimate: MemoryEstimate) -> list[str]:
    """The estimate for people, one line for each use of memory."""
    notes = {
        "weights": f"{readable_count(estimate.parameters.total)} parameters",
        "gradients": "float32",
        "optimizer": "offloaded" if estimate.optimizer == 0 else "this rank's shard",
        "activations": f"microbatches in flight: {estimate.microbatches_in_flight:.3g}",
        "logits": "with the tiles that they are computed in" if estimate.logits else "on the last stage only",
        "total": "",
        "host": "host memory",
        "saving": "while a checkpoint is made: of the fullest rank then",
        "saving_host": "host memory of a rank while a checkpoint is made or loaded",
    }
    lines = [f"memory of a rank of pipeline stage {estimate.stage}, the fullest (estimate)"]
    for name, note in notes.items():
        size = getattr(estimate, name)
        if name != "host" or size:
            lines.append(f"  {name.replace('_', ' '):<12}{readable_bytes(size):>12}  {note}".rstrip())
    return lines


def _estimate_stage(config: RunConfig, architecture: Architecture, world_size: int, stage: int) -> MemoryEstimate:
    parallel = config.parallel
    parameters = rank_parameters(parallel, architecture, stage)
    weights = _weights(config, parameters)
    state = _optimizer_state(config, parameters, world_size)
    logits = _output_layer_bytes(config, architecture)
    in_flight = _chunks_in_flight(parallel, stage) / parallel.virtual_pipeline
    offload, with_reference = config.optimizer.offload, config.algorithm.kl_coefficient > 0
    gradients = _FLOAT32 * parameters.total
    gathered = _gathered_for_checkpoint(config, parameters, world_size, stage)
    return MemoryEstimate(
        stage=stage,
        parameters=parameters,
        output_layer=choose_output_layer(config, architecture),
        microbatches_in_flight=in_flight,
        weights=weights,
        gradients=gradients,
        optimizer=0 if offload else state,
        activations=_activations(config, architecture, stage),
        logits=logits if stage == parallel.pipeline - 1 else 0,
        # Masters, moments and a copy of the gradients; the reference's weights, and the policy's own while the
        # reference is in their place.
        host=(state * 4 // 3 if offload else 0) + (2 * weights if with_reference else 0),
        saving=weights + gradients + (0 if offload else state) + gathered,
        saving_host=3 * _FLOAT32 * parameters.total,
    )


def _item_bytes(config: RunConfig) -> int:
    return _FLOAT32 if config.precision == "fp32" else 2


def _weights(config: RunConfig, parameters: RankParameters) -> int:
    size = _item_bytes(config) * parameters.total
    if config.precision != "fp8":
        return size
    # FP8 keeps a copy of one byte for either direction: beside the weights in bf16, or in their place.
    matrices = parameters.matrices + parameters.experts
    return size + (0 if config.fp8.parameters else 2 * matrices)


def _optimizer_state(config: RunConfig, parameters: RankParameters, world_size: int) -> int:
    """Two moments in float32 and, unless the weights are float32 themselves, a master; one shard of them."""
    replicas, expert_replicas = _replicas(config.parallel, world_size)
    each = _FLOAT32 * (2 if config.precision == "fp32" else 3)
    return each * (-(-parameters.dense // replicas) + -(-parameters.experts // expert_replicas))


def _replicas(parallel: ParallelConfig, world_size: int) -> tuple[int, int]:
    """How many ranks share a stage's dense parameters (data x context), and how many its experts."""
    return world_size // (parallel.tensor * parallel.pipeline), world_size // (parallel.expert * parallel.pipeline)


def _gathered_for_checkpoint(config: RunConfig, parameters: RankParameters, world_size: int, stage: int) -> int:
    """Megatron gathers masters, then either moment, from all replicas, each bucket of gradients on the device."""
    if config.parallel.overlap and stage == 0 and config.parallel.virtual_pipeline == 1:
        return 0  # in small buckets; elsewhere all gradients of a model chunk are one
    chunks = config.parallel.virtual_pipeline
    held = zip((parameters.dense, parameters.experts), _replicas(config.parallel, world_size), strict=True)
    # And this rank's shard of it.
    return max(_FLOAT32 * (size + size // replicas) // chunks for size, replicas in held)


def _activations(config: RunConfig, architecture: Architecture, stage: int) -> int:
    """Per layer of the stage and microbatch in flight, what `activation_recompute` leaves of it."""
    parallel, item = config.parallel, _item_bytes(config)
    tokens = config.actor.microbatch_tokens // parallel.tensor
    layers = layers_of_stage(parallel, architecture, stage)
    whole = [layer_activation_bytes(architecture, index, item) for index in layers]
    kept, again = whole, 0
    match config.actor.activation_recompute:
        case "selective":
            # The attention's inputs are kept, and its output is the next product's input: only the normaliser goes.
            again = _FLOAT32 * architecture.num_heads
            kept = [size - again for size in whole]
        case "full":
            again = max(whole)
            kept = [item * architecture.hidden_size] * len(layers)
    in_flight = _chunks_in_flight(parallel, stage)
    return tokens * (sum(kept) * in_flight // parallel.virtual_pipeline + again)


def _output_layer_bytes(config: RunConfig, architecture: Architecture) -> int:
    """What the last stage's output layer needs beside its weight."""
    parallel, tokens, item = config.parallel, config.actor.microbatch_tokens, _item_bytes(config)
    columns, hidden = padded_vocab_size(parallel, architecture) // parallel.tensor, architecture.hidden_size
    tiles = 2 * _FLOAT32 * min(TILE_ELEMENTS[config.device], tokens * columns)
    if choose_output_layer(config, architecture) == "logits":
        return logits_bytes(config, architecture) + tiles
    # Gathered hidden states, and the float32 sums of both gradients, each cast to the weight's own type at the end.
    sums = _FLOAT32 + (item if item < _FLOAT32 else 0)
    return tiles + tokens * hidden * (item + sums) + columns * hidden * sums


def layers_of_stage(parallel: ParallelConfig, architecture: Architecture, stage: int) -> list[int]:
    """Indices of the stage's layers: with interleaving, every `pipeline`-th chunk."""
    last, others = parallel.last_stage_layers, parallel.pipeline - 1
    if last is not None and others > 0:
        size = (architecture.num_layers - last) // others
        return list(range(stage * size, architecture.num_layers if stage == others else (stage + 1) * size))
    size = architecture.num_layers // (parallel.pipeline * parallel.virtual_pipeline)
    starts = [(chunk * parallel.pipeline + stage) * size for chunk in range(parallel.virtual_pipeline)]
    return [start + offset for start in starts for offset in range(size)]


def _chunks_in_flight(parallel: ParallelConfig, stage: int) -> int:
    """Forward passes of one model chunk that wait for their backward pass, with enough microbatches to fill the stages.

    1F1B and its interleaved form: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; Megatron's own warm-up counts.
    """
    behind = parallel.pipeline - stage - 1
    if parallel.virtual_pipeline == 1:
        return behind + 1
    warm_up = 2 * behind + (parallel.virtual_pipeline - 1) * parallel.pipeline
    return warm_up + 1


def readable_count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,}"


def readable_bytes(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
