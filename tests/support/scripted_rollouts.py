"""A rollout server whose answers depend only on the prompt, and tiny models for it: runs are equal to the last bit."""

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from aiohttp import web

from megatron_a3po.fleet.event_loop import EventLoopThread
from tests.support.deadlines import scaled
from tests.support.paths import ROOT
from tests.support.receiver import start_receiver
from tests.support.scripted_server import ScriptedServer, response
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model


class DeterministicServer(ScriptedServer):
    """Receive real broadcasts, and sample the tokens that a hash of the prompt gives, by the last version received."""

    async def _generate(self, body: dict[str, Any], number: int) -> web.Response:
        await self._running.wait()
        prompts = body["input_ids"] if isinstance(body["input_ids"][0], list) else [body["input_ids"]]
        sampling = body["sampling_params"]
        answers = [
            self._answer(prompt, sample, sampling["max_new_tokens"])
            for prompt in prompts
            for sample in range(sampling["n"])
        ]
        single = len(answers) == 1 and not isinstance(body["input_ids"][0], list)
        return web.json_response(answers[0] if single else answers)

    def _answer(self, prompt: list[int], sample: int, num_tokens: int) -> dict[str, Any]:
        digest = hashlib.sha256(f"{prompt} {sample}".encode()).digest()
        tokens = [2 + digest[position] % 200 for position in range(num_tokens)]
        answer = response(num_tokens=num_tokens, versions=[self.version] * 2)
        answer["output_ids"] = tokens
        # Around the log-prob of a random model, so that importance weights are neither capped nor vanish.
        answer["meta_info"]["output_token_logprobs"] = [
            [-5.5 + digest[position + 8] / 512, token, None] for position, token in enumerate(tokens)
        ]
        return answer


@contextmanager
def scripted_server() -> Iterator[DeterministicServer]:
    """Run a server in a thread of this process. The receiver of its weights is another process."""
    loop = EventLoopThread()
    with start_receiver() as receiver:
        server = DeterministicServer(version="0", receiver=receiver)
        loop.run(server.__aenter__(), scaled(10.0))
        try:
            yield server
        finally:
            loop.run(server.__aexit__(), scaled(10.0))
            loop.close()


def describe_model(folder: Path) -> Path:
    """Write what the rollout side reads of a model: the quickstart's tokenizer, and the sizes of a Qwen3."""
    tokenizer = _import_tool().make_tokenizer()
    tokenizer.save_pretrained(folder)
    described = {"model_type": "qwen3", "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def make_model(folder: Path) -> Path:
    """Write a random Qwen3 with the quickstart's tokenizer."""
    save_tiny_model("qwen3", folder)
    tokenizer = _import_tool().make_tokenizer()
    assert len(tokenizer) == VOCAB_SIZE
    tokenizer.save_pretrained(folder)
    return folder


def settings(model: Path, run_dir: Path, url: str, **changes: Any) -> dict[str, Any]:
    """Return a configuration: four steps on TP2 x PP2 in bf16, where float32 masters hold more than the weights.

    `changes` replace keys; those of a section replace the section's keys.
    """
    values: dict[str, Any] = {
        "model": str(model),
        "run_dir": str(run_dir),
        "num_steps": 4,
        # At a higher one, the version that samples a response depends on which request comes first.
        "max_staleness": 0,
        "device": "cpu",
        "precision": "bf16",
        "data": {"task": "spell_backward", "size": 60, "num_held_out": 4},
        "rollout": {"servers": [url], "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6},
        "parallel": {"tensor": 2, "pipeline": 2},
        "actor": {"microbatch_tokens": 512, "collective_timeout_seconds": scaled(60)},
        "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 2},
        "publish": {"bucket_bytes": 65536, "timeout_seconds": scaled(20), "verify_prompts": 2},
        "checkpoint": {"every_steps": 1},
        "evaluation": {"every_steps": 0},
    }
    for key, value in changes.items():
        values[key] = values[key] | value if isinstance(value, dict) and key in values else value
    return values


def _import_tool() -> ModuleType:
    """Import the program, which is in no package."""
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "tools" / "make_tiny_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # slotted dataclasses look their own module up
    spec.loader.exec_module(module)
    return module
