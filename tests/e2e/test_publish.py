"""Weights of many layouts on real SGLang servers, compared through the servers' checksums and log-probs.

What the checksums must be, a server says after reading the expected weights from a Hugging Face folder by itself; the
log-probs must be Hugging Face's.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import end_model_parallel, run_ranks
from tests.distributed.publish_cases import Case, changed_policy, encoded
from tests.e2e.conftest import SERVER_START_SECONDS
from tests.e2e.runs import get, post, wait_until
from tests.support.deadlines import scaled
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

_TP2_PP2 = {"tensor": 2, "pipeline": 2}
PROMPT = [7, 250, 3, 99, 41, 180, 12, 64, 5, 128, 33, 201]
MAX_LOGPROB_DIFFERENCE = 2e-5
LAYOUTS: dict[str, list[dict[str, int]]] = {
    "qwen3_tied": [{"tensor": 4}, _TP2_PP2, {"pipeline": 2, "virtual_pipeline": 2}],
    "qwen2": [_TP2_PP2, {"tensor": 2, "context": 2}],
    "qwen3": [{**_TP2_PP2, "virtual_pipeline": 2}, {"pipeline": 4}, {"tensor": 4}],
    "qwen3_moe": [
        {"tensor": 2, "expert": 2},
        {"pipeline": 2, "expert": 2},
        {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
    ],
    "qwen3_mqa": [{"tensor": 4}],
}
EVERY_TIME = ("qwen3", "qwen3_moe")
OTHERS = [family for family in LAYOUTS if family not in EVERY_TIME]
RANKS = dict.fromkeys(LAYOUTS, (1, 1)) | {"qwen3": (2,)}
"""Tensor-parallel ranks of the servers. Not two of one key-value head: there SGLang's second rank on a CPU holds the
padding of its attention."""


@contextmanager
def started_servers(model: Path, folder: Path, ranks: tuple[int, ...]) -> Iterator[list[str]]:
    from megatron_a3po.serving.local_server import LocalServer

    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                LocalServer(model, folder / f"server{number}.log", ["--skip-tokenizer-init", "--tp-size", str(size)])
            )
            for number, size in enumerate(ranks)
        ]
        for server in servers:
            wait_until(
                lambda server=server: get(f"{server.url}/ready")[0] == 200, SERVER_START_SECONDS, server.describe_death
            )
        yield [server.url for server in servers]


def read_from(url: str, folder: Path) -> list[dict[str, str]]:
    """Checksums of a server after it has read the weights in `folder`."""
    assert post(f"{url}/update_weights_from_disk", {"model_path": str(folder)})["success"]
    return checksums(url)


def checksums(url: str) -> list[dict[str, str]]:
    """Of every rank of a server, by the server's names of its tensors."""
    return [rank["checksums"] for rank in post(f"{url}/weights_checker", {"action": "checksum"})["ranks"]]


def logprobs(url: str) -> list[float]:
    """Of the tokens of `PROMPT` behind the first."""
    sampling = {"temperature": 1.0, "max_new_tokens": 0}
    request = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    scored = post(f"{url}/generate", request)["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in scored] == PROMPT
    return [logprob for logprob, _, _ in scored[1:]]


def hugging_face_logprobs(folder: Path) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(PROMPT)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids[None]).logits[0, :-1]
    found: list[float] = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()
    return found


@pytest.mark.parametrize("family", [*EVERY_TIME, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_servers_hold_the_trainers_weights_whatever_its_layout(family: str, tmp_path: Path) -> None:
    model, changed = tmp_path / family, tmp_path / "changed"
    save_tiny_model(family, model)
    _save_changed(model, changed)
    cases = [Case(family=family, parallel=layout) for layout in LAYOUTS[family]]
    with started_servers(model, tmp_path, RANKS[family]) as urls:
        former = [read_from(url, model) for url in urls]
        expected = [read_from(url, changed) for url in urls]
        arguments = json.dumps(encoded(cases)), str(tmp_path), json.dumps(urls)
        output = run_ranks(_publish, 4, *arguments, timeout_seconds=400.0)

    assert tuple(map(len, expected)) == RANKS[family]
    for ranks_before, ranks in zip(former, expected, strict=True):
        for before, after in zip(ranks_before, ranks, strict=True):
            assert len(after) > 20
            assert [name for name, checksum in after.items() if before[name] == checksum] == []
    right, wrong = hugging_face_logprobs(changed), hugging_face_logprobs(model)
    assert _largest_difference(right, wrong) > 0.1
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"title"')]
    # Through the groups, and through files.
    assert [entry["title"] for entry in found] == [case.title for case in cases for _ in range(2)]
    for entry in found:
        assert entry["before"] == former, entry["title"]
        assert entry["after"] == expected, entry["title"]
        assert set(entry["versions"]) == {"7"}, entry["title"]
        for found_logprobs in entry["logprobs"]:
            assert _largest_difference(found_logprobs, right) <= MAX_LOGPROB_DIFFERENCE, entry["title"]


def _largest_difference(found: list[float], expected: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


def _save_changed(model: Path, changed: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, changed)
    tensors = {name: tensor.float() * 1.25 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})


def _publish(cases: str, folder: str, urls: str) -> None:
    import torch
    import torch.distributed as dist

    from megatron_a3po import cpu
    from megatron_a3po.parallel.layout import RankInfo, init_distributed

    cpu.install()
    torch.set_num_threads(1)
    info = RankInfo.from_environment()
    init_distributed(info, "cpu", scaled(120.0))
    for case in [Case(**fields) for fields in json.loads(cases)]:
        path = Path(folder) / case.family
        model = changed_policy(case, path)
        for transport in ("group", "disk"):
            before = [read_from(url, path) for url in json.loads(urls)] if info.rank == 0 else []
            _publish_once(case, path, model, json.loads(urls), transport)
            if info.rank == 0:
                versions = [json.loads(get(f"{url}/model_info")[1])["weight_version"] for url in json.loads(urls)]
                result = {
                    "title": case.title,
                    "before": before,
                    "after": [checksums(url) for url in json.loads(urls)],
                    "versions": versions,
                    "logprobs": [logprobs(url) for url in json.loads(urls)],
                }
                print(json.dumps(result), flush=True)
        end_model_parallel()
    dist.destroy_process_group()


def _publish_once(case: Case, path: Path, model: Any, urls: list[str], transport: str) -> None:
    import torch.distributed as dist

    from megatron_a3po.runtime.timing import PhaseTimer
    from megatron_a3po.weights.build import build_publisher
    from tests.distributed.parity import configuration
    from tests.support.publishing import fleet_of

    publish = {"bucket_bytes": 100_000, "timeout_seconds": 60.0, "transport": transport, "fallback": False}
    config = configuration(Case(family=case.family, parallel=case.parallel, settings={"publish": publish}), path)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    with fleet_of(*urls) as fleet:
        mine = fleet if dist.get_rank() == 0 else None
        with build_publisher(config, model.chunks, model.groups, mine, group, timer=PhaseTimer()) as publisher:
            publisher.publish(7)
