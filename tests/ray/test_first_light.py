"""The real builders, gateways, admission and streams in a local Serve, with the fake engine."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from openai import AsyncOpenAI

pytestmark = pytest.mark.anyio

SERVICES = ("triage", "assessment", "analysis", "records")


def client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


async def test_all_services_at_once(cluster) -> None:
    """The OpenAI SDK, streaming and not, against all four services at the same time, each answered in full."""

    async def streamed(service: str) -> str:
        stream = await openai.chat.completions.create(
            model=service, messages=[{"role": "user", "content": "one two"}], stream=True, max_tokens=12
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def whole(service: str) -> str:
        answer = await openai.completions.create(model=service, prompt="one two", max_tokens=12)
        return answer.choices[0].text

    openai = client(cluster.url)
    expected = "".join(f"w{i} " for i in range(12))
    answers = await asyncio.gather(
        *(ask(service) for service in SERVICES for ask in (streamed, whole) for _ in range(3))
    )
    assert answers == [expected] * len(answers)


async def test_slo_table_counts(cluster) -> None:
    """GET /slo counts every completed request of every gateway."""
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        before = (await http.get("/slo")).json()["services"]["records"]["outcomes"]["completed"]
        openai = client(cluster.url)
        for _ in range(6):
            await openai.completions.create(model="records", prompt="one", max_tokens=2)
        for _ in range(40):
            after = (await http.get("/slo")).json()["services"]["records"]["outcomes"]["completed"]
            if after == before + 6:
                break
            await asyncio.sleep(0.1)
        assert after == before + 6
