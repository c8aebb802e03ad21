"""A rollout server that belongs to the run: started with it, watched by it, ended with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_a3po.cpu import rollout_server
from megatron_a3po.runtime.processes import die_with_parent, free_port


class LocalServer:
    """One SGLang process tree on this machine, without a GPU. Use as a context manager."""

    def __init__(self, model: Path, log_file: Path, arguments: Sequence[str] = ()) -> None:
        self.log_file = log_file
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
            "--enable-priority-scheduling",
            *rollout_server.server_arguments(),
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environment = os.environ | rollout_server.server_environment(tensor_parallel=1)
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
        # At SIGTERM SGLang takes seven seconds to drain; a server that is no longer needed has nothing to save. Its
        # schedulers share the session's process group, and may outlive a server that was killed by somebody else.
        while _group_exists(self.process_id):
            os.killpg(self.process_id, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.05)

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


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _die_with_parent() -> None:
    # SIGKILL, since the parent can no longer look after a slow end. SGLang's own children die with theirs.
    die_with_parent(signal.SIGKILL)
