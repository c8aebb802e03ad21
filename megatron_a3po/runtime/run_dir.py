"""The folder of one run: nothing of another run in it, and known to every rank."""

from pathlib import Path

from megatron_a3po.errors import ConfigError


def refuse_used_run_dir(run_dir: Path) -> None:
    """Raises ConfigError when a run left its `config.resolved.yaml` in the folder."""
    if (run_dir / "config.resolved.yaml").exists():
        raise ConfigError(
            f"run_dir = {run_dir}: there is a run in this folder; give another one (`run_dir=...`) or remove it"
        )


def claim_run_dir(run_dir: Path, resolved_config: str) -> None:
    """Create the folder with `config.resolved.yaml`. Raises ConfigError; of two runs at one time, for the second."""
    refuse_used_run_dir(run_dir)
    make_log_folder(run_dir)
    try:
        with (run_dir / "config.resolved.yaml").open("x", encoding="utf-8") as file:
            file.write(resolved_config)
    except OSError as error:
        raise ConfigError(f"run_dir = {run_dir}: {error}; give another one (`run_dir=...`)") from None


def make_log_folder(run_dir: Path) -> Path:
    """The folder of everything that the processes of a run and their libraries print. Raises ConfigError."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run_dir = {run_dir}: cannot be created ({error}); give another one (`run_dir=...`)"
        ) from None
    return run_dir / "logs"
