"""Measure how much staleness each objective tolerates, with the model and task of the quickstart.

    python tools/make_tiny_model.py
    python tools/study_staleness.py [--staleness 1 2 4 8] [--objectives a3po ppo ...] [--seeds 0 1 2] [--processes 2]

Staleness is simulated in plain PyTorch and Hugging Face, with one thread per run and no server: batch k is sampled by
the weights of version max(0, k - staleness), so that the staleness of every token is exact and a run depends only on
its settings. The configuration (configs/tiny_cpu.yaml), the loss (algorithm/objective.py), log-probs, advantages,
rewards and prompts are those of the real trainer. The study isolates the objective: it does not measure the speed of
the system, the staleness of real runs, or versions that change inside a response. `make quickstart` measures the
system.

Writes runs.jsonl (a line per run), results.md (a table) and accuracy.svg into --output. A run that has a line there is
not repeated, so the command can be interrupted and repeated; remove runs.jsonl after changing the objective.
"""

import argparse
import copy
import hashlib
import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from make_tiny_model import MAX_RESPONSE_TOKENS, TASK
from study_report import (
    OBJECTIVES,
    RUNS_FILE,
    SYNC,
    RunRecord,
    RunSettings,
    append_run,
    read_runs,
    spreads,
    write_report,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from megatron_a3po.algorithm.advantage import compute_advantages
from megatron_a3po.algorithm.diagnostics import as_numbers
from megatron_a3po.algorithm.objective import Objective
from megatron_a3po.config import RunConfig
from megatron_a3po.errors import A3poError
from megatron_a3po.parallel.vocab_parallel import logprobs_and_entropy
from megatron_a3po.preflight.load import load_config
from megatron_a3po.prompts.load import load_prompts
from megatron_a3po.prompts.prompts import Prompt, PromptSet
from megatron_a3po.rewards.scorers import task_scorer
from megatron_a3po.types import Microbatch

CONFIG_FILE = Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml"
EVALUATE_EVERY_STEPS = 5
NUM_EVALUATION_PROMPTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Workbench:
    """What all runs share; nothing of it changes."""

    model: Any
    tokenizer: Any
    prompts: PromptSet
    weights: str
    """Digest of the model's weights"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    token_ids: Tensor
    """[responses, prompt + MAX_RESPONSE_TOKENS] int64; padding after the end of the sequence"""
    logprobs: Tensor
    """[responses, MAX_RESPONSE_TOKENS] float32, of the policy that sampled"""
    mask: Tensor
    """[responses, MAX_RESPONSE_TOKENS] bool: true up to the end of the sequence, that token included"""


def run_config(folder: Path, settings: RunSettings) -> RunConfig:
    """Return the quickstart's configuration with other settings. Raises ConfigError without a model in `folder`."""
    return load_config(CONFIG_FILE, [f"model={folder}", *settings.overrides()], environment={})


@cache
def open_workbench(folder: Path) -> Workbench:
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Workbench(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        tokenizer=tokenizer,
        prompts=load_prompts(load_config(CONFIG_FILE, [f"model={folder}"], environment={}), tokenizer, folder),
        weights=digest(folder),
    )


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


@torch.no_grad()
def sample(bench: Workbench, model: Any, prompts: Sequence[Prompt], generator: torch.Generator) -> Samples:
    """Sample one response to each prompt at temperature 1; all prompts have the same length."""
    tokens = [torch.tensor([prompt.token_ids for prompt in prompts])]
    logprobs, mask = [], []
    alive, cache_so_far = torch.ones(len(prompts), dtype=torch.bool), None
    for _ in range(MAX_RESPONSE_TOKENS):
        output = model(tokens[-1], past_key_values=cache_so_far, use_cache=True, logits_to_keep=1)
        cache_so_far = output.past_key_values
        log_p = output.logits[:, -1].log_softmax(-1)
        drawn = torch.multinomial(log_p.exp(), 1, generator=generator)
        logprobs.append(log_p.gather(1, drawn))
        mask.append(alive)
        tokens.append(drawn.where(alive[:, None], bench.tokenizer.pad_token_id))
        alive = alive & (drawn[:, 0] != bench.tokenizer.eos_token_id)
    return Samples(token_ids=torch.cat(tokens, 1), logprobs=torch.cat(logprobs, 1), mask=torch.stack(mask, 1))


def score(bench: Workbench, prompts: Sequence[Prompt], samples: Samples) -> Tensor:
    """Return the rewards, [responses] float32."""
    responses = samples.token_ids[:, -MAX_RESPONSE_TOKENS:]
    texts = bench.tokenizer.batch_decode(responses, skip_special_tokens=True)
    score_response = task_scorer(TASK)
    return torch.tensor([score_response(text, prompt.row) for prompt, text in zip(prompts, texts, strict=True)])


def held_out_accuracy(bench: Workbench, model: Any) -> float:
    """Return the held-out accuracy, sampled with the same random numbers every time to make values comparable."""
    prompts = bench.prompts.held_out[:NUM_EVALUATION_PROMPTS]
    samples = sample(bench, model, prompts, torch.Generator().manual_seed(123))
    return float(score(bench, prompts, samples).mean())


def make_batch(samples: Samples, advantages: Tensor, weight_version: int) -> Microbatch:
    """Return the batch of the actor: the MAX_RESPONSE_TOKENS positions of each sequence that predict a response."""
    count, length = samples.mask.shape
    first = samples.token_ids.shape[1] - length - 1
    mask = samples.mask.flatten()
    return Microbatch(
        token_ids=samples.token_ids[:, first:-1].flatten(),
        labels=samples.token_ids[:, first + 1 :].flatten(),
        position_ids=torch.arange(first, first + length).repeat(count),
        loss_mask=mask,
        behaviour_logprobs=samples.logprobs.flatten(),
        weight_versions=torch.where(mask, weight_version, -1),
        advantages=torch.where(mask, advantages.repeat_interleave(length), 0.0),
        sequence_ids=torch.arange(count).repeat_interleave(length),
        cu_seqlens=torch.arange(0, (count + 1) * length, length, dtype=torch.int32),
        max_seqlen=length,
    )


def response_logprobs(model: Any, samples: Samples) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of response positions, [responses * MAX_RESPONSE_TOKENS], with graph."""
    # No attention mask: padding stands behind everything that counts, and attention only looks back.
    logits = model(samples.token_ids[:, :-1], use_cache=False, logits_to_keep=MAX_RESPONSE_TOKENS).logits
    labels = samples.token_ids[:, -MAX_RESPONSE_TOKENS:]
    return logprobs_and_entropy(logits.flatten(0, 1), labels.flatten(), None)


def backward(objective: Objective, model: Any, samples: Samples, batch: Microbatch, version: int) -> dict[str, float]:
    """Add the gradients of the loss at the weights of this version, and return the metrics of the objective."""
    if objective.needs_recomputed_logprobs:
        with torch.no_grad():
            batch = replace(batch, recomputed_logprobs=response_logprobs(model, samples)[0])
    logprobs, entropy = response_logprobs(model, samples)
    loss_sum, totals = objective(logprobs, entropy, batch, version)
    (loss_sum / batch.loss_mask.sum()).backward()
    return objective.metrics(as_numbers(totals))


def train(bench: Workbench, config: RunConfig) -> tuple[dict[int, float], list[dict[str, float]]]:
    """Train; return held-out accuracy by training step, and the metrics of every step."""
    model, sampler = copy.deepcopy(bench.model), copy.deepcopy(bench.model)
    options, group_size = config.optimizer, config.rollout.group_size
    betas, decay = (options.adam_beta1, options.adam_beta2), options.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, betas, options.adam_eps, decay)
    objective = Objective(**config.objective_options())
    generator = torch.Generator().manual_seed(config.seed)
    group_ids = torch.arange(config.rollout.prompts_per_step).repeat_interleave(group_size)
    versions = deque([copy.deepcopy(model.state_dict())], maxlen=config.max_staleness + 1)
    accuracy, metrics = {0: held_out_accuracy(bench, model)}, []
    for version in range(config.num_steps):
        sampler.load_state_dict(versions[0])
        # Seeds take stretches of one stream of prompts that do not overlap.
        first = (config.seed * config.num_steps + version) * config.rollout.prompts_per_step
        asked = [bench.prompts.training_prompt(first + group) for group in range(config.rollout.prompts_per_step)]
        prompts = [prompt for prompt in asked for _ in range(group_size)]
        samples = sample(bench, sampler, prompts, generator)
        advantages = compute_advantages(score(bench, prompts, samples), group_ids, config.algorithm.advantage)
        batch = make_batch(samples, advantages.values, weight_version=max(0, version - config.max_staleness))
        optimizer.zero_grad()
        measured = backward(objective, model, samples, batch, version)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad_norm)
        optimizer.step()
        versions.append(copy.deepcopy(model.state_dict()))
        metrics.append(measured | {"gradient_norm": float(norm)})
        step = version + 1
        if step % EVALUATE_EVERY_STEPS == 0 or step == config.num_steps:
            accuracy[step] = held_out_accuracy(bench, model)
    return accuracy, metrics


def run(folder: Path, settings: RunSettings) -> RunRecord:
    """Run one setting on one thread."""
    torch.set_num_threads(1)
    bench = open_workbench(folder)
    start = time.process_time()
    accuracy, metrics = train(bench, run_config(folder, settings))
    return RunRecord(
        settings=settings,
        weights=bench.weights,
        cpu_seconds=time.process_time() - start,
        accuracy=accuracy,
        metrics=spreads(metrics),
    )


def study(folder: Path, grid: Sequence[RunSettings], output: Path, processes: int) -> None:
    """Run what `output` does not hold yet, and report on all runs in it that started from the same weights.

    Raises ConfigError for a missing model or a foreign `output`. An interruption ends the workers at once.
    """
    for settings in grid:
        run_config(folder, settings)
    output.mkdir(parents=True, exist_ok=True)
    weights, file = digest(folder), output / RUNS_FILE
    found = [record for record in read_runs(file) if record.weights == weights]
    finished = {record.settings for record in found}
    missing = [settings for settings in grid if settings not in finished]
    print(f"{len(missing)} of {len(grid)} runs to do, {processes} at a time", flush=True)
    start = time.monotonic()
    executor = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        # Ctrl-C reaches the whole process group: the workers inherit that it is ignored, and end with this process.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        futures = [executor.submit(run, folder, settings) for settings in missing]
        signal.signal(signal.SIGINT, handler)
        for number, future in enumerate(as_completed(futures), 1):
            record = future.result()
            append_run(file, record)
            found.append(record)
            eta = (time.monotonic() - start) / number * (len(missing) - number)
            print(f"run {number}/{len(missing)}  {record}  eta {eta / 60:.1f} min", flush=True)
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)
    num_steps = {settings.num_steps for settings in grid}
    write_report(output, [record for record in found if record.settings.num_steps in num_steps])


def make_grid(arguments: argparse.Namespace) -> list[RunSettings]:
    """Return all settings with seeds in the outermost loop, so that an interrupted study has complete seeds."""
    return [
        RunSettings(
            objective=objective, staleness=staleness, learning_rate=rate, seed=seed, num_steps=arguments.num_steps
        )
        for seed in arguments.seeds
        for rate in arguments.learning_rates
        for objective in arguments.objectives
        for staleness in ([0] if objective == SYNC else arguments.staleness)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny_qwen3"), help="starting weights (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("docs/staleness"), help="folder (%(default)s)")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES), metavar="NAME")
    parser.add_argument("--staleness", nargs="+", type=int, default=[1, 2, 4, 8], metavar="VERSIONS")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[2e-4, 5e-4], metavar="RATE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--num-steps", type=int, default=60, help="steps of each run (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time, one thread each (%(default)s)")
    arguments = parser.parse_args()
    if arguments.processes < 1:
        parser.error("--processes must be at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        study(arguments.model, make_grid(arguments), arguments.output, arguments.processes)
    except A3poError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: {arguments.output / RUNS_FILE} keeps what is done; the same command goes on", flush=True)
        return 130
    print(f"written: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
