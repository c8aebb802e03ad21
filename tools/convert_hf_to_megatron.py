"""Convert a Hugging Face folder to Megatron's torch_dist format, for any parallel layout.

    python tools/convert_hf_to_megatron.py models/Qwen3-8B models/Qwen3-8B-megatron
    torchrun --nproc-per-node 8 tools/convert_hf_to_megatron.py ...      # eight processes share the work

Needs no GPU and little memory: a process holds the largest weights of one layer at a time. If it is interrupted, the
same command continues. A run takes the result as `model=...`, like the Hugging Face folder itself.
"""

import argparse
from pathlib import Path

from megatron_a3po.conversion.processes import Processes, run_tool


def _convert(arguments: argparse.Namespace, processes: Processes) -> None:
    from megatron_a3po.config.model_folder import MEGATRON_WEIGHTS
    from megatron_a3po.conversion.to_megatron import convert_to_megatron
    from megatron_a3po.conversion.verify import verify

    if arguments.verify and (arguments.target / "config.json").exists():
        processes.say(f"{arguments.target}: is there already, and is only verified")
    else:
        convert_to_megatron(arguments.source, arguments.target, processes)
        processes.say_written(arguments.target)
    if arguments.verify:
        verify(arguments.source, arguments.target / MEGATRON_WEIGHTS, processes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="Hugging Face folder: config.json, *.safetensors, tokenizer")
    parser.add_argument("target", type=Path, help="folder to create; it must not exist or be empty")
    parser.add_argument(
        "--verify", action="store_true", help="convert back and compare every bit, and logits on random tokens"
    )
    run_tool(parser, _convert)
