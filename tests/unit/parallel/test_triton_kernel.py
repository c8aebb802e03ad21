"""The Triton kernel, run by Triton's interpreter on the CPU, against double precision."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.support.paths import ROOT


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
    tokens: int, columns: int, hidden_size: int, real: int, first: int, temperature: float
) -> None:
    arguments = [tokens, columns, hidden_size, real, first, temperature]
    process = subprocess.run(
        [sys.executable, __file__, json.dumps(arguments)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    differences = json.loads(process.stdout)
    assert differences.pop("slices") > 1
    assert all(difference <= 1e-5 for difference in differences.values()), differences


def _compare(
    tokens: int, columns: int, hidden_size: int, real: int, first: int, temperature: float
) -> dict[str, float]:
    """Largest differences of what the kernel's slices add up to."""
    from megatron_a3po.parallel.triton_logprobs import local_statistics

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    weight = torch.randn(columns, hidden_size, generator=generator)
    labels = torch.randint(0, first + real, (tokens,), generator=generator)
    labels[:2] = torch.tensor([first, first + real - 1])
    slices = local_statistics(
        hidden, weight, labels, first=first, num_real_columns=real, temperature=temperature
    ).double()

    real = min(real, columns)
    z = (hidden.double() @ weight.double().T)[:, :real] / temperature
    column = labels - first
    mine = (column >= 0) & (column < real)
    label_logit = torch.where(mine, z.gather(1, column.clamp(0, real - 1)[:, None])[:, 0], 0.0)
    maximum = z.amax(1)
    scale = (slices[:, 0] - maximum).exp()
    weighted = scale * (slices[:, 2] + (slices[:, 0] - maximum) * slices[:, 1])
    return {
        "slices": len(slices),
        "normaliser": _relative((scale * slices[:, 1]).sum(0), (z - maximum[:, None]).exp().sum(1)),
        "weighted": _relative(weighted.sum(0), ((z - maximum[:, None]).exp() * (z - maximum[:, None])).sum(1)),
        "label": (slices[:, 3].sum(0) - label_logit).abs().max().item(),
    }


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs() / (1.0 + expected.abs())).max().item()


def test_the_check_at_the_start_passes_with_a_right_kernel_and_finds_a_wrong_one() -> None:
    program = """
        import torch
        from megatron_a3po.errors import TrainingError
        from megatron_a3po.parallel import triton_logprobs
        triton_logprobs.check_kernel(torch.device("cpu"))
        right = triton_logprobs.local_statistics
        for row in range(4):
            def wrong(*tensors, **options):
                statistics = right(*tensors, **options)
                statistics[:, row] += 0.02
                return statistics
            triton_logprobs.local_statistics = wrong
            try:
                triton_logprobs.check_kernel(torch.device("cpu"))
            except TrainingError as error:
                assert "actor.output_layer: logits" in str(error)
            else:
                raise AssertionError(f"row {row} may be wrong")
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr


def test_a_token_whose_logits_overflow_is_not_finite_itself_and_leaves_its_neighbours_as_they_are() -> None:
    program = """
        import torch
        from megatron_a3po.parallel.triton_logprobs import local_statistics
        generator = torch.Generator().manual_seed(2)
        hidden, weight = torch.randn(5, 16, generator=generator), torch.randn(260, 16, generator=generator)
        labels, statistics = torch.arange(5), []
        for size in (1.0, 3e38):
            hidden[2] = size * hidden[2].sign()
            statistics.append(local_statistics(hidden, weight, labels, first=0, num_real_columns=260, temperature=1.0))
        clean, broken = statistics
        assert torch.equal(clean[..., labels != 2], broken[..., labels != 2])
        assert clean.isfinite().all() and not broken[:, 1, 2].isfinite().all()
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr


if __name__ == "__main__":
    print(json.dumps(_compare(*json.loads(sys.argv[1]))))
