"""Convert Megatron's weights, of a converted folder or a run's checkpoint, to a Hugging Face folder, file by file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron_a3po.config.model_folder import MEGATRON_WEIGHTS, has_megatron_weights, read_model_config
from megatron_a3po.conversion.parts import describe_model, split_parts
from megatron_a3po.conversion.processes import Processes
from megatron_a3po.conversion.torch_dist import TorchDistReader
from megatron_a3po.conversion.unfinished import claim_target
from megatron_a3po.errors import ConfigError
from megatron_a3po.hf.fp8_blocks import FP8, scale_shape
from megatron_a3po.hf.output import HfOutput
from megatron_a3po.hf.quantize import SCALE_SUFFIX, is_quantized, quantization_config, quantize_blockwise
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.hf.shards import MAX_SHARD_BYTES, ShardFile, shard_name
from megatron_a3po.preflight.families import architecture_name
from megatron_a3po.runtime.manifest import MANIFEST, check
from megatron_a3po.runtime.run_dir import CONFIG_FILE
from megatron_a3po.weights.hf_mapping import HfMapping, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronSource:
    """The folder of the weights, and the folder of all else about the model."""

    weights: Path
    model: Path


def find_source(source: Path, model: Path | None) -> MegatronSource:
    """Find the weights and the model in `source`.

    `model`: the Hugging Face folder with config.json and tokenizer; None: take what `source` has or names. Raises
    ConfigError if either is missing.
    """
    weights = source / MEGATRON_WEIGHTS if has_megatron_weights(source) else source
    if not (weights / MANIFEST).exists():
        raise ConfigError(
            f"{source}: no Megatron weights there ({MANIFEST} is missing); give a folder that "
            "tools/convert_hf_to_megatron.py made, or a checkpoint of a run (run_dir/checkpoints/step_...)"
        )
    if model is None and (source / "config.json").exists():
        model = source
    elif model is None and (source / CONFIG_FILE).exists():
        model = _model_of_run(source / CONFIG_FILE)
    if model is None or not (model / "config.json").exists():
        place = "there" if model is None else f"in {model} (a run's `model` counts from where it was started)"
        raise ConfigError(
            f"{source}: config.json and tokenizer of its model are not {place}; name the Hugging Face folder that the "
            "run started from (--model)"
        )
    return MegatronSource(weights=weights, model=model)


def _model_of_run(file: Path) -> Path | None:
    try:
        return Path(yaml.safe_load(file.read_text(encoding="utf-8"))["model"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return None


def convert_to_hf(source: MegatronSource, target: Path, processes: Processes, *, fp8: bool) -> None:
    """Write the Hugging Face folder `target`. Collective: each process writes its share of the files.

    Each process holds one part of the model at a time. `fp8`: write linear weights in FP8 with a scale per block.
    Raises CheckpointError for damaged weights and a disk that is too small, ConfigError for folders that cannot be used
    and models that the FP8 format cannot hold.
    """
    mapping = describe_model(source.model)
    if fp8:
        _refuse_stacked_experts(mapping, source.model)
    manifest = check(source.weights, processes.rank, processes.world_size)
    weights = MegatronWeights(mapping, TorchDistReader(source.weights), fp8=fp8)
    specs = {part: weights.specs(part) for part in mapping.parts}
    sizes = {part: sum(spec.nbytes for spec in found) for part, found in specs.items()}
    files = split_parts(mapping.parts, sizes, MAX_SHARD_BYTES)
    shards = tuple(
        ShardFile(
            file_name=shard_name(number, len(files)), tensors=tuple(spec for part in parts for spec in specs[part])
        )
        for number, parts in enumerate(files, 1)
    )
    kept = _unquantised_modules([spec for found in specs.values() for spec in found])
    settings = quantization_config(kept) if fp8 else None
    output = HfOutput(target=target, source=source.model, quantization_config=settings)
    origin = "".join(record.sha256 for record in manifest.files.values())
    processes.on_rank_zero(lambda: claim_target(target))
    done = processes.on_rank_zero(lambda: sorted(output.begin(shards, origin=origin)))
    mine = [number for number in processes.share(range(len(files))) if shards[number].file_name not in done]
    with processes.progress("converting", sum(shards[number].nbytes for number in mine)) as advance:
        for number in mine:
            with output.writer(shards[number]) as writer:
                for name, tensor in weights.tensors(files[number]):
                    writer.append(name, tensor)
                    advance(tensor.nbytes)
    processes.on_rank_zero(lambda: output.finish(shards))


def _refuse_stacked_experts(mapping: HfMapping, model: Path) -> None:
    """Raise ConfigError for experts in one tensor: servers would expect them in FP8, which the format cannot store."""
    shapes = {name: shape for part in mapping.parts for name, shape in mapping.hf_shapes(part).items()}
    stacked = [name for name, shape in shapes.items() if len(shape) > 2]
    if stacked:
        name = architecture_name(read_model_config(model))
        raise ConfigError(
            f"{model}: {name} cannot be written in FP8: it stores the experts of a layer as one tensor (such as "
            f"{stacked[0]}), for which the format has no scales; convert without --fp8"
        )


def _unquantised_modules(written: Sequence[TensorSpec]) -> list[str]:
    """Return the linear modules that are not in FP8, and the output layer also if it has no tensor of its own."""
    names = [spec.name for spec in written if len(spec.shape) == 2 and spec.dtype != FP8]
    linear = [name.removesuffix(".weight") for name in names if name.endswith(".weight") and "embed_tokens" not in name]
    return list(dict.fromkeys([*linear, "lm_head"]))


class MegatronWeights:
    """Makes Hugging Face's tensors from a checkpoint, part by part."""

    def __init__(self, mapping: HfMapping, reader: TorchDistReader, *, fp8: bool) -> None:
        self.mapping = mapping
        self._reader = reader
        self._fp8 = fp8

    def specs(self, part: Part) -> list[TensorSpec]:
        """Return what `tensors` will yield, without reading anything."""
        hollow = {
            parameter.name: torch.empty(parameter.shape, dtype=dtype, device="meta")
            for parameter, dtype in self._dtypes(part)
        }
        found = []
        for name, tensor in self.mapping.to_hf(part, hollow).items():
            shape = tuple(tensor.shape)
            if self._fp8 and is_quantized(name, tensor.ndim):
                scales = scale_shape(*shape)
                found.append(TensorSpec(name=name, dtype=FP8, shape=shape))
                found.append(TensorSpec(name=name + SCALE_SUFFIX, dtype=torch.float32, shape=scales))
            else:
                found.append(TensorSpec(name=name, dtype=tensor.dtype, shape=shape))
        return found

    def tensors(self, parts: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the parts."""
        for part in parts:
            for name, tensor in self.mapping.to_hf(part, self.read(part)).items():
                if self._fp8 and is_quantized(name, tensor.ndim):
                    values, scales = quantize_blockwise(tensor, name)
                    yield name, values
                    yield name + SCALE_SUFFIX, scales
                else:
                    yield name, tensor

    def read(self, part: Part) -> dict[str, Tensor]:
        """Return the whole parameters of a part, by Megatron's names."""
        values = {parameter.name: torch.empty(parameter.shape, dtype=dtype) for parameter, dtype in self._dtypes(part)}
        self._reader.read(
            [
                piece
                for parameter in part.parameters
                for piece in self.mapping.sharded(parameter, values[parameter.name])
            ]
        )
        return values

    def _dtypes(self, part: Part) -> Iterator[tuple[Any, torch.dtype]]:
        for parameter in part.parameters:
            yield parameter, self._reader.dtype(self.mapping.sharded(parameter)[0].key)
