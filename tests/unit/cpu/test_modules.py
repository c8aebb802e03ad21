"""The CPU modules against plain formulas in float64, and what the facade must not break."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_a3po import cpu
from megatron_a3po.cpu import rollout_server
from megatron_a3po.errors import ConfigError

HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture(autouse=True)
def _installed() -> None:
    cpu.install()


def _naive_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None = None, sink: Tensor | None = None
) -> Tensor:
    """One sequence, [tokens, heads, dim], as the formula says; the queries are its last tokens."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    places = torch.arange(len(key))
    before = places[-len(query) :, None] - places if len(query) else places[None, :0]
    hidden = (before < 0) | (before > (len(key) if window is None else window))
    exponentials = scores.masked_fill(hidden, -math.inf).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", exponentials / total, value)


def _random_qkv(tokens: int, kv_heads: int = KV_HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, heads, DIM, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (HEADS, kv_heads, kv_heads)
    ]


def _spans(lengths: list[int]) -> Tensor:
    return torch.stack([torch.tensor([0, *lengths[:-1]]).cumsum(0), torch.tensor(lengths)], 1)


def _packed_attention(
    packed: list[Tensor], lengths: list[int], query_lengths: list[int] | None = None, **settings: Any
) -> Tensor:
    from megatron_a3po.cpu.attention import packed_causal_attention

    query, key, value = packed
    return packed_causal_attention(query, key, value, _spans(query_lengths or lengths), _spans(lengths), **settings)


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
@pytest.mark.parametrize("window", [None, 0, 5])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("queries", ["all", "last"])
@pytest.mark.parametrize("lengths", [[1], [5, 3, 1, 8, 2], [100, 1, 0, 37, 64, 65, 3]])
def test_packed_attention_and_its_gradients_equal_the_formula_for_each_sequence(
    lengths: list[int], queries: str, with_sink: bool, window: int | None, kv_heads: int
) -> None:
    query_lengths = lengths if queries == "all" else [(length + 2) // 3 for length in lengths]
    packed = _random_qkv(sum(lengths), kv_heads)
    packed[0] = packed[0].detach()[: sum(query_lengths)].requires_grad_()
    sink = torch.linspace(-1, 2, HEADS, requires_grad=True) if with_sink else None
    inputs = [*packed, sink] if sink is not None else packed
    output = _packed_attention(packed, lengths, query_lengths, window=window, sink=sink)

    reference = [x.detach().double().requires_grad_() for x in inputs]
    split = (reference[0].split(query_lengths), reference[1].split(lengths), reference[2].split(lengths))
    exact_sink = reference[3] if with_sink else None
    parts = [_naive_causal_attention(*part, window=window, sink=exact_sink) for part in zip(*split, strict=True)]
    expected = torch.cat(parts)
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=1e-5)

    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(output, inputs, direction)
    expected_gradients = torch.autograd.grad(expected, reference, direction.double())
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), expected_gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_garbage_in_one_sequence_leaves_the_others_bit_identical(garbage: float) -> None:
    lengths = [9, 12, 14, 3]
    spoiled_tokens = slice(9, 21)
    clean = _random_qkv(sum(lengths))
    spoiled = [x.detach().clone() for x in clean]
    for x in spoiled:
        x[spoiled_tokens] = garbage
        x.requires_grad_()

    def others(x: Tensor) -> Tensor:
        return torch.cat([x[: spoiled_tokens.start], x[spoiled_tokens.stop :]])

    results = []
    for inputs in (clean, spoiled):
        output = others(_packed_attention(inputs, lengths))
        gradients = torch.autograd.grad(output.square().sum(), inputs)
        results.append([output, *(others(gradient) for gradient in gradients)])
    for clean_result, spoiled_result in zip(*results, strict=True):
        assert torch.equal(clean_result, spoiled_result)


def _attention(layer_number: int = 1, **config: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_a3po.cpu.attention import CpuDotProductAttention

    defaults = {"attention_dropout": 0.0, "softmax_type": "vanilla", "window_size": None, "window_attn_skip_freq": None}
    defaults |= {"context_parallel_size": 1, "tensor_model_parallel_size": 1}
    defaults |= {"num_attention_heads": HEADS, "params_dtype": torch.float32}
    merged: Any = SimpleNamespace(**defaults | config)
    return CpuDotProductAttention(merged, layer_number, AttnMaskType.causal, "self")


def test_tokens_between_padded_sequences_give_zeros_and_are_never_attended_to() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    query, key, value = _random_qkv(12)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3, 7]), cu_seqlens_q_padded=torch.tensor([0, 6, 12])
    )
    output = _attention()(query, key, value, None, packed_seq_params=packed)
    expected = torch.zeros(12, HEADS * DIM)
    for tokens in (slice(0, 3), slice(6, 10)):
        expected[tokens] = _naive_causal_attention(query[tokens], key[tokens], value[tokens]).flatten(1)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


