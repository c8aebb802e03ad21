"""SGLang's endpoints with made-up tokens and with faults on demand. For fault injection only.

Real servers are tested under tests/e2e; what is answered here was observed on SGLang 0.5.23.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Self

from aiohttp import web

from megatron_a3po.fleet.protocol import generate_request
from megatron_a3po.fleet.timings import FleetTimings
from tests.support.deadlines import scaled
from tests.support.receiver import Json, Receiver

Action = Callable[[web.Request, Json], Awaitable[web.StreamResponse]]
"""What one call does instead of the usual."""

FAST = FleetTimings(
    watch_seconds=0.02,
    retry_seconds=0.01,
    start_look_seconds=0.02,
    request_look_seconds=0.1,
    grace_seconds=4.0,
    flush_seconds=0.001,
)
"""Times of a fleet whose servers answer from this process"""
REQUEST = generate_request([1, 2, 3], num_samples=1, max_new_tokens=4, temperature=1.0, priority=0)
DEADLINE_SECONDS = scaled(60.0)
"""A silent server stays so."""
PROMPT_SECONDS = scaled(20.0)
"""Much less than the deadline, and much more than a busy machine needs for what happens at once"""


class ScriptedServer:
    """One server on a port of its own, from `async with` to its end. `script` says which calls go wrong, and how."""

    def __init__(self, *, version: str = "default", receiver: Receiver | None = None) -> None:
        self.version = version
        """Label of the weights, changed by an update."""
        self.load_format = "auto"
        """Where the weights come from; "dummy": they are random."""
        self.startup_time = 1.5
        """Of the process, which has another one when it is started again."""
        self.receiver = receiver
        """Who takes part in the weight-update group; None: groups and updates succeed without anything received."""
        self.generation_seconds: Callable[[int], float] = lambda _: 0.0
        """How long the k-th call of /generate takes, from 1."""
        self.checksums: dict[str, str] = {"model.norm.weight": "00ff"}
        self.in_fp8_blocks: set[str] = set()
        """Names of tensors with scales of their own, of which the checksums do not tell"""
        self.parallelism = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "rank": 0, "size": 1}
        self.calls: list[tuple[str, Json]] = []
        """Every POST in order of arrival, with its body."""
        self.in_flight = 0
        self.max_in_flight = 0
        """Calls of /generate under way, now and at most."""
        self.sessions: dict[str, float] = {}
        """When the open ones end by themselves, by the loop's clock."""
        self._counts: Counter[str] = Counter()
        self._script: dict[str, tuple[range, Action]] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._aborted = asyncio.Event()
        self._aborting_pauses = 0
        self.scheduler_is_free = asyncio.Event()
        """Cleared: the front end answers, and what is left to the scheduler waits."""
        self.scheduler_is_free.set()
        self._opening: set[str] = set()
        self._left_to_scheduler: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        # A handler whose client has gone is cancelled, and the end does not wait for the handlers that still hang.
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._left_to_scheduler:
            task.cancel()
        await self._runner.cleanup()

    def script(self, path: str, action: Action, calls: range = range(1, 1_000_000)) -> None:
        """The calls of `path` with these numbers, counted from 1 since the start, are answered by `action`."""
        self._script[path] = (calls, action)

    def paths(self) -> list[str]:
        """The POSTs in order of arrival, without /generate."""
        return [path for path, _ in self.calls if path != "/generate"]

    def bodies(self, path: str) -> list[Json]:
        return [body for called, body in self.calls if called == path]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body: Json = await request.json() if request.can_read_body else {}
        self._counts[path] += 1
        number = self._counts[path]
        if request.method == "POST":
            self.calls.append((path, body))
        calls, action = self._script.get(path, (range(0), refuse(500, "")))
        if number in calls:
            return await action(request, body)
        usual = getattr(self, "_" + path.strip("/"), None)
        if usual is None:
            return web.json_response({"error": {"message": f"{path}: unknown"}}, status=404)
        if path not in ("/ready", "/model_info", "/open_session", "/close_session"):
            await self.scheduler_is_free.wait()
        answer: web.StreamResponse = await (usual(body, number) if path == "/generate" else usual(body))
        return answer

    async def _generate(self, body: Json, number: int) -> web.Response:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            prompts = body["input_ids"] if isinstance(body["input_ids"][0], list) else [body["input_ids"]]
            sampling = body["sampling_params"]
            each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
            first_version, pauses = self.version, self._aborting_pauses
            seconds = self.generation_seconds(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._aborted.wait()
            if pauses != self._aborting_pauses:
                answers = [
                    response(num_tokens=own["max_new_tokens"] // 2, versions=[first_version], finish_reason="abort")
                    for own in each
                    for _ in range(own["n"])
                ]
                return web.json_response(answers)
            await self._running.wait()
            versions = [first_version, self.version]
            answers = [
                response(num_tokens=own["max_new_tokens"], versions=versions, seed=sum(prompt))
                for prompt, own in zip(prompts, each, strict=True)
                for _ in range(own["n"])
            ]
            single = len(answers) == 1 and not isinstance(body["input_ids"][0], list)
            return web.json_response(answers[0] if single else answers)
        finally:
            self.in_flight -= 1

    async def _ready(self, _: Json) -> web.Response:
        return web.Response(status=200 if self._running.is_set() else 503)

    async def _model_info(self, _: Json) -> web.Response:
        return web.json_response({"weight_version": self.version, "load_format": self.load_format})

    async def _server_info(self, _: Json) -> web.Response:
        answer = {"tp_size": 1, "enable_priority_scheduling": True, "max_running_requests": 16}
        return web.json_response(answer | {"startup_time": self.startup_time})

    async def _pause_generation(self, body: Json) -> web.Response:
        if body["mode"] == "abort":
            self._aborting_pauses += 1
            self._aborted.set()
            self._aborted.clear()
        self._running.clear()
        return success()

    async def _continue_generation(self, _: Json) -> web.Response:
        self._running.set()
        return success()

    async def _begin_weight_update(self, _: Json) -> web.Response:
        return success()

    async def _end_weight_update(self, _: Json) -> web.Response:
        return success()

    async def _init_weights_update_group(self, body: Json) -> web.Response:
        await self._receive("join", body)
        return success()

    async def _destroy_weights_update_group(self, body: Json) -> web.Response:
        await self._receive("leave", body)
        return success()

    async def _update_weights_from_distributed(self, body: Json) -> web.Response:
        await self._receive("receive", body)
        self.version = body.get("weight_version", self.version)
        return success()

    async def _update_weights_from_disk(self, body: Json) -> web.Response:
        self.version = body.get("weight_version", self.version)
        return success()

    async def _open_session(self, body: Json) -> web.Response:
        name, is_open = body["session_id"], False

        async def open_session() -> None:
            nonlocal is_open
            now = asyncio.get_running_loop().time()
            is_open = self.sessions.get(name, now) <= now
            if is_open:
                self.sessions[name] = now + body["timeout"]
            self._opening.discard(name)

        if name not in self._opening:
            self._opening.add(name)
            await asyncio.shield(self._leave_to_scheduler(open_session))
        if is_open:
            return web.json_response(name)
        message = "Failed to open the session. Check if a session with the same id is still open."
        return web.json_response({"error": {"message": message}}, status=400)

    async def _close_session(self, body: Json) -> web.Response:
        async def close_session() -> None:
            self.sessions.pop(body["session_id"], None)

        self._leave_to_scheduler(close_session)
        return web.Response()

    def _leave_to_scheduler(self, work: Callable[[], Awaitable[None]]) -> "asyncio.Task[None]":
        """It is done also when whoever asked has gone."""

        async def do() -> None:
            await self.scheduler_is_free.wait()
            await work()

        task = asyncio.create_task(do())
        self._left_to_scheduler.add(task)
        task.add_done_callback(self._left_to_scheduler.discard)
        return task

    async def _update_weight_version(self, body: Json) -> web.Response:
        self.version = body["new_version"]
        return success()

    async def _flush_cache(self, _: Json) -> web.Response:
        return web.Response(text="Cache flushed.")

    async def _abort_request(self, _: Json) -> web.Response:
        return web.Response()

    async def _weights_checker(self, body: Json) -> web.Response:
        skipped = body.get("skip_tensor_list") or []
        kept = {
            name: checksum
            for name, checksum in self.checksums.items()
            if name in self.in_fp8_blocks or not any(part in name for part in skipped)
        }
        rank = {"checksums": kept, "per_gpu_checksum": "1234", "parallelism_info": self.parallelism}
        answer = {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": "5678"}
        return web.json_response(answer)

    async def _receive(self, command: str, body: Json) -> None:
        if self.receiver is not None:
            await asyncio.to_thread(self.receiver.call, command, body)


def success() -> web.Response:
    return web.json_response({"success": True, "message": "Succeeded."})


def response(*, num_tokens: int, versions: list[str], finish_reason: str = "length", seed: int = 0) -> Json:
    """One response as /generate gives it: all tokens by one version, or the first half by an older one."""
    ids = [(seed + position) % 50 + 1 for position in range(num_tokens)]
    half = num_tokens // 2 if len(set(versions)) > 1 else 0
    spans = [(versions[0], 0, half), (versions[-1], half, num_tokens)]
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": "made-up",
            "finish_reason": {"type": finish_reason, "length": num_tokens},
            "prompt_tokens": 3,
            "completion_tokens": num_tokens,
            "weight_version": versions[-1],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans if end > start],
        },
    }


