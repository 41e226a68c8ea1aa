"""The engine client that vLLM's OpenAI serving classes talk to: AsyncLLM, with a promise on every request.

The serving classes call ``generate`` somewhere inside; which client request they work for is known from a context
variable, because each request is served in a task of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.serial_utils import MsgpackEncoder

from vllm_plugin.promise import PROMISE_KEY, RequestPromise, detach_hold


@dataclass(slots=True)
class Probe:
    """A request that is only validated. Collects the size of what it would run."""

    prompt_tokens: int = 0
    max_tokens: int = 0
    sequences: int = 0


@dataclass(slots=True)
class Emission:
    """A request that runs.

    ``before_pull`` is called each time the serving class asks the engine for more: everything it has produced until
    then belongs to the tokens counted in ``tokens`` (per choice) and is held for ``hold_us``.
    """

    promise: RequestPromise
    before_pull: Callable[[], None]
    hold_us: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    unstamped: int = 0

    def note(self, output: RequestOutput) -> None:
        """Take the hold off an engine output and count its tokens."""
        output.kv_transfer_params, hold_us = detach_hold(output.kv_transfer_params)
        if hold_us is None:
            self.unstamped += 1
        self.hold_us = hold_us or 0
        for choice in output.outputs:
            if choice.token_ids:
                self.tokens[choice.index] = self.tokens.get(choice.index, 0) + len(choice.token_ids)


current_request: ContextVar[Probe | Emission | None] = ContextVar("current_request", default=None)


class PromiseClient:
    """AsyncLLM as vLLM's serving classes see it; everything but ``generate`` is passed on unchanged."""

    def __init__(self, llm: AsyncLLM, supported_tasks: tuple[Any, ...]) -> None:
        self._llm = llm
        self._supported_tasks = supported_tasks
        self._encoder = MsgpackEncoder()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like ``AsyncLLM.generate``; under a :class:`Probe` only validate, raising what the engine would raise."""
        request = current_request.get()
        if isinstance(request, Probe):
            self._validate(request, prompt, sampling_params, request_id, kwargs)
            return _nothing()
        if request is None:
            stream: AsyncGenerator[RequestOutput, None] = self._llm.generate(
                prompt, sampling_params, request_id, **kwargs
            )
            return stream
        return self._generate(request, prompt, sampling_params, request_id, kwargs)

    def _validate(
        self, probe: Probe, prompt: Any, params: SamplingParams, request_id: str, kwargs: dict[str, Any]
    ) -> None:
        engine_request = self._llm.input_processor.process_inputs(
            request_id, prompt, params, self._supported_tasks, lora_request=kwargs.get("lora_request")
        )
        # What cannot be sent to the engine, like a number beyond 64 bits, has to show here.
        self._encoder.encode(engine_request)
        probe.prompt_tokens += len(engine_request.prompt_token_ids or ())
        probe.max_tokens = max(probe.max_tokens, params.max_tokens or 0)
        probe.sequences += params.n

    async def _generate(
        self,
        request: Emission,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        kwargs: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        params.extra_args = {**(params.extra_args or {}), PROMISE_KEY: request.promise.to_wire()}
        if request.promise.streaming:
            params.output_kind = RequestOutputKind.DELTA
        stream = self._llm.generate(prompt, params, request_id, **kwargs)
        try:
            async for output in stream:
                request.note(output)
                yield output
                request.before_pull()
        finally:
            await stream.aclose()


async def _nothing() -> AsyncGenerator[RequestOutput, None]:
    return
    yield  # an async generator that ends at once
