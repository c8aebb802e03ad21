"""Every supported family on the CPU modules: log-probs and gradients equal Hugging Face's under parallel layouts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model

pytestmark = pytest.mark.distributed

LENGTHS = [13, 1, 24, 7, 40, 2, 17, 33]
TOLERANCE = 2e-5
"""Largest difference of a log-prob, and of a gradient relative to the largest one of its tensor, in float32"""

REFERENCE = "reference.pt"
PADDING = -1
"""Marks the place of a padding token in a pack, where sequences have their numbers"""


@pytest.mark.parametrize(
    ("layout", "families"),
    [
        ({}, FAMILIES),
        ({"tensor": 2, "expert": 2}, ("qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss")),
        ({"tensor": 2, "context": 2}, ("qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")),
        ({"context": 2, "expert": 2, "pipeline": 2}, ("glm4_moe", "deepseek_v3")),
    ],
    ids=str,
)
def test_logprobs_and_gradients_equal_hugging_face(
    tmp_path: Path, layout: dict[str, int], families: tuple[str, ...]
) -> None:
    for family in families:
        save_tiny_model(family, tmp_path / family)
        _save_reference(tmp_path / family)
    world_size = 4 if layout else 1
    arguments = (str(tmp_path), json.dumps(layout), *families)
    output = run_ranks(_compare_with_hugging_face, world_size, *arguments, timeout_seconds=240)
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [result["family"] for result in results] == list(families)
    for result in results:
        assert result["logprobs"] < TOLERANCE
        assert result["gradients"] < TOLERANCE, result


def _random_sequences() -> tuple[list[Any], list[Any]]:
    """Token ids, and what the log-prob of the next token at each place is multiplied by in the loss."""
    import torch

    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(1, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    return sequences, [torch.randn(length, generator=generator) for length in LENGTHS]


def _save_reference(folder: Path) -> None:
    """By Hugging Face: log-probs of each sequence, and the gradients under their names in a checkpoint."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    sequences, factors = _random_sequences()
    num_tokens = sum(len(ids) - 1 for ids in sequences)
    logprobs = []
    for ids, factor in zip(sequences, factors, strict=True):
        log_p = model(ids[None, :-1]).logits[0].log_softmax(-1) if len(ids) > 1 else torch.zeros(0, VOCAB_SIZE)
        logprobs.append(log_p.gather(-1, ids[1:, None])[:, 0])
        if len(ids) > 1:
            ((factor[:-1] * logprobs[-1]).sum() / num_tokens).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients")
    gradients = load_file(folder / "gradients" / "model.safetensors")
    kept = {name: tensor for name, tensor in gradients.items() if not name.endswith("e_score_correction_bias")}
    torch.save(([x.detach() for x in logprobs], kept), folder / REFERENCE)


