"""The staleness study: its runs are what they say, and what is finished is not run again."""

import math
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT

TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))  # programs, in no package; one of them imports the others

import make_tiny_model  # noqa: E402
import study_report  # noqa: E402
import study_staleness as study  # noqa: E402

from megatron_a3po.errors import ConfigError  # noqa: E402
from megatron_a3po.prompts.encoder import PromptEncoder  # noqa: E402
from megatron_a3po.prompts.tasks import load_task  # noqa: E402
from tests.support.tiny_models import save_tiny_model  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, with the quickstart's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("qwen3_tied", folder)
    make_tiny_model.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bench(folder: Path) -> study.Workbench:
    """The study's own, but for the number of words, which take a while to make."""
    torch.set_num_threads(1)  # as in the study
    tokenizer = make_tiny_model.make_tokenizer()
    data = make_tiny_model.DATA | {"size": 1000, "num_held_out": 32}
    return study.Workbench(
        model=study.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        tokenizer=tokenizer,
        prompts=load_task(**data, encoder=PromptEncoder(tokenizer)),
        weights=study.digest(folder),
    )


@pytest.fixture
def reachable_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model never gives a right answer, and equal rewards teach nothing."""

    def reward(text: str, _entry: object) -> float:
        return float(len(text) % 2)

    monkeypatch.setattr(study, "task_scorer", lambda _task: reward)


def settings(objective: str, staleness: int, *, seed: int = 0, num_steps: int = 2) -> study_report.RunSettings:
    return study_report.RunSettings(
        objective=objective, staleness=staleness, learning_rate=5e-3, seed=seed, num_steps=num_steps
    )


def train(
    bench: study.Workbench, folder: Path, objective: str, staleness: int
) -> tuple[dict[int, float], list[dict[str, float]]]:
    config = study.run_config(folder, settings(objective, staleness))
    rollout = config.rollout.model_copy(update={"prompts_per_step": 4})
    return study.train(bench, config.model_copy(update={"rollout": rollout}))


def record(run: study_report.RunSettings, folder: Path, accuracy: dict[int, float]) -> study_report.RunRecord:
    metrics = dict.fromkeys(study_report.METRICS, study_report.Spread(mean=0.5, minimum=0.0, maximum=5.0))
    return study_report.RunRecord(
        settings=run, weights=study.digest(folder), cpu_seconds=1.0, accuracy=accuracy, metrics=metrics
    )


def test_the_sampled_logprobs_are_those_of_a_forward_pass_over_the_whole_response(bench: study.Workbench) -> None:
    samples = study.sample(bench, bench.model, bench.prompts.held_out, torch.Generator().manual_seed(0))

    with torch.no_grad():
        logprobs, _ = study.response_logprobs(bench.model, samples)

    mask = samples.mask.flatten()
    torch.testing.assert_close(logprobs[mask], samples.logprobs.flatten()[mask], atol=1e-5, rtol=0)


def test_a_response_counts_up_to_its_end_of_sequence_and_is_padded_from_there(bench: study.Workbench) -> None:
    prompts = list(bench.prompts.held_out) * 8
    samples = study.sample(bench, bench.model, prompts, torch.Generator().manual_seed(0))

    responses, eos = samples.token_ids[:, 8:], bench.tokenizer.eos_token_id
    ended = (responses == eos) & samples.mask
    assert ended.any()
    assert (ended.cumsum(1) - ended.int() == ~samples.mask).all()
    assert (responses[~samples.mask] == bench.tokenizer.pad_token_id).all()


@pytest.mark.usefixtures("reachable_reward")
@pytest.mark.parametrize("objective", ["sync", "recompute"])
def test_without_staleness_every_ratio_and_weight_is_one(bench: study.Workbench, folder: Path, objective: str) -> None:
    _, metrics = train(bench, folder, objective, 0)

    for step in metrics:
        assert step["ratio_max"] == 1.0
        assert step["importance_weight_max"] == pytest.approx(1.0, abs=1e-4)
        assert step["clipped_share"] == 0
        assert step["gradient_norm"] > 0


@pytest.mark.usefixtures("reachable_reward")
@pytest.mark.parametrize("objective", ["a3po-constant", "a3po-dual-clip"])
def test_a_run_gives_finite_numbers(bench: study.Workbench, folder: Path, objective: str) -> None:
    accuracy, metrics = train(bench, folder, objective, 2)

    assert list(accuracy) == [0, 2]
    assert len(metrics) == 2 and set(study_report.spreads(metrics)) == set(study_report.METRICS)
    assert all(math.isfinite(value) for step in metrics for value in step.values())


@pytest.mark.usefixtures("reachable_reward")
def test_the_second_batch_is_stale_and_ppo_is_a3po_at_staleness_one(bench: study.Workbench, folder: Path) -> None:
    (_, a3po), (_, ppo) = train(bench, folder, "a3po", 1), train(bench, folder, "ppo", 1)

    for ours, theirs in zip(a3po, ppo, strict=True):  # theta for b in the first batch: equal but for the last bits
        for name in study_report.METRICS:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    first, second = a3po
    assert first["kl_k3"] == pytest.approx(0, abs=1e-6) and second["kl_k3"] > 1e-4
    assert first["clipped_share"] == 0 and second["clipped_share"] > 0


def test_the_batch_labels_every_counting_token_with_the_version_that_sampled_it(bench: study.Workbench) -> None:
    samples = study.sample(bench, bench.model, bench.prompts.held_out, torch.Generator().manual_seed(0))

    batch = study.make_batch(samples, torch.arange(32.0), weight_version=3)

    assert (batch.weight_versions == torch.where(samples.mask.flatten(), 3, -1)).all()
    assert (batch.labels.view(32, 7) == samples.token_ids[:, 8:]).all()
    assert (batch.token_ids.view(32, 7) == samples.token_ids[:, 7:-1]).all()
    assert (batch.advantages.view(32, 7) == torch.arange(32.0)[:, None] * samples.mask).all()
    assert batch.cu_seqlens.tolist() == list(range(0, 225, 7))


def test_only_runs_without_a_line_are_run_and_the_report_shows_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = [settings(objective, staleness) for objective, staleness in (("sync", 0), ("a3po", 2), ("ppo", 2))]
    file = tmp_path / study_report.RUNS_FILE
    study_report.append_run(file, record(grid[0], folder, {0: 0.25, 2: 0.95}))
    study_report.append_run(file, record(grid[2], folder, {0: 0.25, 2: 0.5}))
    with file.open("a") as lines:
        lines.write('{"settings": {"objective": "a3')  # where a killed run stopped writing
    submitted = []
    monkeypatch.setattr(study, "ProcessPoolExecutor", in_this_process(submitted))
    monkeypatch.setattr(study, "run", lambda folder, run: record(run, folder, {0: 0.25, 2: 0.9}))

    study.study(folder, grid, tmp_path, processes=1)
    study.study(folder, grid, tmp_path, processes=1)

    assert submitted == [grid[1]]
    assert {run.settings for run in study_report.read_runs(file)} == set(grid)
    table = (tmp_path / study_report.TABLE_FILE).read_text()
    assert "| 0 | sync | 0.950 (0.950) | 0.000 (0.000) | 2 (2) | 5 (5) | 50.0% (50.0%) | 5 (5) | 1.0 |" in table
    assert "| 2 | ppo | 0.500 (0.500) | 0.000 (0.000) | never |" in table
    assert (tmp_path / study_report.PLOT_FILE).read_text().count("a3po") >= 1


def test_runs_from_other_weights_do_not_count(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = settings("sync", 0)
    other = record(run, folder, {0: 0.1, 2: 0.1}).model_copy(update={"weights": "0" * 16})
    study_report.append_run(tmp_path / study_report.RUNS_FILE, other)
    submitted = []
    monkeypatch.setattr(study, "ProcessPoolExecutor", in_this_process(submitted))
    monkeypatch.setattr(study, "run", lambda folder, run: record(run, folder, {0: 0.25, 2: 0.9}))

    study.study(folder, [run], tmp_path, processes=1)

    assert submitted == [run]


def test_a_foreign_file_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / study_report.RUNS_FILE
    file.write_text('{"thesis": 1}\n')

    with pytest.raises(ConfigError, match=r"line 1, is no run of this study.*another --output"):
        study_report.read_runs(file)

    assert file.read_text() == '{"thesis": 1}\n'


def test_the_worst_drop_is_the_largest_fall_from_what_was_reached_before(folder: Path) -> None:
    curve = record(settings("a3po", 2), folder, {0: 0.2, 5: 0.6, 10: 0.92, 15: 0.7, 20: 0.95, 25: 0.9})

    assert curve.worst_drop == pytest.approx(0.22)
    assert curve.final_accuracy == 0.9
    assert curve.steps_to_target == 10


def in_this_process(submitted: list[study_report.RunSettings]) -> Callable[..., object]:
    """An executor that runs at once and notes what."""

    class Executor:
        def __init__(self, *_: object) -> None: ...

        def submit(
            self, function: Callable[..., object], folder: Path, run: study_report.RunSettings
        ) -> Future[object]:
            submitted.append(run)
            future: Future[object] = Future()
            future.set_result(function(folder, run))
            return future

        def shutdown(self, **_: object) -> None: ...

    return Executor
