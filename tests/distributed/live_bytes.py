"""How many bytes of tensors live at most."""

import weakref
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations inside of the block make, until they are freed; `peak` is the most."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self._known: set[int] = set()
        self.peak = 0

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {self._key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage(), before)
        return result

    def _key(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _count(self, storage: Any, before: set[int]) -> None:
        key = storage._cdata
        if key in before or key in self._live:
            return
        self._live[key] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, key, None)
        self.peak = max(self.peak, sum(self._live.values()))
