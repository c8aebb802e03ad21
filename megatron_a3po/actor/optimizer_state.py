"""Save and load the state of the optimizer (float32 masters, moments, steps) in a form that any layout loads.

The form is Megatron's. This module adds what Megatron omits for some of the Adams.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_a3po.actor.optimizer import PolicyOptimizer

SHARDING = "fully_reshardable"


def fill_empty_states(optimizer: PolicyOptimizer) -> None:
    """Make the state that an Adam has from its first step on: Megatron saves and loads only existing state."""
    for distributed in _parts(optimizer):
        # Only fused Adams have this function. The one on the host has none.
        if not isinstance(distributed.optimizer, torch.optim.AdamW) and distributed.init_state_fn is not None:
            distributed.init_state_fn(distributed.optimizer, distributed.config)
    for hybrid in _offloaded(optimizer):
        for adam in hybrid.sub_optimizers:
            _fill_empty_state(adam)
        hybrid._sync_sub_optimizers_state_to_hdo()
    for distributed, adam in _torch_optimizers(optimizer):
        _fill_empty_state(adam)
        # Megatron stores the step in the parameter groups, but looks for it among the loaded tensors.
        original = type(distributed)._set_main_param_and_optimizer_states.__get__(distributed)
        distributed._set_main_param_and_optimizer_states = _without_step(original)


def adam_steps(optimizer: PolicyOptimizer) -> int:
    """Return the number of steps that Adam has made."""
    fill_empty_states(optimizer)
    groups = [group for part in _parts(optimizer) for group in part.state_dict()["optimizer"]["param_groups"]]
    return max(int(group.get("step") or 0) for group in groups)


def sharded_optimizer_state(
    optimizer: PolicyOptimizer, of_model: dict[str, Any], metadata: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    """Return masters and moments by the parameters' names. Collective. `of_model`: the sharded state of the weights.

    Parameter groups are left out. They come from the configuration, and they would differ between layouts in which
    experts have an optimizer of their own and layouts in which they have none.
    """
    for part in _parts(optimizer):
        original = type(part).get_parameter_state_dp_zero.__get__(part)
        part.get_parameter_state_dp_zero = _with_gaps(original, part.buffers)
    state = optimizer.megatron.sharded_state_dict(of_model, is_loading=is_loading, metadata=metadata)
    parts = [state] if len(_parts(optimizer)) == 1 else [state[key] for key in sorted(state)]
    return {str(number): part["param_state"] for number, part in enumerate(parts)}


def load_optimizer_state(optimizer: PolicyOptimizer, loaded: dict[str, Any], num_steps: int) -> None:
    """Load a filled `sharded_optimizer_state` into the optimizer, which has made `num_steps` steps."""
    for number, part in enumerate(_parts(optimizer)):
        own = part.state_dict()
        for group in own["optimizer"]["param_groups"]:
            group["step"] = num_steps
        part.load_state_dict(own | {"param_state": loaded[str(number)], "param_state_sharding_type": SHARDING})
    _separate_steps(optimizer)
    for hybrid in _offloaded(optimizer):
        _keep_own_share(hybrid)


def _parts(optimizer: PolicyOptimizer) -> list[Any]:
    """Return Megatron's distributed optimizers: one, or two if experts have their own."""
    return list(optimizer.megatron.chained_optimizers)


def _torch_optimizers(optimizer: PolicyOptimizer) -> Iterator[tuple[Any, torch.optim.AdamW]]:
    """Yield (distributed optimizer, torch's AdamW inside); nothing if Adam is Transformer Engine's or apex's."""
    for distributed in _parts(optimizer):
        if isinstance(distributed.optimizer, torch.optim.AdamW):
            yield distributed, distributed.optimizer


def _offloaded(optimizer: PolicyOptimizer) -> Iterator[Any]:
    """Yield Megatron's optimizers on the host. Each has one AdamW of torch per parameter."""
    for distributed in _parts(optimizer):
        if isinstance(distributed.optimizer, HybridDeviceOptimizer):
            yield distributed.optimizer


def _fill_empty_state(adam: torch.optim.Optimizer) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.tensor(0.0), **moments}


def _without_step(original: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    return lambda parameter, tensors: original(parameter, {"step": None, **tensors})


def _separate_steps(optimizer: PolicyOptimizer) -> None:
    """Copy the step tensor for each parameter: Megatron loads one for all, and each parameter would count it up."""
    for _, adam in _torch_optimizers(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()


def _keep_own_share(hybrid: HybridDeviceOptimizer) -> None:
    """Copy the loaded moments: Megatron leaves views, which would keep whole tensors alive on every rank."""
    for state in hybrid.state.values():
        state |= {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    hybrid._sync_sub_optimizers_state_to_hdo()  # Masters need no copy: they are written into existing parameters.


def _with_gaps(original: Callable[..., Any], buffers: list[Any]) -> Callable[..., Any]:
    """Gather buckets with the padding between them, at the offsets where Megatron looks for parameters.

    Megatron gathers them without it. Behind a padded bucket it would save zeros, or values of other parameters, under a
    parameter's name.
    """

    def gather(**arguments: Any) -> Any:
        gathered = original(**arguments)
        for number, buffer in enumerate(buffers):
            for tensors in gathered[number].values():
                for key in tensors.keys() - {"numel_unpadded"}:
                    tensors[key] = _spread(tensors[key], buffer)
        return gathered

    return gather


def _spread(unpadded: torch.Tensor, buffer: Any) -> torch.Tensor:
    """Copy each bucket of [numel_unpadded] to its place in [numel]."""
    sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
    starts = [bucket.offset for bucket in buffer.buckets]
    if starts == [sum(sizes[:number]) for number in range(len(sizes))]:
        return unpadded
    spread = unpadded.new_zeros(buffer.numel)
    for start, values in zip(starts, unpadded.split(sizes), strict=True):
        spread[start : start + len(values)] = values
    return spread
