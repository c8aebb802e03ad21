"""Make the model of the quickstart: a Qwen3 of 115,000 parameters that reverses six-letter words one time in four.

    python tools/make_tiny_model.py [--output models/tiny_qwen3] [--seed 0] [--force]

The model is warm-started by supervised learning on a teacher that always reverses the word but stops at the right
letter only sometimes. Reinforcement learning can then improve it, because one sample in four is right. The result is an
ordinary Hugging Face folder. Nothing is downloaded; it takes about 20 seconds.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from megatron_a3po.errors import A3poError, ConfigError
from megatron_a3po.prompts.encoder import PromptEncoder
from megatron_a3po.prompts.prompts import Prompt, PromptSet
from megatron_a3po.prompts.tasks import load_task
from megatron_a3po.rewards.scorers import TaskSpec, task_scorer

INSTRUCTION = "Spell this word backward (example: sun -> nus):"
WORD_LENGTH = 6
MAX_RESPONSE_TOKENS = WORD_LENGTH + 1  # the letters and the end-of-sequence token
PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"
IGNORED_LABEL = -100  # functional.cross_entropy leaves this label out

# The same as `data` in configs/tiny_cpu.yaml, so that the words held out here are held out there too. Words of one
# length only, because mixed lengths make the warm start's accuracy vary from seed to seed.
DATA: dict[str, Any] = {
    "task": "spell_backward",
    "task_options": {"min_word_len": WORD_LENGTH, "max_word_len": WORD_LENGTH},
    "size": 20_000,
    "seed": 7,
    "prompt_pattern": r"Spell this word backward \(example: sun -> nus\): [a-z]{6}",
    "num_held_out": 512,
}
TASK = TaskSpec(name=DATA["task"], options=DATA["task_options"])

RECORD_FILE = ".warm_start.json"
FOLDER_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    RECORD_FILE,
)


class WarmStartSettings(BaseModel):
    """Settings of the supervised warm start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    num_demonstrations: int = 4000
    share_of_right_answers: float = 0.25
    num_steps: int = 400
    batch_size: int = 128
    learning_rate: float = 3e-3
    num_warmup_steps: int = 30
    final_learning_rate_share: float = 0.05


class WarmStartRecord(BaseModel):
    """What `.warm_start.json` in the model folder says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: WarmStartSettings
    num_parameters: int
    held_out_sampled_accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """What the teacher wrote."""

    token_ids: Tensor
    """[demonstrations, prompt + response] int64; answers that stop early are padded on the right."""
    labels: Tensor
    """[demonstrations, response] int64; the response, with IGNORED_LABEL for padding."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, padding, end of sequence and the instruction: 259 in all.

    The instruction is the same in every prompt. As one token it keeps a prompt at 8 tokens instead of 54.
    """
    vocabulary = {
        token: i for i, token in enumerate([PAD_TOKEN, EOS_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD_TOKEN, EOS_TOKEN])
    tokenizer.add_tokens([AddedToken(INSTRUCTION, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,  # or decoding would edit the model's answer before it is scored
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """Return a float32 Qwen3 with random weights that two tensor-parallel ranks or two pipeline stages can share."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=192,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).float()


def sloppy_answer(answer: Sequence[int], *, share_right: float, rng: random.Random) -> list[int]:
    """Return an answer: right with probability `share_right`, otherwise equally often too short or too long."""
    if rng.random() < share_right:
        return list(answer)
    if rng.random() < 0.5:
        return list(answer[: rng.randint(1, len(answer) - 1)])
    return [*answer, answer[-1]]


def make_demonstrations(
    prompts: PromptSet, tokenizer: PreTrainedTokenizerFast, settings: WarmStartSettings
) -> Demonstrations:
    """Return the teacher's answers to training prompts."""
    rng, score = random.Random(settings.seed), task_scorer(TASK)
    token_rows, label_rows = [], []
    for i in range(settings.num_demonstrations):
        prompt = prompts.training_prompt(i)
        right = prompt.token_ids[-WORD_LENGTH:][::-1]
        if score(tokenizer.decode(right), prompt.row) != 1.0:
            raise A3poError(f"the task does not accept {tokenizer.decode(right)!r} for {prompt.prompt_id}")
        answer = sloppy_answer(right, share_right=settings.share_of_right_answers, rng=rng)
        response = [*answer, tokenizer.eos_token_id][:MAX_RESPONSE_TOKENS]  # who runs on never gets to the end
        num_padding = MAX_RESPONSE_TOKENS - len(response)
        token_rows.append([*prompt.token_ids, *response, *[tokenizer.pad_token_id] * num_padding])
        label_rows.append([*response, *[IGNORED_LABEL] * num_padding])
    return Demonstrations(token_ids=torch.tensor(token_rows), labels=torch.tensor(label_rows))


