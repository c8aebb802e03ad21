"""Checks across keys, and of the configuration against the model folder and the ranks at hand. No torch."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_a3po.config.schema import RunConfig

SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM",)


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong with one key, and what to do."""

    key: str
    value: Any
    problem: str
    remedy: str
    also: tuple[str, ...] = ()
    """The other keys whose values make this one wrong."""

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {self.value!r}"
        return f"{self.key}{shown}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")

    def follows_from(self, wrong: set[str]) -> bool:
        """Whether a key of this mistake, or the section of one, is among those that were wrong already."""
        return any(f"{key}.".startswith(f"{other}.") for key in (self.key, *self.also) for other in wrong)


def find_mistakes(config: RunConfig, world_size: int | None) -> list[Mistake]:
    """Everything that makes a well-formed configuration impossible to run on `world_size` ranks (None: unknown)."""
    return [*_device(config), *_layout(config, world_size), *_model(config)]


def _device(config: RunConfig) -> Iterator[Mistake]:
    if config.device == "cpu" and config.precision != "fp32":
        yield Mistake(
            "precision", config.precision, "not offered with `device: cpu`", "set `precision: fp32`", ("device",)
        )
    if config.device == "cuda" and config.rollout.servers == "local":
        yield Mistake(
            "rollout.servers",
            "local",
            "a run starts its own server only with `device: cpu`",
            "start SGLang on other GPUs and give its address: `rollout.servers: [http://host:port]`",
            ("device",),
        )
    if isinstance(config.rollout.servers, list):
        if not config.rollout.servers:
            yield Mistake("rollout.servers", [], "no server", "use `local` or at least one http://host:port")
        for url in config.rollout.servers:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                yield Mistake("rollout.servers", url, "not a URL", "write http://host:port")
        plain = [url.rstrip("/").lower() for url in config.rollout.servers]
        for url in sorted({url for url in plain if plain.count(url) > 1}):
            yield Mistake("rollout.servers", url, "stands there twice", "name every server once")
    buffer, longest = config.algorithm.overlong_buffer_tokens, config.rollout.max_new_tokens
    if buffer > longest:
        yield Mistake(
            "algorithm.overlong_buffer_tokens",
            buffer,
            f"longer than a response may be, rollout.max_new_tokens = {longest}",
            f"use at most {longest}, or 0 for no penalty",
            ("rollout.max_new_tokens",),
        )
    if config.publish.max_logprob_difference is not None and config.publish.verify_prompts == 0:
        yield Mistake(
            "publish.max_logprob_difference",
            config.publish.max_logprob_difference,
            "nothing is compared while `publish.verify_prompts` is 0",
            "set `publish.verify_prompts` to a small number such as 4, or remove this key",
            ("publish.verify_prompts",),
        )


def _layout(config: RunConfig, world_size: int | None) -> Iterator[Mistake]:
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    if config.actor.microbatch_tokens % tensor:
        yield Mistake(
            "actor.microbatch_tokens",
            config.actor.microbatch_tokens,
            f"not a multiple of parallel.tensor = {tensor}, which sequence parallelism needs",
            f"use {-(-config.actor.microbatch_tokens // tensor) * tensor}",
            ("parallel.tensor",),
        )
    if world_size is None:
        return
    if world_size % (tensor * pipeline):
        yield Mistake(
            "parallel",
            f"tensor {tensor} x pipeline {pipeline}",
            f"{tensor * pipeline} ranks do not divide the {world_size} ranks that torchrun started",
            f"start torchrun with `--nproc-per-node {tensor * pipeline}` or change the layout",
            ("parallel.tensor", "parallel.pipeline"),
        )
        return
    data = world_size // (tensor * pipeline)
    trajectories = config.rollout.prompts_per_step * config.rollout.group_size
    if trajectories < data:
        yield Mistake(
            "rollout.prompts_per_step",
            config.rollout.prompts_per_step,
            f"{trajectories} trajectories per batch cannot feed {data} data-parallel ranks",
            "raise it, or start fewer ranks",
            ("rollout.group_size", "parallel.tensor", "parallel.pipeline"),
        )


def _model(config: RunConfig) -> Iterator[Mistake]:
    folder = config.model
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "give a Hugging Face model folder; `python tools/make_tiny_model.py` makes a tiny one"
        yield Mistake("model", str(folder), "no config.json there", remedy)
        return
    except (OSError, ValueError) as error:
        yield Mistake("model", str(folder), f"its config.json cannot be read ({error})", "copy the folder again")
        return
    if not isinstance(described, dict):
        yield Mistake("model", str(folder), "its config.json does not describe a model", "copy the folder again")
        return
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / file).exists():
            yield Mistake("model", str(folder), f"no {file} there", "copy the tokenizer's files into the folder")
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        yield Mistake("model", str(folder), "no *.safetensors there", "copy the weights into the folder")
    for shard in shards:
        if not _is_whole(shard):
            yield Mistake("model", str(shard), "the file is cut off or damaged", "copy it again")
    architectures = described.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if architecture not in SUPPORTED_ARCHITECTURES:
        yield Mistake("model", architecture, "architecture not supported", f"use {', '.join(SUPPORTED_ARCHITECTURES)}")
        return
    numbers = (*(field for _, field, _ in _DIVIDED), "vocab_size", "max_position_embeddings")
    missing = [field for field in numbers if type(described.get(field)) is not int or described[field] < 1]
    if missing:
        problem = f"its config.json has no positive number {', '.join(missing)}"
        yield Mistake("model", str(folder), problem, "copy the folder again")
        return
    yield from _divisibility(config, described)


def _is_whole(shard: Path) -> bool:
    """Whether a safetensors file is as long as its header says: 8 bytes of length, JSON, data."""
    try:
        with shard.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > shard.stat().st_size:
                return False
            header = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return 8 + header_bytes + max(ends, default=0) == shard.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


_DIVIDED = (
    ("tensor", "num_attention_heads", "attention heads"),
    ("tensor", "num_key_value_heads", "key-value heads"),
    ("tensor", "intermediate_size", "hidden units of the MLP"),
    ("pipeline", "num_hidden_layers", "layers"),
)
"""(key of `parallel`, field of the model's config.json, what it counts)"""


def _divisibility(config: RunConfig, described: dict[str, Any]) -> Iterator[Mistake]:
    for axis, field, what in _DIVIDED:
        ranks, count = getattr(config.parallel, axis), described[field]
        if count % ranks:
            fitting = [divisor for divisor in range(1, min(count, 64) + 1) if count % divisor == 0]
            problem = f"does not divide the model's {count} {what}"
            yield Mistake(f"parallel.{axis}", ranks, problem, f"use one of {fitting}", ("model",))
    longest = described["max_position_embeddings"]
    if config.rollout.max_new_tokens >= longest:
        yield Mistake(
            "rollout.max_new_tokens",
            config.rollout.max_new_tokens,
            f"the model's context is {longest} tokens, prompt included",
            f"use less than {longest}",
            ("model",),
        )
