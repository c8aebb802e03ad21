"""The options of prompts and rewards. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_a3po.config.section import Positive, PositiveFloat, Section, Seed, Share

HELD_OUT = "held_out"
"""Name, among the evaluation datasets, of the prompts that training leaves out"""
Columns = Literal["gsm8k", "dapo_math"] | dict[str, str]


class DataConfig(Section):
    """Prompts: those of a reasoning-gym `task`, or a dataset at `path`."""

    task: str | None = None
    """Name of a reasoning-gym task."""
    task_options: dict[str, Any] = {}
    """Options of that task, for example {min_word_len: 6}."""
    size: Annotated[int, Field(gt=0, le=10_000_000)] = 20000
    """Number of entries that the task generates."""
    prompt_pattern: str | None = None
    """Regular expression that a task's question must match in full to be used; null: every question."""
    path: Path | None = None
    """A .jsonl or .parquet file, a folder of them, or one that save_to_disk of Hugging Face's datasets wrote."""
    split: str | None = None
    """Which part of the dataset, where a folder holds several."""
    columns: Columns = {"prompt": "prompt", "answer": "answer"}
    """A built-in schema (gsm8k: openai/gsm8k, dapo_math: DAPO-Math-17k), or which column is the prompt (text, messages
    or token ids), the answer, the id, and what else a reward function wants; dots lead into nested columns."""
    num_held_out: Annotated[int, Field(ge=0)] = 512
    """Prompts kept out of training, for evaluation; 0: only `evaluation.datasets` are sampled there."""
    seed: Seed = 7
    """Seed of a task's entries and of the held-out split; the order of training follows the run's seed."""
    chat_template: Literal["auto"] | bool = "auto"
    """Write prompts with the tokenizer's chat template; auto: where it has one."""
    system_prompt: str | None = None
    """First message of every conversation that has no system message of its own."""
    enable_thinking: bool | None = None
    """The switch of Qwen3's chat template; null: as the template has it."""
    instruction: str | None = None
    """Stands behind every question; null: what the schema says, of which only gsm8k has one (answers in a box)."""
    max_prompt_tokens: Positive | None = None
    """Longer prompts are left out; null: only those that leave no room for a response of rollout.max_new_tokens."""
    max_bad_share: Share = 0.01
    """The run does not start when a larger share of a dataset's rows cannot be used; run_dir/quarantine.jsonl lists
    them."""


class RewardConfig(Section):
    """Rewards are computed in worker processes on the first rank's machine."""

    scorer: str = "auto"
    """math: math-verify on the last box or "answer: ...". math_exact: that answer, character for character. task: the
    reasoning-gym task's own. package.module:function: yours. http://...: a server's. auto: task, for datasets math."""
    timeout_seconds: PositiveFloat = 60
    """For the responses to one prompt; then the worker is killed and replaced."""
    max_workers: Positive = 8
    """One starts with the run; more start while responses wait."""
    worker_memory_bytes: Positive | None = 4 * 1024**3
    """Address space of one worker; null: no limit."""
    max_failed_share: Share = 0.05
    """A group whose reward fails is dropped. The run fails when a larger share of the last 100 groups, or of an
    evaluation, did."""
    format_pattern: str | None = None
    """Regular expression to be found in a response; a dot stands for line ends too."""
    format_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """What a response without that pattern loses in training."""
    length_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """What a response of max_new_tokens loses in training, and a shorter one in proportion; algorithm has another
    penalty, for the last overlong_buffer_tokens only."""


class EvaluationDataset(Section):
    """A dataset that is only evaluated on."""

    path: Path
    """As `data.path`"""
    split: str | None = None
    columns: Columns | None = None
    """null: as `data.columns`"""
    instruction: str | None = None
    """As `data.instruction`; null: that one, or what the schema of these columns says"""
    num_prompts: Positive | None = None
    """Of a larger one, so many are sampled, chosen by `data.seed`; null: all."""


class EvaluationConfig(Section):
    """What is sampled to see how good the policy is, before training, on the way, and after it."""

    every_steps: Annotated[int, Field(ge=0)] = 10
    """Evaluate each so many steps; 0: only before the first and after the last step."""
    datasets: dict[str, EvaluationDataset] = {}
    """By name, besides `held_out`, the prompts that `data.num_held_out` keeps. What trains on `data.path` leaves them
    out."""
    num_samples: Positive = 1
    """Responses per prompt: the k of avg@k and pass@k."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """0: greedy; null: that of training"""
    max_new_tokens: Positive | None = None
    """null: as in training"""

    def is_due(self, step: int, num_steps: int) -> bool:
        return step == num_steps or (self.every_steps > 0 and step % self.every_steps == 0)
