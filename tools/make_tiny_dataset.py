"""Write datasets of the tiny model's words: one for training, as Parquet with the columns of DAPO-Math-17k, and two
small ones for evaluation, as JSON lines.

    python tools/make_tiny_dataset.py [--output data/tiny_words]
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet
from make_tiny_model import DATA, make_tokenizer

from megatron_a3po.prompts.encoder import PromptEncoder
from megatron_a3po.prompts.prompts import Prompt
from megatron_a3po.prompts.tasks import load_task

NUM_EASY = 64
"""Held-out words of the one evaluation set; the others make the second one."""


def write_datasets(folder: Path) -> None:
    """Into `folder`, which exists."""
    prompts = load_task(**DATA, encoder=PromptEncoder(make_tokenizer()))
    rows = [
        {
            "data_source": DATA["task"],
            "prompt": [{"role": "user", "content": prompt.question}],
            "reward_model": {"ground_truth": prompt.answer},
            "extra_info": {"index": prompt.prompt_id},
        }
        for prompt in map(prompts.training_prompt, range(len(prompts)))
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    _write_jsonl(folder / "words_a.jsonl", prompts.held_out[:NUM_EASY])
    _write_jsonl(folder / "words_b.jsonl", prompts.held_out[NUM_EASY:])


def _write_jsonl(path: Path, prompts: Iterable[Prompt]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            row = {"problem": prompt.question, "answer": prompt.answer, "unique_id": prompt.prompt_id}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("data/tiny_words"), help="folder to create (%(default)s)")
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        folder = Path(temporary) / output.name
        folder.mkdir()
        write_datasets(folder)
        os.rename(folder, output)
    print(f"{output}: train.parquet, words_a.jsonl, words_b.jsonl")


if __name__ == "__main__":
    main()
