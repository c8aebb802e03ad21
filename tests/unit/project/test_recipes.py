"""Every recipe loads for the GPUs that its head comment states, and fits them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_a3po.__main__ import main
from megatron_a3po.config import RunConfig
from megatron_a3po.preflight.architecture import Architecture
from megatron_a3po.preflight.families import read_architecture
from megatron_a3po.preflight.load import load_config
from megatron_a3po.preflight.memory import estimate_memory
from tests.support.pages import PAGES
from tests.support.paths import ROOT

RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if not path.stem.startswith(("base", "tiny")))
ARCHITECTURES = ROOT / "tests" / "support" / "architectures"
SERVED_IN_FP8 = ("qwen3_8b_dapo_math_fp8", "deepseek_v3_dapo_math")
GIB = 2**30
LEFT_FREE_GIB = 15
"""For what the estimate leaves out: the CUDA context, buffers of NCCL and of publication, fragmentation"""

PUBLISHED_BILLIONS = {
    "Qwen2.5-1.5B-Instruct": "1.54",
    "Qwen3-8B": "8.2",
    "Qwen3-32B": "32.8",
    "Qwen3-30B-A3B": "30.5",
    "Llama-3.1-70B-Instruct": "70.6",
    "DeepSeek-V3": "671",
}
"""Of the model cards"""


@dataclass(frozen=True)
class Stated:
    """What a recipe's head comment says."""

    trainers: int
    trainer_gigabytes: int
    layout: dict[str, int]
    rollouts: int
    rollout_gigabytes: int
    servers: int
    server_ranks: int
    nodes: int
    estimate_gib: str


