"""A rollout server that belongs to the run: started with it, watched by it, ended with it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from megatron_a3po.config.model_files import has_megatron_weights
from megatron_a3po.cpu import rollout_server
from megatron_a3po.runtime.processes import die_with_parent, free_port

_END_SECONDS = 10.0
"""A killed process may need so long, for example to give back memory."""


def _sglang_command(model: Path, port: int, arguments: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
        # It need not find weights there: all of them are published before the first response.
        *(("--load-format", "dummy") if has_megatron_weights(model) else ()),
        "--enable-priority-scheduling",
        *rollout_server.server_arguments(),
        *arguments,
    ]


class LocalServer:
    """One SGLang process tree on this machine, without a GPU. Use as a context manager."""

    def __init__(
        self,
        model: Path,
        log_file: Path,
        arguments: Sequence[str] = (),
        *,
        make_command: Callable[[Path, int, Sequence[str]], list[str]] = _sglang_command,
    ) -> None:
        self.log_file = log_file
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = make_command(model, port, arguments)
        self._process: subprocess.Popen[bytes] | None = None
        # SGLang's sockets and scratch files. The path is short: a socket's may have 107 characters.
        self._temporary = tempfile.TemporaryDirectory(prefix="rollout-", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        environment = os.environ | rollout_server.server_environment(
            tensor_parallel=1, python_path=os.environ.get("PYTHONPATH", "")
        )
        environment["TMPDIR"] = self._temporary.name
        for name in rollout_server.UNSET_VARIABLES:
            environment.pop(name, None)
        with self.log_file.open("ab") as log:
            # A session of its own: Ctrl-C reaches the run, which ends the server in its own order.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process is not None
        # At SIGTERM SGLang takes seven seconds to drain, and a server that is no longer needed has nothing to save.
        shared_memory = {path for process in _group(self.process_id) for path in _shared_memory(process)}
        with suppress(ProcessLookupError):
            os.killpg(self.process_id, signal.SIGKILL)
        deadline = time.monotonic() + _END_SECONDS
        while _group(self.process_id) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._process.poll()
        for path in shared_memory:
            path.unlink(missing_ok=True)
        self._temporary.cleanup()

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def describe_death(self) -> str | None:
        """What to tell the user when the process has ended; None while it runs."""
        status = self._process.poll() if self._process is not None else None
        if status is None:
            return None
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        return f"the rollout server (process {self.process_id}) {how}; its log is {self.log_file}"


def _group(group: int) -> list[psutil.Process]:
    """The processes of the server's own session, schedulers included, which may outlive a server that somebody killed.

    Without those that have ended and that nobody collects, as in containers whose first process is no init.
    """
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def _shared_memory(process: psutil.Process) -> list[Path]:
    """The named shared memory that a process has open, and that nobody removes once it is killed."""
    with suppress(psutil.Error):
        return [Path(area.path) for area in process.memory_maps() if area.path.startswith("/dev/shm/")]
    return []


def _die_with_parent() -> None:
    # SIGKILL, since the parent can no longer look after a slow end. SGLang's own children die with theirs.
    die_with_parent(signal.SIGKILL)
