"""Check a conversion: compare every tensor bit by bit, and the logits of both models."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import Tensor

from megatron_a3po.conversion.logits import logits_not_compared
from megatron_a3po.conversion.parts import describe_model
from megatron_a3po.conversion.processes import Processes
from megatron_a3po.conversion.to_hf import MegatronWeights
from megatron_a3po.conversion.to_megatron import LazyTensors
from megatron_a3po.conversion.torch_dist import TorchDistReader
from megatron_a3po.errors import CheckpointError
from megatron_a3po.hf.folder import HfFolder
from megatron_a3po.hf.quantize import SCALE_SUFFIX, dequantize_blockwise
from megatron_a3po.preflight.load import load_architecture
from megatron_a3po.weights.hf_mapping import Part

_BYTES_PER_PARAMETER = 7
"""For the comparison of logits, one model after the other: float32 weights, their bf16 source, and some more"""


def verify(hf: Path, megatron: Path, processes: Processes, *, fp8: bool = False) -> None:
    """Compare a Hugging Face folder with a folder of Megatron's weights, and print the result. Collective.

    `fp8`: the tensors of `hf` were quantised when they were written. Raises CheckpointError if they differ.
    """
    number = _compare_tensors(hf, megatron, processes, fp8=fp8)
    processes.say(f"all {number} tensors are equal bit by bit" + (" to such a quantisation" if fp8 else ""))
    folder = HfFolder.open(hf)
    if folder.is_quantized or any(name.endswith("_blocks") for name in folder.names()):
        processes.say("logits not compared: Hugging Face computes quantised weights in a precision of its own")
    else:
        processes.say(processes.on_rank_zero(lambda: _compare_logits(hf, megatron)))


def _compare_tensors(hf: Path, megatron: Path, processes: Processes, *, fp8: bool) -> int:
    """Convert Megatron's weights back, each process its share, compare them and return the number of tensors."""
    folder, mapping = HfFolder.open(hf), describe_model(hf)
    weights = MegatronWeights(mapping, TorchDistReader(megatron), fp8=fp8)
    mine = processes.share(mapping.parts)
    num_tensors, different = 0, []
    with processes.progress("comparing", sum(part.numel for part in mine)) as advance:
        for part in mine:
            num_tensors += len(part.hf_names)
            different += _different(weights, part, folder)
            advance(part.numel)
    answers = processes.gather([num_tensors, different])
    names = [name for _, share in answers for name in share]
    if names:
        raise CheckpointError(
            f"{hf} and {megatron} differ in {len(names)} tensors, such as {', '.join(names[:5])}; convert again, and "
            "should it differ again, report it"
        )
    return sum(number for number, _ in answers)


def _different(weights: MegatronWeights, part: Part, folder: HfFolder) -> list[str]:
    if all(name in folder for name in part.hf_names):
        return [name for name, tensor in _as_read(weights, part) if not _same_bits(tensor, folder.read(name))]
    # gpt-oss' experts in MXFP4, which has no way back: the parameters are compared instead.
    values, expected = weights.read(part), weights.mapping.from_hf(part, LazyTensors(folder=folder))
    return [name for name in values if not _same_bits(values[name], expected[name].contiguous())]


def _as_read(weights: MegatronWeights, part: Part) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as HfFolder.read returns them: FP8 weights are dequantised."""
    made = dict(weights.tensors([part]))
    for name, tensor in made.items():
        if name + SCALE_SUFFIX in made:
            yield name, dequantize_blockwise(tensor, made[name + SCALE_SUFFIX], torch.bfloat16)
        elif not name.endswith(SCALE_SUFFIX):
            yield name, tensor


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(ours.contiguous().view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))


def _compare_logits(hf: Path, megatron: Path) -> str:
    """Run both models on the same random tokens in a separate process, which frees its memory at its end."""
    needed = _BYTES_PER_PARAMETER * load_architecture(hf).num_parameters
    available = psutil.virtual_memory().available
    if needed > available:
        return logits_not_compared("memory", needed, available)
    command = [sys.executable, "-m", "megatron_a3po.conversion.logits", str(hf), str(megatron)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CheckpointError(f"the logits could not be compared: {(result.stdout + result.stderr)[-2000:]}")
    return result.stdout.strip().splitlines()[-1]
