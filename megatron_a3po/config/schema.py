"""Every option of a run. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_a3po.config.data_schema import DataConfig, EvaluationConfig, RewardConfig
from megatron_a3po.config.section import Positive, PositiveFloat, Section, Seed, Share

ProximalMethod = Literal["loglinear", "recompute", "reuse_target", "behaviour", "linear"]
Level = Literal["token", "sequence"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class AlgorithmConfig(Section):
    behaviour_weight: Literal["inverse", "inverse_sqrt"] | Share = "inverse"
    """Weight of the behaviour policy in the proximal one at staleness d >= 1: 1/d, 1/sqrt(d), or a constant number."""
    fresh_anchor: Literal["target", "behaviour"] = "target"
    """The proximal policy of a token of the present version: the policy itself (the paper), or the behaviour policy."""
    compare_with_recompute: bool = False
    """Report the errors of the approximation against a forward pass, which costs that pass."""
    clip_epsilon_low: Share = 0.2
    """The ratio pi_target / pi_proximal is clipped below at 1 - clip_epsilon_low."""
    clip_epsilon_high: PositiveFloat = 0.2
    """... and above at 1 + clip_epsilon_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """For negative advantages the surrogate is bounded by dual_clip * |advantage|; null: no bound."""
    ratio_level: Level = "token"
    """sequence: ratios and weights are geometric means over a response (GSPO)."""
    weight_cap: PositiveFloat | None = 5.0
    """Cap on the importance weight pi_proximal / pi_behaviour; null: none."""
    weight_cap_mode: Literal["mask", "clamp"] = "mask"
    """mask: what is over the cap gives no gradient. clamp: its weight is cut to the cap."""
    weight_cap_level: Level = "token"
    """sequence: the geometric mean over a response is compared with the cap, for all its tokens."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Responses that end within so many tokens of max_new_tokens lose up to 1 of their reward (DAPO); 0: none."""
    entropy_coefficient: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the entropy bonus."""
    kl_coefficient: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the KL penalty to the starting policy; above 0, its weights are kept in host memory."""
    kl_estimator: Literal["k1", "k3"] = "k3"
    """As a loss, k1 has an expected gradient of zero on policy: it is there for comparison."""
    max_nonfinite_share: Share = 0.01
    """The run fails when a larger share of an optimizer step's loss tokens has log-probs that are not finite."""
    zero_variance_alarm_steps: Positive = 5
    """A warning appears when in so many steps in a row equal rewards left every advantage 0."""

    def loss_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `algorithm.loss.decoupled_ppo_loss`."""
        names = {"clip_epsilon_low", "clip_epsilon_high", "dual_clip", "ratio_level"}
        return self.model_dump(include=names | {"weight_cap", "weight_cap_mode", "weight_cap_level"})

    def objective_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `algorithm.objective.Objective` that this section has."""
        names = {"behaviour_weight", "fresh_anchor", "compare_with_recompute", "entropy_coefficient"}
        return self.model_dump(include=names | {"kl_coefficient", "kl_estimator"}) | {"loss": self.loss_options()}


class RolloutConfig(Section):
    servers: Literal["local", "registered"] | list[str] = "local"
    """local: the run starts one SGLang server and ends it. registered: those that tools/launch_rollout_servers.py has
    started with this configuration. Or the URLs of running servers."""
    num_servers: Positive = 1
    """So many registered servers the run waits for at its start; it uses all that answer then."""
    server_arguments: list[str] = []
    """More command-line arguments for SGLang servers that the run or the launcher starts."""
    server_tensor_parallel: Positive = 1
    """Tensor-parallel ranks of such a server, each with a GPU of its own."""
    key_file: Path | None = None
    """File, for its owner only, with the key that servers ask for; null: it is in the environment variable
    A3PO_SERVER_KEY, or there is none."""
    prompts_per_step: Positive = 32
    """Groups of one training batch."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses sampled per prompt; the group's mean reward is the baseline, so one alone teaches nothing."""
    max_new_tokens: Positive = 1024
    temperature: PositiveFloat = 1.0
    """Used for sampling and, identically, for the trainer's log-probs."""
    max_concurrent_groups: Positive = 64
    """Groups that may be in flight at the servers at one time."""
    start_timeout_seconds: PositiveFloat = 300
    request_timeout_seconds: Annotated[float, Field(ge=30, allow_inf_nan=False)] = 600
    """A server that has requests, and whose scheduler answers nothing for so long, is left out; publications do not
    count. One request may take longer, and goes to another server after four times as long."""


