"""vLLM's own OpenAI serving classes, run inside the engine replica, and what they lack.

What is vLLM's: request models, chat template, tools, logprobs, structured output, streaming chunks, error texts. What
is ours: complete validation before anything is queued, error statuses instead of errors inside a 200 stream, and the
tokens and the hold that belong to each piece of the response.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.datastructures import State
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest, TokenizeResponse
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from deployments.engine_errors import (
    PromptTooLongError,
    early_error,
    error_delivery,
    error_response,
    grammar_fault,
    is_prompt_too_long,
    refusal,
    validation_fault,
)
from deployments.promise_client import Emission, Probe, PromiseClient, current_request
from deployments.protocol import Delivery, Endpoint, Prepared, Refusal, Submission
from vllm_plugin.promise import RequestPromise

# Fields with which a client could reach into the engine's own plumbing.
_INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "priority", "request_id", "session_id", "vllm_xargs")

# Longer bodies are refused with vLLM's own text: counting them would cost seconds for a request nobody serves.
_COUNTED_PROMPT_CHARS = 1_000_000

Send = Callable[[Delivery], None]


class OpenAISurface:
    """Answers ``Submission``s with vLLM's serving classes."""

    def __init__(self, state: State) -> None:
        self._state = state

    @classmethod
    async def build(
        cls, llm: AsyncLLM, engine_args: AsyncEngineArgs, adapters: Mapping[str, Path], base_name: str
    ) -> OpenAISurface:
        """Create the serving classes over ``llm`` and load every adapter (service name -> directory)."""
        tasks = await llm.get_supported_tasks()
        args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        for name, value in vars(engine_args).items():
            setattr(args, name, value)
        args.served_model_name = [base_name]
        args.lora_modules = [
            LoRAModulePath(name=name, path=str(path), base_model_name=base_name) for name, path in adapters.items()
        ]
        args.enable_log_requests = False
        state = State()
        await init_app_state(PromiseClient(llm, tasks), state, args, tasks)  # type: ignore[arg-type]
        return cls(state)

    @property
    def lora_requests(self) -> list[LoRARequest]:
        """The loaded adapters as vLLM addresses them."""
        return list(self._state.openai_serving_models.lora_requests.values())

    async def prepare(self, submission: Submission) -> Prepared | Refusal:
        """Validate a request as the engine would, without running it."""
        probe = Probe()
        token = current_request.set(probe)
        try:
            request = self._parse(submission)
            stream = bool(request.stream)
            request.stream = True
            result = await self._serve(submission.endpoint, request)
            if isinstance(result, ErrorResponse):
                return refusal(result)
            await result.aclose()
        except Exception as error:
            if is_prompt_too_long(error):
                error = await self._counted(submission, error)
            return refusal(validation_fault(error))
        finally:
            current_request.reset(token)
        return Prepared(probe.prompt_tokens, probe.max_tokens, probe.sequences, stream)

    async def respond(self, submission: Submission, arrival_us: int, send: Send) -> None:
        """Run a request and ``send`` its deliveries; the last of them has ``last`` set, whatever happens."""
        parts: list[str] = []
        begun = False

        def flush(last: bool = False) -> None:
            nonlocal begun
            if not last and not (emission.promise.streaming and (parts or emission.tokens)):
                return
            begun = True
            _send_parts(send, submission.request_id, parts, emission, last)

        emission = Emission(_promise_of(submission, arrival_us), flush)
        token = current_request.set(emission)
        try:
            request = self._parse(submission)
            emission.promise = replace(emission.promise, streaming=bool(request.stream))
            result = await self._serve(submission.endpoint, request)
            if isinstance(result, ErrorResponse):
                send(error_delivery(submission.request_id, result))
            elif isinstance(result, AsyncGenerator):
                async for event in result:
                    if not begun and not parts and event.startswith('data: {"error"'):
                        fault = grammar_fault(submission.body, early_error(event))
                        send(error_delivery(submission.request_id, fault))
                        return
                    parts.append(event)
                flush(last=True)
            else:
                parts.append(json.dumps(result.model_dump(mode="json"), ensure_ascii=False))
                flush(last=True)
        except Exception as error:
            response = error_response(error)
            if begun and emission.promise.streaming:
                parts.append(f"data: {response.model_dump_json()}\n\n")
                flush(last=True)
            else:
                send(error_delivery(submission.request_id, grammar_fault(submission.body, response)))
        finally:
            current_request.reset(token)

    async def _counted(self, submission: Submission, error: Exception) -> Exception:
        """The same refusal with the prompt's true length: vLLM stops to count one token beyond the context."""
        body = submission.body
        try:
            if submission.endpoint is Endpoint.CHAT:
                fields = ("messages", "tools", "chat_template_kwargs")
                request = TokenizeChatRequest.model_validate({key: body[key] for key in fields if key in body})
            elif isinstance(body.get("prompt"), str):
                request = TokenizeCompletionRequest(prompt=body["prompt"])
            else:
                return error
            if len(json.dumps(body)) > _COUNTED_PROMPT_CHARS:
                return error
            counted = await self._state.serving_tokenization.create_tokenize(request, None)
        except Exception:
            return error
        if not isinstance(counted, TokenizeResponse):
            return error
        return PromptTooLongError(counted.count, counted.max_model_len)

    def _parse(self, submission: Submission) -> ChatCompletionRequest | CompletionRequest:
        body = {key: value for key, value in submission.body.items() if key not in _INTERNAL_FIELDS}
        body["request_id"] = submission.request_id
        if body.get("use_beam_search"):
            raise ValueError("use_beam_search is not supported: its steps have no deadlines")
        model = ChatCompletionRequest if submission.endpoint is Endpoint.CHAT else CompletionRequest
        return model.model_validate(body)

    async def _serve(self, endpoint: Endpoint, request: Any) -> Any:
        if endpoint is Endpoint.CHAT:
            return await self._state.openai_serving_chat.create_chat_completion(request)
        return await self._state.openai_serving_completion.create_completion(request)


def _promise_of(submission: Submission, arrival_us: int) -> RequestPromise:
    promise = submission.promise
    return RequestPromise(
        service=submission.service,
        arrival_us=arrival_us,
        ttft_us=promise.ttft_us,
        tbt_us=promise.tbt_us,
        release=promise.release,
        hold_max_us=promise.hold_max_us,
        streaming=False,  # known when vLLM has parsed the request: it takes "false" for False
    )


def _send_parts(send: Send, request_id: str, parts: list[str], emission: Emission, last: bool) -> None:
    """Send what was produced since the last engine output, with that output's tokens and hold."""
    counts = sorted(emission.tokens.items()) or [(0, 0)]
    emission.tokens.clear()
    data, hold_us = "".join(parts), emission.hold_us
    parts.clear()
    for index, tokens in counts[1:]:
        # Several choices got tokens in one step: one text, one count per choice.
        send(Delivery(request_id, "", hold_us, tokens, index))
    index, tokens = counts[0]
    send(Delivery(request_id, data, hold_us, tokens, index, last))
