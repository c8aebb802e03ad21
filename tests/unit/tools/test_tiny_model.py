"""The quickstart's model: the folder that tools/make_tiny_model.py makes, with a few warm-start steps only."""

import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from megatron_a3po.errors import ConfigError
from megatron_a3po.preflight.load import load_config
from megatron_a3po.prompts.encoder import PromptEncoder
from megatron_a3po.prompts.tasks import load_task
from tests.support.paths import ROOT


def import_tool() -> ModuleType:
    """Import the program, which is in no package."""
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "tools" / "make_tiny_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # slotted dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


tool = import_tool()
SETTINGS = tool.WarmStartSettings(num_steps=2, num_demonstrations=64, batch_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("models") / "tiny"
    tool.make_tiny_model(output, SETTINGS)
    return output


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def test_transformers_loads_the_folder_as_a_qwen3_with_tied_embeddings(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)

    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.num_parameters() == 115_264
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_generation_stops_at_the_tokenizers_end_of_sequence(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    generation = AutoModelForCausalLM.from_pretrained(folder).generation_config

    assert generation.eos_token_id == tokenizer.eos_token_id == 1
    assert generation.pad_token_id == tokenizer.pad_token_id == 0


def test_a_prompt_has_eight_tokens_of_a_vocabulary_of_259(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = load_task(**tool.DATA, encoder=PromptEncoder(tokenizer))

    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 259
    assert {len(prompt.token_ids) for prompt in prompts.held_out} == {8}


@pytest.mark.parametrize("text", ["detavo", "a", "tod .", " n't", "Zürich"])
def test_text_comes_back_from_its_tokens_unchanged(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)

    assert len(token_ids) == len(text.encode())
    assert tokenizer.decode([*token_ids, 1, 0], skip_special_tokens=True) == text


def test_the_teacher_is_right_one_time_in_four_and_else_stops_early_or_runs_on() -> None:
    rng = random.Random(0)
    right = [5, 6, 7, 8]

    answers = [tool.sloppy_answer(right, share_right=0.25, rng=rng) for _ in range(4000)]

    assert {tuple(answer) for answer in answers} == {(5,), (5, 6), (5, 6, 7), (5, 6, 7, 8), (5, 6, 7, 8, 8)}
    assert answers.count(right) / 4000 == pytest.approx(0.25, abs=0.03)
    assert sum(len(answer) == 5 for answer in answers) / 4000 == pytest.approx(0.375, abs=0.03)


def test_demonstrations_reverse_the_word_and_label_the_response_only(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = load_task(**tool.DATA, encoder=PromptEncoder(tokenizer))

    demonstrations = tool.make_demonstrations(prompts, tokenizer, SETTINGS)

    assert demonstrations.token_ids.shape == (64, 15)
    for token_ids, labels in zip(demonstrations.token_ids.tolist(), demonstrations.labels.tolist(), strict=True):
        response = [label for label in labels if label != tool.IGNORED_LABEL]
        letters = [token for token in response if token != 1]
        assert token_ids[8 : 8 + len(response)] == response
        assert letters[:6] == token_ids[2:8][::-1][: len(letters)]
        assert (response[-1] == 1) == (len(letters) < 7)


def test_the_warm_start_lowers_the_loss(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tool.make_tiny_model(tmp_path / "tiny", SETTINGS.model_copy(update={"num_steps": 40, "num_warmup_steps": 1}))

    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.6 * losses[0]


def test_the_same_settings_give_the_same_bytes_and_another_seed_does_not(folder: Path, tmp_path: Path) -> None:
    tool.make_tiny_model(tmp_path / "again", SETTINGS)
    tool.make_tiny_model(tmp_path / "other", SETTINGS.model_copy(update={"seed": 1}))

    for name in tool.FOLDER_FILES:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() != (tmp_path / "other" / weights).read_bytes()


def test_a_complete_folder_is_reused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "write_model", fail("made again"))

    record = tool.make_tiny_model(folder, SETTINGS)

    assert record.settings == SETTINGS
    assert f"reusing {folder}" in capsys.readouterr().out


def test_a_folder_of_another_seed_is_neither_reused_nor_replaced_without_force(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()

    with pytest.raises(ConfigError, match="seed=0 instead of 5: pass --force"):
        tool.make_tiny_model(folder, SETTINGS.model_copy(update={"seed": 5}))

    assert (folder / "model.safetensors").read_bytes() == before


def test_force_never_replaces_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(ConfigError, match="not made by this tool"):
        tool.make_tiny_model(tmp_path, SETTINGS, force=True)

    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_interrupted_making_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "sampled_accuracy", fail("interrupted"))

    with pytest.raises(RuntimeError, match="interrupted"):
        tool.make_tiny_model(tmp_path / "tiny", SETTINGS)

    assert list(tmp_path.iterdir()) == []


def test_the_final_name_appears_only_when_every_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "tiny"
    write_model = tool.write_model
    existed = []

    def write_and_look(folder: Path, settings: object) -> object:
        record = write_model(folder, settings)
        existed.append(output.exists())
        return record

    monkeypatch.setattr(tool, "write_model", write_and_look)
    tool.make_tiny_model(output, SETTINGS)

    assert existed == [False]
    assert sorted(path.name for path in output.iterdir()) == sorted(tool.FOLDER_FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_the_tool_and_the_quickstart_config_hold_the_same_words_out(folder: Path) -> None:
    config = load_config(ROOT / "configs" / "tiny_cpu.yaml", [f"model={folder}"], environment={})

    assert config.data.model_dump(include=set(tool.DATA)) == tool.DATA


def fail(message: str) -> Callable[..., None]:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError(message)

    return failing
