"""The images and the compose file, which no test here builds: what can be read off them is right."""

import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from megatron_a3po.__main__ import _parser as run_parser
from megatron_a3po.config import RunConfig
from megatron_a3po.config.yaml_files import read_yaml
from megatron_a3po.preflight.load import known_keys
from tests.support.paths import ROOT
from tools.launch_rollout_servers import _parser as launcher_parser

IMAGES = ["trainer", "rollout"]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
IN_IMAGE = "/opt/megatron_a3po"


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, its arguments) in order, lines joined."""
    text = (ROOT / "docker" / f"{image}.Dockerfile").read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def arguments(image: str, name: str) -> list[str]:
    return [text for instruction, text in instructions(image) if instruction == name]


@pytest.mark.parametrize("image", IMAGES)
def test_nothing_runs_as_root(image: str) -> None:
    names = [name for name, _ in instructions(image)]
    (user,) = arguments(image, "USER")
    default = next(text for text in arguments(image, "ARG") if text.startswith(f"{user.removeprefix('$')}="))

    assert int(default.partition("=")[2]) > 0
    assert set(names[names.index("USER") + 1 :]) <= {"WORKDIR", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


@pytest.mark.parametrize(
    ("image", "process"),
    [
        ("trainer", "/opt/venv/bin/python3 -u -m megatron_a3po train --config my.yaml"),
        ("rollout", "/opt/venv/bin/python -m megatron_a3po.serving.entrypoint --model-path models/x"),
    ],
)
def test_the_health_check_finds_the_process_and_not_itself(image: str, process: str) -> None:
    (check,) = arguments(image, "HEALTHCHECK")
    (pattern,) = re.findall(r'pgrep -f "([^"]+)"', check)

    assert re.search(pattern, process)
    assert not re.search(pattern, f"/bin/sh -c {check}")
    assert "nvidia-smi" in check


def test_servers_are_installed_from_the_lock_without_transformer_engine() -> None:
    (install,) = [text for text in arguments("rollout", "RUN") if "--require-hashes" in text]
    (program,) = re.findall(r"awk '([^']+)' requirements/gpu.lock > (?=/tmp/rollout.lock)", install)
    lock = ROOT / "requirements" / "gpu.lock"
    kept = subprocess.run(["awk", program, str(lock)], capture_output=True, text=True, check=True).stdout
    whole, kept_packages = (
        re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:] for text in (lock.read_text(), kept)
    )
    assert kept_packages == [package for package in whole if not package.startswith("transformer-engine")]
    assert len(whole) == len(kept_packages) + 3


def rollout_command(**variables: str) -> list[str]:
    """Its words, as Compose makes them: the text with the given variables put in, split as a shell does."""
    text = SERVICES["rollout"]["command"]
    for name, value in variables.items():
        nested = rf"\$\{{{name}:\+(\S*)\$\{{{name}\}}\}}"
        assert re.search(nested, text)
        text = re.sub(nested, lambda match, value=value: match[1] + value if value else "", text)
    return shlex.split(text)


def test_servers_may_get_another_model_than_the_run() -> None:
    served = launcher_parser().parse_args(rollout_command(SERVED_MODEL="models/Qwen3-8B-FP8"))
    assert served.overrides == ["rollout.key_file=server.key", "model=models/Qwen3-8B-FP8"]


def test_the_compose_file_gives_both_commands_one_configuration() -> None:
    command = SERVICES["trainer"]["command"]
    torchrun, run = command[: command.index("-m")], command[command.index("-m") + 2 :]
    trained, served = run_parser().parse_args(run), launcher_parser().parse_args(rollout_command(SERVED_MODEL=""))

    assert arguments("trainer", "ENTRYPOINT") == ['["torchrun"]']
    assert arguments("rollout", "ENTRYPOINT") == [f'["python", "{IN_IMAGE}/tools/launch_rollout_servers.py"]']
    assert torchrun == ["--standalone", "--nproc-per-node=4"] and command[len(torchrun) + 1] == "megatron_a3po"
    assert (trained.config, trained.overrides) == (served.config, served.overrides)
    assert {override.partition("=")[0] for override in trained.overrides} <= set(known_keys())
    (default,) = re.findall(r"\$\{RECIPE:-(.*)\}", trained.config)
    assert (ROOT / "configs" / f"{default}.yaml").exists() and trained.config.startswith(f"{IN_IMAGE}/configs/")


def test_the_containers_share_the_gpus_of_a_node_as_the_small_recipes_do() -> None:
    gpus = {
        service: SERVICES[service]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for service in IMAGES
    }
    assert sorted(gpus["trainer"] + gpus["rollout"]) == [str(number) for number in range(8)]
    for recipe in ("qwen2.5_1.5b_gsm8k", "qwen3_8b_dapo_math", "qwen3_8b_dapo_math_fp8"):
        values, _ = read_yaml(ROOT / "configs" / f"{recipe}.yaml")
        config = RunConfig.model_validate(values)
        assert len(gpus["rollout"]) == config.rollout.num_servers * config.rollout.server_tensor_parallel
        assert len(gpus["trainer"]) % config.parallel.tensor == 0
