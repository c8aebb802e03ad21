"""Log-probs and entropy of a vocab-parallel output layer, from which only four floats per token and rank are gathered.

Both functions process float32 logits in tiles. `logprobs_and_entropy` reads the tiles from given logits.
`linear_logprobs_and_entropy` computes them from hidden states, in the forward and again in the backward pass, so that
the logits never exist as a whole.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

_TILE_ELEMENTS = 1 << 19
"""Float32 logits of a tile on a CPU: 2 MiB, which stay in its cache"""
_TILE_ELEMENTS_CUDA = 1 << 26
"""On a GPU: 256 MiB, so large that the time to launch a kernel does not count"""
_TILE_ROWS = 1024
"""Tokens of a computed tile: enough for a matrix product at full speed"""
_EXCLUDED = -1e30
"""Logit of padded vocabulary. It is finite, since an infinity would make the entropy 0 * inf."""

_MakeTile = Callable[[slice, slice], Tensor]
"""(rows, columns) -> a fresh float32 tile of unscaled logits"""


def logprobs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each label and the entropy of each distribution, both [tokens] float32.

    Both are equal on every rank of `tp_group`; None means one rank. logits [tokens, vocab/tp]: this rank's columns, any
    float dtype, not modified. labels [tokens] int64: in the whole vocabulary, equal on all ranks. `vocab_size` is the
    vocabulary without padding; later columns are ignored. The entropy carries gradient only with `with_entropy`. The
    gradient of a token's logits is 0 if those of its log-prob and entropy are 0, even if the logits are not finite.

    Collectives: one all-gather of four floats per token in the forward pass, whatever the mask; none in the backward
    pass. Ranks are merged in their order, so that the result is the same on every rank and in every run.
    """
    logprobs, entropy = _FromLogits.apply(logits, labels, tp_group, temperature, vocab_size)
    return logprobs, entropy if with_entropy else entropy.detach()


