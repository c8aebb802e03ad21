"""The command line `a3po {train,evaluate,plan,report}`, the same as `python -m megatron_a3po`.

torchrun starts `-m megatron_a3po train` on every rank.
"""

import argparse
import os
import re
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TextIO

from megatron_a3po.checkpoint.resume import plan_resume
from megatron_a3po.config import RunConfig
from megatron_a3po.errors import A3poError, ConfigError, RunFinished
from megatron_a3po.preflight.load import load_config, to_yaml
from megatron_a3po.runtime.processes import die_with_parent, end_process
from megatron_a3po.runtime.run_dir import make_log_folder

_CONFIG_MISTAKE = 2
_FAILED = 1
_LET_OTHERS_SPEAK_SECONDS = 3.0


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` None: those of the process."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    # argparse accepts positional arguments on one side of an option only.
    if hasattr(parsed, "overrides") and not any(text.startswith("-") for text in rest):
        parsed.overrides += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return int(parsed.run(parsed))


def console() -> None:
    """Run the command `a3po`, which is `python -m megatron_a3po`: modules in the working directory can be imported."""
    sys.path.insert(0, os.getcwd())
    end_process(main())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_a3po", description="Train language models with A-3PO.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy with A-3PO", description="Train a policy with A-3PO.")
    _add_config(train)
    train.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration with all keys, and stop"
    )
    train.set_defaults(run=_train)

    evaluate = commands.add_parser(
        "evaluate",
        help="measure how often a model answers correctly",
        description="Sample and grade responses to the held-out prompts and evaluation datasets of a configuration, "
        "from its model (model=runs/NAME/model for a trained one) or from running servers.",
    )
    _add_config(evaluate)
    evaluate.add_argument("--name", type=_name, help="folder in run_dir/evaluations; default: the time")
    evaluate.set_defaults(run=_evaluate)

    plan = commands.add_parser(
        "plan", help="check configuration, model and datasets; print what would run, and in how much memory"
    )
    _add_config(plan)
    plan.add_argument(
        "--ranks", type=_positive, required=True, help="number of ranks that torchrun would start on all nodes together"
    )
    plan.set_defaults(run=_plan)

    report = commands.add_parser("report", help="write report.html of a run that has not ended or was interrupted")
    report.add_argument("run_dir", type=Path, help="folder of the run")
    report.set_defaults(run=_report)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name; use letters, digits, `_`, `-` and `.`")
    return text


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="YAML file, or the name of a shipped recipe such as tiny_cpu"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="changes, for example seed=1; `train ... --print-config` prints all keys",
    )


def _train(parsed: argparse.Namespace) -> int:
    rank = int(os.environ.get("RANK", "0"))
    environment = os.environ if parsed.print_config else {"WORLD_SIZE": "1", **os.environ}
    try:
        config = load_config(parsed.config, parsed.overrides, environment)
        if parsed.print_config:
            print(to_yaml(config), end="")
            return 0
        if rank == 0:
            plan_resume(config.run_dir, config.resume, to_yaml(config))
            _refuse_scorer(config)
        log_file = make_log_folder(config.run_dir) / f"rank{rank}.log"
    except ConfigError as error:
        # Under torchrun, its own report of the failure would hide what is on stderr.
        say_mistake(error, rank=rank, file=sys.stdout if "RANK" in os.environ else sys.stderr)
        return _CONFIG_MISTAKE
    return _run(config, rank, log_file)


def _refuse_scorer(config: RunConfig) -> None:
    """Raise ConfigError for a reward function that cannot be imported, before a run folder is made for it."""
    from megatron_a3po.rewards.worker_pool import try_scorer

    for _ in try_scorer(config):
        pass


def say_mistake(error: A3poError, *, rank: int, file: TextIO) -> None:
    """Print a mistake on the first rank of each node, whose files, GPUs and environment may differ from others'.

    The other ranks wait a moment, so that torchrun does not end the first one before it has printed.
    """
    if int(os.environ.get("LOCAL_RANK", rank)) > 0:
        time.sleep(_LET_OTHERS_SPEAK_SECONDS)
        return
    where = f" on {socket.gethostname()}" if rank > 0 else ""
    print(f"error{where}: {error}", file=file, flush=True)


def _run(config: RunConfig, rank: int, log_file: Path) -> int:
    """Train, with screen, signals and exit codes of a command."""
    from megatron_a3po.runtime.logging import configure_logging, logger, redirect_output
    from megatron_a3po.runtime.signals import (
        INTERRUPTED_EXIT_CODE,
        PREEMPTED_EXIT_CODE,
        Interrupted,
        Preempted,
        Preemption,
    )

    die_with_parent(signal.SIGTERM if rank == 0 else signal.SIGKILL)
    preemption = Preemption()
    saves = config.checkpoint.every_steps > 0
    preemption.watch(grace_seconds=config.checkpoint.preemption_grace_seconds if saves else None)
    screen = redirect_output(log_file)
    configure_logging(screen if rank == 0 else None)
    try:
        from megatron_a3po.runtime.recorder import complete_run
        from megatron_a3po.train import train

        if rank == 0:  # the others have nothing to clean up
            preemption.raise_interrupted()
        train(config, preemption)
    except RunFinished as finished:
        logger.info("%s", finished)
        if rank == 0:
            complete_run(config.run_dir)
    except Preempted as preempted:
        logger.warning("%s", preempted)
        return PREEMPTED_EXIT_CODE
    except Interrupted as interrupted:
        preemption.be_over()
        logger.error(
            "ended by %s, with everything that the run had started%s",
            interrupted,
            "; if nobody sent it, another rank ended first" if str(interrupted) == "SIGTERM" else "",
        )
        return INTERRUPTED_EXIT_CODE
    except BaseException as error:
        if preemption.requested_by and _is_lost_connection(error):  # rank 0 has ended and said so
            end_process(INTERRUPTED_EXIT_CODE)
        # torchrun ends all ranks as soon as one has ended. Usually rank 0 knows best what went wrong. But a broken
        # connection only follows from the end of another rank, which must have time to print its error.
        if rank > 0 or _is_lost_connection(error):
            time.sleep(_LET_OTHERS_SPEAK_SECONDS)
        print(f"error on rank {rank}: {_message(error)}\n  logs: {config.run_dir / 'logs'}", file=screen, flush=True)
        with suppress(OSError):  # the log may be what failed, on a full disk
            traceback.print_exception(error)
        end_process(_FAILED)
    return 0


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, A3poError) else f"{type(error).__name__}: {error}"


def _exit_code(error: Exception) -> int:
    return _CONFIG_MISTAKE if isinstance(error, ConfigError) else _FAILED


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank ended."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection"))


def _evaluate(parsed: argparse.Namespace) -> int:
    from megatron_a3po.runtime.logging import configure_logging, redirect_output

    try:
        config = load_config(parsed.config, parsed.overrides, {})
        _refuse_scorer(config)
        log_file = make_log_folder(config.run_dir) / "evaluate.log"
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _CONFIG_MISTAKE
    name = parsed.name or time.strftime("%Y%m%d-%H%M%S")
    screen = redirect_output(log_file)
    configure_logging(screen)
    try:
        from megatron_a3po.evaluate import evaluate

        results = evaluate(config, name)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"error: {_message(error)}\n  log: {log_file}", file=screen, flush=True)
        traceback.print_exception(error)
        return _exit_code(error)
    for result in results:
        print(result, file=screen)
    print(f"responses and results: {config.run_dir / 'evaluations' / name}", file=screen)
    return 0


def _plan(parsed: argparse.Namespace) -> int:
    from megatron_a3po.preflight.describe import describe_run
    from megatron_a3po.preflight.load import load_architecture

    try:
        config = load_config(parsed.config, parsed.overrides, {"WORLD_SIZE": str(parsed.ranks)})
        # Flushed, because the tokenizer and the datasets take a while.
        print("\n".join(describe_run(config, load_architecture(config.model), parsed.ranks)), flush=True)
        from megatron_a3po.prompts.load import try_datasets
        from megatron_a3po.rewards.worker_pool import try_scorer

        for line in chain(try_datasets(config), try_scorer(config)):
            print(line)
    except Exception as error:
        print(f"error: {_message(error)}", file=sys.stderr)
        return _exit_code(error)
    return 0


def _report(parsed: argparse.Namespace) -> int:
    from megatron_a3po.runtime.report import write_report

    try:
        print(write_report(parsed.run_dir))
    except FileNotFoundError as error:
        print(f"error: {parsed.run_dir}: the folder does not hold a run ({error.filename} is missing)", file=sys.stderr)
        return _CONFIG_MISTAKE
    return 0


if __name__ == "__main__":
    end_process(main())
