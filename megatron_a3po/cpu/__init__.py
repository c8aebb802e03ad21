"""Run the production path without a GPU. Only `device: cpu` imports this package.

Three things differ from a GPU run: gloo runs the collectives, modules of ours replace Transformer Engine's with the
same parameter names and checkpoint keys (see `spec_provider`), and the device behind `torch.cuda` is the CPU (see
`facade`). Parallel layouts, schedules, the distributed optimizer, checkpoints and the bridge are the real ones.
"""

import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_a3po.errors import ConfigError

_installed = False


def install() -> None:
    """Prepare this process for Megatron-Core and megatron-bridge on a CPU. A second call does nothing.

    Call it before anything imports megatron: Megatron decides at its import whether Transformer Engine exists, and
    binds the result into many modules.

    Raises:
        ConfigError: a GPU is visible or Transformer Engine is installed, which the CPU modules must not be mixed with.
        RuntimeError: megatron was imported first.
    """
    global _installed
    if _installed:
        return
    import torch

    if torch.cuda.is_available():
        raise ConfigError(
            f"device: cpu, but {torch.cuda.device_count()} GPU(s) are visible; "
            'set CUDA_VISIBLE_DEVICES="" to hide them, or use device: cuda'
        )
    if importlib.util.find_spec("transformer_engine") is not None:
        raise ConfigError(
            "device: cpu, but transformer_engine is installed in this environment; "
            "use the CPU environment (requirements/cpu.lock), or device: cuda"
        )
    early = sorted(name for name in sys.modules if name.startswith(("megatron.core", "megatron.bridge")))
    if early:
        raise RuntimeError(f"megatron_a3po.cpu.install() must run before megatron, but {early[0]} is already imported")

    from megatron_a3po.cpu import facade

    facade.install()
    with _quiet_imports(), facade.no_compilation():
        # Keep this order: Megatron-Core must see that Transformer Engine is missing, megatron-bridge must not.
        from megatron_a3po.cpu import bridge_guard, spec_provider

        spec_provider.install()
        bridge_guard.import_bridge()
    _installed = True


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Hide warnings about missing GPU libraries at import, and leave the root logger as it was.

    Importing megatron-bridge sets the root logger to INFO and gives it a handler on stdout.
    """
    root = logging.getLogger()
    level, handlers, disabled_level = root.level, list(root.handlers), root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled_level)
        root.setLevel(level)
        root.handlers[:] = handlers
