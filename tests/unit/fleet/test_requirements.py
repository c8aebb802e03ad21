"""Servers as they were started that a run cannot use: each is named with the remedy, before anything is sampled."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_a3po.config.server_requirements import REQUIREMENTS, Demands, as_markdown
from megatron_a3po.fleet.protocol import ServerInfo
from megatron_a3po.fleet.requirements import unusable
from megatron_a3po.rollout.sampler import stop_token_ids
from tests.support.paths import ROOT

URL = "http://10.0.0.7:30000"


def said(info: dict[str, Any], **demands: Any) -> str | None:
    return unusable(URL, ServerInfo.model_validate(info), Demands(**demands))


def test_a_server_as_a_run_starts_it_is_usable() -> None:
    info = {"max_req_input_len": 256, "preferred_sampling_params": None, "pp_size": 1, "attn_dp_size": 8}
    assert said(info, longest_request=256) is None
    assert said({}, longest_request=256) is None


@pytest.mark.parametrize(
    ("info", "remedy"),
    [
        ({"preferred_sampling_params": '{"top_k": 20}'}, "without --preferred-sampling-params"),
        ({"speculative_algorithm": "EAGLE3"}, "without --speculative-algorithm"),
        ({"tokenizer_worker_num": 4}, "without --tokenizer-worker-num"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"dp_size": 8}, "use --tp-size, or more servers"),
        (
            {"max_req_input_len": 255},
            "has room for 255 tokens of a prompt and its response, and this run's may have 256;",
        ),
    ],
)
def test_a_server_that_cannot_work_is_named_with_the_remedy(info: dict[str, Any], remedy: str) -> None:
    problem = said(info, longest_request=256)
    assert problem is not None and problem.startswith(URL) and remedy in problem


def test_a_response_ends_as_the_tokenizer_or_a_file_of_the_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer:
        eos_token_id = 5

        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            raise NotImplementedError

    assert stop_token_ids(tmp_path, Tokenizer()) == {5}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert stop_token_ids(tmp_path, Tokenizer()) == {5, 7, 9}
    monkeypatch.setattr(Tokenizer, "get_added_vocab", lambda _: {"<|eom_id|>": 11, "<pad>": 12}, raising=False)
    assert stop_token_ids(tmp_path, Tokenizer()) == {5, 7, 9, 11}


def test_every_field_of_the_table_is_one_that_the_run_reads_of_a_server() -> None:
    assert {row.field for row in REQUIREMENTS if row.field} <= ServerInfo.model_fields.keys()


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "servers.md").read_text(encoding="utf-8")
    begin, end = "<!-- requirements: begin -->\n", "<!-- requirements: end -->"
    assert page[page.index(begin) + len(begin) : page.index(end)] == as_markdown()