def linear_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `logprobs_and_entropy` of hidden @ weight.T, one tile of logits at a time.

    hidden [tokens, hidden size]: equal on every rank. weight [vocab/tp, hidden size]: this rank's rows of the output
    layer or of the tied embedding. Both have one float dtype; products are accumulated in float32. A hidden state that
    is not finite makes the gradient of `weight` NaN (0 * NaN), as it does for the layers below.

    Collectives: one all-gather of four floats per token in the forward pass; one all-reduce of the gradient of `hidden`
    in the backward pass, which makes it whole on every rank. The backward pass computes the tiles again: four matrix
    products instead of three. In return, memory does not grow with the vocabulary, and with the tokens only by the
    gradient of `hidden`.
    """
    logprobs, entropy = _FromHidden.apply(hidden, weight, labels, tp_group, temperature, vocab_size)
    return logprobs, entropy if with_entropy else entropy.detach()


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, tp_group, temperature, vocab_size):  # type: ignore[no-untyped-def]
        head = _Head(logits.shape[-1], labels, tp_group, temperature, vocab_size)
        ctx.head = head
        ctx.tile_shape = max(1, _tile_elements(logits) // logits.shape[-1]), logits.shape[-1]
        logprobs, entropy, normaliser = head.over_all_ranks(head.statistics(_copy_of(logits), ctx.tile_shape))
        ctx.save_for_backward(logits, normaliser, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        logits, normaliser, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        gradients = ctx.head.backward(
            _copy_of(logits), ctx.tile_shape, normaliser, entropy, grad_logprobs, grad_entropy
        )
        for rows, columns, gradient in gradients:
            grad_logits[rows, columns] = gradient
        return grad_logits, None, None, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, tp_group, temperature, vocab_size):  # type: ignore[no-untyped-def]
        head = _Head(weight.shape[0], labels, tp_group, temperature, vocab_size)
        ctx.head, ctx.tp_group = head, tp_group
        ctx.tile_shape = _TILE_ROWS, max(1, _tile_elements(hidden) // _TILE_ROWS)
        if hidden.is_cuda:
            local = head.statistics_by_kernel(hidden, weight)
        else:
            local = head.statistics(_product_of(hidden, weight), ctx.tile_shape)
        logprobs, entropy, normaliser = head.over_all_ranks(local)
        ctx.save_for_backward(hidden, weight, normaliser, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, normaliser, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        gradients = ctx.head.backward(
            _product_of(hidden, weight), ctx.tile_shape, normaliser, entropy, grad_logprobs, grad_entropy
        )
        for rows, columns, gradient in gradients:
            grad_hidden[rows] += _product(gradient, weight[columns])
            grad_weight[columns] += _product(gradient.T, hidden[rows])
        if ctx.tp_group is not None:
            dist.all_reduce(grad_hidden, group=ctx.tp_group)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None, None


def _tile_elements(tensor: Tensor) -> int:
    return _TILE_ELEMENTS_CUDA if tensor.is_cuda else _TILE_ELEMENTS


def _copy_of(logits: Tensor) -> _MakeTile:
    return lambda rows, columns: logits[rows, columns].to(torch.float32, copy=True)


def _product_of(hidden: Tensor, weight: Tensor) -> _MakeTile:
    return lambda rows, columns: _product(hidden[rows], weight[columns].T)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices in float32. A GPU multiplies in the dtype of `right` and accumulates in float32."""
    if right.is_cuda and right.dtype != torch.float32:
        return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _Head:
    """One rank's part of the softmax over all ranks' columns, tile by tile in both directions."""

    def __init__(
        self,
        num_columns: int,
        labels: Tensor,
        tp_group: dist.ProcessGroup | None,
        temperature: float,
        vocab_size: int | None,
    ) -> None:
        self._num_columns = num_columns
        self._first = 0 if tp_group is None else tp_group.rank() * num_columns
        self._num_real_columns = num_columns if vocab_size is None else vocab_size - self._first
        self._labels = labels
        self._tp_group = tp_group
        self._temperature = temperature

    def statistics(self, make_tile: _MakeTile, tile_shape: tuple[int, int]) -> Tensor:
        """Return [4, tokens] over this rank's columns: maximum, the two sums of `_merge`, and the label's z or 0."""
        local = self._labels.new_zeros(4, len(self._labels), dtype=torch.float32)
        local[0] = _EXCLUDED
        for rows, columns in self._tiles(tile_shape):
            z = self._scale(make_tile(rows, columns), columns)
            column, mine = self._label_columns(rows, columns)
            local[3, rows] += torch.where(mine, z.gather(-1, column[:, None])[:, 0], 0.0)
            tile_maximum = z.amax(-1)
            exponentials = z.sub_(tile_maximum[:, None]).exp()
            tile = torch.stack([tile_maximum, exponentials.sum(-1), exponentials.mul_(z).sum(-1)])
            local[:3, rows] = _merge(torch.stack([local[:3, rows], tile]))
        return local

    def statistics_by_kernel(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the same as `statistics`, computed on a GPU without tiles in memory."""
        # Triton needs a driver to define kernels, so import this only where there is a GPU.
        from megatron_a3po.parallel.triton_logprobs import local_statistics

        slices = local_statistics(
            hidden,
            weight,
            self._labels,
            first=self._first,
            num_real_columns=self._num_real_columns,
            temperature=self._temperature,
        )
        return torch.cat([_merge(slices[:, :3]), slices[:, 3].sum(0)[None]])

    def over_all_ranks(self, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs and entropy [tokens], and [2, tokens] for the backward: maximum, log of the sum above it."""
        gathered = _all_gather(local, self._tp_group)
        maximum, normaliser, weighted = _merge(gathered[:, :3])

        # Subtract the maximum from the logits first: added to the normaliser, a large one would round it away.
        log_normaliser = normaliser.log()
        logprobs = gathered[:, 3].sum(0) - maximum - log_normaliser
        return logprobs, log_normaliser - weighted / normaliser, torch.stack([maximum, log_normaliser])

    def backward(
        self,
        make_tile: _MakeTile,
        tile_shape: tuple[int, int],
        normaliser: Tensor,
        entropy: Tensor,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (rows, columns, gradient of the unscaled logits in float32) tile by tile."""
        asked = torch.zeros_like(self._labels, dtype=torch.bool)
        if grad_logprobs is not None:
            asked |= grad_logprobs != 0
            grad_logprobs = grad_logprobs / self._temperature
        if grad_entropy is not None:
            asked |= grad_entropy != 0
            grad_entropy = grad_entropy / self._temperature
        # Clear rows by their bits: a factor of 0 would leave NaN where logits are not finite.
        bits = torch.where(asked, -1, 0).to(torch.int32)
        for rows, columns in self._tiles(tile_shape):
            z = self._scale(make_tile(rows, columns), columns)
            z -= normaliser[0, rows, None]
            z -= normaliser[1, rows, None]
            gradient = z.exp()
            if grad_logprobs is not None:
                column, mine = self._label_columns(rows, columns)
                on_label = torch.where(mine, grad_logprobs[rows], 0.0)[:, None]
            if grad_entropy is not None:
                # p * (-g_logprob - g_entropy * (log p + entropy))
                z.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None])
                gradient *= z if grad_logprobs is None else z.sub_(grad_logprobs[rows, None])
            elif grad_logprobs is not None:
                gradient *= -grad_logprobs[rows, None]
            if grad_logprobs is not None:
                gradient.scatter_add_(-1, column[:, None], on_label)
            gradient.view(torch.int32).bitwise_and_(bits[rows, None])
            yield rows, columns, gradient

    def _tiles(self, shape: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
        rows, columns = shape
        for row in range(0, len(self._labels), rows):
            for column in range(0, self._num_columns, columns):
                yield slice(row, row + rows), slice(column, min(column + columns, self._num_columns))

    def _scale(self, z: Tensor, columns: slice) -> Tensor:
        """Divide by the temperature and exclude padded vocabulary, in place."""
        z.div_(self._temperature)
        if columns.stop > self._num_real_columns:
            z[:, max(self._num_real_columns - columns.start, 0) :] = _EXCLUDED
        return z

    def _label_columns(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Return each label's column in the tile, and whether it is there; elsewhere the column is any."""
        column = self._labels[rows] - (self._first + columns.start)
        mine = (column >= 0) & (column < columns.stop - columns.start)
        return torch.where(mine, column, 0), mine


def _all_gather(local: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Gather [4, tokens] of every rank as [ranks, 4, tokens]."""
    if tp_group is None or tp_group.size() == 1:
        return local[None]
    gathered = [torch.empty_like(local) for _ in range(tp_group.size())]
    dist.all_gather(gathered, local, group=tp_group)
    return torch.stack(gathered)


def _merge(parts: Tensor) -> Tensor:
    """Merge [parts, 3, tokens] into [3, tokens]: maximum, sum of e^(z - maximum), that sum weighted by z - maximum."""
    maxima, normalisers, weighted = parts.unbind(1)
    maximum = maxima.amax(0)
    shift = maxima - maximum
    scale = shift.exp()
    return torch.stack([maximum, (scale * normalisers).sum(0), (scale * (weighted + shift * normalisers)).sum(0)])
