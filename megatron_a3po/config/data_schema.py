"""The options of prompts, rewards and evaluation, and what all sections have in common. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]

HELD_OUT = "held_out"
"""Name of the evaluation dataset that consists of the prompts kept out of training"""
Columns = Literal["gsm8k", "dapo_math"] | dict[str, str]


class Section(BaseModel):
    """A part of the configuration: closed, immutable, every option with a docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class DataConfig(Section):
    """Prompts of a reasoning-gym `task` or of a dataset at `path`."""

    task: str | None = None
    """Name of a reasoning-gym task."""
    task_options: dict[str, Any] = {}
    """Options of that task, for example {min_word_len: 6}."""
    size: Annotated[int, Field(gt=0, le=10_000_000)] = 20000
    """Number of entries that the task generates."""
    prompt_pattern: str | None = None
    """Regular expression that must match the whole question of a task for it to be used; null: use every question."""
    path: Path | None = None
    """A .jsonl or .parquet file, a folder of them, or a folder written by `save_to_disk` of Hugging Face datasets."""
    split: str | None = None
    """Split of the dataset, if the folder holds several."""
    columns: Columns = {"prompt": "prompt", "answer": "answer"}
    """A built-in schema (gsm8k: openai/gsm8k, dapo_math: DAPO-Math-17k), or a mapping that names the columns of the
    prompt (text, messages or token ids), the answer, the id, and whatever else a reward function needs. Dots lead into
    nested columns."""
    num_held_out: Annotated[int, Field(ge=0)] = 512
    """Number of prompts kept out of training for evaluation; 0: evaluate on `evaluation.datasets` only."""
    seed: Seed = 7
    """Seed of a task's entries and of the held-out split; the order of training follows the seed of the run."""
    chat_template: Literal["auto"] | bool = "auto"
    """Format prompts with the chat template of the tokenizer; auto: if it has one."""
    system_prompt: str | None = None
    """System message of every conversation that does not begin with one."""
    enable_thinking: bool | None = None
    """Value of `enable_thinking` in Qwen3's chat template; null: the template's default."""
    instruction: str | None = None
    """Text appended to every question; null: the instruction of the schema, which only gsm8k has (answer in a box)."""
    max_prompt_tokens: Positive | None = None
    """Leave out longer prompts; null: leave out only prompts without room for a response of rollout.max_new_tokens."""
    max_bad_share: Share = 0.01
    """The run does not start if a larger share of a dataset's rows is rejected; run_dir/quarantine.jsonl lists the
    rejected rows."""


class RewardConfig(Section):
    """Rewards, computed in worker processes on the machine of rank 0."""

    scorer: str = "auto"
    """math: compare the last box or "answer: ..." with math-verify. math_exact: compare it character by character.
    task: the scorer of the reasoning-gym task. package.module:function: your function. http://...: a server.
    auto: `task` for a task, `math` for a dataset."""
    timeout_seconds: PositiveFloat = 60
    """Time for the responses to one prompt; after it the worker is killed and replaced."""
    max_workers: Positive = 8
    """One worker starts with the run; more start while responses wait."""
    worker_memory_bytes: Positive | None = 4 * 1024**3
    """Limit on the address space of one worker; null: no limit."""
    max_failed_share: Share = 0.05
    """A group whose reward fails is dropped. The run fails if a larger share of the last 100 groups, or of an
    evaluation, was dropped for that reason."""
    format_pattern: str | None = None
    """Regular expression that a response should contain; a dot matches line ends too."""
    format_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Reward subtracted in training from a response without `format_pattern`."""
    length_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Reward subtracted in training from a response of max_new_tokens; a shorter one loses in proportion. For a penalty
    near the limit only, see algorithm.overlong_buffer_tokens."""


class EvaluationDataset(Section):
    """A dataset that is only evaluated on."""

    path: Path
    """Like `data.path`."""
    split: str | None = None
    columns: Columns | None = None
    """Like `data.columns`; null: the same columns."""
    instruction: str | None = None
    """Like `data.instruction`; null: the same instruction, or that of the schema in `columns`."""
    num_prompts: Positive | None = None
    """Use this many prompts, chosen by `data.seed`; null: use all."""


class EvaluationConfig(Section):
    """Evaluation of the policy before, during and after training."""

    every_steps: Annotated[int, Field(ge=0)] = 10
    """Evaluate every this many steps; 0: only before the first and after the last step."""
    datasets: dict[str, EvaluationDataset] = {}
    """Datasets by name, in addition to the prompts of `data.num_held_out`, which are called `held_out`. Training on
    `data.path` leaves out the prompts of these datasets."""
    num_samples: Positive = 1
    """Responses per prompt, the k of avg@k and pass@k."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Sampling temperature; 0: greedy; null: as in training."""
    max_new_tokens: Positive | None = None
    """Longest response; null: as in training."""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to evaluate after this step."""
        return step == num_steps or (self.every_steps > 0 and step % self.every_steps == 0)