class ParallelConfig(Section):
    """Ranks that `tensor * pipeline * context` leaves over are data-parallel."""

    tensor: Positive = 1
    """Tensor-parallel ranks; sequence parallelism is on when it is above 1."""
    pipeline: Positive = 1
    """Pipeline stages (1F1B schedule)."""
    virtual_pipeline: Positive = 1
    """Model chunks on each pipeline stage; above 1, the interleaved schedule."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage, which has the output layer besides; the others divide the rest. null: as many
    as the others have."""
    context: Positive = 1
    """Ranks that share the tokens of every sequence."""
    expert: Positive = 1
    """Ranks that share the experts of a mixture-of-experts layer; taken from the tensor, context and data ranks."""
    overlap: bool = True
    """Reduce gradients during the backward pass, and gather updated parameters during the next forward pass."""


class ActorConfig(Section):
    output_layer: Literal["auto", "fused", "logits"] = "auto"
    """fused: log-probs straight from the hidden states, without logits in memory. auto: fused for large logits."""
    microbatch_tokens: Positive = 8192
    """Upper bound on the tokens of a packed microbatch on one rank; `parallel.context` ranks share a microbatch."""
    oversized: Literal["error", "alone"] = "error"
    """A sequence that is longer than that bound stops the run, or makes a microbatch of its own."""
    minibatches: Positive = 1
    """Optimizer steps per batch, each on its own share of the groups; weights are published after the last."""
    activation_recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, the attention, or whole layers."""
    collective_timeout_seconds: PositiveFloat = 600
    """How long a rank waits for the others in one collective before the run fails."""


class OptimizerConfig(Section):
    learning_rate: PositiveFloat = 1e-6
    """The highest that the schedule reaches."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up; it would be at `min_learning_rate` one step after the last."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly from zero."""
    min_learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    adam_beta1: Beta = 0.9
    adam_beta2: Beta = 0.98
    adam_eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled (AdamW); biases and norms have none."""
    clip_grad_norm: PositiveFloat = 1.0
    max_skipped_steps: Annotated[int, Field(ge=0)] = 3
    """Optimizer steps in a row that may be skipped because their gradient is not finite; one more stops the run."""
    offload: bool = False
    """Keep the optimizer's state in host memory and step there."""


class Fp8Config(Section):
    """Used with `precision: fp8`, where Transformer Engine computes the layers' matrix products in FP8."""

    recipe: Literal["blockwise", "delayed", "tensorwise", "mxfp8"] = "blockwise"
    """How values are scaled. blockwise: Hopper. mxfp8: Blackwell. delayed, tensorwise: both."""
    parameters: bool = False
    """Keep the layers' weights in FP8 as well; the optimizer's masters are float32, and start from the FP8 values."""
    bf16_layers_at_start: Annotated[int, Field(ge=0)] = 0
    """First layers of the model that compute in bf16."""
    bf16_layers_at_end: Annotated[int, Field(ge=0)] = 0
    """Last layers of the model that compute in bf16."""


