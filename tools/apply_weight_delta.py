"""Keep a machine's copy of the policy at the version that a run publishes with `publish.delta_folder`.

    python tools/apply_weight_delta.py /shared/published /dev/shm/policy

The first folder is `publish.folder` of the run. The second is its `publish.delta_folder`, from which the servers of
this machine read. Start this program before the run on every machine with rollout servers. It runs until it is ended,
across runs. It logs and retries what fails, for example on a full disk or while shared storage is away. It needs disk
or memory for one copy of the model. It verifies every byte of its copy; if it is ended during an update, it builds the
next version from whole files.
"""

import argparse
import logging
import signal
import socket
import sys
from pathlib import Path

from megatron_a3po.errors import A3poError
from megatron_a3po.weights.transports.delta.followers import follow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="publish.folder of the run, on shared storage")
    parser.add_argument("local", type=Path, help="publish.delta_folder of the run, on this machine")
    parser.add_argument("--host", default=socket.gethostname(), help="name of this machine; default: %(default)s")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        follow(options.folder, options.local, options.host)
    except KeyboardInterrupt:
        pass
    except (A3poError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
