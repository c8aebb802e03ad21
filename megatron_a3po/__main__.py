"""Command line: `python -m megatron_a3po {train,report} ...`, under torchrun for more than one rank."""

import argparse
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from megatron_a3po.config import RunConfig, load_config, to_yaml
from megatron_a3po.errors import A3poError, ConfigError, RunFinished
from megatron_a3po.runtime.processes import die_with_parent, end_process
from megatron_a3po.runtime.resume import plan_resume
from megatron_a3po.runtime.run_dir import make_log_folder

_CONFIG_MISTAKE = 2
_FAILED = 1
_LET_OTHERS_SPEAK_SECONDS = 3.0


def main(arguments: list[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    return int(parsed.run(parsed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_a3po", description="Train language models by A-3PO.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy by A-3PO", description="Train a policy by A-3PO.")
    train.add_argument("--config", required=True, metavar="FILE", help="YAML file, for example configs/tiny_cpu.yaml")
    train.add_argument("--print-config", action="store_true", help="print the whole resolved configuration and stop")
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for example max_staleness=0 seed=1; all: --print-config"
    )
    train.set_defaults(run=_train)

    report = commands.add_parser("report", help="write report.html of a run that goes on or was interrupted")
    report.add_argument("run_dir", type=Path, help="folder of the run")
    report.set_defaults(run=_report)
    return parser


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
        log_file = make_log_folder(config.run_dir) / f"rank{rank}.log"
    except ConfigError as error:
        if rank == 0:
            # Under torchrun stderr drowns in torchrun's own report of the failure.
            print(f"error: {error}", file=sys.stdout if "RANK" in os.environ else sys.stderr, flush=True)
        else:
            time.sleep(_LET_OTHERS_SPEAK_SECONDS)
        return _CONFIG_MISTAKE
    return _run(config, rank, log_file)


def _run(config: RunConfig, rank: int, log_file: Path) -> int:
    """Train with the screen, signals and exit codes of a command."""
    from megatron_a3po.runtime.logging import configure_logging, logger, redirect_output
    from megatron_a3po.runtime.signals import (
        INTERRUPTED_EXIT_CODE,
        PREEMPTED_EXIT_CODE,
        Interrupted,
        Preempted,
        Preemption,
    )

    # Only rank 0 has something to clean up.
    die_with_parent(signal.SIGTERM if rank == 0 else signal.SIGKILL)
    preemption = Preemption()
    saves = config.checkpoint.every_steps > 0
    preemption.watch(
        grace_seconds=config.checkpoint.preemption_grace_seconds if saves else None, raise_interrupted=rank == 0
    )
    screen = redirect_output(log_file)
    configure_logging(screen if rank == 0 else None)
    try:
        from megatron_a3po.runtime.recorder import complete_run
        from megatron_a3po.train import train

        train(config, preemption)
    except RunFinished as finished:
        logger.info("%s", finished)
        if rank == 0:
            complete_run(config.run_dir)
    except Preempted as preempted:
        logger.warning("%s", preempted)
        return PREEMPTED_EXIT_CODE
    except Interrupted as interrupted:
        logger.error(
            "ended by %s, with everything that the run had started%s",
            interrupted,
            "; if nobody sent it, another rank ended before" if str(interrupted) == "SIGTERM" else "",
        )
        return INTERRUPTED_EXIT_CODE
    except BaseException as error:
        if preemption.requested_by and _is_lost_connection(error):  # rank 0 has ended at once, and said so
            end_process(INTERRUPTED_EXIT_CODE)
        # torchrun ends all ranks as soon as one has ended. Most often rank 0 knows best what went wrong; but a broken
        # connection is the echo of another rank's end, and that one must have spoken.
        if rank > 0 or _is_lost_connection(error):
            time.sleep(_LET_OTHERS_SPEAK_SECONDS)
        message = str(error) if isinstance(error, A3poError) else f"{type(error).__name__}: {error}"
        print(f"error on rank {rank}: {message}\n  logs: {config.run_dir / 'logs'}", file=screen, flush=True)
        with suppress(OSError):  # the log may be what failed, on a full disk
            traceback.print_exception(error)
        end_process(_FAILED)
    return 0


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection"))


def _report(parsed: argparse.Namespace) -> int:
    from megatron_a3po.runtime.report import write_report

    try:
        print(write_report(parsed.run_dir))
    except FileNotFoundError as error:
        print(f"error: {parsed.run_dir}: no run in this folder ({error.filename} is missing)", file=sys.stderr)
        return _CONFIG_MISTAKE
    return 0


if __name__ == "__main__":
    end_process(main())
