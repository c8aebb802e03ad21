"""Start `python -m sglang.launch_server` with a key from the environment.

On a command line the key would be seen by everybody, and SGLang 0.5.23 writes it into its log and its /server_info.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_a3po.config.server_key import KEY_VARIABLE
from megatron_a3po.cpu.rollout_server import fork_processes
from megatron_a3po.runtime.processes import start_watchdog

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def main(arguments: Sequence[str]) -> None:
    """Run the server until it ends."""
    start_watchdog()  # SGLang starts threads, and processes that end with it only once they have imported everything
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    key = os.environ.pop(KEY_VARIABLE, None)  # the processes of the server inherit the rest
    load_plugins()
    server_args = prepare_server_args(list(arguments))
    if key is not None:
        _protect(server_args, key)
    if server_args.device == "cpu":
        fork_processes()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _protect(server_args: "ServerArgs", key: str) -> None:
    """Make all endpoints except those of health ask for the key, and SGLang hide it as it hides keys of watermarks."""
    from sglang.srt.sampling.watermarking import core as redaction
    from sglang.srt.utils.common import build_server_info

    server_args.api_key = key
    redaction.WATERMARK_SECRET_FIELD_NAMES |= {"api_key"}
    server_args.resolve_once()
    if key in str(redaction.redact_watermark_secrets(build_server_info(server_args, {}))):
        raise SystemExit("this version of SGLang would show the key of the server in its log; use SGLang 0.5.23")


if __name__ == "__main__":
    main(sys.argv[1:])