def test_unpacked_attention_equals_the_formula_for_each_batch_entry() -> None:
    query, key, value = (x.view(10, 2, -1, DIM) for x in _random_qkv(20))
    output = _attention()(query, key, value, attention_mask=None)
    expected = [_naive_causal_attention(query[:, i], key[:, i], value[:, i]).flatten(1) for i in range(2)]
    torch.testing.assert_close(output, torch.stack(expected, 1), atol=1e-6, rtol=1e-5)


def test_layers_alternate_between_a_sliding_window_and_the_whole_sequence() -> None:
    query, key, value = (x[:, None] for x in _random_qkv(20))
    for layer_number, window in ((1, 6), (2, None), (3, 6)):
        attention = _attention(layer_number, window_size=(6, 0), window_attn_skip_freq=2)
        expected = _naive_causal_attention(query[:, 0], key[:, 0], value[:, 0], window).flatten(1)
        torch.testing.assert_close(attention(query, key, value, None)[:, 0], expected, atol=1e-6, rtol=1e-5)


def test_learnable_sinks_are_a_parameter_sharded_by_heads() -> None:
    (sinks,) = _attention(softmax_type="learnable", tensor_model_parallel_size=2).parameters()
    assert sinks.shape == (HEADS // 2,) and sinks.tensor_model_parallel
    assert not list(_attention().parameters())


@pytest.mark.parametrize(("name", "value"), [("softmax_type", "off-by-one"), ("attention_dropout", 0.1)])
def test_attention_that_the_cpu_does_not_have_is_refused_with_its_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        _attention(**{name: value})


def _norm(kind: str, dtype: torch.dtype, zero_centered: bool = False) -> Any:
    from megatron_a3po.cpu.modules import CpuNorm

    shape = {"normalization": kind, "layernorm_zero_centered_gamma": zero_centered, "params_dtype": dtype}
    norm = CpuNorm(SimpleNamespace(**shape, sequence_parallel=True), 32, eps=1e-6)
    torch.manual_seed(0)
    for parameter in norm.parameters():
        parameter.detach().add_(torch.randn(32))
    return norm


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_rms_norm_equals_the_formula(zero_centered: bool, dtype: torch.dtype, tolerance: float) -> None:
    norm = _norm("RMSNorm", dtype, zero_centered)
    hidden = (3 * torch.randn(5, 2, 32)).to(dtype)
    exact = hidden.double()
    factor = norm.weight.double() + zero_centered
    expected = factor * exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    output = norm(hidden)
    assert output.dtype == dtype and norm.bias is None
    assert norm.weight.sequence_parallel
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


def test_layer_norm_equals_torch() -> None:
    norm = _norm("LayerNorm", torch.float32)
    hidden = torch.randn(7, 32)
    expected = torch.nn.functional.layer_norm(hidden, (32,), norm.weight, norm.bias, 1e-6)
    torch.testing.assert_close(norm(hidden), expected)


def test_asking_for_cuda_gives_the_cpu_with_its_random_state_but_a_torch_device_context_still_decides() -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.ones(2).to("cuda:0").cuda().device.type == "cpu"
    assert torch.empty(2, device=torch.cuda.current_device(), pin_memory=True).device.type == "cpu"
    assert not torch.cuda.is_available()
    with torch.device("meta"):
        assert torch.zeros(3).is_meta and torch.arange(3).is_meta
        assert all(parameter.is_meta for parameter in torch.nn.Linear(2, 2).parameters())

    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(4))


def test_hugging_face_from_pretrained_computes_the_right_rotary_frequencies(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": DIM}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(**sizes, **heads, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path)
    expected = 1e4 ** -(torch.arange(0, DIM, 2) / DIM)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, expected)


def test_an_environment_with_transformer_engine_and_an_import_of_megatron_before_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The inert Transformer Engine is gone after megatron-bridge was imported.
    assert "megatron.bridge" in sys.modules
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
    monkeypatch.setattr(cpu, "_installed", False)
    with pytest.raises(RuntimeError, match="before megatron"):
        cpu.install()
    (tmp_path / "transformer_engine.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="transformer_engine is installed"):
        cpu.install()


def test_a_rollout_server_of_several_ranks_binds_each_to_a_core() -> None:
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in rollout_server.server_environment(["--skip-tokenizer-init"])
    for arguments in (["--tp-size", "3"], ["--x", "--tp", "3"], ["--tp-size=3"], ["--tensor-parallel-size", "3"]):
        assert rollout_server.server_environment(arguments)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2"
    assert rollout_server.server_environment([], "/other")["PYTHONPATH"].endswith("sgl_stand_in:/other")
    with pytest.raises(ConfigError, match=r"rollout\.server_arguments: argument .*'two'"):
        rollout_server.server_environment(["--tp-size", "two"])


def test_rollout_server_settings_need_neither_torch_nor_megatron_and_the_stand_in_names_what_is_missing() -> None:
    script = """
import sys
from megatron_a3po.cpu import rollout_server
assert not {"torch", "megatron"} & set(sys.modules)
sys.path.insert(0, rollout_server.server_environment()["PYTHONPATH"])
from sgl_kernel import silu_and_mul
silu_and_mul(1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "NotImplementedError: sgl_kernel.silu_and_mul was called" in done.stderr
