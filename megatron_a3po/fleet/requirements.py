"""Whether a run can use a server as it was started."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_a3po.fleet.protocol import ServerInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """What a run asks of every server."""

    pause_mode: str = "retract"
    longest_request: int = 0
    """Tokens of a prompt and its response, at most"""


def unusable(url: str, info: ServerInfo, demands: Demands) -> str | None:
    """Why the run cannot use this server, with the remedy; None if it can."""
    problem = next(_problems(info, demands), None)
    return f"{url} {problem}" if problem is not None else None


def _problems(info: ServerInfo, demands: Demands) -> Iterator[str]:
    if demands.pause_mode == "in_place":
        yield from _in_place_problems(info)
    if info.max_req_input_len is not None and demands.longest_request > info.max_req_input_len:
        yield (
            f"has room for {info.max_req_input_len:,} tokens of a prompt and its response, and this run's "
            f"may have {demands.longest_request:,}; start the server with a larger --context-length or more memory "
            "(--mem-fraction-static), or lower `data.max_prompt_tokens`, `rollout.max_new_tokens` or "
            "`evaluation.max_new_tokens`"
        )
    if info.preferred_sampling_params:
        yield (
            "samples by preferred parameters of its own, of which the log-probs that it reports know nothing; start "
            "the server without --preferred-sampling-params"
        )
    if info.speculative_algorithm is not None:
        yield (
            "decodes speculatively, and would load published weights into its draft, too; start the server without "
            "--speculative-algorithm"
        )
    if info.tokenizer_worker_num > 1:
        yield (
            "has several tokenizer workers, of which one alone hears of a new version; start the server without "
            "--tokenizer-worker-num"
        )
    for argument, size in (("--pp-size", info.pp_size), ("--dp-size", info.dp_size)):
        if size > 1:
            yield f"runs with {argument} {size}, where SGLang receives no weights; use --tp-size, or more servers"


def _in_place_problems(info: ServerInfo) -> Iterator[str]:
    if not info.disable_radix_cache:
        yield (
            "has a radix cache, in which the keys and values of old weights would survive `publish.pause_mode: "
            "in_place`; start the server with --disable-radix-cache, or use `retract`"
        )
    if not info.disable_overlap_schedule:
        yield (
            "is a token ahead when it pauses in place, and would give that token the new version; start the server "
            "with --disable-overlap-schedule, or use `retract`"
        )
