"""Command line: `python -m megatron_a3po {train,report} ...`, under torchrun for more than one rank."""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

from megatron_a3po.config import RunConfig, load_config, to_yaml
from megatron_a3po.errors import A3poError, ConfigError

_CONFIG_MISTAKE = 2
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    return int(parsed.run(parsed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_a3po", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy by A-3PO", description="Train a policy by A-3PO.")
    train.add_argument("--config", required=True, metavar="FILE", help="YAML file, for example configs/tiny_cpu.yaml")
    train.add_argument("--print-config", action="store_true", help="print the whole resolved configuration and stop")
    train.add_argument("--check-config", action="store_true", help="only say what is wrong with the configuration")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="for example max_staleness=0 data.seed=1")
    train.set_defaults(run=_train)

    report = commands.add_parser("report", help="write report.html of a run that goes on or was interrupted")
    report.add_argument("run_dir", type=Path)
    report.set_defaults(run=_report)
    return parser


def _train(parsed: argparse.Namespace) -> int:
    rank = int(os.environ.get("RANK", "0"))
    only_look = parsed.print_config or parsed.check_config
    environment = os.environ if only_look else {"WORLD_SIZE": "1", **os.environ}
    try:
        config = load_config(parsed.config, parsed.overrides, environment)
        if not only_look:
            _claim(config, rank)
    except ConfigError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            # torchrun ends all ranks as soon as one has ended: rank 0 must have spoken by then.
            time.sleep(5.0)
        return _CONFIG_MISTAKE
    if parsed.print_config:
        print(to_yaml(config), end="")
    return 0 if only_look else _run(config, rank)


def _claim(config: RunConfig, rank: int) -> None:
    from megatron_a3po.runtime.run_dir import claim_run_dir

    if rank == 0:
        claim_run_dir(config.run_dir, to_yaml(config))


def _run(config: RunConfig, rank: int) -> int:
    """Train with the screen, signals and exit codes of a command."""
    from megatron_a3po.runtime.logging import configure_logging, logger, redirect_output
    from megatron_a3po.runtime.processes import Interrupted, die_on_signals, die_with_parent, raise_on_signals
    from megatron_a3po.runtime.run_dir import log_file

    die_with_parent()
    raise_on_signals() if rank == 0 else die_on_signals()
    screen = redirect_output(log_file(config.run_dir, rank))
    configure_logging(screen if rank == 0 else None)
    try:
        from megatron_a3po.train import train

        train(config)
    except Interrupted as interrupted:
        logger.error("interrupted by %s; everything that the run started has ended", interrupted)
        return _INTERRUPTED
    except BaseException as error:
        traceback.print_exc()
        message = str(error) if isinstance(error, A3poError) else f"{type(error).__name__}: {error}"
        print(f"error on rank {rank}: {message}\n  logs: {config.run_dir / 'logs'}", file=screen, flush=True)
        return 1
    return 0


def _report(parsed: argparse.Namespace) -> int:
    from megatron_a3po.runtime.report import write_report

    try:
        print(write_report(parsed.run_dir))
    except FileNotFoundError as error:
        print(f"error: {parsed.run_dir}: no run in this folder ({error.filename} is missing)", file=sys.stderr)
        return _CONFIG_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main())
