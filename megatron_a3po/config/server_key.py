"""The key that rollout servers require.

It comes from a file or the environment, because every user of a machine can read command lines.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from megatron_a3po.config.mistakes import Mistake
from megatron_a3po.errors import ConfigError

KEY_VARIABLE = "A3PO_SERVER_KEY"
_MAKE_ONE = "make one with `openssl rand -hex 32`"


def read_server_key(key_file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key in the file or, without a file, in the environment; None: no key. Raises ConfigError."""
    if key_file is not None:
        if (mistake := find_key_mistake(key_file)) is not None:
            raise ConfigError(str(mistake))
        return key_file.read_text(encoding="ascii").strip()
    key = environment.get(KEY_VARIABLE)
    if key is not None and not _is_key(key):
        raise ConfigError(f"{KEY_VARIABLE} is not a key (one word of visible ASCII characters); {_MAKE_ONE}")
    return key


def find_key_mistake(key_file: Path) -> Mistake | None:
    """Return what is wrong with the key's file, without showing its content, or None."""

    def mistake(problem: str, remedy: str) -> Mistake:
        return Mistake("rollout.key_file", str(key_file), problem, remedy)

    try:
        mode = key_file.stat().st_mode
        if not stat.S_ISREG(mode):
            return mistake("not a regular file", f"{_MAKE_ONE}, in a file that only its owner may read")
        if mode & 0o077:
            return mistake(f"others may read it (mode {mode & 0o777:04o})", f"run `chmod 600 {key_file}`")
        content = key_file.read_bytes().decode("latin-1")
    except OSError as error:
        return mistake(f"cannot be read ({error.strerror})", f"{_MAKE_ONE}, in a file that only its owner may read")
    if not _is_key(content.strip()):
        return mistake("does not hold a key (one word of visible ASCII characters)", _MAKE_ONE)
    return None


def _is_key(text: str) -> bool:
    return re.fullmatch("[!-~]+", text) is not None
