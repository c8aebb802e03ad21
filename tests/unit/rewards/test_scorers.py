"""Scorers by name: a user's function, a task's own, and a server's over HTTP."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatron_a3po.errors import RewardError
from megatron_a3po.rewards.scorers import KEY_VARIABLE, ScorerSpec, TaskSpec, make_scorer
from megatron_a3po.rewards.types import InvalidReward, Sample, Score, to_score

FUNCTIONS = "tests.support.reward_functions"
Reply = Callable[[dict[str, Any]], tuple[int, str]]


def sample(response: str, **changes: Any) -> Sample:
    values: dict[str, Any] = {"prompt_id": "p/1", "prompt": "What?", "answer": "42", "row": {"level": 5}}
    return Sample(response=response, num_tokens=3, truncated=False, **(values | changes))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("length", [3.0, 1.0, 2.0]),
        ("slow_length", [3.0, 1.0, 2.0]),
        ("rank_in_group", [2.0, 0.0, 1.0]),
        ("slow_rank_in_group", [2.0, 0.0, 1.0]),
        ("with_reason", [(0.0, "odd"), (0.0, "odd"), (1.0, "even")]),
    ],
)
def test_a_function_may_be_async_or_not_and_take_one_response_or_all_of_a_group(
    function: str, expected: list[Any]
) -> None:
    scores = make_scorer(ScorerSpec(scorer=f"{FUNCTIONS}:{function}"))([sample(text) for text in ("aaa", "a", "aa")])

    assert scores == [to_score(result) for result in expected]


@pytest.mark.parametrize(
    ("scorer", "remedy"),
    [
        ("no_such_module:f", "PYTHONPATH"),
        (f"{FUNCTIONS}:lenght", "length, with_reason"),
        (f"{FUNCTIONS}:NO_FUNCTION", "name a function"),
        ("os.path:join", "takes `sample`"),
        ("task", "use `math`"),
    ],
)
def test_a_scorer_that_cannot_be_used_is_an_error_with_its_name_and_a_remedy(scorer: str, remedy: str) -> None:
    with pytest.raises(RewardError, match=rf"reward\.scorer = '{scorer}'.*{remedy}"):
        make_scorer(ScorerSpec(scorer=scorer))


class JudgeServer:
    """Answers every POST by the next of its replies, the last one again and again, and keeps the requests."""

    def __init__(self) -> None:
        self.replies: list[Reply] = [lengths]
        self.asked: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                judge.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                judge.authorizations.append(self.headers["Authorization"])
                reply = judge.replies.pop(0) if len(judge.replies) > 1 else judge.replies[0]
                status, text = reply(judge.asked[-1])
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/score"

    def score(self, *responses: str) -> list[Score]:
        return make_scorer(ScorerSpec(scorer=self.url))([sample(text) for text in responses])


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    real_sleep = asyncio.sleep
    monkeypatch.setattr("megatron_a3po.rewards.scorers.asyncio.sleep", lambda _: real_sleep(0))
    judge = JudgeServer()
    thread = threading.Thread(target=judge.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield judge
    judge.server.shutdown()
    thread.join()
    judge.server.server_close()


def lengths(body: dict[str, Any]) -> tuple[int, str]:
    return 200, json.dumps({"scores": [len(item["response"]) for item in body["samples"]]})


def test_a_server_is_asked_once_for_a_group_and_sees_all_of_it(judge: JudgeServer) -> None:
    assert [score.value for score in judge.score("a", "aa")] == [1.0, 2.0]
    expected = {"prompt_id": "p/1", "prompt": "What?", "answer": "42", "row": {"level": 5}}
    expected |= {"num_tokens": 3, "truncated": False}
    assert judge.asked == [{"samples": [expected | {"response": "a"}, expected | {"response": "aa"}]}]


def test_a_server_gets_the_key_of_the_environment(judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    judge.score("a")
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    judge.score("a")
    assert judge.authorizations == [None, "Bearer secret"]


def test_a_server_that_is_busy_is_asked_again_and_may_give_reasons(judge: JudgeServer) -> None:
    reasons = '{"scores": [{"score": 0.5, "reason": "half"}, 1]}'
    judge.replies = [lambda _: (503, "busy"), lambda _: (502, "busy"), lambda _: (200, reasons)]

    assert judge.score("a", "b") == [Score(value=0.5, reason="half"), Score(value=1.0)] and len(judge.asked) == 3


@pytest.mark.parametrize(
    ("status", "text", "error", "message"),
    [
        (404, "no such path", RuntimeError, "404: no such path"),
        (500, "broken", RuntimeError, "500: broken"),
        (200, "<html>", InvalidReward, "instead of"),
        (200, '{"rewards": [1]}', InvalidReward, "instead of"),
        (200, '{"scores": 1}', InvalidReward, "instead of"),
        (200, '{"scores": [{"reason": "x"}]}', InvalidReward, "instead of"),
        (200, '{"scores": [1, 2]}', InvalidReward, "2 rewards for 1 responses"),
        (200, '{"scores": [NaN]}', InvalidReward, "nan"),
        (200, '{"scores": ["1.0"]}', InvalidReward, "'1.0'"),
    ],
)
def test_a_server_that_gives_no_rewards_is_a_failure_with_its_words(
    judge: JudgeServer, status: int, text: str, error: type[Exception], message: str
) -> None:
    judge.replies = [lambda _: (status, text)]

    with pytest.raises(error, match=message):
        judge.score("a")


def test_a_task_rewards_exactly_what_it_finds_perfect() -> None:
    scorer = make_scorer(ScorerSpec(scorer="task", task=TaskSpec(name="spell_backward", options={})))
    entry = {"question": "...: ovated", "answer": "detavo", "metadata": {}}
    # Six letters of "detavox" are right, one sixth each, which sums to 0.9999999999999999: right in float32.

    scores = scorer([sample("detavo", row=entry), sample("detavox", row=entry), sample("", row=entry)])

    assert [(score.value, score.reason) for score in scores] == [(1.0, "right"), (0.0, "wrong"), (0.0, "wrong")]


@pytest.mark.parametrize(("result", "value", "reason"), [(True, 1.0, ""), (2, 2.0, ""), ((-0.5, "ok_1"), -0.5, "ok_1")])
def test_a_result_is_a_number_or_a_number_and_a_reason(result: Any, value: float, reason: str) -> None:
    assert to_score(result) == Score(value=value, reason=reason)


@pytest.mark.parametrize("result", ["1", b"1", None, [1], float("inf"), 10**400, (1.0, "A"), (1, 2, 3)])
def test_anything_else_is_no_reward(result: Any) -> None:
    with pytest.raises(InvalidReward):
        to_score(result)
