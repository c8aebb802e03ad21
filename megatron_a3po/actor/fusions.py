"""Find the fused kernels of this environment. They are used, and the start-up summary names them."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusions:
    """The kernels that were found."""

    transformer_engine: tuple[int, int] | None
    """(major, minor) of its version; None if it is not installed"""
    optimizer: str
    """the Adam that Megatron takes: Transformer Engine's, else apex's, else torch's"""
    gradient_accumulation: bool
    """whether weight gradients can be added to the float32 buffer inside the matrix product"""

    def lines(self) -> Iterator[str]:
        """Yield what is fused and what is not, with the reason, for people."""
        if self.transformer_engine is None:
            yield "layers: unfused torch modules (Transformer Engine is not installed)"
        else:
            yield f"layers: Transformer Engine {'.'.join(map(str, self.transformer_engine))}, fused"
        yield f"optimizer: {self.optimizer}"
        why = "fused" if self.gradient_accumulation else "not fused (apex's fused_weight_gradient_mlp_cuda is missing)"
        yield f"gradient accumulation in float32: {why}"


def detect_fusions() -> Fusions:
    """Find out what can be imported, without importing it."""
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
        # Megatron's output layer needs apex's extension, even if Transformer Engine has a fusion of its own.
        gradient_accumulation=_exists("fused_weight_gradient_mlp_cuda"),
    )


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(module: str) -> tuple[int, int] | None:
    if not _exists(module):
        return None
    major, minor, *_ = metadata.version(module).split(".")
    return int(major), int(minor)