class PublishConfig(Section):
    transport: Literal["group", "disk"] = "group"
    """group: through process groups with the servers. disk: through files that the servers read."""
    fallback: bool = True
    """After a failure of the groups, publish through files; false: the run fails."""
    folder: Path | None = None
    """Where those files lie, on storage that the servers see under the same path; null: run_dir/published."""
    delta_folder: Path | None = None
    """Write to those files only what has changed, and have servers read this folder, which tools/apply_weight_delta.py
    keeps on each of their machines; a local server's is kept by the run. null: files of whole models."""
    bucket_bytes: Positive = 512 * 1024 * 1024
    """Weights travel in flattened buckets of about this size; a rank that sends needs memory for two."""
    timeout_seconds: PositiveFloat = 120
    """How long one bucket, the building of an update group, or the servers' reading of files may take."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What becomes of responses under way when weights are published. retract: they wait, and go on with their context
    computed anew. in_place: they go on with the old weights' keys and values; for servers without radix cache and
    overlap schedule. abort: the servers return what there is of them, and the run has them continued."""
    min_servers: Positive | None = None
    """A server that fails is left out until it has received a whole version again; with fewer servers than this, the
    run ends. null: all of them are needed."""
    verify_prompts: Annotated[int, Field(ge=0)] = 4
    """After each publish, short responses to so many prompts are sampled, one at least by every server, and their
    log-probs compared with the trainer's."""
    max_logprob_difference: PositiveFloat | None = None
    """The run fails when that comparison differs by more; null: the difference is only reported."""


class CheckpointConfig(Section):
    every_steps: Annotated[int, Field(ge=0)] = 20
    """Save a checkpoint to resume from each so many steps, and after the last one; 0: never."""
    keep_last: Positive = 2
    """Older checkpoints are deleted..."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """... but for those of steps that are a multiple of this; 0: no exception."""
    export_every_steps: Annotated[int, Field(ge=0)] = 0
    """Write the policy as a Hugging Face folder, `run_dir/exports/step_...`, each so many steps; 0: only after the last
    one, as `run_dir/model`. Exports are never deleted."""
    asynchronous: bool = False
    """Copy the state to host memory and write it while training goes on; for a while that memory is used twice."""
    preemption_grace_seconds: PositiveFloat = 25
    """At SIGTERM or SIGUSR1 a run finishes its step, saves, and ends with exit code 75. After so long it ends at once:
    torchrun kills its ranks 30 s after it was sent a signal itself."""

    def is_due(self, step: int, num_steps: int) -> bool:
        return self.every_steps > 0 and (step == num_steps or step % self.every_steps == 0)

    def exports(self, step: int, num_steps: int) -> list[str]:
        """Folders below `run_dir` in which the policy of this step is written."""
        is_due = self.export_every_steps > 0 and step % self.export_every_steps == 0
        return [f"exports/step_{step:08d}"] * is_due + ["model"] * (step == num_steps)


class RunConfig(Section):
    """One run. The decisions of an experiment stand first; sections hold the rest."""

    model: Path
    """Folder of the starting policy: Hugging Face's (config.json, safetensors, tokenizer), or what
    tools/convert_hf_to_megatron.py makes of one."""
    run_dir: Path
    """Folder of everything that this run writes; it must not hold another run."""
    resume: Literal["auto", "none"] | Path = "auto"
    """auto: go on from the newest valid checkpoint in `run_dir`, if there is one. none: the folder must be unused.
    Or the folder of a checkpoint (run_dir/checkpoints/step_...): of this run, whose later ones are then set aside, or
    of another one, for an unused `run_dir`. The same command again, as launchers give it, goes on from what the run
    has saved since; to go back to that folder once more, remove run_dir/checkpoints/resumed_from."""
    num_steps: Positive
    """Training steps; each consumes one batch and ends with a weight publication."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """No token is trained on that was sampled by weights older than this many versions; 0: synchronous."""
    proximal: ProximalMethod = "loglinear"
    """loglinear: A-3PO. recompute: decoupled PPO, with a forward pass of its own. reuse_target: the same without it,
    for one optimizer step per batch. behaviour: PPO that ignores staleness. linear: A-3PO in probabilities."""
    device: Literal["cuda", "cpu"] = "cuda"
    precision: Literal["bf16", "fp32", "fp8"] = "bf16"
    """bf16: weights in bf16, masters and gradients in float32. fp8: the same with matrix products in FP8. fp32: all in
    float32, which Transformer Engine multiplies as TF32 on a GPU."""
    seed: Seed = 0
    """Order of the training prompts. Sampling is the servers' own and differs from run to run."""
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
