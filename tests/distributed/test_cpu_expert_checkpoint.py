"""A checkpoint of the CPU modules that was saved under one layout loads under another, element for element."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.test_cpu_families import _build_model, _initialize
from tests.tiny_models import save_tiny_model

FAMILIES = ("deepseek_v3", "gpt_oss")
"""Experts with and without biases, sinks, multi-latent attention, an expert bias in the router"""


@pytest.mark.distributed
def test_weights_saved_by_four_ranks_are_loaded_by_one(tmp_path: Path) -> None:
    for family in FAMILIES:
        save_tiny_model(family, tmp_path / family)
        (tmp_path / f"{family}-checkpoint").mkdir()
    run_ranks(_save, 4, str(tmp_path), json.dumps({"tensor": 2, "expert": 2}), timeout_seconds=150)
    output = run_ranks(_load_and_compare, 1, str(tmp_path), "{}", timeout_seconds=100)
    assert [line.split()[1] for line in output.splitlines() if line.startswith("same")] == list(FAMILIES)


def _sharded_state_dict(chunk: Any) -> Any:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return chunk.module.sharded_state_dict(metadata={"dp_cp_group": group})


def _save(folder: str, layout: str) -> None:
    sizes = _initialize(layout)
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    for family in FAMILIES:
        _, chunk = _build_model(f"{folder}/{family}", sizes)
        dist_checkpointing.save(_sharded_state_dict(chunk), f"{folder}/{family}-checkpoint")
    dist.barrier()
    dist.destroy_process_group()


def _load_and_compare(folder: str, layout: str) -> None:
    sizes = _initialize(layout)
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from safetensors.torch import load_file

    for family in FAMILIES:
        bridge, chunk = _build_model(f"{folder}/{family}", sizes)
        with torch.no_grad():
            for tensor in [*chunk.module.parameters(), *chunk.module.buffers()]:
                tensor.zero_()
        state = dist_checkpointing.load(_sharded_state_dict(chunk), f"{folder}/{family}-checkpoint")
        chunk.module.load_state_dict(state)
        expected = load_file(f"{folder}/{family}/model.safetensors")
        exported = dict(bridge.export_hf_weights([chunk], show_progress=False))
        assert exported.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(exported[name], tensor), name
        print(f"same {family}", flush=True)
    dist.destroy_process_group()
