"""Every option of a run. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_a3po.config.data_schema import (
    DataConfig,
    EvaluationConfig,
    Positive,
    PositiveFloat,
    RewardConfig,
    Section,
    Seed,
    Share,
)

ProximalMethod = Literal["loglinear", "recompute", "reuse_target", "behaviour", "linear"]
Level = Literal["token", "sequence"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class AlgorithmConfig(Section):
    """The A-3PO loss, advantages, and penalties."""

    behaviour_weight: Literal["inverse", "inverse_sqrt"] | Share = "inverse"
    """Weight of the behaviour policy in the proximal policy at staleness d >= 1: 1/d, 1/sqrt(d), or a constant."""
    fresh_anchor: Literal["target", "behaviour"] = "target"
    """Proximal policy of a token of the current version: the policy itself (the paper), or the behaviour policy."""
    compare_with_recompute: bool = False
    """Run an extra forward pass to measure the error of the approximation."""
    clip_epsilon_low: Share = 0.2
    """The ratio pi_target / pi_proximal is clipped below at 1 - clip_epsilon_low."""
    clip_epsilon_high: PositiveFloat = 0.2
    """The ratio is clipped above at 1 + clip_epsilon_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound the surrogate at negative advantages by dual_clip * |advantage|; null: no bound."""
    ratio_level: Level = "token"
    """token: ratios and weights per token. sequence: their geometric means over a response (GSPO)."""
    weight_cap: PositiveFloat | None = 5.0
    """Cap on the importance weight pi_proximal / pi_behaviour; null: no cap."""
    weight_cap_mode: Literal["mask", "clamp"] = "mask"
    """mask: tokens over the cap give no gradient. clamp: their weight is reduced to the cap."""
    weight_cap_level: Level = "token"
    """token: compare each weight with the cap. sequence: compare the geometric mean over a response."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """How rewards of a group become advantages."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Responses within this many tokens of max_new_tokens lose up to 1 of their reward (DAPO); 0: no penalty."""
    entropy_coefficient: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the entropy bonus."""
    kl_coefficient: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the KL penalty to the starting policy, whose weights are kept in host memory if this is above 0."""
    kl_estimator: Literal["k1", "k3"] = "k3"
    """Estimator of that KL divergence. As a loss, k1 has an expected gradient of zero on policy."""
    max_nonfinite_share: Share = 0.01
    """The run fails if a larger share of the loss tokens of an optimizer step has log-probs that are not finite."""
    zero_variance_alarm_steps: Positive = 5
    """Warn after this many steps in a row in which equal rewards made every advantage 0."""

    def loss_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `algorithm.loss.decoupled_ppo_loss`."""
        names = {"clip_epsilon_low", "clip_epsilon_high", "dual_clip", "ratio_level"}
        return self.model_dump(include=names | {"weight_cap", "weight_cap_mode", "weight_cap_level"})

    def objective_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `algorithm.objective.Objective` that this section has."""
        names = {"behaviour_weight", "fresh_anchor", "compare_with_recompute", "entropy_coefficient"}
        return self.model_dump(include=names | {"kl_coefficient", "kl_estimator"}) | {"loss": self.loss_options()}


class RolloutConfig(Section):
    """The rollout servers and the sampling of training batches."""

    servers: Literal["local", "registered"] | list[str] = "local"
    """local: the run starts one SGLang server and ends it. registered: use servers that
    tools/launch_rollout_servers.py started with this configuration. Or a list of URLs of running servers."""
    num_servers: Positive = 1
    """At its start, the run waits for this many registered servers; it uses all that answer then."""
    server_arguments: list[str] = []
    """Additional command-line arguments for SGLang servers that the run or the launcher starts."""
    server_tensor_parallel: Positive = 1
    """Tensor-parallel ranks of such a server; each uses one GPU."""
    key_file: Path | None = None
    """File, readable by its owner only, with the key that servers require; null: use the environment variable
    A3PO_SERVER_KEY, or no key if it is not set."""
    prompts_per_step: Positive = 32
    """Prompts, and so groups of responses, in one training batch."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses sampled per prompt; the mean reward of the group is the baseline."""
    max_new_tokens: Positive = 1024
    """Longest response in tokens."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling and, identically, of the trainer's log-probs."""
    max_concurrent_groups: Positive = 64
    """Groups that may be in flight at the servers at the same time."""
    start_timeout_seconds: PositiveFloat = 300
    """Time for servers to become ready at the start of the run."""
    request_timeout_seconds: Annotated[float, Field(ge=30, allow_inf_nan=False)] = 600
    """A server with requests is put in quarantine if its scheduler gives no answer for this long; time in publications
    does not count. A single request may take longer; after four times as long it goes to another server."""


