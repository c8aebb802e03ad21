"""Convert Megatron weights, from a converted folder or a checkpoint of a run, to a Hugging Face folder.

    python tools/convert_megatron_to_hf.py runs/math/checkpoints/step_00000200 models/math-200
    torchrun --nproc-per-node 8 tools/convert_megatron_to_hf.py ...      # eight processes share the work

The checkpoint may have any layout. Needs no GPU and little memory: a process holds the largest weights of one layer at
a time. If it is interrupted, the same command continues.
"""

import argparse
from pathlib import Path

from megatron_a3po.conversion.processes import Processes, run_tool


def _convert(arguments: argparse.Namespace, processes: Processes) -> None:
    from megatron_a3po.conversion.to_hf import convert_to_hf, find_source
    from megatron_a3po.conversion.verify import verify

    source = find_source(arguments.source, arguments.model)
    fp8 = arguments.fp8 == "blockwise"
    if arguments.verify and (arguments.target / "config.json").exists():
        processes.say(f"{arguments.target}: is there already, and is only verified")
    else:
        convert_to_hf(source, arguments.target, processes, fp8=fp8)
        processes.say_written(arguments.target)
    if arguments.verify:
        verify(arguments.target, source.weights, processes, fp8=fp8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", type=Path, help="folder made by convert_hf_to_megatron.py, or run_dir/checkpoints/step_..."
    )
    parser.add_argument("target", type=Path, help="folder to create; it must not exist or be empty")
    parser.add_argument(
        "--model",
        type=Path,
        help="Hugging Face folder with config.json and tokenizer; default: the one named in source",
    )
    parser.add_argument(
        "--fp8",
        choices=["blockwise"],
        help="write linear weights in FP8 with one scale per 128 x 128 block; not for gpt-oss",
    )
    parser.add_argument(
        "--verify", action="store_true", help="convert back and compare every bit, and logits on random tokens"
    )
    run_tool(parser, _convert)
