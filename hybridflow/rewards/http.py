"""Rewards from a server of the user's: JSON by POST, many requests at a time, attempts that fail are made again.

A request is {"prompt": ..., "response": ..., "answer": ..., "metadata": {...}}; the answer is a JSON number or an object with
the number under `reward`. Nothing else is read from it.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import aiohttp

from hybridflow.rewards.pool import Scores, collect
from hybridflow.rewards.scorers import Item, checked_reward

FIRST_PAUSE = 0.5  # seconds before the second attempt; doubled for each further one, and up to half of it is chance
LONGEST_PAUSE = 30.0
LONGEST_ANSWER = 1 << 20  # bytes
_TRY_AGAIN = (429, *range(500, 600))


class _Refused(Exception):
    """What the server says no to, or says that is no reward: the same request would have the same answer."""


class HttpScorer:
    """`concurrency` requests at a time to `url`, each attempt of at most `timeout` seconds, `retries` more where one fails."""

    def __init__(self, url: str, concurrency: int, timeout: float, retries: int):
        self._url, self._concurrency, self._retries = url, concurrency, retries
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    def score(self, items: Sequence[Item]) -> Scores:
        """Score all items; returns when the last is done or given up."""
        return asyncio.run(self._score(items))

    def close(self) -> None:
        pass

    async def _score(self, items: Sequence[Item]) -> Scores:
        free = asyncio.Semaphore(self._concurrency)  # a pause between attempts keeps its place: the server is busy
        connections = aiohttp.TCPConnector(limit=self._concurrency)
        async with aiohttp.ClientSession(timeout=self._timeout, connector=connections) as session:

            async def one(item: Item) -> tuple[float | None, str | None, bool]:
                async with free:
                    return await self._with_retries(session, item)

            found = await asyncio.gather(*(one(item) for item in items))
        return collect({n: (reward, why) for n, (reward, why, _) in enumerate(found)}, sum(late for _, _, late in found))

    async def _with_retries(self, session: aiohttp.ClientSession, item: Item) -> tuple[float | None, str | None, bool]:
        """The reward, or None, why there is none, and whether it came too late."""
        for attempt in range(self._retries + 1):
            if attempt:
                pause = min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            try:
                return await self._ask(session, item), None, False
            except _Refused as error:
                return None, str(error), False
            except TimeoutError:
                why, late = f"no answer after {self._timeout.total} s", True
            except aiohttp.ClientError as error:
                why, late = f"{type(error).__name__}: {error}", False
        return None, f"{self._url}: {why}, in {self._retries + 1} attempts", late

    async def _ask(self, session: aiohttp.ClientSession, item: Item) -> float:
        """
        Raises:
            TimeoutError, aiohttp.ClientError: worth another attempt.
            _Refused: not worth one.
        """
        prompt, response, answer, metadata = item
        try:
            body = json.dumps({"prompt": prompt, "response": response, "answer": answer, "metadata": metadata}, default=_plain)
        except TypeError as error:
            raise _Refused(f"metadata that JSON cannot hold: {error}") from error
        async with session.post(self._url, data=body, headers={"Content-Type": "application/json"}) as reply:
            if reply.status in _TRY_AGAIN:
                reply.raise_for_status()
            text = await _read(reply)
            if reply.status != 200:
                raise _Refused(f"{self._url} answers with status {reply.status}: {text[:200]!r}")
            return _reward(text)


async def _read(reply: aiohttp.ClientResponse) -> str:
    content = b""
    async for part in reply.content.iter_any():
        content += part
        if len(content) > LONGEST_ANSWER:
            raise _Refused(f"an answer of more than {LONGEST_ANSWER} bytes")
    return content.decode(errors="replace")


def _reward(text: str) -> float:
    try:
        value = json.loads(text)
        value = value["reward"] if isinstance(value, dict) else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("it is not a number")
        return checked_reward(value)
    except (ValueError, KeyError, OverflowError) as error:
        raise _Refused(f"the answer {text[:200]!r} is no reward: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as JSON's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not serialisable")
