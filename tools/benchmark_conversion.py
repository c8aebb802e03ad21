"""Measure memory and time of both conversions of a synthetic model in the shape of Llama 3.2 1B (1.24 billion).

    python tools/benchmark_conversion.py --processes 1
    python tools/benchmark_conversion.py --processes 4 --layers 4     # a smaller model

Writes the model (2.5 GB), converts it to Megatron's format and back, and prints the peak resident memory of the largest
process, of which the libraries take 0.8 GiB.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_a3po.hf.safetensors_format import TensorSpec
from megatron_a3po.hf.safetensors_writer import SafetensorsWriter

_TOOLS = Path(__file__).resolve().parent
_HIDDEN, _INTERMEDIATE, _KEYS = 2048, 8192, 512
_VOCABULARY = 128256
_PEAK = re.compile(r"at most ([0-9.]+) GiB")


def write_model(folder: Path, layers: int, vocabulary: int = _VOCABULARY) -> int:
    """A Hugging Face folder with random bf16 weights; the number of its parameters."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(layers, vocabulary)), encoding="utf-8")
    specs = list(_specs(layers, vocabulary))
    generator = torch.Generator().manual_seed(0)
    with SafetensorsWriter(folder / "model.safetensors", specs) as writer:
        for spec in specs:
            # Any bits will do: they are moved, and never computed with.
            bits = torch.randint(0, 2**15, spec.shape, dtype=torch.int16, generator=generator)
            writer.append(spec.name, bits.view(torch.bfloat16))
    return sum(spec.nbytes for spec in specs) // 2


def _config(layers: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _specs(layers: int, vocabulary: int) -> Iterator[TensorSpec]:
    shapes = {
        "input_layernorm": (_HIDDEN,),
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_KEYS, _HIDDEN),
        "self_attn.v_proj": (_KEYS, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "post_attention_layernorm": (_HIDDEN,),
        "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
    }
    yield TensorSpec(name="model.embed_tokens.weight", dtype=torch.bfloat16, shape=(vocabulary, _HIDDEN))
    for layer in range(layers):
        for name, shape in shapes.items():
            yield TensorSpec(name=f"model.layers.{layer}.{name}.weight", dtype=torch.bfloat16, shape=shape)
    yield TensorSpec(name="model.norm.weight", dtype=torch.bfloat16, shape=(_HIDDEN,))


def run_tool(tool: str, processes: int, *arguments: str) -> tuple[float, float]:
    """(peak memory of the largest process in GiB, seconds)"""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(_TOOLS / tool), *arguments]
    begun = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    peak = _PEAK.search(result.stdout)
    assert peak is not None, result.stdout
    return float(peak[1]), time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="number of processes that share the work (default 1)")
    parser.add_argument("--layers", type=int, default=16, help="layers of the synthetic model (default 16)")
    parser.add_argument(
        "--folder", type=Path, help="folder to write to (7.5 GB, removed at the end); default: temporary"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        root = Path(name)
        parameters = write_model(root / "hf", arguments.layers)
        print(
            f"{parameters:,} parameters, {2 * parameters / 2**30:.2f} GiB; {arguments.processes} processes", flush=True
        )
        print("| conversion | peak memory of a process | seconds |\n|---|---|---|", flush=True)
        for title, tool, source, target in (
            ("to Megatron", "convert_hf_to_megatron.py", "hf", "megatron"),
            ("to Hugging Face", "convert_megatron_to_hf.py", "megatron", "back"),
        ):
            peak, seconds = run_tool(tool, arguments.processes, str(root / source), str(root / target))
            print(f"| {title} | {peak:.2f} GiB | {seconds:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
