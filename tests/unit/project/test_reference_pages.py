"""docs/metrics.md and docs/symptoms.md have the code's metrics and messages; tests/e2e compare whole runs' metrics."""

import ast
import re

from megatron_a3po.algorithm.diagnostics import Totals
from megatron_a3po.algorithm.objective import MAXIMUM_NAMES, SUM_NAMES, Objective
from megatron_a3po.config import RunConfig
from megatron_a3po.rollout.evaluator import DatasetResult
from tests.support.documented_metrics import DOCUMENTED, undocumented
from tests.support.pages import PAGES
from tests.support.paths import ROOT


def texts_of_the_code() -> list[str]:
    """String literals, with a gap where a value is put in."""
    found = []
    for path in [*(ROOT / "megatron_a3po").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_quoted_messages_are_those_of_the_code() -> None:
    quoted = re.findall(r"^\| `([^`]+ [^`]+)` \|", PAGES["docs/symptoms.md"], re.MULTILINE)
    texts = texts_of_the_code()

    assert len(quoted) > 20
    assert [message for message in quoted if not any(message in text for text in texts)] == []


def test_what_the_objective_says_with_every_option_is_explained() -> None:
    algorithm = {"compare_with_recompute": True, "kl_coefficient": 0.1}
    config = RunConfig.model_validate(
        {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"task": "-"}, "algorithm": algorithm}
    )
    metrics = Objective(**config.objective_options()).metrics(
        Totals(sums=dict.fromkeys(SUM_NAMES, 1.0), maxima=dict.fromkeys(MAXIMUM_NAMES, 1.0))
    )
    assert len(metrics) > 25
    assert undocumented([metrics]) == set()


def test_what_an_evaluation_says_is_explained() -> None:
    result = DatasetResult(
        dataset="aime",
        num_prompts=30,
        num_without_reward=0,
        num_samples=4,
        average=0.5,
        average_interval=(0.4, 0.6),
        pass_at={1: 0.5, 2: 0.6, 4: 0.7},
        pass_at_k_interval=(0.6, 0.8),
        response_tokens=100.0,
        truncated_share=0.0,
        weight_versions=(1,),
        seconds=1.0,
    )
    assert undocumented([result.metrics()]) == set()
    assert undocumented([{"eval/aime/other": 1.0, "ratio": 1.0}]) == {"eval/aime/other", "ratio"}


def test_nothing_is_explained_that_the_code_does_not_say() -> None:
    texts = texts_of_the_code()
    parts = [name.split("/")[-1] for name in DOCUMENTED]
    assert len(parts) > 60
    assert [part for part in parts if not part.isupper() and not any(part.rstrip("K") in text for text in texts)] == []
