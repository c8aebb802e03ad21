"""Settings to start SGLang 0.5.23 as a rollout server on a CPU. Imports neither torch nor SGLang."""

import argparse
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

from megatron_a3po.errors import ConfigError

# Let servers write byte code: otherwise each process of a server would recompile six thousand modules.
UNSET_VARIABLES = ("PYTHONDONTWRITEBYTECODE",)

STAND_IN_DIRECTORY = Path(__file__).parent / "sgl_stand_in"


def server_environment(arguments: Sequence[str] = (), python_path: str = "") -> dict[str, str]:
    """Return environment variables to add for a server process. The caller removes `UNSET_VARIABLES`.

    Raises ConfigError if the arguments have no valid number of tensor-parallel ranks.

    Args:
        arguments: the server's command line. Of several tensor-parallel ranks, rank i is bound to core i.
        python_path: PYTHONPATH of the server, to which the stand-in for `sgl_kernel` is prepended.
    """
    tensor_parallel = _tensor_parallel(arguments)
    environment = {
        "PYTHONPATH": f"{STAND_IN_DIRECTORY}:{python_path}" if python_path else str(STAND_IN_DIRECTORY),
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_USE_CPU_ENGINE": "1",  # without it the layers import vLLM
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # a crash would wait for 60 s before the process ends
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health answers at once, also while paused
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if tensor_parallel > 1:
        environment["SGLANG_NCCL_SO_PATH"] = "/nonexistent/libnccl.so"  # its NCCL wrapper asserts a CUDA device
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(tensor_parallel))
    return environment


def fork_processes() -> None:
    """Let SGLang fork its processes from the one that has imported it, instead of having each import it again.

    It asks for spawned ones, as CUDA demands, which takes each of them ten seconds of a core. Here it forks before it
    has started a thread.
    """
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None


def _tensor_parallel(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    try:
        size: int = parser.parse_known_args(arguments)[0].tp_size
    except argparse.ArgumentError as error:
        raise ConfigError(f"rollout.server_arguments: {error}; give the server's number of ranks") from None
    return size


def server_arguments() -> list[str]:
    """Return arguments of `sglang.launch_server` beside the model, the address and the tensor-parallel size."""
    return [
        *("--device", "cpu"),
        *("--dtype", "float32"),
        *("--attention-backend", "torch_native"),
        *("--max-total-tokens", "16384"),
        *("--max-running-requests", "16"),
        "--disable-custom-all-reduce",
        "--skip-server-warmup",
        "--sleep-on-idle",  # an idle server would keep a core busy
    ]
