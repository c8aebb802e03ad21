"""The mapping between the policy's Megatron parameters and Hugging Face tensors, by name and by value.

Names and arithmetic are megatron-bridge's. It is used as on a single rank, so no parallel layout is involved: a whole
Megatron parameter, however it was gathered or read, becomes Hugging Face tensors, and the other way round.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from transformers import AutoConfig

from megatron_a3po.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A whole parameter, or persistent buffer, of the Megatron model."""

    name: str
    """Megatron's name, with the number of the layer in the whole model and of the expert among all experts"""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype that the model is built with; a checkpoint may hold another"""
    task: Any
    """megatron-bridge's WeightConversionTask"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """The smallest piece that is converted on its own: parameters, and the Hugging Face tensors that they become.

    Mostly one parameter and one tensor. A parameter with queries, keys and values becomes three tensors. Where one
    Hugging Face tensor holds all experts of a layer, their parameters are one part.
    """

    parameters: tuple[Parameter, ...]
    hf_names: tuple[str, ...]

    @property
    def numel(self) -> int:
        return sum(torch.Size(parameter.shape).numel() for parameter in self.parameters)


class HfMapping:
    """All parts of a model in the order of its layers, with their conversion in both directions."""

    def __init__(self, parts: tuple[Part, ...], bridge: Any, model: Any, sharded: Mapping[str, Any]) -> None:
        self.parts = parts
        self._bridge = bridge
        self._model = model
        self._sharded = sharded

    def to_hf(self, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the Hugging Face tensors of a part by name, from its whole parameters by name; they may share memory.

        Raises CheckpointError when megatron-bridge returns other names.
        """
        found: dict[str, Tensor] = {}
        stacked: dict[str, dict[int, Tensor]] = {}
        for parameter in part.parameters:
            task = parameter.task
            converted = task.mapping.megatron_to_hf(tensors[parameter.name], task.megatron_module)
            if getattr(task.mapping, "is_grouped_export", False):
                config = self._model.config
                converted = self._bridge._accumulate_grouped_export(task, converted, config, stacked, {}) or {}
            else:
                converted = self._bridge.maybe_modify_converted_hf_weight(task, converted, {})
            found |= converted
        if set(found) != set(part.hf_names):
            raise CheckpointError(f"{part.parameters[0].name}: became {sorted(found)}, not {sorted(part.hf_names)}")
        return found

    def hf_shapes(self, part: Part) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a part's Hugging Face tensors, by name."""
        hollow = {
            parameter.name: torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            for parameter in part.parameters
        }
        return {name: tuple(tensor.shape) for name, tensor in self.to_hf(part, hollow).items()}

    def from_hf(self, part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole parameters of a part by name, from its Hugging Face tensors by name.

        Reads each name from `tensors` once. Raises CheckpointError for a tensor of the wrong shape.
        """
        loaded: dict[str, Any] = {}
        found: dict[str, Tensor] = {}
        for parameter in part.parameters:
            mapping = parameter.task.mapping
            key = str(mapping.hf_param)
            if key not in loaded:
                loaded[key] = self._bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, tensors)
            converted = mapping.hf_to_megatron(loaded[key], parameter.task.megatron_module)
            if tuple(converted.shape) != parameter.shape:
                raise CheckpointError(
                    f"{', '.join(part.hf_names)}: give {parameter.name} the shape {tuple(converted.shape)}, but "
                    f"config.json describes {parameter.shape}; config.json and weights are of two models"
                )
            found[parameter.name] = converted
        return found

    def sharded(self, parameter: Parameter, tensor: Tensor | None = None) -> list[ShardedTensor]:
        """Return the parameter as the torch_dist format stores it: its pieces, with their keys and places.

        tensor: the whole values; None allocates them, to be filled.
        """
        template = self._sharded[parameter.name]
        values = torch.empty(parameter.shape, dtype=parameter.dtype) if tensor is None else tensor
        entry = {"": _with_data(template, values)}
        apply_factories(entry)
        return [_with_all_axes(tensor) for tensor in nested_values(entry)]


def _with_data(template: Any, values: Tensor) -> Any:
    """Return a copy of a ShardedTensor, or of a factory of several, that has these values."""
    if isinstance(template, ShardedTensorFactory):
        copied = ShardedTensorFactory(**{name: getattr(template, name) for name in template.__dataclass_fields__})
        copied.data = values
        return copied
    copied = template.without_data()
    copied.data, copied.dtype = values, values.dtype
    return copied


def _with_all_axes(tensor: ShardedTensor) -> ShardedTensor:
    """Return the tensor with as many axes as the whole has. Otherwise torch expects other ranks to hold the rest."""
    shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    return replace(tensor, data=tensor.data.view(shape), local_shape=shape, prepend_axis_num=0)


def build_hf_mapping(model: Path) -> HfMapping:
    """Build the mapping for the model that `config.json` in the folder `model` describes. Reads no weights.

    Not collective. Megatron's process groups must exist, with tensor, pipeline and expert sizes of 1.
    """
    bridge = AutoBridge.from_hf_config(AutoConfig.from_pretrained(model))
    provider = bridge.to_megatron_provider(load_weights=False)
    settings = {
        # Layers for multi-token prediction do not belong to the policy.
        "mtp_num_layers": None,
        # Layouts pad the vocabulary; the mapping has the model's own rows.
        "should_pad_vocab": False,
        # Positions have no parameters, and some of their settings exist only in the trainer.
        "position_embedding_type": "none",
        "perform_initialization": False,
        "init_model_with_meta_device": True,  # otherwise Transformer Engine allocates on the GPU
        "gradient_accumulation_fusion": False,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "apply_rope_fusion": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "moe_shared_expert_overlap": False,
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    provider._pg_collection = groups
    with torch.device("meta"):
        chunk = provider.provide()
    _leave_meta_device(chunk)
    names = bridge._model_bridge  # a new one at each access
    tasks = names.build_conversion_tasks(bridge.hf_pretrained, [chunk])
    # Some of megatron-bridge's models read the configuration where a loaded model would have it.
    names.hf_pretrained = SimpleNamespace(config=bridge.hf_pretrained)
    sharded = chunk.sharded_state_dict(metadata={"singleton_local_shards": False, "dp_cp_group": groups.dp_cp})
    return HfMapping(_parts(tasks), names, chunk, sharded)


def _leave_meta_device(model: torch.nn.Module) -> None:
    """Give every parameter one element of memory: megatron-bridge moves what it converts to the parameter's device."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            hollow = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            module._parameters[name] = torch.nn.Parameter(hollow, requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)


def _parts(tasks: list[Any]) -> tuple[Part, ...]:
    by_names: dict[tuple[str, ...], list[Parameter]] = {}
    for task in tasks:
        named = task.mapping.hf_param
        names = (named,) if isinstance(named, str) else tuple(named.values())
        shape, dtype = tuple(task.param_weight.shape), task.param_weight.dtype
        parameter = Parameter(name=task.global_param_name, shape=shape, dtype=dtype, task=task)
        by_names.setdefault(names, []).append(parameter)
    parts = [Part(parameters=tuple(found), hf_names=names) for names, found in by_names.items()]
    return tuple(sorted(parts, key=lambda part: _order(part.hf_names[0])))


def _order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return the sorting key: the embedding, then layers by number, then everything else."""
    layer = re.search(r"\.layers\.\d+\.", name)
    place = 1 if layer else 0 if "embed" in name else 2
    return place, [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]
