"""The HTTP interface of SGLang 0.5.23 as data: requests and answers."""

import math
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_a3po.errors import RolloutError
from megatron_a3po.types import FinishReason, Trajectory

_UNFINISHED = "unfinished "
_WHOLE_DISTRIBUTION = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
}
"""Servers report log-probs of the whole distribution, so tokens must be drawn from it, whatever a server prefers."""


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class FinishReasonInfo(_Answer):
    """Why a response ended."""

    type: FinishReason
    message: str | None = None


class VersionSpan(_Answer):
    """Output tokens [start, end) were sampled by weights of this version."""

    version: str
    start: int
    end: int


class MetaInfo(_Answer):
    """What a server says about one response."""

    # Metadata of a request that was aborted while queued lacks most keys, so all of them have a default.
    finish_reason: FinishReasonInfo
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[VersionSpan] = []


class GenerateResponse(_Answer):
    """One response."""

    output_ids: list[int] = []
    meta_info: MetaInfo


class ServerInfo(_Answer):
    """How a server was started, from `/server_info`."""

    model_path: str = ""
    quantization: str | None = None
    """As asked for on the command line; None: as the model's folder says"""
    tp_size: int = 1
    enable_priority_scheduling: bool = False
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    max_req_input_len: int | None = None
    preferred_sampling_params: Any = None
    speculative_algorithm: str | None = None
    tokenizer_worker_num: int = 1
    pp_size: int = 1
    dp_size: int = 1
    startup_time: Any = None
    """How long the parts of the start took, to the microsecond, so that every process has other figures"""


class ModelInfo(_Answer):
    """Which weights a server holds, from `/model_info`."""

    weight_version: str = ""
    load_format: str | None = None
    """"dummy": the server was started with random weights and has read no others from files since."""


class RankChecksums(_Answer):
    """The checksums of one rank of a server."""

    checksums: dict[str, str]
    """By the server's own names of its tensors"""


class WeightChecksums(_Answer):
    """The answer of `/weights_checker`, without `parallelism_info`, which differs between servers."""

    ranks: Annotated[list[RankChecksums], Field(min_length=1)]


def parse_answer[Model: BaseModel](model: type[Model], answer: Any, source: str) -> Model:
    """Validate an answer. Raises RolloutError, which names the `source`."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        raise RolloutError(f"{source} answered what is no {model.__name__}: {error}") from None


def version_label(version: int | str, run: str | None) -> str:
    """Return the label of a version: its number, and the run that published it, if it has a name."""
    return f"{version} of {run}" if run is not None else str(version)


def unfinished_label(version: int | str, run: str | None) -> str:
    """Return the label of a server from the first part of a version to its last. No token is sampled under it."""
    return _UNFINISHED + version_label(version, run)


def is_unfinished(label: str) -> bool:
    """Return whether the label says that the server may hold parts of two versions."""
    return label.startswith(_UNFINISHED)


def label_request(label: str) -> dict[str, Any]:
    """Return the body of `/update_weight_version`, which by default would abort all requests."""
    return {"new_version": label, "abort_all_requests": False}


def labelled_version(label: str) -> int | None:
    """Return the version number of a label; None for a label that no run has given."""
    number, _, _ = label.partition(" of ")
    return int(number) if number.isdecimal() else None


def generate_request(
    token_ids: list[int] | list[list[int]],
    *,
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    priority: int,
) -> dict[str, Any]:
    """Return the body of `/generate`. A list of prompts gives a list of responses; so does `num_samples` above 1."""
    sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens, "n": num_samples, **_WHOLE_DISTRIBUTION}
    return {"input_ids": token_ids, "sampling_params": sampling, "return_logprob": True, "priority": priority}


def to_trajectory(
    response: GenerateResponse, *, prompt_id: str, group_id: int, prompt_ids: tuple[int, ...], reward: float
) -> Trajectory:
    """Return the response as a trajectory, after a check that ids, log-probs and versions cover the same tokens.

    A log-prob that is not finite (null in JSON) is for the loss to drop and count. Raises RolloutError.
    """
    meta, output_ids = response.meta_info, response.output_ids
    logprobs = [math.nan if logprob is None else logprob for logprob, _, _ in meta.output_token_logprobs]
    if [token for _, token, _ in meta.output_token_logprobs] != output_ids:
        raise RolloutError(
            f"prompt {prompt_id}: the server's log-probs do not belong to its {len(output_ids)} output tokens"
        )
    return Trajectory(
        prompt_id=prompt_id,
        group_id=group_id,
        token_ids=torch.tensor([*prompt_ids, *output_ids], dtype=torch.int64),
        prompt_length=len(prompt_ids),
        behaviour_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        weight_versions=torch.tensor(_versions(meta.weight_versions, len(output_ids), prompt_id), dtype=torch.int64),
        reward=reward,
        finish_reason=meta.finish_reason.type,
    )


def _versions(spans: list[VersionSpan], num_tokens: int, prompt_id: str) -> list[int]:
    versions: list[int] = []
    for span in spans:
        version = labelled_version(span.version)
        if span.start != len(versions) or span.end < span.start or version is None:
            raise RolloutError(
                f"prompt {prompt_id}: weight version span {span} does not continue after token {len(versions)}; every "
                "token must carry a published version"
            )
        versions += [version] * (span.end - span.start)
    if len(versions) != num_tokens:
        raise RolloutError(f"prompt {prompt_id}: weight versions for {len(versions)} of {num_tokens} tokens")
    return versions
