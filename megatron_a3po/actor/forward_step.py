"""One microbatch through Megatron's pipeline schedule. The only place that knows Megatron's own divisions.

Megatron divides what a loss function returns by the number of microbatches, unless it returns three values: the sum
over tokens, the number of tokens, and a report. Then gradients are divided once, by the tokens of the whole batch over
all microbatches and data-parallel ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_a3po.parallel.vocab_parallel import logprobs_and_entropy
from megatron_a3po.types import Microbatch

LossFunction = Callable[[Tensor, Tensor, Microbatch], tuple[Tensor, Any]]
"""(log-probs of the labels, entropy, microbatch), tensors [tokens] float32 -> (sum of losses, report)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyHead:
    """Log-probs of the labels from the last stage's hidden states, in place of Megatron's own loss."""

    tp_group: torch.distributed.ProcessGroup
    vocab_size: int
    temperature: float

    def __call__(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: Tensor, **_: Any
    ) -> Tensor:
        """[2, tokens] float32: log-probs of the labels `context`, and entropy (without gradient)."""
        logits, _bias = output_layer(hidden_states, weight=output_weight)  # [tokens, 1, vocab/tp]
        logprobs, entropy = logprobs_and_entropy(
            logits.squeeze(1), context, self.tp_group, temperature=self.temperature, vocab_size=self.vocab_size
        )
        return torch.stack([logprobs, entropy])


def run_microbatches(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    head: PolicyHead,
    loss_function: LossFunction,
    *,
    forward_only: bool,
) -> list[Any]:
    """All microbatches through the 1F1B schedule; gradients are left in the chunks unless `forward_only`.

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
            output_processor_context=microbatch.labels,
        )

        def loss(output: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss_sum, report = loss_function(output[0], output[1], microbatch)
            return loss_sum, microbatch.loss_mask.sum().int(), report

        return output, loss

    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=max(microbatch.token_ids.numel() for microbatch in microbatches),
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
