"""The memory of a training rank, estimated from the configuration and the sizes of the model."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_a3po.config.schema import ParallelConfig, RunConfig
from megatron_a3po.preflight.architecture import Architecture

VOCAB_MULTIPLE = 64
"""The vocabulary of each tensor-parallel rank is padded to a multiple of this; without tensor parallelism it is not."""
LARGE_LOGITS_BYTES = 1 << 30
"""Above this size of the logits and their gradient, `actor.output_layer: auto` is fused."""
TILE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Number of float32 logits from which log-probs are computed at a time."""
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Parameters that one rank of a pipeline stage holds."""

    dense: int
    experts: int
    matrices: int
    """the part of `dense` that Transformer Engine multiplies in FP8, if the precision is fp8"""

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on the device of one rank of a pipeline stage.

    The estimate leaves out the CUDA context and loaded kernels (1 to 2 GiB), buffers of NCCL, of pipeline communication
    and of publication (a few times `publish.bucket_bytes`), temporary tensors of the current layer, the reload of a
    reference policy, fragmentation of the allocator, microbatches longer than `actor.microbatch_tokens`, and experts
    that see more than their share of the tokens. Activations are counted in the precision of the weights, which is too
    much for FP8, where some take one byte.
    """

    stage: int
    parameters: RankParameters
    output_layer: Literal["fused", "logits"]
    """of the last stage"""
    microbatches_in_flight: float
    """forward passes of the stage whose activations wait for their backward pass"""
    weights: int
    gradients: int
    optimizer: int
    """masters and moments; 0 if they are kept in host memory"""
    activations: int
    logits: int
    """memory of the output layer besides its weight: logits and their gradient, or tiles of them and sums"""
    host: int
    """in host memory: state and gradients of an offloaded optimizer, and the weights of a reference policy"""
    saving: int
    """on the device of the fullest rank while a checkpoint is saved between steps; not part of `total`"""
    saving_host: int
    """in host memory, besides `host`, while a checkpoint is saved or loaded: masters and moments of all
    parameters of a rank, not only of its shard; leaves out up to two temporary copies of one of the three"""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def estimate_memory(config: RunConfig, architecture: Architecture, world_size: int) -> MemoryEstimate:
    """Estimate the memory of the fullest rank of a configuration that has passed the checks of `load_config`."""
    pipeline = config.parallel.pipeline
    stages = [_estimate_stage(config, architecture, world_size, stage) for stage in range(pipeline)]
    fullest = max(stages, key=lambda it: it.total)
    saving, host = max(it.saving for it in stages), max(it.saving_host for it in stages)
    return replace(fullest, saving=saving, saving_host=host)


def rank_parameters(parallel: ParallelConfig, architecture: Architecture, stage: int) -> RankParameters:
    """Return the parameters of one rank of a pipeline stage; all ranks of a stage hold equal numbers."""
    tensor, last = parallel.tensor, parallel.pipeline - 1
    layers = [architecture.layer_parameters(index) for index in layers_of_stage(parallel, architecture, stage)]
    matrices = sum(layer.sharded for layer in layers) // tensor
    dense = matrices + sum(layer.replicated for layer in layers)
    table = padded_vocab_size(parallel, architecture) // tensor * architecture.hidden_size
    if stage == 0:
        dense += table
    if stage == last:
        # An output layer that is tied to an embedding on another stage has a copy of it.
        dense += architecture.hidden_size + (table if last > 0 or not architecture.tied_embeddings else 0)
    experts = sum(layer.experts for layer in layers) // parallel.expert
    return RankParameters(dense=dense, experts=experts, matrices=matrices)


