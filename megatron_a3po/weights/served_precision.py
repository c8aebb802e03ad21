"""In which precision the servers hold the model, and so in which it has to be published."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_a3po.config.model_folder import UnreadableModel, read_model_config
from megatron_a3po.errors import PublishError
from megatron_a3po.hf.fp8_blocks import BLOCK
from megatron_a3po.hf.quantize import is_quantized
from megatron_a3po.hf.safetensors_format import TensorSpec

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that a server fuses into one, which has one precision."""


_UNQUANTISED = "unquant"

type Served = tuple[str, str, str | None]
"""What a server says about itself: its URL, the folder of its model, and the quantisation that it was started with
(None: as the folder says; "unquant": none, as its tensors tell where the folder is not seen here)."""


def served_quantization(servers: Sequence[Served]) -> dict[str, Any] | None:
    """The `quantization_config` that all servers follow; None for unquantised models.

    It stands in config.json of the folder that a server has read. Raises PublishError for a folder that cannot be read
    here, unless the server's tensors are unquantised, for servers that differ, and for other quantisation than FP8 in
    blocks of 128 x 128.
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
    """Which tensors are published in FP8, by a `quantization_config`; None: none.

    `modules_to_not_convert` counts as in SGLang: a name stands for the modules whose dotted path has it as a part, and
    a layer's experts are all converted or none.
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


def _is_part(module: str, names: set[str]) -> bool:
    return any(f".{name}." in f".{module}." for name in names)


def _of_server(url: str, model: str, quantization: str | None) -> dict[str, Any] | None:
    try:
        config = read_model_config(Path(model)).get("quantization_config")
    except UnreadableModel as error:
        if quantization == _UNQUANTISED:
            return None
        raise PublishError(
            f"{url}: in which precision it serves {model} is not known: the folder cannot be read here "
            f"({error.problem}), and the server does not show unquantised weights; make the folder visible here under "
            "the same path, or start the server on one that is"
        ) from None
    if config is None and quantization in (None, _UNQUANTISED):
        return None
    if config is None:
        raise PublishError(
            f"{url} quantises by itself (--quantization {quantization}), which published weights do not go "
            "through; start it on a folder with block-wise FP8 weights, or without quantisation"
        )
    is_blockwise = config.get("quant_method") == "fp8" and config.get("weight_block_size") == [BLOCK, BLOCK]
    if not is_blockwise or config.get("scale_fmt") not in (None, "float32"):
        raise PublishError(
            f"{url} serves a model with the quantization_config {config}, but only FP8 (quant_method fp8) in blocks "
            f"of {BLOCK} x {BLOCK} with float32 scales can be published"
        )
    return dict(config)
