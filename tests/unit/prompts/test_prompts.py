"""Prompts: which words are trained on, which are held out, and in which order they come."""

from typing import Any

import pytest

from megatron_a3po.errors import DataError
from megatron_a3po.prompts.encoder import PromptEncoder
from megatron_a3po.prompts.prompts import PromptSet
from megatron_a3po.prompts.tasks import _select, load_task
from tests.unit.prompts.conftest import ByteTokenizer

INSTRUCTION = "Spell this word backward (example: sun -> nus): "
DATA: dict[str, Any] = {
    "task": "spell_backward",
    "task_options": {"min_word_len": 6, "max_word_len": 6},
    "size": 300,
    "seed": 7,
    "prompt_pattern": r".*: [a-z]{6}",
    "num_held_out": 40,
}


def load(**changes: Any) -> PromptSet:
    return load_task(**(DATA | changes), encoder=PromptEncoder(ByteTokenizer()))


def questions(prompts: PromptSet, indices: range) -> list[str]:
    return [bytes(prompts.training_prompt(i).token_ids).decode() for i in indices]


def test_the_question_is_encoded_unchanged() -> None:
    ovated = load().held_out[0]
    assert (ovated.prompt_id, ovated.answer) == ("spell_backward/7/0", "detavo")
    assert bytes(ovated.token_ids).decode() == ovated.question == INSTRUCTION + "ovated"


def test_prompts_that_are_too_long_are_left_out_and_a_foreign_tokenizer_is_refused() -> None:
    longest = len(INSTRUCTION) + 6

    assert len(load(prompt_pattern=None, max_prompt_tokens=longest)) == len(load(prompt_pattern=None))
    with pytest.raises(DataError, match=r" 0 of them .*max_prompt_tokens = 20"):
        load(max_prompt_tokens=20)
    with pytest.raises(DataError, match=r"122.* 120"):
        load(vocab_size=120)


def test_every_epoch_holds_each_training_prompt_once_in_an_order_of_its_own_that_the_settings_give() -> None:
    prompts, again = load(), load()
    size = len(prompts)
    epochs = [questions(prompts, range(i * size, (i + 1) * size)) for i in range(3)]

    assert len(set(epochs[0])) == size
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    stream = [question for epoch in epochs for question in epoch]
    assert questions(again, range(3 * size - 1, -1, -1)) == stream[::-1], "in whatever order it is asked for"
    with pytest.raises(IndexError, match="-1"):
        prompts.training_prompt(-1)


def test_a_seed_chooses_the_prompts_and_an_order_seed_their_order() -> None:
    first, other_seed, other_order = load(), load(seed=8), load(order_seed=1)
    stream, other_prompts, reordered = (questions(each, range(len(each))) for each in (first, other_seed, other_order))

    assert set(stream) != set(other_prompts)
    assert stream != reordered and sorted(stream) == sorted(reordered)
    assert first.held_out[0].prompt_id == other_order.held_out[0].prompt_id


def test_held_out_prompts_are_the_first_ones_and_never_trained_on() -> None:
    prompts, everything = load(), load(num_held_out=0)
    trained_on = set(questions(prompts, range(len(prompts))))
    held_out = [bytes(prompt.token_ids).decode() for prompt in prompts.held_out]
    numbers = [int(prompt.prompt_id.split("/")[-1]) for prompt in prompts.held_out]

    assert len(held_out) == 40 and numbers == sorted(numbers)
    assert trained_on.isdisjoint(held_out)
    assert trained_on | set(held_out) == set(questions(everything, range(len(everything))))


def test_only_questions_that_match_the_whole_pattern_are_kept() -> None:
    prompts = load(prompt_pattern=r".*: [a-m][a-z]*", num_held_out=0)

    words = [question[len(INSTRUCTION) :] for question in questions(prompts, range(len(prompts)))]

    assert 0 < len(words) < 300
    assert all("a" <= word[0] <= "m" and word == word.lower() for word in words)
    with pytest.raises(DataError):
        load(prompt_pattern=r"Spell this word")  # matches every beginning, no whole question


def test_a_question_that_differs_only_in_case_is_a_duplicate_and_the_first_one_stays() -> None:
    entries = [{"question": question} for question in ("Anna", "otto", "anna", "OTTO", "otto", "eve")]

    assert list(_select(enumerate(entries), None)) == [0, 1, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "spel_backward"}, r"data\.task = 'spel_backward'.*spell_backward"),
        ({"task_options": {"min_word": 6}}, r"data\.task_options.*'min_word'.*min_word_len"),
        ({"task_options": {"seed": 3}}, r"data\.task_options.*'seed'"),
        ({"task_options": {"min_word_len": 9, "max_word_len": 3}}, r"data\.task_options.*max_word_len"),
        ({"prompt_pattern": "("}, r"data\.prompt_pattern = '\('"),
        ({"size": 0}, r"data\.size = 0"),
        ({"seed": -1}, r"data\.seed = -1"),
        ({"num_held_out": -1}, r"data\.num_held_out = -1"),
    ],
)
def test_a_mistake_in_the_settings_is_an_error_that_names_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(**changes)


def test_too_few_prompts_are_an_error_with_counts_and_a_remedy() -> None:
    num_prompts = len(load(num_held_out=0))

    assert len(load(num_held_out=num_prompts - 1)) == 1
    with pytest.raises(DataError, match=rf"{num_prompts} .*data\.num_held_out = {num_prompts} .*raise data\.size"):
        load(num_held_out=num_prompts)
    with pytest.raises(DataError, match="gives 0 different prompts"):
        load(prompt_pattern="no question is like this", num_held_out=0)


def test_the_fingerprint_tells_other_training_prompts() -> None:
    prompts = load()
    others = [load(num_held_out=41), load(seed=8), load(prompt_pattern=r".*: [a-m].*")]
    assert load().fingerprint == prompts.fingerprint
    assert len({prompts.fingerprint, *(other.fingerprint for other in others)}) == 4
