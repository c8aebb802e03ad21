"""Checks of the model folder, and of the configuration against the model."""

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.config.model_folder import MEGATRON_WEIGHTS, UnreadableModel, has_megatron_weights, read_model_config
from megatron_a3po.config.schema import RunConfig
from megatron_a3po.preflight.check_layout import architecture_mistakes
from megatron_a3po.preflight.families import SUPPORTED_ARCHITECTURES, OddFields, architecture_name, read_architecture
from megatron_a3po.preflight.variants import unbuilt_variants


def model_mistakes(config: RunConfig) -> Iterator[Mistake]:
    """Yield what is wrong with the model folder or does not fit the model in it."""
    folder = config.model
    try:
        described = read_model_config(folder)
    except UnreadableModel as error:
        yield Mistake("model", str(folder), error.problem, error.remedy)
        return
    yield from _files(folder)
    name = architecture_name(described)
    if name not in SUPPORTED_ARCHITECTURES:
        yield Mistake(
            "model", name, "the architecture is not supported", f"use one of {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
        return
    for field, value, built in unbuilt_variants(described):
        problem = f"its config.json has {field} = {value!r}, but {name} would be built with {built} anyway"
        yield Mistake("model", str(folder), problem, "use another model")
    try:
        architecture = read_architecture(described)
    except OddFields as error:
        problem = f"its config.json has no valid {', '.join(error.fields)}"
        yield Mistake("model", str(folder), problem, "copy the folder again")
        return
    yield from architecture_mistakes(config, architecture)
    longest = architecture.max_positions
    for section, tokens in (
        ("rollout", config.rollout.max_new_tokens),
        ("evaluation", config.evaluation.max_new_tokens),
    ):
        if tokens is not None and tokens >= longest:
            yield Mistake(
                f"{section}.max_new_tokens",
                tokens,
                f"the context of the model is {longest} tokens, including the prompt",
                f"use less than {longest}",
                ("model",),
            )


def _files(folder: Path) -> Iterator[Mistake]:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / file).exists():
            yield Mistake("model", str(folder), f"the folder has no {file}", "copy the files of the tokenizer into it")
    if has_megatron_weights(folder):
        if not (folder / MEGATRON_WEIGHTS / "manifest.json").exists():
            problem = f"the folder has no {MEGATRON_WEIGHTS}/manifest.json"
            yield Mistake(
                "model", str(folder), problem, "convert the model again with `tools/convert_hf_to_megatron.py`"
            )
        return
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        yield Mistake("model", str(folder), "the folder has no *.safetensors", "copy the weights into it")
    for shard in shards:
        if not _is_whole(shard):
            yield Mistake("model", str(shard), "the file is truncated or damaged", "copy it again")


def _is_whole(shard: Path) -> bool:
    """Return whether a safetensors file (8 bytes of length, JSON, data) is as long as its header says."""
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