def padded_vocab_size(parallel: ParallelConfig, architecture: Architecture) -> int:
    """Return the number of rows of the embedding over all tensor-parallel ranks."""
    multiple = VOCAB_MULTIPLE * parallel.tensor if parallel.tensor > 1 else 1
    return -(-architecture.vocab_size // multiple) * multiple


def logits_bytes(config: RunConfig, architecture: Architecture) -> int:
    """Return the bytes of the logits of a full microbatch and their gradient on one rank of the last stage."""
    columns = padded_vocab_size(config.parallel, architecture) // config.parallel.tensor
    return 2 * config.actor.microbatch_tokens * columns * _item_bytes(config)


def choose_output_layer(config: RunConfig, architecture: Architecture) -> Literal["fused", "logits"]:
    """Return the output layer of `actor.output_layer`, where auto avoids large logits."""
    wanted = config.actor.output_layer
    if wanted != "auto":
        return wanted
    return "fused" if logits_bytes(config, architecture) > LARGE_LOGITS_BYTES else "logits"


def memory_table(estimate: MemoryEstimate) -> list[str]:
    """Return the estimate as text, one line for each use of memory."""
    notes = {
        "weights": f"{readable_count(estimate.parameters.total)} parameters",
        "gradients": "float32",
        "optimizer": "offloaded" if estimate.optimizer == 0 else "this rank's shard",
        "activations": f"microbatches in flight: {estimate.microbatches_in_flight:.3g}",
        "logits": "including the tiles for log-probs" if estimate.logits else "on the last stage only",
        "total": "",
        "host": "host memory",
        "saving": "the fullest rank while a checkpoint is saved",
        "saving_host": "host memory of a rank while a checkpoint is saved or loaded",
    }
    lines = [f"memory of the fullest rank, on pipeline stage {estimate.stage} (estimate)"]
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
    # FP8 keeps a one-byte copy for each direction: besides the bf16 weights, or instead of them.
    matrices = parameters.matrices + parameters.experts
    return size + (0 if config.fp8.parameters else 2 * matrices)


def _optimizer_state(config: RunConfig, parameters: RankParameters, world_size: int) -> int:
    """Return the bytes of one shard of two float32 moments and, unless the weights are float32, of the masters."""
    replicas, expert_replicas = _replicas(config.parallel, world_size)
    each = _FLOAT32 * (2 if config.precision == "fp32" else 3)
    return each * (-(-parameters.dense // replicas) + -(-parameters.experts // expert_replicas))


def _replicas(parallel: ParallelConfig, world_size: int) -> tuple[int, int]:
    """Return the number of ranks that share a stage's dense parameters (data x context), and that of its experts."""
    return world_size // (parallel.tensor * parallel.pipeline), world_size // (parallel.expert * parallel.pipeline)


def _gathered_for_checkpoint(config: RunConfig, parameters: RankParameters, world_size: int, stage: int) -> int:
    """Return the device bytes in which Megatron gathers masters, then moments, from all replicas.

    It gathers one gradient bucket at a time and holds this rank's shard of it besides.
    """
    if config.parallel.overlap and stage == 0 and config.parallel.virtual_pipeline == 1:
        return 0  # the buckets are small; elsewhere one bucket holds all gradients of a model chunk
    chunks = config.parallel.virtual_pipeline
    held = zip((parameters.dense, parameters.experts), _replicas(config.parallel, world_size), strict=True)
    return max(_FLOAT32 * (size + size // replicas) // chunks for size, replicas in held)


def _activations(config: RunConfig, architecture: Architecture, stage: int) -> int:
    """Return the bytes that `activation_recompute` keeps of all layers and microbatches in flight."""
    parallel, item = config.parallel, _item_bytes(config)
    tokens = config.actor.microbatch_tokens // parallel.tensor
    layers = layers_of_stage(parallel, architecture, stage)
    whole = [layer_activation_bytes(architecture, index, item) for index in layers]
    kept, again = whole, 0
    match config.actor.activation_recompute:
        case "selective":
            # The inputs and the output of the attention are kept for other products: only the normaliser goes.
            again = _FLOAT32 * architecture.num_heads
            kept = [size - again for size in whole]
        case "full":
            again = max(whole)
            kept = [item * architecture.hidden_size] * len(layers)
    in_flight = _chunks_in_flight(parallel, stage)
    return tokens * (sum(kept) * in_flight // parallel.virtual_pipeline + again)


def layer_activation_bytes(architecture: Architecture, index: int, item_bytes: int) -> int:
    """Return the bytes per token that the backward pass needs of a layer, before tensor parallelism divides them.

    This is the accounting of Korthikanti et al. 2022 (arXiv 2205.05198, sections 4 and 5), which counts every tensor
    that a backward formula needs once: 34 bytes x hidden size for GPT in half precision. Here there are no dropout
    masks (2 of the 34), but grouped queries, a gated MLP, and attention that keeps a float32 normaliser per head
    instead of scores. Experts are assumed to be evenly loaded.
    """
    hidden = architecture.hidden_size
    norms = 4 * hidden  # input and output of both norms
    mlp = 3 * architecture.intermediate_size
    experts = architecture.experts
    if architecture.moe_layers[index] and experts:
        routed = experts.per_token * (hidden + 3 * experts.intermediate_size)
        mlp = routed + 3 * experts.shared_intermediate_size
    return item_bytes * (norms + _attention_width(architecture) + mlp) + _FLOAT32 * architecture.num_heads


def _attention_width(architecture: Architecture) -> int:
    """Return the width of queries, keys, values and output, and of what enters their norms."""
    heads, kv_heads, head_dim = architecture.num_heads, architecture.num_kv_heads, architecture.head_dim
    latent = architecture.latent
    if latent is None:
        before_norms = (heads + kv_heads) * head_dim if architecture.qk_norm else 0
        return (2 * heads + 2 * kv_heads) * head_dim + before_norms
    low_rank = 2 * (latent.query_rank or 0) + 2 * latent.kv_rank + latent.rope_dim
    # Keys exist twice: as they come from the low rank, and with the shared position in each head.
    return low_rank + heads * (2 * head_dim + latent.nope_dim + 2 * latent.value_dim)


def _output_layer_bytes(config: RunConfig, architecture: Architecture) -> int:
    """Return the bytes that the output layer of the last stage needs besides its weight."""
    parallel, tokens, item = config.parallel, config.actor.microbatch_tokens, _item_bytes(config)
    columns, hidden = padded_vocab_size(parallel, architecture) // parallel.tensor, architecture.hidden_size
    tiles = 2 * _FLOAT32 * min(TILE_ELEMENTS[config.device], tokens * columns)
    if choose_output_layer(config, architecture) == "logits":
        return logits_bytes(config, architecture) + tiles
    # Gathered hidden states, and float32 sums of both gradients, which are cast to the type of the weight at the end.
    sums = _FLOAT32 + (item if item < _FLOAT32 else 0)
    return tiles + tokens * hidden * (item + sums) + columns * hidden * sums


def layers_of_stage(parallel: ParallelConfig, architecture: Architecture, stage: int) -> list[int]:
    """Return the indices of the stage's layers; with interleaving it has every `pipeline`-th chunk."""
    last, others = parallel.last_stage_layers, parallel.pipeline - 1
    if last is not None and others > 0:
        size = (architecture.num_layers - last) // others
        return list(range(stage * size, architecture.num_layers if stage == others else (stage + 1) * size))
    size = architecture.num_layers // (parallel.pipeline * parallel.virtual_pipeline)
    starts = [(chunk * parallel.pipeline + stage) * size for chunk in range(parallel.virtual_pipeline)]
    return [start + offset for start in starts for offset in range(size)]


def _chunks_in_flight(parallel: ParallelConfig, stage: int) -> int:
    """Return the number of chunk forward passes that wait for their backward pass when all stages are busy.

    1F1B and its interleaved form: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, with Megatron's warm-up.
    """
    behind = parallel.pipeline - stage - 1
    if parallel.virtual_pipeline == 1:
        return behind + 1
    warm_up = 2 * behind + (parallel.virtual_pipeline - 1) * parallel.pipeline
    return warm_up + 1


def readable_count(number: int) -> str:
    """Return a count such as `8.2 billion`."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,}"


def readable_bytes(size: int) -> str:
    """Return a size such as `3.81 GiB`."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