def _compare_with_hugging_face(folder: str, layout: str, *families: str) -> None:
    from megatron_a3po import cpu

    cpu.install()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    sizes = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1} | json.loads(layout)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        sizes["tensor"],
        sizes["pipeline"],
        context_parallel_size=sizes["context"],
        expert_model_parallel_size=sizes["expert"],
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(1)
    sequences, factors = _random_sequences()
    for family in families:
        bridge, chunk = _build_model(f"{folder}/{family}", sizes)
        logprobs = _train_microbatch(chunk, sequences, factors, sizes)
        gradients = _gradients_in_hugging_face_layout(bridge, chunk)  # collective
        expected_logprobs, expected_gradients = torch.load(f"{folder}/{family}/{REFERENCE}")
        worst = torch.zeros(())
        for i, (places, found) in logprobs.items():
            if len(places):
                worst = torch.maximum(worst, (found - expected_logprobs[i][places]).abs().max())
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            assert gradients.keys() == expected_gradients.keys()
            errors = {
                name: (gradient - expected_gradients[name]).abs().max().item()
                / max(expected_gradients[name].abs().max().item(), 1e-6)
                for name, gradient in gradients.items()
            }
            name = max(errors, key=lambda name: errors[name])
            result = {"family": family, "logprobs": worst.item(), "gradients": errors[name], "worst": name}
            print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _build_model(folder: str, sizes: dict[str, int]) -> tuple[Any, Any]:
    """megatron-bridge's bridge and this rank's part of the model with its weights, wrapped by Megatron's DDP."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config

    bridge = AutoBridge.from_hf_pretrained(folder, torch_dtype=torch.float32)
    provider = bridge.to_megatron_provider(load_weights=False)
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": sizes["tensor"],
        "pipeline_model_parallel_size": sizes["pipeline"],
        "context_parallel_size": sizes["context"],
        "expert_model_parallel_size": sizes["expert"],
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": sizes["tensor"] > 1,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "bf16": False,
        "fp16": False,
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 64 if sizes["tensor"] > 1 else 1,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "apply_rope_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "moe_shared_expert_overlap": False,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_bias_update_rate": 0.0,
        "mtp_num_layers": None,
    }
    for name, value in settings.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    provider.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    provider._pg_collection = groups
    (chunk,) = provider.provide_distributed_model(
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, average_in_collective=False),
        wrap_with_ddp=True,
        use_cpu_initialization=True,
        mixed_precision_wrapper=None,
        pg_collection=groups,
    )
    bridge.load_hf_weights([chunk])
    get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
    return bridge, chunk


def _pack(sequences: list[Any], factors: list[Any], sizes: dict[str, int]) -> tuple[Any, list[Any], Any]:
    """This rank's part of the sequences that its data-parallel rank trains on: packing, columns, packed parameters.

    Columns are [tokens / cp]: token, next token, factor of its log-prob, number of the sequence, place in it.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    cp_size, cp_rank = sizes["context"], parallel_state.get_context_parallel_rank()
    multiple = sizes["tensor"] * (2 * cp_size if cp_size > 1 else 1)
    boundaries, parts = [0], []
    mine = range(parallel_state.get_data_parallel_rank(), len(sequences), parallel_state.get_data_parallel_world_size())
    for number in mine:
        ids, length = sequences[number], len(sequences[number])
        padded = math.ceil(length / multiple) * multiple
        rows = torch.zeros(5, padded, dtype=torch.float64)
        rows[0, :length], rows[1, : length - 1] = ids, ids[1:]
        rows[2, : length - 1], rows[3] = factors[number][:-1], PADDING
        rows[3, : length - 1], rows[4] = number, torch.arange(padded)
        boundaries.append(boundaries[-1] + padded)
        if cp_size > 1:
            chunks = rows.chunk(2 * cp_size, 1)
            rows = torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]], 1)
        parts.append(rows)
    bounds = torch.tensor(boundaries, dtype=torch.int32)
    longest = int(bounds.diff().max())
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    tokens, labels, factor, number, place = torch.cat(parts, 1)
    return packed, [tokens.long(), labels.long(), factor.float(), number.long(), place.long()], mine


def _train_microbatch(chunk: Any, sequences: list[Any], factors: list[Any], sizes: dict[str, int]) -> Any:
    """Gradients go to `main_grad`. On the last pipeline stage: by sequence, the places of this rank and log-probs."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    packed, (tokens, labels, factor, number, place), mine = _pack(sequences, factors, sizes)
    found: dict[int, Any] = {}

    def forward_step(batches: Any, stage: Any) -> tuple[Any, Any]:
        next(batches)
        return stage(tokens[None], place[None], None, packed_seq_params=packed), loss_sum

    def loss_sum(output: Any) -> tuple[Any, Any, dict[str, Any]]:
        logits = gather_from_tensor_model_parallel_region(output)[0, :, :VOCAB_SIZE]
        logprobs = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        for i in mine:
            found[i] = (place[number == i], logprobs[number == i].detach())
        return (factor * logprobs).sum(), (number != PADDING).sum().int(), {}

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([0]),
        model=chunk,
        num_microbatches=1,
        seq_length=len(tokens),
        micro_batch_size=1,
        forward_only=False,
    )
    return found


def _gradients_in_hugging_face_layout(bridge: Any, chunk: Any) -> dict[str, Any]:
    """Put the gradients where the weights are, so that they are gathered and named like weights."""
    for parameter in chunk.parameters():
        parameter.data.copy_(parameter.main_grad)
    exported = bridge.export_hf_weights([chunk], show_progress=False)
    return {
        name: tensor[:VOCAB_SIZE].clone() if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor.clone()
        for name, tensor in exported
        if not name.endswith("e_score_correction_bias")
    }
