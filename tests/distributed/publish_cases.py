"""Layouts whose weights are collected and published, and what they must come to by the Hugging Face files."""

import dataclasses
from pathlib import Path
from typing import Any

from tests.distributed.parity import Case, configuration

_TP2_PP2 = {"tensor": 2, "pipeline": 2}
PUBLISHED = [
    Case(parallel={"tensor": 4}),
    Case(parallel=_TP2_PP2),
    Case(parallel={"pipeline": 2, "virtual_pipeline": 2}),
    Case(family="qwen3", parallel={"tensor": 2, "context": 2}),
    Case(family="qwen2", parallel=_TP2_PP2),
    Case(family="qwen2", parallel={"tensor": 4}),
    Case(family="qwen3_mqa", parallel=_TP2_PP2),
    Case(family="qwen3_moe", parallel={"tensor": 2, "expert": 4}),
    Case(family="qwen3_moe", parallel={"pipeline": 2, "expert": 2}, settings={"precision": "bf16"}),
    Case(family="qwen3_moe", parallel={"pipeline": 2, "virtual_pipeline": 2, "expert": 2}),
    Case(family="glm4_moe", parallel={"pipeline": 2, "expert": 2}),
    Case(family="gpt_oss", parallel={"tensor": 2, "expert": 2}),
]
COLLECTED = [
    Case(parallel={}),
    Case(parallel={"pipeline": 4}),
    Case(family="qwen3", parallel=_TP2_PP2),
    Case(family="qwen3", parallel={**_TP2_PP2, "virtual_pipeline": 2}),
    Case(family="llama3", parallel={"tensor": 2}),
    Case(family="qwen3_mqa", parallel={"tensor": 2}),
    Case(family="qwen3_mqa", parallel={"tensor": 4}),
    Case(family="gpt_oss", parallel={"tensor": 4}),
    Case(family="qwen3_moe", parallel={"expert": 4}),
    Case(family="qwen3_moe", parallel={"tensor": 2, "expert": 2}),
    Case(family="glm4_moe", parallel={"tensor": 2, "expert": 2}),
    Case(family="deepseek_v3", parallel={"tensor": 2, "expert": 2}),
    Case(family="deepseek_v3", parallel={"pipeline": 2, "expert": 2, "last_stage_layers": 1}),
    Case(family="gpt_oss", parallel={"pipeline": 2, "expert": 2}),
]


def encoded(cases: list[Case]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(case) for case in cases]


def changed_policy(case: Case, folder: Path) -> Any:
    """A tiny model's policy in the layout of the case, whose weights are those of the file times 1.25. Collective."""
    import torch.distributed as dist

    from megatron_a3po.actor.fusions import detect_fusions
    from megatron_a3po.actor.model import build_model
    from tests.support.tiny_models import save_tiny_model

    if dist.get_rank() == 0 and not folder.exists():
        save_tiny_model(case.family, folder)
    dist.barrier()
    model = build_model(configuration(case, folder), detect_fusions())
    change(model)
    return model


def change(model: Any) -> None:
    """All weights, times 1.25."""
    import torch
    from megatron.bridge.models.conversion.utils import persistent_buffers

    with torch.no_grad():
        for chunk in model.chunks:
            for tensor in (*chunk.parameters(), *(buffer for _, buffer in persistent_buffers(chunk))):
                tensor.mul_(1.25)


def expected_bytes(folder: Path, *, times: int = 1, precision: str = "fp32") -> dict[str, bytes]:
    """The tensors of the file times 1.25, so many times, each time rounded to the precision."""
    import torch
    from safetensors.torch import load_file

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    for _ in range(times):
        tensors = {name: tensor * 1.25 for name, tensor in tensors.items()}
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
