"""What has changed in a buffer, against the bits themselves."""

import pytest
import torch
from torch import Tensor

from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.weights.transports.delta.encoding import Delta, apply_delta, as_words, make_delta


def random_bytes(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def changed(words: Tensor, density: float, seed: int) -> Tensor:
    """With other bits in that share of the words."""
    generator = torch.Generator().manual_seed(seed)
    where = torch.rand(words.shape, generator=generator) < density
    other = words.bitwise_xor(torch.randint(1, 120, words.shape, generator=generator).to(words.dtype))
    return torch.where(where, other, words)


def all_bf16_patterns() -> Tensor:
    return torch.arange(1 << 16).to(torch.int16)


@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.3, 0.6])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("num_words", [1, 255, 256, 257, 5000])
def test_a_delta_makes_the_new_bits_of_the_former_ones(density: float, itemsize: int, num_words: int) -> None:
    dtype = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    spec = TensorSpec(name="w", dtype=dtype, shape=(num_words,))
    buffer = random_bytes(num_words * itemsize, seed=1)
    former = as_words(buffer, [spec])
    new = changed(former, density, seed=2)
    number, delta = make_delta(former, new)
    assert number == int((former != new).sum())
    if delta is None:
        assert 2 * -(-num_words // 256) + number * (1 + itemsize) >= num_words * itemsize
    else:
        apply_delta(delta, buffer)
        assert torch.equal(former, new)


def test_every_bf16_pattern_becomes_any_other_and_a_nan_that_stays_is_no_change() -> None:
    patterns = all_bf16_patterns()
    assert patterns.view(torch.bfloat16).isnan().sum() > 200
    assert make_delta(patterns, patterns.clone())[0] == 0
    for step in (1, 0x8000 - 1, 12345):  # among them other payloads of a NaN
        new = patterns.clone()
        new[::3] += step
        number, delta = make_delta(patterns, new)
        result = patterns.clone()
        assert delta is not None and number == len(new[::3])
        apply_delta(delta, result.view(torch.uint8))
        assert result.numpy().tobytes() == new.numpy().tobytes()


def test_the_sign_of_a_zero_is_a_change() -> None:
    zeros = torch.zeros(1000, dtype=torch.bfloat16)
    new = zeros.clone()
    new[77] = -0.0
    assert torch.equal(zeros, new)
    assert make_delta(zeros.view(torch.int16), new.view(torch.int16))[0] == 1


def test_positions_are_right_beyond_what_is_worked_on_at_once() -> None:
    former = torch.zeros((1 << 24) + 513, dtype=torch.uint8)
    new = former.clone()
    places = torch.tensor([0, 255, 256, (1 << 24) - 1, 1 << 24, (1 << 24) + 512])
    new[places] = torch.arange(1, 7, dtype=torch.uint8)
    number, delta = make_delta(former, new)
    assert number == 6 and delta is not None
    apply_delta(delta, former)
    assert torch.equal(former, new)


def test_a_delta_of_another_buffer_is_refused() -> None:
    former = torch.zeros(700, dtype=torch.int16)
    new = former.clone()
    new[699] = 1
    _, delta = make_delta(former, new)
    assert delta is not None
    for size in (699, 256, 1400):  # the last word is beyond the end; other numbers of blocks
        with pytest.raises(ValueError):
            apply_delta(delta, torch.zeros(size, dtype=torch.int16).view(torch.uint8))
    with pytest.raises(ValueError):
        apply_delta(
            Delta(counts=delta.counts, offsets=delta.offsets, values=delta.values[:0]), former.view(torch.uint8)
        )
