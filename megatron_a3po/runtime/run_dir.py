"""The folder of one run: nothing of another run in it, and known to every rank."""

from pathlib import Path

from megatron_a3po.errors import ConfigError


def claim_run_dir(run_dir: Path, resolved_config: str) -> None:
    """Create the folder with `config.resolved.yaml`. Raises ConfigError when a run already left one there."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        with (run_dir / "config.resolved.yaml").open("x", encoding="utf-8") as file:
            file.write(resolved_config)
    except FileExistsError:
        raise ConfigError(
            f"run_dir = {run_dir}: there is a run in this folder; give another one (`run_dir=...`) or remove it"
        ) from None
    except OSError as error:
        raise ConfigError(f"run_dir = {run_dir}: cannot be written ({error}); give another one (`run_dir=...`)") from None


def log_file(run_dir: Path, rank: int) -> Path:
    """Where everything goes that this rank or its libraries print."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    return run_dir / "logs" / f"rank{rank}.log"
