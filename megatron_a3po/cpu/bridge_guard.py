"""Import megatron-bridge without Transformer Engine, whose names some of its modules need at import."""

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_a3po.cpu.spec_provider import PARALLELISM_OF_MODULES

# Import these before the bridge: they look for Transformer Engine at import, and must see that it is missing.
_CORE_MODULES = ("distributed", "dist_checkpointing", "fp8_utils", "models.gpt", "optimizer", "pipeline_parallel")

_TRANSFORMER_ENGINE = (
    "transformer_engine",
    "transformer_engine.common",
    "transformer_engine.common.recipe",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.optimizers",
)


def import_bridge() -> None:
    """Import megatron-bridge and tell it how the CPU modules' weights are sharded."""
    for name in _CORE_MODULES:
        importlib.import_module(f"megatron.core.{name}")
    extensions: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    extensions.FP8GlobalStateManager = _NoFp8  # the bridge logs a traceback for each place that misses it
    with _inert_transformer_engine():
        importlib.import_module("megatron.bridge")
        mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    for module_class, parallelism in PARALLELISM_OF_MODULES.items():
        mapping.AutoMapping.register_module_type(module_class.__name__, parallelism)


class _NoFp8:
    """The part of Transformer Engine's global FP8 state that the bridge reads. On a CPU, FP8 is never on."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


class _InertClass(type):
    """Classes to import and inherit from. Each attribute of one is another."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _InertClass(name, (), {})


class _InertModule(types.ModuleType):
    __version__ = "0.0.0"  # older than any feature that Megatron checks for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _InertClass(name, (), {"__module__": self.__name__})


@contextmanager
def _inert_transformer_engine() -> Iterator[None]:
    """Let `import transformer_engine` give a module of empty classes inside the block.

    Afterwards it is missing again, so that later imports and checks see that there is none.
    """
    for name in _TRANSFORMER_ENGINE:
        module = _InertModule(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in _TRANSFORMER_ENGINE:
            del sys.modules[name]
