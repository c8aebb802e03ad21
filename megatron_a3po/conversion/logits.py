"""Compare the logits of a Hugging Face model and of Megatron's weights.

    python -m megatron_a3po.conversion.logits HF_FOLDER MEGATRON_WEIGHTS

Both compute in float32, on the CPU, or with Transformer Engine's modules on a GPU. Without enough memory, nothing is
compared, and the output says so.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

from megatron_a3po.config import RunConfig
from megatron_a3po.conversion.processes import choose_modules
from megatron_a3po.parallel.layout import RankInfo, init_distributed
from megatron_a3po.preflight.load import load_architecture
from megatron_a3po.runtime.processes import end_process

_NUM_TOKENS = 64
_GPU_BYTES_PER_PARAMETER = 4.5
"""float32 weights, and some more for the computation of 64 tokens"""
_LIMIT = 1e-3
"""Relative to the largest logit: far above the rounding of float32, far below a wrong rope, norm or transposition."""


def main(hf: Path, megatron: Path) -> int:
    """Compare the logits of the two folders and print the difference; return the exit code."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # of the torchrun that this process is no rank of
    # Transformer Engine multiplies float32 as TF32, which alone differs by 1e-3.
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    described = {
        "model": hf,
        "run_dir": megatron,
        "num_steps": 1,
        "device": choose_modules(),
        "precision": "fp32",
        "data": {"task": "none"},
    }
    config = RunConfig.model_validate(described)
    if config.device == "cuda":
        needed, (free, _) = _GPU_BYTES_PER_PARAMETER * load_architecture(hf).num_parameters, torch.cuda.mem_get_info()
        if needed > free:
            print(logits_not_compared("GPU memory", needed, free))
            return 0
    init_distributed(RankInfo.from_environment(), config.device, config.actor.collective_timeout_seconds)
    theirs, tokens = _hf_logits(hf)
    difference = float((_megatron_logits(config, megatron, tokens) - theirs).abs().max() / theirs.abs().max())
    print(f"logits of {_NUM_TOKENS} random tokens: they differ by at most {difference:.1e} of the largest")
    return 0 if difference <= _LIMIT else 1  # also for NaN


def logits_not_compared(place: str, needed_bytes: float, free_bytes: float) -> str:
    """Return the message for too little memory; `place`: which memory."""
    return (
        f"logits not compared: a model in float32 needs {needed_bytes / 2**30:.1f} GiB of {place}, and "
        f"{free_bytes / 2**30:.1f} GiB are free"
    )


def _hf_logits(hf: Path) -> tuple[Tensor, Tensor]:
    """Return (logits [tokens, vocabulary] float32, token ids [tokens])."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(model.config.vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens[None]).logits[0], tokens


def _megatron_logits(config: RunConfig, weights: Path, tokens: Tensor) -> Tensor:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_a3po.actor.fusions import detect_fusions
    from megatron_a3po.actor.model import build_untrained
    from megatron_a3po.actor.start_weights import load_megatron_weights

    [chunk], groups = build_untrained(config, detect_fusions())
    for parameter in chunk.parameters():
        parameter.data.fill_(torch.nan)  # so that what is not loaded shows
    load_megatron_weights([chunk], groups, weights)
    ids = tokens[None].to(config.device)
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32, device=config.device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=len(tokens),
        max_seqlen_kv=len(tokens),
    )
    positions = torch.arange(len(tokens), device=config.device)[None]
    with torch.no_grad():
        return chunk(ids, positions, None, packed_seq_params=packed)[0].float().cpu()


if __name__ == "__main__":
    end_process(main(*map(Path, sys.argv[1:])))
