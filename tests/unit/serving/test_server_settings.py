"""What a configuration may say of rollout servers."""

from pathlib import Path

import pytest

from megatron_a3po.config import DataConfig, PublishConfig, RolloutConfig, RunConfig
from megatron_a3po.preflight.check_run import find_mistakes
from megatron_a3po.preflight.load import to_yaml
from megatron_a3po.serving.local_server import server_arguments
from tests.unit.config.test_server_key import KEY, write_key


def config_of(publish: PublishConfig | None = None, **rollout: object) -> RunConfig:
    return RunConfig(
        model=Path("nowhere"),
        run_dir=Path("runs/x"),
        num_steps=1,
        device="cpu",
        data=DataConfig(task="spell_backward"),
        rollout=RolloutConfig.model_validate(rollout),
        publish=publish or PublishConfig(),
    )


def mistakes(config: RunConfig) -> list[str]:
    keys = ("rollout.server", "rollout.num", "rollout.key", "publish.")
    return [str(mistake) for mistake in find_mistakes(config, None) if mistake.key.startswith(keys)]


def test_registered_servers_are_for_every_device() -> None:
    config = config_of(servers="registered", num_servers=2, server_tensor_parallel=2)
    assert mistakes(config) == mistakes(config.model_copy(update={"device": "cuda"})) == []


def test_the_run_waits_for_the_servers_that_it_needs_and_for_no_others() -> None:
    (mistake,) = mistakes(config_of(servers=["http://a:1"], num_servers=2))
    assert mistake.startswith("rollout.num_servers = 2: ") and "rollout.servers: registered" in mistake

    publish = PublishConfig(min_servers=3)
    assert mistakes(config_of(publish, servers="registered", num_servers=3)) == []
    (mistake,) = mistakes(config_of(publish, servers="registered", num_servers=2))
    assert mistake.startswith("publish.min_servers = 3: ") and "2 rollout servers" in mistake


def test_in_place_registered_servers_must_be_started_without_radix_cache_and_overlap() -> None:
    publish, arguments = PublishConfig(pause_mode="in_place"), ["--disable-radix-cache", "--disable-overlap-schedule"]
    assert mistakes(config_of(publish, servers="registered", server_arguments=arguments)) == []
    for given, missing in (arguments[:1], arguments[1]), (arguments[1:], arguments[0]):
        (mistake,) = mistakes(config_of(publish, servers="registered", server_arguments=given))
        assert f"add {missing} to `rollout.server_arguments`" in mistake


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--api-key", KEY], "set `rollout.key_file` or A3PO_SERVER_KEY"),
        ([f"--admin-api-key={KEY}"], "set `rollout.key_file` or A3PO_SERVER_KEY"),
        (["--tp", "2"], "set `rollout.server_tensor_parallel`"),
        (["--tensor-parallel-size=2"], "set `rollout.server_tensor_parallel`"),
        (["--pp-size", "2"], "use more servers"),
        (["--data-parallel-size=2"], "use more servers"),
        (["--tokenizer-worker-num", "4"], "leave it out"),
        (['--preferred-sampling-params={"top_k": 20}'], "leave it out"),
        (["--speculative-algorithm", "EAGLE3"], "leave it out"),
        (["--host", "0.0.0.0"], "--host"),
        (["--port=30000"], "chooses free ports"),
        (["--model-path", "other"], "set `model`"),
        (["--trust-remote-code"], "--trust-remote-code"),
        (["--config", "more.yaml"], "give each one itself"),
        (["--trust-remote"], "SGLang may read it as --trust-remote-code"),
        ([f"--api-k={KEY}"], "SGLang may read it as --api-key"),
        (["--tp-s=2"], "set `rollout.server_tensor_parallel`"),
        (["--mod", "other"], "set `model`"),
        (["--h=0.0.0.0"], "SGLang may read it as --host"),
        (["--conf=more.yaml"], "SGLang may read it as --config"),
    ],
)
def test_what_the_run_decides_itself_is_no_argument_of_its_servers(arguments: list[str], remedy: str) -> None:
    (mistake,) = mistakes(config_of(server_arguments=arguments))
    assert mistake.startswith("rollout.server_arguments = ") and remedy in mistake
    assert KEY not in mistake


def test_arguments_that_only_resemble_reserved_ones_may_be_given() -> None:
    arguments = ["--model-impl", "auto", "--hicache-ratio=2", "--tp-other", "-1", "-h", "--", "tp", ""]
    assert mistakes(config_of(server_arguments=arguments)) == []


def test_ranks_of_a_server_are_arguments_before_those_of_the_user() -> None:
    rollout = RolloutConfig(server_tensor_parallel=2, server_arguments=["--max-running-requests", "64"])
    assert server_arguments(rollout) == ["--tp-size", "2", "--max-running-requests", "64"]


def test_a_key_file_that_others_may_read_is_a_mistake_and_no_key_is_ever_written_down(tmp_path: Path) -> None:
    config = config_of(servers="registered", key_file=write_key(tmp_path))
    assert mistakes(config) == []
    assert KEY not in to_yaml(config) and str(tmp_path / "key") in to_yaml(config)
    (tmp_path / "key").chmod(0o644)
    (mistake,) = mistakes(config)
    assert "others may read it (mode 0644)" in mistake and KEY not in mistake
