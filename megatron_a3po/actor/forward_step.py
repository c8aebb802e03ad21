"""Run microbatches through Megatron's pipeline schedule. Only this module knows by what Megatron divides the loss.

Megatron divides the value of a loss function by the number of microbatches, unless the function returns three values:
the sum over tokens, the number of tokens, and a report. Then it divides gradients once, by the number of tokens in the
whole batch over all microbatches and data-parallel ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_a3po.types import Microbatch

LossFunction = Callable[[Tensor, Tensor, Microbatch], tuple[Tensor, Any]]
"""(log-probs of the labels, entropy, microbatch), tensors [tokens] float32 -> (sum of losses, report)"""


def run_microbatches(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    head: Callable[..., Tensor],
    loss_function: LossFunction,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run all microbatches through the (interleaved) 1F1B schedule, with log-probs and entropy from `head`.

    `head` is described in `actor.head`. Gradients stay in the chunks, unless `forward_only`. Collective over the
    pipeline and its tensor-parallel ranks. Returns the reports of the loss function on the last stage, an empty list on
    the others.
    """

    def forward_step(iterator: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next(iterator)
        output = model(
            microbatch.token_ids[None],
            microbatch.position_ids[None],
            None,
            packed_seq_params=_packed_seq_params(microbatch),
            output_processor=head,
            output_processor_context=microbatch,
        )

        def loss(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss_sum, report = loss_function(output[0], output[1], microbatch)
            return loss_sum, microbatch.loss_mask.sum().int(), report

        return output, loss

    iterators = [iter(microbatches) for _ in chunks]
    interleaved = len(chunks) > 1
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if interleaved else iterators[0],
            model=list(chunks) if interleaved else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=max(
                microbatch.token_ids.numel() for microbatch in microbatches
            ),  # a hint only, since lengths vary
            micro_batch_size=1,
            forward_only=forward_only,
        )


def _packed_seq_params(microbatch: Microbatch) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=microbatch.cu_seqlens,
        cu_seqlens_kv=microbatch.cu_seqlens,
        max_seqlen_q=microbatch.max_seqlen,
        max_seqlen_kv=microbatch.max_seqlen,
    )