class ParallelConfig(Section):
    """The layout of the training ranks; ranks beyond `tensor * pipeline * context` are data-parallel."""

    tensor: Positive = 1
    """Tensor-parallel ranks; above 1, sequence parallelism is on."""
    pipeline: Positive = 1
    """Pipeline stages (1F1B schedule)."""
    virtual_pipeline: Positive = 1
    """Model chunks on each pipeline stage; above 1, the schedule is interleaved."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage, which also has the output layer; the other stages share the rest equally.
    null: all stages have the same number of layers."""
    context: Positive = 1
    """Context-parallel ranks, which share the tokens of every sequence."""
    expert: Positive = 1
    """Expert-parallel ranks, taken from the tensor-, context- and data-parallel ranks of a pipeline stage."""
    overlap: bool = True
    """Reduce gradients during the backward pass and gather updated parameters during the next forward pass."""


class ActorConfig(Section):
    """How the training ranks compute a batch."""

    output_layer: Literal["auto", "fused", "logits"] = "auto"
    """fused: compute log-probs from the hidden states, without logits in memory. auto: fused if logits are large."""
    microbatch_tokens: Positive = 8192
    """Upper bound on the tokens of a packed microbatch per rank; `parallel.context` ranks share a microbatch."""
    oversized: Literal["error", "alone"] = "error"
    """A sequence longer than a microbatch. error: stop the run. alone: give it a microbatch of its own."""
    minibatches: Positive = 1
    """Optimizer steps per batch, each on its own share of the groups; weights are published after the last one."""
    activation_recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes instead of keeping it: nothing, the attention, or whole layers."""
    collective_timeout_seconds: PositiveFloat = 600
    """Time that a rank waits for the others in one collective before the run fails."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: PositiveFloat = 1e-6
    """Highest learning rate of the schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up; it would reach `min_learning_rate` one step after the last."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from zero."""
    min_learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Lowest learning rate of a linear or cosine schedule."""
    adam_beta1: Beta = 0.9
    adam_beta2: Beta = 0.98
    adam_eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled weight decay (AdamW); biases and norms are exempt."""
    clip_grad_norm: PositiveFloat = 1.0
    max_skipped_steps: Annotated[int, Field(ge=0)] = 3
    """Optimizer steps in a row that may be skipped because the gradient is not finite; one more stops the run."""
    offload: bool = False
    """Keep the optimizer state in host memory and take the step there."""


class Fp8Config(Section):
    """Options of `precision: fp8`, in which Transformer Engine computes the matrix products of layers in FP8."""

    recipe: Literal["blockwise", "delayed", "tensorwise", "mxfp8"] = "blockwise"
    """Scaling of values. blockwise: Hopper. mxfp8: Blackwell. delayed, tensorwise: both."""
    parameters: bool = False
    """Keep the weights of layers in FP8 as well; the optimizer's masters are float32 and start from the FP8 values."""
    bf16_layers_at_start: Annotated[int, Field(ge=0)] = 0
    """Number of first layers that compute in bf16."""
    bf16_layers_at_end: Annotated[int, Field(ge=0)] = 0
    """Number of last layers that compute in bf16."""


