"""Find out whether a server holds its model unquantised, by its own tensors.

This is for a model whose folder is not seen here.
"""

import re
from typing import Any

from megatron_a3po.errors import RolloutError
from megatron_a3po.fleet.membership import Server
from megatron_a3po.fleet.pool import ServerPool
from megatron_a3po.fleet.protocol import WeightChecksums, parse_answer
from megatron_a3po.runtime.logging import logger

UNQUANTISED = "unquant"
"""SGLang's name for it"""
_UNQUANTISED_NAME = re.compile(r"[._](weight|bias|sinks)$")
_CHECKER = "/weights_checker"


async def is_unquantised(pool: ServerPool, server: Server) -> bool:
    """Return whether the server's tensors are unquantised; False also where the server does not tell.

    SGLang's checksums leave out the scales of FP8 blocks, and are those of the values that the blocks stand for. But
    such weights cannot be skipped, as all others can. Any other quantisation shows in the tensors' names.
    """
    try:
        kept = await _names(pool, server, {"skip_tensor_list": ["weight"]})
        names = await _names(pool, server, {})
    except RolloutError as error:
        logger.debug("%s does not say what it holds: %s", server.url, error)
        return False
    return bool(names) and all(map(_UNQUANTISED_NAME.search, names)) and not any("weight" in name for name in kept)


async def _names(pool: ServerPool, server: Server, options: dict[str, Any]) -> set[str]:
    answer = await pool.post(server, _CHECKER, {"action": "checksum", **options})
    parsed = parse_answer(WeightChecksums, answer, server.url + _CHECKER)
    return {name for rank in parsed.ranks for name in rank.checksums}
