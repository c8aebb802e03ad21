"""A configuration is read completely or refused before anything starts, with every mistake and its remedy."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_a3po.config import RunConfig
from megatron_a3po.config.yaml_files import read_yaml
from megatron_a3po.errors import ConfigError
from megatron_a3po.preflight.load import known_keys, load_config, to_yaml
from tests.support.paths import ROOT

DESCRIPTION = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "max_position_embeddings": 100,
    "vocab_size": 259,
}
GOOD = """\
model: {model}
run_dir: runs/x
num_steps: 60
device: cpu
precision: fp32
data:
  task: spell_backward
rollout:
  max_new_tokens: 20
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DESCRIPTION))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def file(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD.format(model=model))
    return path


def refusal(path: Path, *overrides: str, world_size: str = "") -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides, {"WORLD_SIZE": world_size})
    return str(error.value)


def mistakes(path: Path, *overrides: str, world_size: str = "") -> list[str]:
    """The keys that are complained about, and the count in the headline must be theirs."""
    headline, *lines = refusal(path, *overrides, world_size=world_size).splitlines()
    numbered = [line.split(". ", 1) for line in lines]
    assert [number.strip() for number, _ in numbered] == [str(index) for index in range(1, len(lines) + 1)]
    assert f": {len(lines)} mistake{'s' * (len(lines) > 1)} in the configuration" in headline
    return [text.split(":")[0].split(" = ")[0] for _, text in numbered]


def test_a_file_gives_its_values_and_defaults_for_the_rest(file: Path, model: Path) -> None:
    config = load_config(file, environment={})

    assert (config.model, config.num_steps, config.data.task) == (model, 60, "spell_backward")
    assert (config.max_staleness, config.algorithm.weight_cap, config.proximal) == (2, 5.0, "loglinear")


def test_a_file_inherits_key_by_key_from_its_chain_of_bases_and_overrides_come_last(file: Path) -> None:
    below = file.parent / "below"
    below.mkdir()
    (below / "middle.yaml").write_text("base: ../run.yaml\nnum_steps: 5\nrollout: {group_size: 4}\n")
    (below / "top.yaml").write_text("base: middle.yaml\nrollout: {max_new_tokens: 30}\n")
    config = load_config(below / "top.yaml", ["rollout.temperature=2", "optimizer.adam_eps=1e-6"], {})

    assert (config.num_steps, config.rollout.group_size, config.rollout.max_new_tokens) == (5, 4, 30)
    assert (config.rollout.temperature, config.optimizer.adam_eps) == (2.0, 1e-6)
    assert config.data.task == "spell_backward"


def test_bases_in_a_circle_and_missing_bases_are_errors(file: Path) -> None:
    (file.parent / "a.yaml").write_text("base: b.yaml\n")
    (file.parent / "b.yaml").write_text("base: a.yaml\n")

    assert "a.yaml" in (message := refusal(file.parent / "a.yaml")) and "`base:`" in message
    (file.parent / "b.yaml").write_text("base: none.yaml\n")
    assert "none.yaml" in refusal(file.parent / "a.yaml")
    (file.parent / "b.yaml").write_text(file.read_text() + "base: [run.yaml]\n")
    assert mistakes(file.parent / "b.yaml") == ["base"]


def test_a_missing_file_is_named_with_its_neighbours(file: Path) -> None:
    message = refusal(file.parent / "rum.yaml")
    assert "rum.yaml" in message and str(file) in message and "tiny_cpu_dataset" in message


@pytest.mark.parametrize(
    "text", ["num_steps: 1\nnum_steps: 2\n", "data: {size: 1, size: 1}\n", "data: [}", "a: {{b}}", "3: 4"]
)
def test_keys_given_twice_or_no_text_and_broken_yaml_are_errors_with_their_place(file: Path, text: str) -> None:
    file.write_text(text)

    assert "not valid YAML" in (message := refusal(file)) and "line" in message


@pytest.mark.parametrize("text", ["", "- a\n", "word"])
def test_a_file_without_keys_is_an_error(file: Path, text: str) -> None:
    file.write_text(text)

    assert str(file) in (message := refusal(file)) and "keys and values" in message


@pytest.mark.parametrize("text", ["2e-4", "2E-4", "+2e-4", "2.0e-4", "0.0002", "2.e-4"])
def test_every_way_to_write_a_small_number_is_a_number(file: Path, text: str) -> None:
    file.write_text(file.read_text() + f"optimizer: {{learning_rate: {text}}}\n")

    assert load_config(file, environment={}).optimizer.learning_rate == 2e-4
    assert load_config(file, [f"optimizer.learning_rate={text}"], {}).optimizer.learning_rate == 2e-4


