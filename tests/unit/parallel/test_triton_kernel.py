"""The Triton kernel, run by Triton's interpreter on the CPU, against double precision."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_a3po.errors import TrainingError
from tests.support.own_process import DEADLINE_SECONDS


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process for all tests here: Triton decides at its import whether it interprets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
            yield process


@pytest.mark.parametrize(
    ("tokens", "columns", "hidden_size", "real", "first", "temperature"),
    [
        (70, 300, 40, 259, 0, 0.7),
        (5, 130, 64, 130, 130, 1.0),
        (3, 260, 16, 1, 520, 2.0),
        (40, 192, 40, 384, 0, 1.0),  # of two ranks the first, whose last block reaches into the columns of the second
    ],
)
def test_slices_of_the_vocabulary_merge_to_the_softmax(
    interpreter: ProcessPoolExecutor,
    tokens: int,
    columns: int,
    hidden_size: int,
    real: int,
    first: int,
    temperature: float,
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    weight = torch.randn(columns, hidden_size, generator=generator)
    labels = torch.randint(0, first + real, (tokens,), generator=generator)
    labels[:2] = torch.tensor([first, first + real - 1])
    options = {"first": first, "num_real_columns": real, "temperature": temperature}
    slices = statistics(interpreter, hidden, weight, labels, **options).double()

    real = min(real, columns)
    z = (hidden.double() @ weight.double().T)[:, :real] / temperature
    column = labels - first
    mine = (column >= 0) & (column < real)
    maximum = z.amax(1)
    below = z - maximum[:, None]
    scale = (slices[:, 0] - maximum).exp()
    weighted = scale * (slices[:, 2] + (slices[:, 0] - maximum) * slices[:, 1])

    assert len(slices) > 1
    torch.testing.assert_close((scale * slices[:, 1]).sum(0), below.exp().sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weighted.sum(0), (below.exp() * below).sum(1), rtol=1e-5, atol=1e-5)
    label_logit = torch.where(mine, z.gather(1, column.clamp(0, real - 1)[:, None])[:, 0], 0.0)
    torch.testing.assert_close(slices[:, 3].sum(0), label_logit, rtol=0.0, atol=1e-5)


def test_a_token_whose_logits_overflow_is_not_finite_itself_and_leaves_its_neighbours_as_they_are(
    interpreter: ProcessPoolExecutor,
) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(5, 16, generator=generator), torch.randn(260, 16, generator=generator)
    labels, found = torch.arange(5), []
    for size in (1.0, 3e38):
        hidden[2] = size * hidden[2].sign()
        found.append(statistics(interpreter, hidden, weight, labels, first=0, num_real_columns=260, temperature=1.0))
    clean, broken = found

    assert torch.equal(clean[..., labels != 2], broken[..., labels != 2])
    assert bool(clean.isfinite().all()) and not bool(broken[:, 1, 2].isfinite().all())


def test_the_check_at_the_start_passes_with_a_right_kernel_and_finds_a_wrong_one(
    interpreter: ProcessPoolExecutor,
) -> None:
    right, *wrong = interpreter.submit(messages_of_the_check).result(DEADLINE_SECONDS)

    assert right == ""
    assert len(wrong) == 4 and all("actor.output_layer: logits" in message for message in wrong)


def statistics(interpreter: ProcessPoolExecutor, *tensors: Tensor, **options: Any) -> Tensor:
    """Return what the kernel computes. As lists: a tensor would be shared by a file descriptor."""
    lists = interpreter.submit(_statistics, [tensor.tolist() for tensor in tensors], options).result(DEADLINE_SECONDS)
    return torch.tensor(lists)


def _statistics(tensors: list[Any], options: dict[str, Any]) -> Any:
    from megatron_a3po.parallel.triton_logprobs import local_statistics

    return local_statistics(*map(torch.tensor, tensors), **options).tolist()


def messages_of_the_check() -> list[str]:
    """Return the refusals of the kernel as it is ("" if there is none), and with an error in each row of its result."""
    from megatron_a3po.parallel import triton_logprobs

    kernel, computed = triton_logprobs.local_statistics, {}

    def with_error(row: int, size: float) -> Any:
        def once(*tensors: Tensor, **options: Any) -> Tensor:
            key = tuple(options.values())
            if key not in computed:
                computed[key] = kernel(*tensors, **options)
            changed = computed[key].clone()
            changed[:, row] += size
            return changed

        return once

    messages = []
    for row, size in [(0, 0.0), *((row, 0.02) for row in range(4))]:
        triton_logprobs.local_statistics = with_error(row, size)
        try:
            triton_logprobs.check_kernel(torch.device("cpu"))
            messages.append("")
        except TrainingError as error:
            messages.append(str(error))
    triton_logprobs.local_statistics = kernel
    return messages
