"""Make `torch.cuda` one device that is the CPU, as far as Megatron-Core 0.19.2 uses it outside of GPU-only features.

`torch.cuda.is_available()` stays False. Code that checks it takes its CPU branch; other code uses this facade.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")

_TENSOR_FACTORIES = (
    *("arange", "eye", "linspace", "randperm", "tril_indices"),
    *("as_tensor", "tensor"),
    *("empty", "full", "ones", "rand", "randint", "randn", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
    "empty_strided",
)


def install() -> None:
    """Replace the parts of torch that would use a GPU. Call it once, before megatron is imported."""
    _install_devices_and_streams()
    _install_memory_statistics()
    _install_random_state()
    _install_tensor_moves()
    _install_tensor_factories()
    _install_tensor_types()
    _install_all_to_all()


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """Make `torch.compile` leave functions as they are inside the block.

    Megatron decorates its fusions with it at import. Each rank would spend minutes on C++ compilation, and a second on
    importing the compiler, for kernels that gain nothing on a CPU.
    """

    def unchanged(model: Any = None, **options: Any) -> Any:
        return (lambda function: function) if model is None else model

    module: Any = torch
    original, module.compile = torch.compile, unchanged
    try:
        yield
    finally:
        module.compile = original


class Stream:
    """A CUDA stream on a device that runs everything immediately and in order, so there is nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class Event:
    """A CUDA event that has already happened. It keeps the time for `elapsed_time`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to `end`, the unit of torch."""
        return (end._seconds - self._seconds) * 1e3


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _install_devices_and_streams() -> None:
    cuda: Any = torch.cuda
    only_stream = Stream()
    cuda.current_device = _returning(CPU)
    cuda.device_count = _returning(1)
    cuda.set_device = _returning(None)
    cuda.synchronize = _returning(None)
    cuda.current_stream = _returning(only_stream)
    cuda.default_stream = _returning(only_stream)
    cuda.stream = lambda stream=None: contextlib.nullcontext(stream)
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.is_current_stream_capturing = _returning(False)


def _install_memory_statistics() -> None:
    cuda: Any = torch.cuda
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _returning(0))
    cuda.memory_stats = lambda *args, **kwargs: {}
    cuda.empty_cache = _returning(None)
    cuda.reset_peak_memory_stats = _returning(None)


def _install_random_state() -> None:
    """Use the CPU's generator for the device, so that Megatron's RNG tracker forks and restores it."""
    cuda: Any = torch.cuda
    generator = torch.default_generator

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        generator.set_state(new_state)

    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    for module in (cuda, cuda.random):
        module.get_rng_state = get_rng_state
        module.set_rng_state = set_rng_state
    cuda.manual_seed = cuda.manual_seed_all = manual_seed
    cuda.initial_seed = generator.initial_seed
    cuda.default_generators = (generator,)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _install_tensor_moves() -> None:
    def on_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(to)
        def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args and _is_cuda(args[0]):
                args = (CPU, *args[1:])
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            return to(self, *args, **kwargs)

        return moved

    def unmoved(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.to, module.to = on_cpu(tensor.to), on_cpu(module.to)
    tensor.cuda = module.cuda = tensor.pin_memory = unmoved
    tensor.record_stream = _returning(None)


def _install_tensor_factories() -> None:
    # Fill this cached set of factory functions now, for `with torch.device(...)`. Filled later, it would hold our
    # wrappers, the context would do nothing, and Hugging Face's from_pretrained would return garbage buffers.
    from torch.utils._device import _device_constructors

    _device_constructors()

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return made

    for name in _TENSOR_FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _install_tensor_types() -> None:
    """Give tensors the type names of CUDA: Megatron's optimizers know only these."""
    tensor: Any = torch.Tensor
    original = tensor.type

    @functools.wraps(original)
    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **kwargs)

    tensor.type = cuda_type


def _install_all_to_all() -> None:
    """Turn split sizes into lists, which gloo needs: Megatron's token dispatcher does so only for CUDA tensors."""
    module: Any = dist
    original = module.all_to_all_single

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        return original(output, input, as_list(output_split_sizes), as_list(input_split_sizes), **kwargs)

    module.all_to_all_single = all_to_all_single
