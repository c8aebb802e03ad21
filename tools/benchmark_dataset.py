#!/usr/bin/env python
"""Measure time and memory of reading a large JSONL dataset.

    python tools/benchmark_dataset.py --rows 1000000 [--tokenizer FOLDER]

Writes a file with this many rows to a temporary folder, reads it as a run does, and prints one JSON line. Without a
tokenizer, every byte is a token.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_a3po.prompts.dataset import DatasetFiles, DatasetLimits, load_dataset
from megatron_a3po.prompts.encoder import PromptEncoder

QUESTION = "Problem {i}: what is {i} plus {j}? " + "Explain each step of it. " * 10
NUM_LOOKED_UP = 1000


class ByteTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def write_rows(path: Path, rows: int) -> int:
    """Returns the bytes of the file."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            row = {"prompt": QUESTION.format(i=i, j=7 * i), "answer": str(8 * i), "source": "x" * 200}
            file.write(json.dumps(row) + "\n")
    return path.stat().st_size


def measure(rows: int, tokenizer: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dataset.jsonl"
        file_bytes = write_rows(path, rows)
        memory, cpu, wall = peak_bytes(), time.process_time(), time.perf_counter()
        prompts = load_dataset(
            DatasetFiles(path=path, columns={"prompt": "prompt", "answer": "answer"}, encoder=PromptEncoder(tokenizer)),
            {},
            run_dir=Path(folder),
            num_held_out=512,
            seed=0,
            order_seed=0,
            limits=DatasetLimits(max_prompt_tokens=4096, vocab_size=1_000_000, max_bad_share=0.0),
        )
        used = {
            "cpu_seconds": round(time.process_time() - cpu, 2),
            "wall_seconds": round(time.perf_counter() - wall, 2),
            "memory_bytes": peak_bytes() - memory,
        }
        start = time.perf_counter()
        for index in range(NUM_LOOKED_UP):
            prompts.training_prompt(index)
        seconds = (time.perf_counter() - start) / NUM_LOOKED_UP
        return {"rows": rows, "file_bytes": file_bytes, **used, "seconds_per_prompt": round(seconds, 6)}


def peak_bytes() -> int:
    """The largest memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="model folder")
    parsed = parser.parse_args()
    tokenizer: Any = ByteTokenizer()
    if parsed.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(parsed.tokenizer)
    print(json.dumps(measure(parsed.rows, tokenizer)))


if __name__ == "__main__":
    main()
