"""A Megatron GPT made by megatron-bridge on the CPU modules computes what Hugging Face computes."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model

LENGTHS = [13, 1, 24, 7, 16, 2]  # 63 tokens: one padding token makes them divisible by the tensor-parallel size


@pytest.mark.distributed
def test_packed_logits_equal_hugging_face_under_tensor_pipeline_and_sequence_parallelism(tmp_path: Path) -> None:
    save_tiny_model("qwen3_tied", tmp_path)
    output = run_ranks(_compare_logits_with_hugging_face, 4, str(tmp_path), timeout_seconds=100)
    assert output.startswith("installed"), "the imports should print nothing"
    assert "compared 63 tokens" in output


def _compare_logits_with_hugging_face(folder: str) -> None:
    from megatron_a3po import cpu

    cpu.install()
    print("installed", flush=True)
    assert not logging.getLogger().handlers and logging.getLogger().level == logging.WARNING
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from transformers import Qwen3ForCausalLM

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    model = _build_model(folder)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(1, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    logits = _packed_logits(model, sequences)
    if logits is not None:
        reference = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
        assert expected.abs().max() > 1.0
        torch.testing.assert_close(logits[: sum(LENGTHS), :VOCAB_SIZE].double(), expected, atol=1e-5, rtol=0)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"compared {sum(LENGTHS)} tokens")
    dist.destroy_process_group()


def _build_model(folder: str) -> Any:
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1234)
    bridge = AutoBridge.from_hf_pretrained(folder, torch_dtype=torch.float32)
    provider = bridge.to_megatron_provider(load_weights=False)
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "bf16": False,
        "fp16": False,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 64,
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    provider._pg_collection = groups
    (model,) = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=groups
    )
    bridge.load_hf_weights([model])
    return model.eval()


def _packed_logits(model: Any, sequences: list[Any]) -> Any:
    """Logits [tokens, padded vocabulary] on the last pipeline stage, None elsewhere."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    lengths = torch.tensor([*LENGTHS, 1])  # the padding token is a sequence of its own
    boundaries = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    longest = int(lengths.max())
    packed = PackedSeqParams("thd", boundaries, boundaries, max_seqlen_q=longest, max_seqlen_kv=longest)
    tokens = torch.cat([*sequences, torch.zeros(1, dtype=torch.int64)])[None]
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    outputs = []

    def forward_step(batches: Any, stage: Any) -> tuple[Any, Any]:
        next(batches)
        return stage(tokens, positions, None, packed_seq_params=packed), keep_logits

    def keep_logits(output: Any) -> tuple[Any, dict[str, Any]]:
        outputs.append(output.clone())
        return output.sum(), {}

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([0]),
            model=model,
            num_microbatches=1,
            seq_length=tokens.shape[1],
            micro_batch_size=1,
            forward_only=True,
        )
    assert bool(outputs) == parallel_state.is_pipeline_last_stage()
    return gather_from_tensor_model_parallel_region(outputs[0])[0] if outputs else None
