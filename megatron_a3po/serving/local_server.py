"""A rollout server on this machine, which ends with the run or the launcher that started it."""

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

from megatron_a3po.config import RolloutConfig
from megatron_a3po.config.model_folder import has_megatron_weights
from megatron_a3po.config.server_key import KEY_VARIABLE
from megatron_a3po.cpu import rollout_server
from megatron_a3po.runtime.processes import die_with_parent, free_port, group_members

_END_SECONDS = 10.0
"""A killed process may need so long, for example to give back memory."""
_NOT_FOR_SERVERS = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""With the first, SGLang reports log-probs of other distributions than it samples from; the others are the ranks'."""


def server_arguments(rollout: RolloutConfig) -> list[str]:
    """Return the command-line arguments of SGLang that the configuration asks for."""
    return ["--tp-size", str(rollout.server_tensor_parallel), *rollout.server_arguments]


def _sglang_command(server: "LocalServer") -> list[str]:
    return [
        *(sys.executable, "-m", "megatron_a3po.serving.entrypoint"),
        *("--model-path", str(server.model), "--host", server.host, "--port", str(server.port)),
        # It need not find weights there: all of them are published before the first response.
        *(("--load-format", "dummy") if has_megatron_weights(server.model) else ()),
        "--enable-priority-scheduling",
        *(rollout_server.server_arguments() if server.gpus is None else ()),
        *server.arguments,
    ]


class LocalServer:
    """One SGLang process tree on this machine. A context manager."""

    def __init__(
        self,
        model: Path,
        log_file: Path,
        arguments: Sequence[str] = (),
        *,
        gpus: Sequence[str] | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        key: str | None = None,
        make_command: Callable[["LocalServer"], list[str]] = _sglang_command,
    ) -> None:
        """gpus: as CUDA_VISIBLE_DEVICES names them, None for the CPU. port: None: a free one. key: what it demands."""
        self.model, self.log_file, self.arguments = model, log_file, arguments
        self.gpus = gpus
        self.host = host
        self.port = free_port(host) if port is None else port
        self.url = f"http://{host}:{self.port}"
        self._key = key
        self._make_command = make_command
        self._process: subprocess.Popen[bytes] | None = None
        # SGLang's sockets and scratch files. The path is short: a socket's may have 107 characters.
        self._temporary = tempfile.TemporaryDirectory(prefix="rollout-", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        with self.log_file.open("ab") as log:
            # A session of its own: Ctrl-C reaches the run, which ends the server in its own order.
            self._process = subprocess.Popen(
                self._make_command(self),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process is not None
        # At SIGTERM SGLang takes seven seconds to drain, and a server that is no longer needed has nothing to save.
        shared_memory = {path for process in group_members(self.process_id) for path in _shared_memory(process)}
        with suppress(ProcessLookupError):
            os.killpg(self.process_id, signal.SIGKILL)
        deadline = time.monotonic() + _END_SECONDS
        while group_members(self.process_id) and time.monotonic() < deadline:
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
        """Return what to tell the user when the process has ended; None while it runs."""
        status = self._process.poll() if self._process is not None else None
        if status is None:
            return None
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        return f"the rollout server (process {self.process_id}) {how}; its log is {self.log_file}"

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self.gpus is None:
            python_path = environment.get("PYTHONPATH", "")
            environment |= rollout_server.server_environment(self.arguments, python_path=python_path)
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        for name in (*rollout_server.UNSET_VARIABLES, *_NOT_FOR_SERVERS, KEY_VARIABLE):
            environment.pop(name, None)
        if self._key is not None:
            environment[KEY_VARIABLE] = self._key
        environment["TMPDIR"] = self._temporary.name
        return environment


def _shared_memory(process: psutil.Process) -> list[Path]:
    """Return the named shared memory that a process has open, which nobody removes once the process is killed."""
    with suppress(psutil.Error):
        return [Path(area.path) for area in process.memory_maps() if area.path.startswith("/dev/shm/")]
    return []


def _die_with_parent() -> None:
    # SIGKILL, since the parent can no longer look after a slow end. The watchdog of `serve` ends SGLang's own children.
    die_with_parent(signal.SIGKILL)
