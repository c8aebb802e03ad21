"""Calls to one rollout server over HTTP."""

import ipaddress
import math
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from megatron_a3po.config.server_key import KEY_VARIABLE
from megatron_a3po.errors import RolloutError, RolloutServerDied
from megatron_a3po.fleet.protocol import GenerateResponse, ModelInfo, ServerInfo, parse_answer


class RequestRefused(RolloutError):
    """The server works and refuses what it was asked for (status 4xx)."""


class KeyRefused(RolloutError):
    """The server asks for another key than the run's (status 401 or 403)."""


_DESCRIBE_SECONDS = 30.0
"""For /server_info: SGLang's scheduler takes part in the answer, and may be in a batch."""


def is_loopback(url: str) -> bool:
    """Return whether no other machine can reach this address."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class SGLangClient:
    """The client of one SGLang server. Every failure is a RolloutError that holds the server's own words."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, timeout_seconds: float, key: str | None = None
    ) -> None:
        """timeout_seconds: for calls that name none of their own. key: sent with every call."""
        self.url = url.rstrip("/")
        self.in_flight = 0
        """Requests under way, which the pool counts from its choice on, to find the least busy server"""
        self._session = session
        self._timeout_seconds = timeout_seconds
        self._headers = {"Authorization": f"Bearer {key}"} if key is not None else {}

    async def generate(self, request: dict[str, Any]) -> list[GenerateResponse]:
        """Return the responses to a request, however long they take."""
        answer = await self._call("POST", "/generate", request, timeout_seconds=None)
        answers = answer if isinstance(answer, list) else [answer]
        return [parse_answer(GenerateResponse, item, f"{self.url}/generate") for item in answers]

    async def is_ready(self) -> bool:
        """Return whether the server takes requests."""
        try:
            await self._call("GET", "/ready", None, timeout_seconds=5.0)
        except RolloutError:
            return False
        return True

    async def problem(self) -> str | None:
        """Return why the server gives no usable answer; None if it does."""
        try:
            await self.model_info()
        except RolloutError as error:
            return str(error)
        return None

    async def weight_version(self) -> str | None:
        """Return the label of the server's weights; None without an answer.

        A server whose generation is paused answers, too, when `/health` may fail.
        """
        try:
            return (await self.model_info()).weight_version
        except RolloutError:
            return None

    async def model_info(self) -> ModelInfo:
        """Ask which weights the server holds."""
        answer = await self._call("GET", "/model_info", None, timeout_seconds=10.0)
        return parse_answer(ModelInfo, answer, f"{self.url}/model_info")

    async def server_info(self) -> ServerInfo:
        """Ask how the server was started."""
        answer = await self._call("GET", "/server_info", None, timeout_seconds=_DESCRIBE_SECONDS)
        return parse_answer(ServerInfo, answer, f"{self.url}/server_info")

    async def post(self, path: str, body: dict[str, Any], timeout_seconds: float | None = None) -> Any:
        """Return the decoded answer of a POST.

        Raises RolloutError on any status but 200, RolloutServerDied without an answer.
        """
        return await self._call("POST", path, body, timeout_seconds or self._timeout_seconds)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_seconds: float | None) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        request = self._session.request(
            method, self.url + path, json=body, timeout=timeout, headers=self._headers, allow_redirects=False
        )
        try:
            async with request as response:
                text = await response.text()
                if response.status in (401, 403):
                    raise KeyRefused(
                        f"{self.url}{path} answered {response.status}: it asks for another key; give the one that it "
                        f"was started with, as `rollout.key_file` or in {KEY_VARIABLE}"
                    )
                if response.status != 200:
                    refused = 400 <= response.status < 500
                    error = RequestRefused if refused else RolloutError
                    raise error(f"{self.url}{path} answered {response.status}: {text[:2000]}")
                return await response.json() if "json" in response.content_type else text
        except TimeoutError:
            raise RolloutError(f"{self.url}{path} gave no answer within {timeout_seconds or math.inf:g} s") from None
        except aiohttp.ClientError as error:
            # Not its repr: that of an answer which is no HTTP shows the headers of the request, and with them the key.
            raise RolloutServerDied(f"{self.url}{path}: connection lost ({type(error).__name__}: {error})") from None
        except ValueError as error:
            raise RolloutError(f"{self.url}{path} answered what cannot be decoded: {error}") from None
