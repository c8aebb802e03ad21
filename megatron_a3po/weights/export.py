"""The policy as an ordinary Hugging Face folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor


def save_hf_folder(named_tensors: Sequence[tuple[str, Tensor]], source: Path, target: Path, *, rank: int) -> None:
    """Rank 0 writes the tensors as safetensors (shards of 5 GB) with the JSON and tokenizer files of `source`.

    The folder appears under its name when it is whole, in the place of a former one.
    """
    if rank != 0:
        return
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy2(file, unfinished)
    save_torch_state_dict({name: tensor.contiguous() for name, tensor in named_tensors}, unfinished)
    if target.exists():
        replaced = target.with_name(f".{target.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        unfinished.rename(target)
        shutil.rmtree(replaced)
    else:
        unfinished.rename(target)
