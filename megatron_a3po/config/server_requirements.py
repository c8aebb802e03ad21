"""What a run asks of an SGLang server, in one table.

It is checked of `rollout.server_arguments` before anything starts, and of every running server by what `/server_info`
says of it; docs/servers.md shows it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """One row: command-line arguments of SGLang 0.5.23, and what is wrong with a server that has them, or lacks them.

    `problem` and `remedy` finish the sentence "the server ...". In them {value} is what the server says of itself and
    {longest_request} what the run needs.
    """

    arguments: tuple[str, ...]
    """The first one is the name that messages use; the others mean the same to SGLang."""
    problem: str
    remedy: str
    in_place_only: bool = False
    """The server must have the argument, with `publish.pause_mode: in_place` only; otherwise it must not have it."""
    field: str | None = None
    """Of `/server_info`; None: a running server does not tell."""
    is_broken: Callable[[Any, int], bool] = lambda value, longest_request: bool(value)
    """Takes the value of the field, and the tokens of the longest prompt and response of the run."""
    configured_remedy: str = "leave it out"
    """What to do about the argument in `rollout.server_arguments`"""


def _is_several(value: Any, longest_request: int) -> bool:
    return bool(value > 1)


def _is_off(value: Any, longest_request: int) -> bool:
    return not value


def _is_too_small(value: Any, longest_request: int) -> bool:
    return value is not None and longest_request > value


_SIZE = "runs with {argument} {value}, where SGLang receives no weights"
_SIZE_REMEDY = "use --tp-size, or more servers"
_CONFIGURED_SIZE_REMEDY = (
    "SGLang receives no weights in this layout; use more servers, or `rollout.server_tensor_parallel`"
)
REQUIREMENTS = (
    Requirement(
        arguments=("--disable-radix-cache",),
        problem="keeps the keys and values of old weights in its radix cache",
        remedy="start the server with --disable-radix-cache, or use `publish.pause_mode: retract`",
        in_place_only=True,
        field="disable_radix_cache",
        is_broken=_is_off,
    ),
    Requirement(
        arguments=("--disable-overlap-schedule",),
        problem="is a token ahead when it pauses, and gives a token of the old weights the new version",
        remedy="start the server with --disable-overlap-schedule, or use `publish.pause_mode: retract`",
        in_place_only=True,
        field="disable_overlap_schedule",
        is_broken=_is_off,
    ),
    Requirement(
        arguments=(),
        problem="has room for {value:,} tokens of a prompt and its response, and this run's may have "
        "{longest_request:,}",
        remedy="start the server with a larger --context-length or more memory (--mem-fraction-static), or lower "
        "`data.max_prompt_tokens`, `rollout.max_new_tokens` or `evaluation.max_new_tokens`",
        field="max_req_input_len",
        is_broken=_is_too_small,
    ),
    Requirement(
        arguments=("--preferred-sampling-params",),
        problem="samples by parameters of its own, of which the log-probs that it reports know nothing",
        remedy="start the server without --preferred-sampling-params",
        field="preferred_sampling_params",
    ),
    Requirement(
        arguments=("--speculative-algorithm",),
        problem="decodes speculatively, and would load published weights into its draft model, too",
        remedy="start the server without --speculative-algorithm",
        field="speculative_algorithm",
    ),
    Requirement(
        arguments=("--tokenizer-worker-num",),
        problem="has several tokenizer workers, of which only one hears of a new version",
        remedy="start the server without --tokenizer-worker-num",
        field="tokenizer_worker_num",
        is_broken=_is_several,
    ),
    Requirement(
        arguments=("--pp-size", "--pipeline-parallel-size"),
        problem=_SIZE,
        remedy=_SIZE_REMEDY,
        field="pp_size",
        is_broken=_is_several,
        configured_remedy=_CONFIGURED_SIZE_REMEDY,
    ),
    Requirement(
        arguments=("--dp-size", "--data-parallel-size"),
        problem=_SIZE,
        remedy=_SIZE_REMEDY,
        field="dp_size",
        is_broken=_is_several,
        configured_remedy=_CONFIGURED_SIZE_REMEDY,
    ),
    Requirement(
        arguments=("--api-key", "--admin-api-key"),
        problem="shows its key to everybody on its command line",
        remedy="set `rollout.key_file` or A3PO_SERVER_KEY",
        configured_remedy="everybody would see it; set `rollout.key_file` or A3PO_SERVER_KEY",
    ),
    Requirement(
        arguments=("--tp-size", "--tp", "--tensor-parallel-size"),
        problem="has another number of ranks than the run starts",
        remedy="set `rollout.server_tensor_parallel`",
        configured_remedy="set `rollout.server_tensor_parallel`",
    ),
    Requirement(
        arguments=("--host", "--port"),
        problem="is at another address than the run or the launcher chooses",
        remedy="use --host of tools/launch_rollout_servers.py, which chooses free ports",
        configured_remedy="tools/launch_rollout_servers.py has --host, and chooses free ports",
    ),
    Requirement(
        arguments=("--model-path", "--model"),
        problem="serves another model than the run trains",
        remedy="set `model`",
        configured_remedy="set `model`",
    ),
    Requirement(
        arguments=("--trust-remote-code",),
        problem="runs programs from the folder of a model",
        remedy="use a model that docs/layouts.md lists",
        configured_remedy="programs in the folder of a model are never run; docs/layouts.md lists the models",
    ),
    Requirement(
        arguments=("--config",),
        problem="may take any of these arguments from a file",
        remedy="give each argument itself",
        configured_remedy="it may hold any of the arguments that are not to be given; give each one itself",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """What a run asks of every server beside the table."""

    pause_mode: str = "retract"
    longest_request: int = 0
    """Tokens of a prompt and its response, at most"""


def problems_of_server(info: Mapping[str, Any], demands: Demands) -> Iterator[str]:
    """Yield what is wrong with a running server, with the remedy. info: what it says of itself, by field."""
    for row in REQUIREMENTS:
        if row.field is None or (row.in_place_only and demands.pause_mode != "in_place"):
            continue
        value = info[row.field]
        if row.is_broken(value, demands.longest_request):
            argument = next(iter(row.arguments), "")
            problem = row.problem.format(value=value, argument=argument, longest_request=demands.longest_request)
            yield f"{problem}; {row.remedy}"


def problems_of_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name of the argument, problem, remedy) for arguments that a run does not let its servers have.

    No value of an argument is shown: it may be a key.
    """
    reserved = {name: row for row in REQUIREMENTS if not row.in_place_only for name in row.arguments}
    for argument in arguments:
        name = argument.split("=")[0]
        # argparse takes beginnings of names; of SGLang's other arguments none is the beginning of a reserved one.
        meant = name if name in reserved else None
        if meant is None and len(name) > len("--"):
            meant = next((each for each in reserved if each.startswith(name)), None)
        if meant is not None:
            also = "" if meant == name else f": SGLang may read it as {meant}"
            yield name, f"not to be given here{also}", reserved[meant].configured_remedy


def missing_in_place(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (argument, problem) for arguments that servers need with `publish.pause_mode: in_place` and lack."""
    for row in REQUIREMENTS:
        if row.in_place_only and row.arguments[0] not in arguments:
            yield row.arguments[0], f"a server without {row.arguments[0]} {row.problem}"


def as_markdown() -> str:
    """Return the table for docs/servers.md."""
    lines = ["| a server that ... | remedy | seen of a running server |", "|---|---|---|"]
    for row in REQUIREMENTS:
        names = ", ".join(f"`{name}`" for name in row.arguments)
        kind = f"with `in_place`, lacks {names}: it " if row.in_place_only else f"has {names}: it " if names else ""
        if "{argument}" in row.problem:
            kind = ""
        value = _Word("above 1" if row.is_broken is _is_several else "fewer")
        problem = row.problem.format(value=value, argument=names, longest_request=_Word("more"))
        lines.append(f"| {kind}{problem} | {row.remedy} | {'yes' if row.field else 'no'} |")
    return "\n".join(lines) + "\n"


class _Word(str):
    """A word in the place of a number."""

    def __format__(self, spec: str) -> str:
        return str(self)
