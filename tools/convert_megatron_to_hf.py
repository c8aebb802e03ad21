"""Convert Megatron's weights, of a converted folder or of a run's checkpoint, to a Hugging Face folder.

    python tools/convert_megatron_to_hf.py runs/math/checkpoints/step_00000200 models/math-200
    torchrun --nproc-per-node 8 tools/convert_megatron_to_hf.py ...      # eight processes divide the files

Whatever layout the checkpoint was saved in. Needs no GPU and little memory: a process holds one layer's largest weights
at a time. Interrupted, the same command goes on where it was.
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
        "source", type=Path, help="what convert_hf_to_megatron.py made, or run_dir/checkpoints/step_..."
    )
    parser.add_argument("target", type=Path, help="folder to make; must not hold anything yet")
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder with config.json and tokenizer; default: what the source names"
    )
    parser.add_argument(
        "--fp8", choices=["blockwise"], help="linear weights in FP8 with one scale per 128 x 128; not gpt-oss"
    )
    parser.add_argument(
        "--verify", action="store_true", help="convert back and compare every bit, and the logits on random tokens"
    )
    run_tool(parser, _convert)