def warm_start(model: Qwen3ForCausalLM, demonstrations: Demonstrations, settings: WarmStartSettings) -> None:
    """Train the model in place: AdamW with linear warm-up and linear decay of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(settings.seed)
    start = time.monotonic()
    for step in range(1, settings.num_steps + 1):
        decay = max(settings.final_learning_rate_share, 1 - step / settings.num_steps)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * min(1, step / settings.num_warmup_steps) * decay
        rows = torch.randint(len(demonstrations.token_ids), (settings.batch_size,), generator=generator)
        token_ids, labels = demonstrations.token_ids[rows], demonstrations.labels[rows]
        # No attention mask: padding stands behind everything that has a label, and attention only looks back.
        logits = model(token_ids[:, :-1], use_cache=False, logits_to_keep=MAX_RESPONSE_TOKENS).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 1 or step % 100 == 0 or step == settings.num_steps:
            eta_seconds = (time.monotonic() - start) / step * (settings.num_steps - step)
            print(f"step {step}/{settings.num_steps}  loss {loss.item():.3f}  eta {eta_seconds:.0f} s", flush=True)


@torch.no_grad()
def sampled_accuracy(
    model: Qwen3ForCausalLM,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerFast,
    *,
    samples_per_prompt: int = 4,
) -> float:
    """Return the share of right answers among samples at temperature 1."""
    token_ids = torch.tensor([prompt.token_ids for prompt in prompts])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        sequences = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_RESPONSE_TOKENS,
            num_return_sequences=samples_per_prompt,
        )
    answers = tokenizer.batch_decode(sequences[:, token_ids.shape[1] :], skip_special_tokens=True)
    asked = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
    score = task_scorer(TASK)
    return sum(score(answer, prompt.row) for prompt, answer in zip(asked, answers, strict=True)) / len(asked)


def write_model(folder: Path, settings: WarmStartSettings) -> WarmStartRecord:
    """Make the model and write its files into the existing `folder`."""
    tokenizer = make_tokenizer()
    prompts = load_task(**DATA, encoder=PromptEncoder(tokenizer))
    print(f"{len(prompts)} training prompts, {len(prompts.held_out)} held out", flush=True)
    model = make_model(tokenizer, seed=settings.seed)
    warm_start(model, make_demonstrations(prompts, tokenizer, settings), settings)
    record = WarmStartRecord(
        settings=settings,
        num_parameters=model.num_parameters(),
        held_out_sampled_accuracy=sampled_accuracy(model, prompts.held_out, tokenizer),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / RECORD_FILE).write_text(record.model_dump_json(indent=2) + "\n")
    return record


def read_record(folder: Path) -> WarmStartRecord | None:
    """Return the record of a complete model folder, or None if `folder` is anything else."""
    if not all((folder / name).is_file() for name in FOLDER_FILES):
        return None
    try:
        return WarmStartRecord.model_validate_json((folder / RECORD_FILE).read_text())
    except ValidationError:
        return None


def make_tiny_model(output: Path, settings: WarmStartSettings, *, force: bool = False) -> WarmStartRecord:
    """Make the model folder `output`, or reuse it if it is complete and has the same settings.

    It is written beside `output` and renamed at the end, so `output` is complete whenever it exists.

    Raises:
        ConfigError: `output` is something else, or was made with other settings and `force` is not set.
    """
    existing = read_record(output)
    if existing is not None and not force:
        if existing.settings != settings:
            ours, theirs = settings.model_dump(), existing.settings.model_dump()
            differences = ", ".join(
                f"{key}={theirs[key]} instead of {ours[key]}" for key in ours if theirs[key] != ours[key]
            )
            raise ConfigError(f"{output} was made with {differences}: pass --force to replace it, or another --output")
        print(f"reusing {output}")
        return existing
    if output.exists() and not (output / RECORD_FILE).is_file():
        raise ConfigError(f"{output} exists and was not made by this tool: remove it, or pass another --output")
    if output.exists() and not force:
        raise ConfigError(f"{output} is incomplete or of another version: pass --force to replace it")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        folder = Path(temporary) / output.name
        folder.mkdir()  # of its own, because a temporary directory is readable by its owner alone
        record = write_model(folder, settings)
        if output.exists():
            shutil.rmtree(output)
        folder.rename(output)
    return record


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("models/tiny_qwen3"), help="folder to create (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, teacher and batches (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace an existing model folder")
    parser.add_argument(
        "--num-threads", type=int, default=1, help="threads of torch; more are slower here (%(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    transformers_logging.disable_progress_bar()
    start = time.monotonic()
    try:
        record = make_tiny_model(arguments.output, WarmStartSettings(seed=arguments.seed), force=arguments.force)
    except A3poError as error:
        sys.exit(f"error: {error}")
    print(
        f"{arguments.output}: {record.num_parameters} parameters, held-out sampled accuracy "
        f"{record.held_out_sampled_accuracy:.3f}, {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
