"""One rollout server over HTTP."""

from typing import Any

import aiohttp

from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.rollout.protocol import GenerateResponse, ModelInfo, ServerInfo, parse_answer


class RequestRefused(RolloutError):
    """The server is well, and does not do what it was asked for (status 4xx)."""


KEEP_ALIVE_SECONDS = 2.0
"""Below the server's own 5 s: a request on a connection that the server is closing would fail."""


class SGLangClient:
    """Calls of one SGLang server. Every failure is a RolloutError that holds the server's own words."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout_seconds: float) -> None:
        self.url = url.rstrip("/")
        self.in_flight = 0
        """Requests under way, for balancing; counted by the pool, from its choice on."""
        self._session = session
        self._timeout_seconds = timeout_seconds

    async def generate(self, request: dict[str, Any]) -> list[GenerateResponse]:
        answer = await self.post("/generate", request)
        answers = answer if isinstance(answer, list) else [answer]
        return [parse_answer(GenerateResponse, item, f"{self.url}/generate") for item in answers]

    async def is_ready(self) -> bool:
        try:
            await self._call("GET", "/ready", None, timeout_seconds=5.0)
        except RolloutError:
            return False
        return True

    async def is_answering(self) -> bool:
        return await self.weight_version() is not None

    async def weight_version(self) -> str | None:
        """The label of its weights; None without an answer. Also told while generation is paused, when `/health` may
        fail."""
        try:
            answer = await self._call("GET", "/model_info", None, timeout_seconds=10.0)
            return parse_answer(ModelInfo, answer, f"{self.url}/model_info").weight_version
        except RolloutError:
            return None

    async def server_info(self) -> ServerInfo:
        answer = await self._call("GET", "/server_info", None, timeout_seconds=30.0)
        return parse_answer(ServerInfo, answer, f"{self.url}/server_info")

    async def post(self, path: str, body: dict[str, Any], timeout_seconds: float | None = None) -> Any:
        """The decoded answer of a POST. Raises RolloutError on any status but 200, RolloutServerDied without answer."""
        return await self._call("POST", path, body, timeout_seconds or self._timeout_seconds)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_seconds: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status != 200:
                    refused = 400 <= response.status < 500
                    error = RequestRefused if refused else RolloutError
                    raise error(f"{self.url}{path} answered {response.status}: {text[:2000]}")
                return await response.json() if "json" in response.content_type else text
        except TimeoutError:
            raise RolloutError(f"{self.url}{path} gave no answer within {timeout_seconds:g} s") from None
        except aiohttp.ClientError as error:
            raise RolloutServerDied(f"{self.url}{path}: connection lost ({error!r})") from None
        except ValueError as error:
            raise RolloutError(f"{self.url}{path} answered what cannot be decoded: {error}") from None
