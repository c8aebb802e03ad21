"""What a rollout server answers becomes a trajectory, or an error: never a guess."""

import copy
from typing import Any

import pytest
import torch

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.protocol import GenerateResponse, generate_request, to_trajectory
from megatron_a3po.types import FinishReason, Trajectory
from tests.support.scripted_server import response

GOOD: dict[str, Any] = response(num_tokens=4, versions=["6", "7"], finish_reason="stop")


def convert(answer: dict[str, Any]) -> Trajectory:
    parsed = GenerateResponse.model_validate(answer)
    return to_trajectory(parsed, prompt_id="task/0/3", group_id=5, prompt_ids=(9, 8, 7), reward=1.0)


def changed(**meta_info: Any) -> dict[str, Any]:
    """The good answer with other metadata; None removes a key."""
    answer = copy.deepcopy(GOOD)
    answer["meta_info"] |= meta_info
    answer["meta_info"] = {key: value for key, value in answer["meta_info"].items() if value is not None}
    return answer


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def test_a_good_answer_keeps_ids_logprobs_and_the_servers_version_of_every_token() -> None:
    trajectory = convert(GOOD)

    assert trajectory.token_ids.tolist() == [9, 8, 7, *GOOD["output_ids"]]
    assert trajectory.token_ids.dtype == torch.int64
    assert (trajectory.prompt_length, trajectory.response_length) == (3, 4)
    assert trajectory.behaviour_logprobs.tolist() == [-0.5] * 4
    assert trajectory.behaviour_logprobs.dtype == torch.float32
    assert trajectory.weight_versions.tolist() == [6, 6, 7, 7]
    assert trajectory.weight_versions.dtype == torch.int64
    assert trajectory.finish_reason is FinishReason.STOP
    assert (trajectory.prompt_id, trajectory.group_id, trajectory.reward) == ("task/0/3", 5, 1.0)


LOGPROBS = GOOD["meta_info"]["output_token_logprobs"]
OTHER_LOGPROBS = {
    "none": None,
    "one short": LOGPROBS[:3],
    "other order": LOGPROBS[::-1],
    "one more": [*LOGPROBS, [-0.5, 1, None]],
}


@pytest.mark.parametrize("case", OTHER_LOGPROBS)
def test_logprobs_that_do_not_belong_to_the_output_tokens_are_an_error_naming_the_prompt(case: str) -> None:
    with pytest.raises(RolloutError, match=r"task/0/3.*4 output tokens"):
        convert(changed(output_token_logprobs=OTHER_LOGPROBS[case]))


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_a_logprob_that_is_not_finite_is_left_to_the_loss_which_drops_and_counts_it(value: float | None) -> None:
    first, *others = LOGPROBS
    logprobs = convert(changed(output_token_logprobs=[[value, *first[1:]], *others])).behaviour_logprobs
    assert logprobs.isfinite().tolist() == [False, True, True, True]


OTHER_SPANS = {
    "no spans": None,
    "end missing": [span("6", 0, 3)],
    "start missing": [span("6", 1, 4)],
    "gap": [span("6", 0, 1), span("7", 2, 4)],
    "overlap": [span("6", 0, 3), span("7", 2, 4)],
    "disorder": [span("7", 2, 4), span("6", 0, 2)],
    "too many": [span("6", 0, 4), span("7", 4, 6)],
    "backwards": [span("6", 0, 4), span("7", 4, 3)],
} | {f"label {label!r}": [span(label, 0, 4)] for label in ("default", "", "-1", "7.0", "²")}


@pytest.mark.parametrize("case", OTHER_SPANS)
def test_version_spans_that_do_not_cover_every_token_with_a_published_version_are_an_error(case: str) -> None:
    with pytest.raises(RolloutError, match=r"task/0/3.*version"):
        convert(changed(weight_versions=OTHER_SPANS[case]))


def test_an_empty_response_has_no_logprobs_and_no_versions() -> None:
    trajectory = convert({"output_ids": [], "meta_info": {"finish_reason": {"type": "stop", "matched": 2}}})

    assert trajectory.response_length == 0
    assert trajectory.weight_versions.dtype == torch.int64


def test_a_request_asks_for_logprobs_of_the_whole_distribution_and_carries_sampling_settings_and_priority() -> None:
    request = generate_request([1, 2], num_samples=8, max_new_tokens=16, temperature=0.7, priority=-3)

    assert request == {
        "input_ids": [1, 2],
        "sampling_params": {
            **{"temperature": 0.7, "max_new_tokens": 16, "n": 8, "min_new_tokens": 0, "ignore_eos": False},
            **{"top_p": 1.0, "top_k": -1, "min_p": 0.0},
            **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        },
        "return_logprob": True,
        "priority": -3,
    }