def head_comment(recipe: str) -> str:
    lines = (ROOT / "configs" / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


def stated(recipe: str) -> Stated:
    head = head_comment(recipe)
    gpus = re.search(
        r"GPUs: (\d+) of (\d+) GB for training \(([^)]*)\), (\d+) of (\d+) GB for rollouts "
        r"\((\d+) servers x TP(\d+)\): (\d+) nodes?\.",
        head,
    )
    memory = re.search(r"Memory of the fullest training rank: ([\d.]+) GiB \(estimate", head)
    assert gpus and memory, head
    layout = {axis: int(size) for axis, size in re.findall(r"([A-Z]+)(\d+)", gpus[3])}
    numbers = [int(gpus[group]) for group in (1, 2, 4, 5, 6, 7, 8)]
    return Stated(*numbers[:2], layout, *numbers[2:], estimate_gib=memory[1])


def described(recipe: str) -> dict[str, Any]:
    """The config.json of the recipe's model, of which the name in `models/` may say the format as well."""
    text = (ROOT / "configs" / f"{recipe}.yaml").read_text(encoding="utf-8")
    base = re.search(r"^base: (?!base)(.*)\.yaml$", text, re.MULTILINE)
    model = re.search(r"^model: models/(.*)$", text, re.MULTILINE)
    if model is None:
        assert base
        return described(base[1])
    name = model[1].removesuffix("-FP8").removesuffix("-megatron")
    return dict(json.loads((ARCHITECTURES / f"{name}.json").read_text(encoding="utf-8")))


def stand_in(config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all models and datasets that recipes name, as far as a configuration is checked against them."""
    for recipe in RECIPES:
        for name in re.findall(r"^model: (models/.*)$", (ROOT / "configs" / f"{recipe}.yaml").read_text(), re.M):
            if not (tmp_path / name).exists():
                stand_in(described(recipe), tmp_path / name)
    for file in ("dapo-math-17k.parquet", "aime-2024.parquet", "math500/test.jsonl", "gsm8k/main/train.parquet"):
        (tmp_path / "data" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / file).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def readable(checkout: Path) -> Path:
    """The checkout with tokenizers, and with a few rows in each dataset of the recipes."""
    words = models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), chat_template="{{ messages[0].content }}")
    for model in (checkout / "models").iterdir():
        tokenizer.save_pretrained(model)
    for name, number in (("dapo-math-17k", 7), ("aime-2024", 3)):
        rows: list[dict[str, Any]] = [
            {
                "prompt": [{"role": "user", "content": f"{name} {index}"}],
                "reward_model": {"ground_truth": "1"},
                "extra_info": {"index": str(index)},
            }
            for index in range(number)
        ]
        write_parquet(checkout / "data" / f"{name}.parquet", rows)
    for split, number in (("train", 6), ("test", 4)):
        rows = [{"question": f"{split} {index}?", "answer": f"so\n#### {index}"} for index in range(number)]
        write_parquet(checkout / "data" / "gsm8k" / "main" / f"{split}.parquet", rows)
    rows = [{"problem": f"{index} + 1", "answer": "1", "unique_id": str(index)} for index in range(5)]
    write_math500(checkout, [json.dumps(row) for row in rows])
    return checkout


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def write_math500(checkout: Path, lines: list[str]) -> None:
    (checkout / "data" / "math500" / "test.jsonl").write_text("".join(f"{line}\n" for line in lines))


def load(recipe: str) -> tuple[RunConfig, Architecture, Stated]:
    says = stated(recipe)
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", environment={"WORLD_SIZE": str(says.trainers)})
    return config, read_architecture(described(recipe)), says


def test_there_is_a_recipe_for_each_kind_of_model() -> None:
    assert {described(recipe)["architectures"][0] for recipe in RECIPES} == {
        *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM", "DeepseekV3ForCausalLM"),
    }
    assert len(RECIPES) == 7


@pytest.mark.parametrize("name", sorted(path.stem for path in ARCHITECTURES.glob("*.json")))
def test_an_architecture_has_the_parameters_of_its_model_card(name: str) -> None:
    parameters = read_architecture(json.loads((ARCHITECTURES / f"{name}.json").read_text())).num_parameters
    published = PUBLISHED_BILLIONS[name]
    assert f"{parameters / 1e9:.{len(published.partition('.')[2])}f}" == published


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_no_mistake_on_the_gpus_that_it_states(recipe: str, checkout: Path) -> None:
    config, _, says = load(recipe)
    parallel = config.parallel

    sizes = {"TP": parallel.tensor, "PP": parallel.pipeline, "CP": parallel.context, "EP": parallel.expert}
    sizes["DP"] = says.trainers // (parallel.tensor * parallel.pipeline * parallel.context)
    assert {axis: size for axis, size in sizes.items() if size > 1} == says.layout
    assert (config.rollout.servers, config.rollout.num_servers) == ("registered", says.servers)
    assert config.rollout.server_tensor_parallel == says.server_ranks
    assert says.rollouts == says.servers * says.server_ranks
    assert says.nodes * 8 == says.trainers + says.rollouts
    assert config.run_dir == Path("runs") / recipe


@pytest.mark.parametrize("recipe", SERVED_IN_FP8)
def test_the_launcher_takes_the_fp8_folder_that_the_head_comment_names(recipe: str, checkout: Path) -> None:
    (override,) = re.findall(r"model=models/[\w.-]+\w", head_comment(recipe))
    stand_in(
        described(recipe) | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        checkout / override.removeprefix("model="),
    )

    served = load_config(ROOT / "configs" / f"{recipe}.yaml", [override], {})
    assert served.model != load(recipe)[0].model


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensor_and_expert_ranks_share_a_node_where_the_layout_allows_it(recipe: str, checkout: Path) -> None:
    config, _, says = load(recipe)

    assert config.parallel.tensor <= 8 and config.rollout.server_tensor_parallel <= 8
    assert config.parallel.expert <= 8 or says.layout["EP"] * says.layout["PP"] == says.trainers


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_longest_sequence_is_a_microbatch(recipe: str, checkout: Path) -> None:
    config, _, _ = load(recipe)
    assert config.data.max_prompt_tokens is not None
    assert config.actor.microbatch_tokens >= config.data.max_prompt_tokens + config.rollout.max_new_tokens


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_fullest_training_rank_fits_its_gpu(recipe: str, checkout: Path) -> None:
    config, architecture, says = load(recipe)
    estimate = estimate_memory(config, architecture, says.trainers)

    assert f"{estimate.total / GIB:.1f}" == says.estimate_gib
    for peak in (estimate.total, estimate.saving):
        assert peak <= (says.trainer_gigabytes - LEFT_FREE_GIB) * GIB
    assert estimate.output_layer == "fused"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_expected_seconds_are_those_of_the_flops(recipe: str, checkout: Path) -> None:
    config, architecture, says = load(recipe)
    found = re.search(r"step of ([\d,]+) tokens per response (?:would train|trains) in (\d+) s", head_comment(recipe))
    if config.precision == "fp8":
        assert found is None
        return
    assert found
    # The backward pass is two forward ones, and recomputation one more.
    passes = 4 if config.actor.activation_recompute == "full" else 3
    responses = config.rollout.prompts_per_step * config.rollout.group_size
    flops = passes * responses * architecture.forward_flops(int(found[1].replace(",", "")))
    assert round(flops / (says.trainers * 400e12)) == int(found[2])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_servers_have_room_for_weights_and_eight_of_the_longest_sequences(recipe: str, checkout: Path) -> None:
    config, architecture, says = load(recipe)
    ranks, latent = says.server_ranks, architecture.latent

    weights = architecture.num_parameters * (1 if recipe in SERVED_IN_FP8 else 2) / ranks
    if latent is None:
        per_layer = 2 * -(-architecture.num_kv_heads // ranks) * architecture.head_dim
    else:
        per_layer = latent.kv_rank + latent.rope_dim
    sequence = config.actor.microbatch_tokens * architecture.num_layers * per_layer * 2
    assert weights + 8 * sequence <= 0.85 * says.rollout_gigabytes * 1e9


def test_the_recipes_page_has_a_row_for_each_recipe_that_says_the_same() -> None:
    rows = re.findall(
        r"^\| `configs/([\w.]+)\.yaml` \| (\d+) x (\d+) GB \| (\d+) x (\d+) GB \| "
        r"([^;|]+); (\d+) servers x TP(\d+) \| ([\d.]+) GiB \|$",
        PAGES["docs/recipes.md"],
        re.MULTILINE,
    )
    assert sorted(row[0] for row in rows) == RECIPES
    for recipe, trainers, gigabytes, rollouts, served, layout, servers, ranks, estimate in rows:
        sizes = {axis: int(size) for axis, size in re.findall(r"([A-Z]+)(\d+)", layout)}
        numbers = [int(number) for number in (trainers, gigabytes, rollouts, served, servers, ranks)]
        nodes = (numbers[0] + numbers[2]) // 8
        assert stated(recipe) == Stated(*numbers[:2], sizes, *numbers[2:], nodes, estimate)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_recipe_would_run_is_planned(recipe: str, readable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says = stated(recipe)
    plan = ["plan", "--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--ranks", str(says.trainers)]
    assert main(plan) == 0
    output = capsys.readouterr().out
    experts = says.layout.pop("EP", None)
    assert f"layout: {says.trainers} ranks = " in output
    assert all(f"{axis}{size}" in output for axis, size in says.layout.items())
    assert experts is None or f"experts divided among {experts} ranks" in output
    assert f"rollouts: {says.servers} servers (registered) x TP{says.server_ranks}" in output
    datasets = "6 to train on, 4 of gsm8k_test" if "gsm8k" in recipe else "7 to train on, 3 of aime24, 5 of math500"
    assert output.endswith(f"prompts: {datasets}\n")

    # What cannot run is said after what would.
    (dataset,) = load(recipe)[0].evaluation.datasets.keys() & {"gsm8k_test", "math500"}
    path = load(recipe)[0].evaluation.datasets[dataset].path
    (path / "test.parquet" if path.is_dir() else path).write_text("{")
    assert main(plan) == 1
    said = capsys.readouterr()
    assert f"layout: {says.trainers} ranks = " in said.out and said.err.startswith("error: ") and str(path) in said.err


def test_a_tokenizer_that_cannot_be_read_is_told_by_the_plan(
    readable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (readable / "models" / "Qwen3-8B" / "tokenizer.json").write_text("{}")
    plan = ["plan", "--config", str(ROOT / "configs" / "qwen3_8b_dapo_math.yaml"), "--ranks", "4"]
    assert main(plan) == 2
    assert capsys.readouterr().err.startswith("error: models/Qwen3-8B: its tokenizer cannot be read (")


def test_the_command_of_the_recipes_page_prints_the_estimate(
    readable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (readable / "configs").symlink_to(ROOT / "configs")
    (command,) = re.findall(r"^python -m megatron_a3po (plan .*)$", PAGES["docs/recipes.md"], re.MULTILINE)

    assert main(command.split()) == 0
    (total,) = re.findall(r"^ +total +([\d.]+) GiB$", capsys.readouterr().out, re.MULTILINE)
    assert f"{float(total):.1f}" == stated("qwen3_8b_dapo_math").estimate_gib