class PublishConfig(Section):
    """The publication of weights to the rollout servers."""

    transport: Literal["group", "disk"] = "group"
    """group: send weights through process groups with the servers. disk: write files that the servers read."""
    fallback: bool = True
    """If the process groups fail, publish through files; false: the run fails."""
    folder: Path | None = None
    """Folder of those files, on storage that the servers see under the same path; null: run_dir/published."""
    delta_folder: Path | None = None
    """Write only what has changed (deltas), and let servers read this folder, which tools/apply_weight_delta.py updates
    on each of their machines; for a local server the run updates it. null: write whole models."""
    bucket_bytes: Positive = 512 * 1024 * 1024
    """Approximate size of the flattened buckets in which weights are sent; a sending rank needs memory for two."""
    timeout_seconds: PositiveFloat = 120
    """Time for one bucket, for the setup of an update group, or for the servers to read files."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to unfinished responses when weights are published. retract: they wait, and their context is
    recomputed. in_place: they continue with the keys and values of the old weights; needs servers without radix cache
    and overlap schedule. abort: the servers return the partial responses, and the run requests the rest."""
    min_servers: Positive | None = None
    """A server that fails is in quarantine until it holds a whole version again. With fewer servers than this outside
    quarantine, the run ends. null: all servers are needed."""
    verify_prompts: Annotated[int, Field(ge=0)] = 4
    """After each publication, sample short responses to this many prompts, at least one from every server, and compare
    their log-probs with the trainer's."""
    max_logprob_difference: PositiveFloat | None = None
    """The run fails if these log-probs differ by more; null: only report the difference."""


class CheckpointConfig(Section):
    """Checkpoints to resume from, exports, and preemption."""

    every_steps: Annotated[int, Field(ge=0)] = 20
    """Save a checkpoint every this many steps and after the last one; 0: never."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Also keep checkpoints of steps that are a multiple of this; 0: keep none of them."""
    export_every_steps: Annotated[int, Field(ge=0)] = 0
    """Export the policy as a Hugging Face folder, `run_dir/exports/step_...`, every this many steps; 0: only after the
    last one, as `run_dir/model`. Exports are never deleted."""
    asynchronous: bool = False
    """Copy the state to host memory and write it while training goes on; this needs additional host memory."""
    preemption_grace_seconds: PositiveFloat = 25
    """After SIGTERM or SIGUSR1, a run finishes its step, saves, and ends with exit code 75. If that takes longer than
    this, it ends at once: torchrun kills its ranks 30 s after it received a signal itself."""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to save a checkpoint after this step."""
        return self.every_steps > 0 and (step == num_steps or step % self.every_steps == 0)

    def exports(self, step: int, num_steps: int) -> list[str]:
        """Return the folders below `run_dir` to which the policy of this step is exported."""
        is_due = self.export_every_steps > 0 and step % self.export_every_steps == 0
        return [f"exports/step_{step:08d}"] * is_due + ["model"] * (step == num_steps)


class RunConfig(Section):
    """One run: the decisions of an experiment, then sections for the rest."""

    model: Path
    """Folder of the starting policy: a Hugging Face model (config.json, safetensors, tokenizer), or such a model
    converted by tools/convert_hf_to_megatron.py."""
    run_dir: Path
    """Folder for everything that this run writes; it must not hold another run."""
    resume: Literal["auto", "none"] | Path = "auto"
    """auto: resume from the newest valid checkpoint in `run_dir`, if there is one. none: `run_dir` must be unused.
    Or a checkpoint folder (run_dir/checkpoints/step_...): of this run, whose later checkpoints are then set aside, or
    of another run, if `run_dir` is unused. If a launcher repeats the command, the run resumes from what it has saved
    since; to go back to that checkpoint once more, remove run_dir/checkpoints/resumed_from."""
    num_steps: Positive
    """Training steps; each consumes one batch and ends with a publication of weights."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Train on no token sampled by weights that are more than this many versions old; 0: synchronous."""
    proximal: ProximalMethod = "loglinear"
    """Proximal policy. loglinear: A-3PO. recompute: decoupled PPO with an extra forward pass. reuse_target: the same
    without that pass, for one optimizer step per batch. behaviour: PPO that ignores staleness. linear: A-3PO in
    probabilities."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the training ranks; cpu: the same code without a GPU."""
    precision: Literal["bf16", "fp32", "fp8"] = "bf16"
    """bf16: weights in bf16, masters and gradients in float32. fp8: the same with matrix products in FP8. fp32:
    everything in float32, which Transformer Engine multiplies as TF32 on a GPU."""
    seed: Seed = 0
    """Seed of the order of training prompts. The servers' sampling has seeds of its own and differs between runs."""
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    parallel: ParallelConfig = ParallelConfig()
    actor: ActorConfig = ActorConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    fp8: Fp8Config = Fp8Config()
    publish: PublishConfig = PublishConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def objective_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `algorithm.objective.Objective`."""
        return self.algorithm.objective_options() | {"proximal": self.proximal}
