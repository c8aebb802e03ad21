"""The precision in which the servers hold the model, and so in which it has to be published."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_a3po.config.model_folder import UnreadableModel, read_model_config
from megatron_a3po.errors import PublishError
from megatron_a3po.hf.fp8_blocks import BLOCK, FP8, scale_shape
from megatron_a3po.hf.quantize import SCALE_SUFFIX, is_quantized
from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.weights.plan import PartSpec

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that a server fuses into one module, which has one precision"""
_UNQUANTISED = "unquant"

type ServedModel = tuple[str, str, str | None]
"""What a server says about itself: its URL, its model's folder, and the quantisation that it was started with. None
stands for the quantisation of the folder; "unquant" means that its tensors show none where the folder is not visible
here."""


def served_quantization(servers: Sequence[ServedModel]) -> dict[str, Any] | None:
    """Return the `quantization_config` of config.json that all servers follow; None for unquantised models.

    Raises PublishError if a server's model folder cannot be read here, unless the server's tensors are unquantised; if
    servers differ; and for quantisation other than FP8 in blocks of 128 x 128.
    """
    found = {url: _of_server(url, model, quantization) for url, model, quantization in servers}
    first_url = servers[0][0]
    for url, config in found.items():
        if config != found[first_url]:
            raise PublishError(
                f"{url} and {first_url} serve the model in different precisions ({config} and {found[first_url]}); "
                "start all servers on the same model folder"
            )
    return found[first_url]


def fp8_rule(config: Mapping[str, Any] | None) -> Callable[[TensorSpec], bool]:
    """Return the test for tensors that are published in FP8 under this `quantization_config`; None: no tensor is.

    `modules_to_not_convert` is read as SGLang reads it: a name stands for all modules whose dotted path contains it,
    and the experts of a layer are all in FP8 or none is. The test raises PublishError for modules that a server fuses
    and that would have two precisions.
    """
    if config is None:
        return lambda _: False
    entries = config.get("modules_to_not_convert") or config.get("ignored_layers") or []
    kept = {
        variant
        for entry in entries
        for variant in (entry.strip("."), "model." + entry.strip(".").removeprefix("model."))
    }

    def is_fp8(spec: TensorSpec) -> bool:
        if not is_quantized(spec.name, len(spec.shape)):
            return False
        module = spec.name.removesuffix(".weight")
        layer, experts, _ = module.partition(".mlp.experts.")
        if experts and any(f"{layer}.mlp.experts" in name for name in kept):
            return False
        alone = _is_part(module, kept)
        parent, _, name = module.rpartition(".")
        for group in _FUSED if not experts else ():
            if name in group and any(_is_part(f"{parent}.{other}", kept) != alone for other in group):
                raise PublishError(
                    f"modules_to_not_convert names some but not all of {', '.join(group)} in {parent}, which the "
                    "server fuses into one; correct the quantization_config of the served model"
                )
        return not alone

    return is_fp8


def in_served_precision(part: PartSpec, is_fp8: Callable[[TensorSpec], bool]) -> PartSpec:
    """Return the part with the tensors that servers receive: FP8 values and their scales where `is_fp8` says so."""
    tensors: list[TensorSpec] = []
    for spec in part.tensors:
        if is_fp8(spec):
            scales = TensorSpec(name=spec.name + SCALE_SUFFIX, dtype=torch.float32, shape=scale_shape(*spec.shape))
            tensors += [replace(spec, dtype=FP8), scales]
        else:
            tensors.append(spec)
    return replace(part, tensors=tuple(tensors))


def _is_part(module: str, names: set[str]) -> bool:
    return any(f".{name}." in f".{module}." for name in names)


def _of_server(url: str, model: str, quantization: str | None) -> dict[str, Any] | None:
    try:
        config = read_model_config(Path(model)).get("quantization_config")
    except UnreadableModel as error:
        if quantization == _UNQUANTISED:
            return None
        raise PublishError(
            f"{url}: the precision of its model {model} is unknown: the folder cannot be read here ({error.problem}), "
            "and the server does not show unquantised weights; make the folder visible here under the same path, or "
            "start the server on one that is"
        ) from None
    if config is None and quantization in (None, _UNQUANTISED):
        return None
    if config is None:
        raise PublishError(
            f"{url} quantises its weights itself (--quantization {quantization}), and published weights would bypass "
            "that; start it on a folder with block-wise FP8 weights, or without quantisation"
        )
    is_blockwise = config.get("quant_method") == "fp8" and config.get("weight_block_size") == [BLOCK, BLOCK]
    if not is_blockwise or config.get("scale_fmt") not in (None, "float32"):
        raise PublishError(
            f"{url} serves a model with the quantization_config {config}, but only FP8 (quant_method fp8) in blocks "
            f"of {BLOCK} x {BLOCK} with float32 scales can be published"
        )
    return dict(config)
