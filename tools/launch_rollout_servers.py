"""Start SGLang servers on this machine for a run with `rollout.servers: registered`, and keep them running.

    python tools/launch_rollout_servers.py --config my.yaml --host 10.0.0.7 [--gpus 4,5,6,7] [key=value ...]

Use the configuration of the run. Its `run_dir` must be on storage that both machines see, because servers register
there when they are ready. There is one server per `rollout.server_tensor_parallel` GPUs. A server that ends is started
again. SIGTERM, SIGUSR1 (which srun passes on) or Ctrl-C ends all of them. If other machines reach the address, servers
need a key, in A3PO_SERVER_KEY or `rollout.key_file`.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from megatron_a3po.config import RunConfig
from megatron_a3po.config.server_key import read_server_key
from megatron_a3po.errors import A3poError, ConfigError
from megatron_a3po.preflight.load import load_config
from megatron_a3po.serving.launcher import KeptServer, check_host, keep_running, server_maker, share_gpus
from megatron_a3po.serving.registry import remove_ended, servers_folder


def main() -> int:
    parsed = _parser().parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return 0 if keep_running(_servers(parsed), stop) else 1
    except A3poError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file or shipped recipe of the run")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of this machine at which the trainer reaches the servers"
    )
    parser.add_argument("--gpus", metavar="LIST", help="GPUs to use, for example 4,5,6,7; default: all visible ones")
    parser.add_argument("--number", type=int, help="number of servers with `device: cpu`; default: 1")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the configuration, the same as for the run"
    )
    return parser


def _servers(parsed: argparse.Namespace) -> list[KeptServer]:
    config = load_config(parsed.config, parsed.overrides, {})
    if config.rollout.servers != "registered":
        raise ConfigError(
            f"rollout.servers = {config.rollout.servers!r}: the run would not look for these servers; set `registered`"
        )
    key = read_server_key(config.rollout.key_file)
    check_host(parsed.host, key)
    for url in remove_ended(servers_folder(config.run_dir)):
        _say(f"{url} was still registered, and had ended together with its launcher")
    makers = [server_maker(config, gpus=gpus, host=parsed.host, key=key) for gpus in _shares(config, parsed)]
    return [KeptServer(make_server, config, key=key, say=_say) for make_server in makers]


def _shares(config: RunConfig, parsed: argparse.Namespace) -> Sequence[Sequence[str] | None]:
    """The GPUs of each server; None: it runs on the CPU."""
    if config.device == "cpu":
        if parsed.gpus is not None:
            raise ConfigError("--gpus: `device: cpu` starts servers on the CPU; give --number instead")
        if parsed.number is not None and parsed.number < 1:
            raise ConfigError(f"--number {parsed.number}: start at least one server")
        return [None] * (parsed.number or 1)
    if parsed.number is not None:
        raise ConfigError("--number: the GPUs and rollout.server_tensor_parallel say how many servers there are")
    return share_gpus(
        _visible_gpus() if parsed.gpus is None else [name for name in parsed.gpus.split(",") if name],
        config.rollout.server_tensor_parallel,
    )


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _say(message: str) -> None:
    with suppress(OSError):  # on a full disk, servers go on
        print(message, flush=True)


if __name__ == "__main__":
    sys.exit(main())
