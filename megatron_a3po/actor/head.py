"""Compute log-probs of the labels from the last stage's hidden states, in place of Megatron's own loss."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_a3po.parallel.vocab_parallel import linear_logprobs_and_entropy, logprobs_and_entropy
from megatron_a3po.types import Microbatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyHead:
    """An `output_processor` for GPTModel. Collective over `tp_group`, whatever the mask."""

    tp_group: torch.distributed.ProcessGroup
    vocab_size: int
    temperature: float
    output_layer: Literal["fused", "logits"]
    with_entropy: bool
    """whether the entropy carries gradient"""

    def __call__(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: Microbatch, **_: Any
    ) -> Tensor:
        """Return [2, tokens] float32: log-probs of the microbatch's labels, and entropy.

        hidden_states [tokens, 1, hidden size], or [tokens/tp, 1, hidden size] under sequence parallelism.
        """
        if self.output_layer == "logits":
            logits, _bias = output_layer(hidden_states, weight=output_weight)  # [tokens, 1, vocab/tp]
            return torch.stack(logprobs_and_entropy(logits.squeeze(1), context.labels, self.tp_group, **self._options))
        hidden = hidden_states
        if output_layer.sequence_parallel:
            # The gradient that comes back is whole on every rank: it must be split, not added up.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        # Compute only the rows of loss tokens. Keep at least one, so that no rank skips a collective.
        rows = context.loss_mask.nonzero()[:, 0]
        rows = rows if rows.numel() else rows.new_zeros(1)
        # Run the hooks, because the layer is not called: overlapped gathering may not have its weight yet.
        for hook in output_layer._forward_pre_hooks.values():
            hook(output_layer, ())
        weight = output_layer.weight if output_weight is None else output_weight
        values = linear_logprobs_and_entropy(
            hidden.squeeze(1)[rows], weight, context.labels[rows], self.tp_group, **self._options
        )
        empty = torch.zeros(2, len(context.labels), dtype=torch.float32, device=hidden.device)
        return empty.index_copy(1, rows, torch.stack(values))

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "vocab_size": self.vocab_size,
            "with_entropy": self.with_entropy,
        }
