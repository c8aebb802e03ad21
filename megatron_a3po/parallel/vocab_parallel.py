"""Log-probs and entropy of vocab-parallel logits. What is gathered is four floats per token and rank."""

import torch
import torch.distributed as dist
from torch import Tensor

_TILE_ELEMENTS = 1 << 22
"""Logits converted to float32 at a time: 16 MiB per temporary."""
_EXCLUDED = -1e30
"""Stands for padded vocabulary. Finite, since an infinity would make the entropy 0 * inf."""


def logprobs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each label, entropy of each distribution), both [tokens] float32, equal on every rank of `tp_group`.

    logits [tokens, vocab/tp], this rank's columns, any float dtype, not modified. labels [tokens] int64 in the whole
    vocabulary, equal on all ranks. `vocab_size`: the vocabulary without its padding; columns from there on count for
    nothing. `tp_group` None: one rank. The entropy carries gradient only with `with_entropy`.

    Collectives: one all-gather of four floats per token, whatever the mask; none in the backward. The merge follows the
    rank order, so that the result is the same on every rank and in every run.
    """
    logprobs, entropy = _LogprobsAndEntropy.apply(logits, labels, tp_group, temperature, vocab_size)
    return logprobs, entropy if with_entropy else entropy.detach()


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, tp_group, temperature, vocab_size):  # type: ignore[no-untyped-def]
        first = tp_group.rank() * logits.shape[-1] if tp_group is not None else 0
        ctx.temperature, ctx.first = temperature, first
        ctx.num_columns = logits.shape[-1] if vocab_size is None else vocab_size - first

        local = torch.empty(4, logits.shape[0], dtype=torch.float32, device=logits.device)
        for rows in _tiles(logits):
            z = _scaled(logits[rows], temperature, ctx.num_columns)
            column, mine = _local_columns(labels[rows], first, logits.shape[-1])
            local[3, rows] = torch.where(mine, z.gather(-1, column[:, None])[:, 0], 0.0)
            local[0, rows] = z.amax(-1)
            z -= local[0, rows, None]
            exponentials = z.exp()
            local[1, rows] = exponentials.sum(-1)
            local[2, rows] = exponentials.mul_(z).sum(-1)
        maximum, normaliser, weighted, label_logit = _merge(_all_gather(local, tp_group))

        # The maximum comes off the logits first and is never added to the normaliser: large ones would round it away.
        log_normaliser = normaliser.log()
        entropy = log_normaliser - weighted / normaliser
        ctx.save_for_backward(logits, labels, maximum, log_normaliser, entropy)
        ctx.set_materialize_grads(False)
        return label_logit - maximum - log_normaliser, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        logits, labels, maximum, log_normaliser, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _tiles(logits):
            z = _scaled(logits[rows], ctx.temperature, ctx.num_columns)
            z -= maximum[rows, None]
            z -= log_normaliser[rows, None]
            probabilities = z.exp()
            grad = torch.zeros_like(z)
            if grad_entropy is not None:
                grad -= grad_entropy[rows, None] * probabilities * (z + entropy[rows, None])
            if grad_logprobs is not None:
                grad -= grad_logprobs[rows, None] * probabilities
                column, mine = _local_columns(labels[rows], ctx.first, logits.shape[-1])
                grad.scatter_add_(-1, column[:, None], torch.where(mine, grad_logprobs[rows], 0.0)[:, None])
            grad_logits[rows] = grad.div_(ctx.temperature)
        return grad_logits, None, None, None, None


def _tiles(logits: Tensor) -> list[slice]:
    step = max(1, _TILE_ELEMENTS // max(1, logits.shape[-1]))
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def _scaled(logits: Tensor, temperature: float, num_columns: int) -> Tensor:
    """A float32 copy of a tile, divided by the temperature, with the padded vocabulary excluded."""
    z = logits.to(torch.float32, copy=True).div_(temperature)
    if num_columns < z.shape[-1]:
        z[:, max(num_columns, 0) :] = _EXCLUDED
    return z


def _local_columns(labels: Tensor, first: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Column of each label on this rank (some column, where it is elsewhere), and whether it is here."""
    column = labels - first
    mine = (column >= 0) & (column < num_columns)
    return torch.where(mine, column, 0), mine


def _all_gather(local: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """[4, tokens] of every rank, as [ranks, 4, tokens]."""
    if tp_group is None or tp_group.size() == 1:
        return local[None]
    gathered = [torch.empty_like(local) for _ in range(tp_group.size())]
    dist.all_gather(gathered, local, group=tp_group)
    return torch.stack(gathered)


def _merge(gathered: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximum, sum of e^(z - maximum), the same sum weighted by z - maximum, and the label's z, over the vocabulary."""
    maxima, normalisers, weighted, label_logits = gathered.unbind(1)
    maximum = maxima.amax(0)
    shift = maxima - maximum
    scale = shift.exp()
    return maximum, (scale * normalisers).sum(0), (scale * (weighted + shift * normalisers)).sum(0), label_logits.sum(0)
