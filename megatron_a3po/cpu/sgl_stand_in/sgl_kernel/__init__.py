"""Stand-in for the CUDA package `sglang-kernel`, which cannot be imported without libcuda.so.1.

SGLang imports names from it wherever it runs. On a CPU without AMX it then computes with plain torch and calls none
of them; a call is an error that names the function.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing_kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but this CPU server has no GPU kernels")

    missing_kernel.__name__ = name
    return missing_kernel