def refuse(status: int, message: str) -> Action:
    async def action(_: web.Request, __: Json) -> web.StreamResponse:
        return web.json_response({"success": False, "message": message}, status=status)

    return action


def refuse_to_flush(server: ScriptedServer, path: str) -> None:
    """An update that succeeds while requests run: its weights are new, the label that is told is not."""

    async def action(_: web.Request, body: Json) -> web.StreamResponse:
        if path == "/update_weights_from_distributed":
            await server._receive("receive", body)
        if not body["flush_cache"]:
            return success()
        message = (
            "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract "
            "or finish them, then call /flush_cache."
        )
        return web.json_response({"success": False, "message": message}, status=400)

    server.script(path, action)


def answer(content: Any) -> Action:
    async def action(_: web.Request, __: Json) -> web.StreamResponse:
        return web.json_response(content)

    return action


def answer_text(content: str, content_type: str) -> Action:
    async def action(_: web.Request, __: Json) -> web.StreamResponse:
        return web.Response(text=content, content_type=content_type)

    return action


async def close_connection(request: web.Request, _: Json) -> web.StreamResponse:
    """The client sees the connection end without an answer, as when the server's process is killed."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hang(_: web.Request, __: Json) -> web.StreamResponse:
    await asyncio.sleep(DEADLINE_SECONDS)
    return web.Response(status=500)


def after(seconds: float, action: Action) -> Action:
    async def delayed(request: web.Request, body: Json) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await action(request, body)

    return delayed
