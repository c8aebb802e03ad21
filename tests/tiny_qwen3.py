"""A random tiny Qwen3 as a Hugging Face folder, for tests that need a model and not its skills."""

from pathlib import Path

VOCAB_SIZE = 259
"""Not divisible by the tensor-parallel size, so that the vocabulary is padded."""


def save_random_qwen3(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # large enough that every layer matters; norms away from 1
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
