"""What the optimizer's masters start from, and the reference weights that a model is lent."""

from contextlib import nullcontext

import pytest
import torch

from megatron_a3po import cpu


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    cpu.install()


def test_masters_are_made_of_the_loaded_weights_and_not_of_what_transformer_engine_kept() -> None:
    """As Transformer Engine 2.20 does it: two methods, set on the parameter."""
    from megatron_a3po.actor.start_weights import forget_initial_values

    loaded, plain = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    kept: list[str] = []
    loaded.get_high_precision_init_val = lambda: torch.full((3,), float("nan"))  # type: ignore[attr-defined]
    loaded.clear_high_precision_init_val = lambda: kept.append("cleared")  # type: ignore[attr-defined]

    forget_initial_values([loaded, plain])

    assert kept == ["cleared"] and not hasattr(loaded, "get_high_precision_init_val")


def network() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


@pytest.mark.parametrize("fails", [False, True])
def test_inside_the_block_the_model_is_the_one_it_was_and_afterwards_itself_bit_for_bit(fails: bool) -> None:
    """Also when the block fails."""
    from megatron_a3po.actor.start_weights import ReferenceWeights

    model = network()
    inputs = torch.ones(1, 3)
    before = model(inputs)
    reference = ReferenceWeights([model[0], model[2]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    own = [parameter.detach().clone() for parameter in model.parameters()]
    places = [parameter.data_ptr() for parameter in model.parameters()]
    moved = model(inputs)

    for _ in range(2):
        with pytest.raises(MemoryError) if fails else nullcontext(), reference.in_place():
            assert torch.equal(model(inputs), before)
            assert model(inputs).requires_grad  # the block itself decides on gradients
            if fails:
                raise MemoryError
        assert torch.equal(model(inputs), moved) and not torch.equal(moved, before)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), own, strict=True))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