def test_all_mistakes_come_in_one_message(file: Path) -> None:
    file.write_text(file.read_text() + "learning_rate: 1\nparallel: {tensor: 3, pipline: 2}\n")
    overrides = ["num_step=3", "num_steps='60'", "seed=true", "max_staleness=-1", "rollout.servers=[host]", "oops"]

    expected = """
        oops num_step num_steps seed max_staleness learning_rate parallel.pipline algorithm.dual_clip rollout.servers
        actor.microbatch_tokens parallel parallel.tensor
    """
    assert sorted(mistakes(file, *overrides, "algorithm.dual_clip=1", world_size="4")) == sorted(expected.split())


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("num_step=1", "num_steps"),
        ("learning_rate=1", "optimizer.learning_rate"),
        ("rollout.group_sizes=8", "rollout.group_size"),
        ("optimiser.learning_rate=1", "optimizer"),
        ("algorithm.max_staleness=1", "max_staleness"),
        ("rollout.tensor=2", "parallel.tensor"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(file: Path, override: str, nearest: str) -> None:
    assert f"did you mean `{nearest}" in refusal(file, override)


def test_an_unknown_key_unlike_all_others_points_to_the_list_of_keys(file: Path) -> None:
    assert "zzz = 1" in (message := refusal(file, "zzz=1")) and "--print-config" in message


WRONG_VALUES = """
    num_steps='60' num_steps=true num_steps=1.5 num_steps=1e2 num_steps=0 num_steps= num_steps=[1] seed=-1 model=3
    device=gpu proximal=none data.task=1 data.task_options=3 data=x rollout= rollout.servers=remote rollout.servers=[1]
    rollout.group_size=1 rollout.server_arguments=--x algorithm.weight_cap=0 algorithm.weight_cap=.nan
    algorithm.clip_epsilon_low=1.5 algorithm.dual_clip=1.0 publish.verify_prompts='6' optimizer.learning_rate='1e-4'
    optimizer.learning_rate=.inf rollout.request_timeout_seconds=20 parallel.tensor=yes
"""


@pytest.mark.parametrize("override", WRONG_VALUES.split())
def test_a_value_of_the_wrong_type_or_range_is_one_mistake_of_that_key_alone(file: Path, override: str) -> None:
    """Nothing that merely follows from it, such as a default in its place that does not fit, is reported too."""
    assert mistakes(file, "publish.verify_prompts=1", "publish.max_logprob_difference=1.0", override) == [
        override.split("=")[0]
    ]


def test_missing_required_keys_are_all_named(file: Path, model: Path) -> None:
    file.write_text(f"device: cpu\nprecision: fp32\nmodel: {model}\nrollout: {{max_new_tokens: 9}}\n")

    assert mistakes(file) == ["run_dir", "num_steps", "data"]
    file.write_text("device: cpu\nprecision: fp32\nnum_steps: 1\ndata: {}\n")
    assert mistakes(file) == ["model", "run_dir", "data"]


@pytest.mark.parametrize("override", ["model.x=1", "model.x.y=1", "num_steps.a.b.c=1", "data.task.x.y=3"])
def test_an_override_below_a_value_is_refused_and_not_lost(file: Path, override: str) -> None:
    assert mistakes(file, override) == [override.split("=")[0]]


@pytest.mark.parametrize("override", ["num_steps", "=3", "--x=3", "a b=1", "num_steps=[", "num_steps={{a}}"])
def test_an_override_that_cannot_be_read_is_named(file: Path, override: str) -> None:
    assert f"1. {override.split('=[')[0].split('={')[0]}" in refusal(file, override)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["device=cuda"], r"rollout\.servers = 'local': .*; use `registered`"),
        (["rollout.servers=[]"], r"rollout\.servers = \[\]: .*; .*http://host:port"),
        (["rollout.servers=['host:30000']"], r"rollout\.servers = 'host:30000': .*; .*http://host:port"),
        (["rollout.servers=[http://a:1, http://b:1, HTTP://a:1/]"], r"rollout\.servers = 'http://a:1': .*; .* once"),
        (
            ["publish.max_logprob_difference=1.0", "publish.verify_prompts=0"],
            r"publish\.max_logprob_difference = 1\.0: .*; set `publish\.verify_prompts`",
        ),
        (
            ["publish.delta_folder=/dev/shm/policy", "publish.fallback=false"],
            r"publish\.delta_folder = '/dev/shm/policy': .*; use `publish\.transport: disk`",
        ),
        (
            ["publish.delta_folder=policy", "rollout.servers=['http://host:30000']"],
            r"publish\.delta_folder = 'policy': .*; use an absolute path",
        ),
        (["optimizer.offload=true"], r"optimizer\.offload = True: .*; remove this key"),
        (["rollout.max_new_tokens=100"], r"rollout\.max_new_tokens = 100: .*; use less than 100"),
        (["evaluation.max_new_tokens=100"], r"evaluation\.max_new_tokens = 100: .*; use less than 100"),
        (["model=nowhere"], r"model = 'nowhere': .*config\.json.*; .*make_tiny_model\.py"),
    ],
)
def test_what_cannot_run_together_is_refused_with_a_remedy(file: Path, overrides: list[str], named: str) -> None:
    _, *lines = refusal(file, *overrides).splitlines()

    assert len(lines) == 1 and re.search(rf"^  1\. {named}", lines[0])


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ("{", "config.json"),
        ("[]", "config.json"),
        ("{}", "use one of Qwen2ForCausalLM, Qwen3ForCausalLM"),
        (json.dumps(DESCRIPTION | {"architectures": ["GPT2LMHeadModel"]}), "'GPT2LMHeadModel'"),
        (json.dumps(DESCRIPTION | {"num_hidden_layers": None}), " num_hidden_layers;"),
        (json.dumps(DESCRIPTION | {"hidden_size": 0, "vocab_size": "259"}), " hidden_size, vocab_size;"),
        (json.dumps(DESCRIPTION | {"architectures": "Qwen3ForCausalLM", "vocab_size": True}), " vocab_size;"),
        (json.dumps(DESCRIPTION | {"attention_bias": True}), "attention_bias = True"),
    ],
)
def test_a_model_folder_that_cannot_be_used_is_refused(file: Path, model: Path, description: str, words: str) -> None:
    (model / "config.json").write_text(description)

    assert words in refusal(file) and mistakes(file) == ["model"]


