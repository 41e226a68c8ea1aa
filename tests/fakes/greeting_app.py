"""A Serve application without an engine: it answers at once. ``crash: true`` makes its replica fail to start."""

from __future__ import annotations

from typing import Any

from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Greeting:
    def __init__(self, crash: bool) -> None:
        if crash:
            raise ValueError("the greeting is lost")

    async def __call__(self, _request: Any) -> str:
        return "good day"


def build(args: dict[str, Any]) -> serve.Application:
    return Greeting.bind(bool(args.get("crash")))
