"""From sharded Megatron parameters to full Hugging Face tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")


def gather_hf_tensors(chunks: Sequence[torch.nn.Module], bridge: Any, vocab_size: int) -> list[tuple[str, Tensor]]:
    """Every tensor of the policy, unsharded, with its Hugging Face name, on every rank. Collective.

    Vocabulary rows that pad the tensor-parallel shards are cut off: a server refuses a tensor with too many rows.
    """
    return [
        (name, _without_padding(name, tensor.detach(), vocab_size))
        for name, tensor in bridge.export_hf_weights(list(chunks), show_progress=False)
    ]


def _without_padding(name: str, tensor: Tensor, vocab_size: int) -> Tensor:
    # A copy: the bridge may hand out the parameter itself, and the next optimizer step would change what is being sent.
    return (tensor[:vocab_size] if name in VOCABULARY_TENSORS else tensor).clone()
