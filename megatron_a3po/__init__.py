"""Asynchronous RL post-training of LLMs: Megatron-Core actors, the A-3PO loss, SGLang rollout servers."""

from megatron_a3po.config import RunConfig
from megatron_a3po.preflight.load import load_config

__all__ = ["RunConfig", "load_config"]
__version__ = "0.1.0"