def test_mistakes_of_the_layout_and_of_the_model_come_together(file: Path) -> None:
    overrides = [
        "parallel.tensor=5",
        "parallel.pipeline=4",
        "parallel.expert=3",
        "precision=fp8",
        "proximal=reuse_target",
    ]
    overrides += ["actor.minibatches=4", "rollout.max_new_tokens=100"]

    assert set(mistakes(file, *overrides, world_size="21")) == {
        *("proximal", "precision", "actor.microbatch_tokens", "parallel", "parallel.tensor", "parallel.pipeline"),
        *("parallel.expert", "rollout.max_new_tokens"),
    }


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_model_folder_without_a_file_is_refused(file: Path, model: Path, name: str) -> None:
    (model / name).unlink()

    assert mistakes(file) == ["model"] and name.replace("model.", "*.") in refusal(file)


def test_weights_that_are_cut_off_are_refused_by_name(file: Path, model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole + b"x"):
        weights.write_bytes(damaged)
        assert mistakes(file) == ["model"] and str(weights) in refusal(file)


def test_layouts_that_divide_the_ranks_are_accepted(file: Path) -> None:
    for world_size in ("4", "8", "16"):
        assert load_config(file, ["parallel.tensor=2", "parallel.pipeline=2"], {"WORLD_SIZE": world_size})


def test_the_printed_configuration_reads_back_equal(file: Path) -> None:
    tricky = ["1e-4", "60", "true", "null", "~", "a: b", "# no", "é", "-", "2024-01-01", "1:30", " x ", "12e03"]
    overrides = ["run_dir='2e5'", f"rollout.server_arguments={json.dumps(tricky)}", "algorithm.weight_cap=null"]
    overrides += ["data.task_options={a: [1, 2e-7, '3e1'], b: {c: null}}", "optimizer.learning_rate=1e-7"]
    overrides += ["data.prompt_pattern='\\d{3}: \"x\"'", "rollout.servers=[http://a:1]"]
    config = load_config(file, overrides, {})
    printed = file.parent / "printed.yaml"
    printed.write_text(to_yaml(config))

    assert config.rollout.server_arguments == tricky
    assert load_config(printed, environment={}) == config


def test_the_printed_configuration_has_every_key(file: Path) -> None:
    flat: set[str] = set()
    printed: dict[str, Any] = load_config(file, environment={}).model_dump()
    for name, value in printed.items():
        is_section = isinstance(RunConfig.model_fields[name].annotation, type) and isinstance(value, dict)
        flat |= {f"{name}.{key}" for key in value} if is_section else {name}

    assert flat == set(known_keys())


def test_a_configuration_cannot_be_changed(file: Path) -> None:
    config = load_config(file, environment={})

    with pytest.raises(ValueError, match="frozen"):
        setattr(config, "num_steps", 3)  # noqa: B010 - a type checker refuses the plain way, as it should


def test_reading_a_configuration_imports_no_torch() -> None:
    code = "import sys, megatron_a3po; print({'torch', 'transformers', 'numpy', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.stdout.strip(), done.returncode) == ("set()", 0), done.stderr


def test_null_in_a_file_takes_back_a_mapping_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {task: x, task_options: {a: 1, b: 2}}\nrollout: {group_size: 4}\n")
    (tmp_path / "mine.yaml").write_text(
        "base: base.yaml\ndata: {task: null, task_options: null, path: p}\nrollout: null\n"
    )
    assert read_yaml(tmp_path / "mine.yaml") == ({"data": {"task": None, "path": "p"}}, [])
