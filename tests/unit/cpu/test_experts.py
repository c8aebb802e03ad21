"""The experts' linear layers against a loop over tokens, and how they are sharded in checkpoints."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_a3po import cpu
from megatron_a3po.errors import ConfigError

INPUT, OUTPUT = 6, 5
COLUMN, ROW = "CpuColumnParallelGroupedLinear", "CpuRowParallelGroupedLinear"


def _group(size: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def _experts(
    layer: str, num_experts: int = 4, *, bias: bool = False, skip_bias_add: bool = False, **groups: Any
) -> Any:
    cpu.install()
    from megatron_a3po.cpu import experts as layers

    sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 1}
    torch.manual_seed(0)
    experts: Any = getattr(layers, layer)(
        num_experts,
        INPUT,
        OUTPUT,
        config=SimpleNamespace(params_dtype=torch.float32, perform_initialization=True, **sizes),
        init_method=torch.nn.init.normal_,
        bias=bias,
        skip_bias_add=skip_bias_add,
        is_expert=True,
        tp_comm_buffer_name="fc1",
        pg_collection=SimpleNamespace(**{"ep": _group(), "expt_tp": _group(), "expt_dp": _group()} | groups),
    )
    for name, parameter in experts.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    return experts


@pytest.mark.parametrize("layer", [COLUMN, ROW])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [[3, 0, 1, 4], [0, 0, 0, 8], [0, 0, 0, 0]])
def test_each_token_meets_the_weights_of_its_expert_only(layer: str, bias: bool, num_tokens: list[int]) -> None:
    experts = _experts(layer, bias=bias)
    tokens = torch.randn(sum(num_tokens), INPUT, requires_grad=True)
    output, left_bias = experts(tokens, num_tokens)
    assert left_bias is None

    exact = {name: p.detach().double().requires_grad_() for name, p in experts.named_parameters()}
    exact_tokens = tokens.detach().double().requires_grad_()
    owners = [expert for expert, count in enumerate(num_tokens) for _ in range(count)]
    rows = [
        exact[f"weight{expert}"] @ exact_tokens[i] + (exact[f"bias{expert}"] if bias else 0.0)
        for i, expert in enumerate(owners)
    ]
    expected = torch.stack(rows) if rows else torch.zeros(0, OUTPUT, dtype=torch.float64)
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=1e-6)

    direction = torch.randn(output.shape)
    output.backward(direction)
    expected.requires_grad_() if not rows else expected.backward(direction.double())
    for name, parameter in experts.named_parameters():
        gradient = exact[name].grad
        # Also an expert without tokens has a gradient, of zeros: every rank reduces the same buffers.
        gradient = torch.zeros_like(exact[name]) if gradient is None else gradient
        torch.testing.assert_close(parameter.grad.double(), gradient, atol=1e-6, rtol=1e-6)


def test_a_skipped_bias_is_handed_to_the_caller() -> None:
    experts = _experts(ROW, bias=True, skip_bias_add=True)
    tokens = torch.randn(8, INPUT)
    output, biases = experts(tokens, [2, 2, 2, 2])
    torch.testing.assert_close(output[2:4], tokens[2:4] @ experts.weight1.T)
    assert [bias is getattr(experts, f"bias{i}") for i, bias in enumerate(biases)] == [True] * 4


@pytest.mark.parametrize("layer", [COLUMN, ROW])
def test_gradients_are_marked_and_checkpoints_place_each_expert_among_those_of_all_ranks(layer: str) -> None:
    experts = _experts(layer, bias=True, ep=_group(2, 1), expt_dp=_group(3, 2))
    # Gradients are reduced by the ranks that hold the same experts.
    assert not any(parameter.allreduce for parameter in experts.parameters())
    assert experts.weight0.tensor_model_parallel and experts.weight0.partition_dim == (0 if layer == COLUMN else 1)
    tensors = experts.sharded_state_dict("mlp.", metadata={"dp_cp_group": None})
    assert set(tensors) == {f"mlp.{kind}{i}" for kind in ("weight", "bias") for i in range(4)}
    for i in range(4):
        weight, bias = tensors[f"mlp.weight{i}"], tensors[f"mlp.bias{i}"]
        assert (weight.key, bias.key) == ("mlp.weight", "mlp.bias")
        assert (weight.global_shape, weight.global_offset) == ((8, OUTPUT, INPUT), (4 + i, 0, 0))
        assert bias.global_shape == (8, OUTPUT) and weight.replica_id[2] == 2
        assert weight.data is getattr(experts, f"weight{i}")


def test_experts_split_by_tensor_parallelism_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"expert_tensor_parallel_size=2.*use 1"):
        _experts(COLUMN, expt_tp=_group(2))
