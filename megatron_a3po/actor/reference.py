"""The frozen reference policy of a KL penalty: the starting weights, in host memory, lent to the same model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class ReferenceWeights:
    """A copy of this rank's parameters as they are now."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._kept = _to_host(self._parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the model computes with the reference; afterwards with its own weights, bit for bit."""
        own = _to_host(self._parameters)
        _copy(self._kept, self._parameters)
        try:
            yield
        finally:
            _copy(own, self._parameters)


def _to_host(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in parameters]


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        # Into the storage: Megatron's parameters are views of the buffers that the optimizer knows.
        target.data.copy_(source)
