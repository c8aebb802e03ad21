"""One microbatch through Megatron's pipeline schedule. The only place that knows Megatron's own divisions.

Megatron divides what a loss function returns by the number of microbatches, unless it returns three values: the sum
over tokens, the number of tokens, and a report. Then gradients are divided once, by the tokens of the whole batch over
all microbatches and data-parallel ranks.
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
    """All microbatches through the (interleaved) 1F1B schedule; `head` (see `actor.head`) gives log-probs and entropy.

    Gradients are left in the chunks unless `forward_only`.

    Collective over the pipeline and its tensor-parallel ranks. Returns the loss function's reports on the last stage,
    an empty list on the others.
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
            seq_length=max(microbatch.token_ids.numel() for microbatch in microbatches),  # only a hint: they vary
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
