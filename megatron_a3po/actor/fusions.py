"""Which fused kernels this environment offers; what is found is used, and the start-up summary names it."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusions:
    """What was found, and in words what was not and why."""

    transformer_engine: tuple[int, int] | None
    """its version (major, minor); None if it is not installed"""
    optimizer: str
    """the Adam that Megatron takes: Transformer Engine's, else apex's, else torch's"""
    gradient_accumulation: bool
    """whether weight gradients can be added to the float32 buffer inside the matrix product"""

    def lines(self) -> Iterator[str]:
        if self.transformer_engine is None:
            yield "layers: unfused torch modules (Transformer Engine is not installed)"
        else:
            yield f"layers: Transformer Engine {'.'.join(map(str, self.transformer_engine))}, fused"
        yield f"optimizer: {self.optimizer}"
        why = "fused" if self.gradient_accumulation else "not fused (apex's fused_weight_gradient_mlp_cuda is missing)"
        yield f"gradient accumulation in float32: {why}"


def detect_fusions() -> Fusions:
    """What can be imported here. Nothing is imported."""
    transformer_engine = _version("transformer_engine")
    if transformer_engine is not None:
        optimizer = "FusedAdam of Transformer Engine"
    elif _exists("apex"):
        optimizer = "FusedAdam of apex"
    else:
        optimizer = "torch AdamW (neither Transformer Engine nor apex is installed)"
    return Fusions(
        transformer_engine=transformer_engine,
        optimizer=optimizer,
        # Megatron's output layer refuses the fusion without apex's extension, even beside Transformer Engine's own.
        gradient_accumulation=_exists("fused_weight_gradient_mlp_cuda"),
    )


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(module: str) -> tuple[int, int] | None:
    if not _exists(module):
        return None
    major, minor, *_ = metadata.version(module).split(".")
    return int(major), int(minor)
