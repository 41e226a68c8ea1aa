"""An engine that generates words on a timer: the whole of ``EnginePort``, without a model.

Step length, hold and failures are set by ``EngineSettings.engine_args``: ``step_us``, ``hold_us``, ``prepare_us``;
``pace`` holds each token until a TBT after the one before. A
request can ask for a failure with the body key ``fake``: ``{"fail_before": STATUS}`` answers with an error instead of
the first token, ``{"fail_after": N}`` ends the stream with an error event after N tokens, ``{"kill_after": N}`` kills
the process, ``{"stall_after": N}`` generates nothing more.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from deployments.openai_errors import envelope
from deployments.protocol import (
    Delivery,
    Endpoint,
    NoStreamError,
    Prepared,
    Refusal,
    ReplicaStatus,
    Submission,
)
from deployments.settings import EngineSettings


@dataclass(slots=True)
class _Job:
    submission: Submission
    prepared: Prepared
    gateway: asyncio.Queue[list[Delivery] | None]
    made: int = 0
    text: str = ""
    release_us: int = 0

    @property
    def fake(self) -> dict[str, Any]:
        return self.submission.body.get("fake") or {}


class FakeEngine:
    """Generates ``w0 w1 w2 ...`` for every choice of every running request, one token a step."""

    def __init__(self, settings: EngineSettings, replica_id: str = "fake") -> None:
        options = settings.engine_args
        self.settings = settings
        self.replica_id = replica_id
        self.incarnation = uuid.uuid4().hex
        self.step_us = int(options.get("step_us", 5_000))
        self.hold_us = int(options.get("hold_us", 0))
        self.prepare_us = int(options.get("prepare_us", 0))
        self.pace = bool(options.get("pace", False))
        self.healthy = True
        self.broken = False
        self.steps = 0
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.running: dict[str, _Job] = {}
        self.waiting: deque[_Job] = deque()
        self._gateways: dict[str, asyncio.Queue[list[Delivery] | None]] = {}
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the step loop."""
        self._loop_task = asyncio.get_running_loop().create_task(self._steps(), name="fake engine")

    async def stop(self) -> None:
        """Stop the step loop and end every stream."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        for queue in self._gateways.values():
            queue.put_nowait(None)
        self._gateways.clear()
        self.running.clear()
        self.waiting.clear()

    async def check_health(self) -> None:
        """Raise once the test has made the engine ill."""
        if not self.healthy:
            raise RuntimeError("the fake engine was made ill")

    async def prepare(self, submission: Submission) -> Prepared | Refusal:
        """Count words as tokens; refuse prompts that are missing or too long."""
        if self.prepare_us:
            await asyncio.sleep(self.prepare_us / 1e6)
        body = submission.body
        if self.broken:
            raise RuntimeError("the fake engine was made to fail: secret detail")
        prompt = _prompt(submission)
        if prompt is None:
            return Refusal(400, envelope(400, "messages or prompt is missing", param="messages"))
        tokens = len(prompt.split())
        limit = self.settings.max_model_len or 8192
        if tokens >= limit:
            message = f"The prompt has {tokens} tokens, the context {limit}."
            return Refusal(400, envelope(400, message, param="messages", code="context_length_exceeded"))
        return Prepared(tokens, int(body.get("max_tokens") or 16), int(body.get("n") or 1), bool(body.get("stream")))

    async def submit(self, submission: Submission) -> None:
        """Queue a request for the next step."""
        prepared = await self.prepare(submission)
        assert isinstance(prepared, Prepared)
        queue = self._gateways.get(submission.gateway_id)
        if queue is None:
            raise NoStreamError(f"gateway {submission.gateway_id} has no stream open")
        self.submitted.append(submission.request_id)
        self.waiting.append(_Job(submission, prepared, queue))

    async def abort(self, request_ids: list[str]) -> None:
        """Drop requests."""
        for request_id in request_ids:
            known = self.running.pop(request_id, None) is not None
            before = len(self.waiting)
            self.waiting = deque(job for job in self.waiting if job.submission.request_id != request_id)
            if known or len(self.waiting) < before:
                self.aborted.append(request_id)

    async def deliveries(self, gateway_id: str) -> AsyncGenerator[list[Delivery], None]:
        """One list per step. A second stream for the same gateway ends the first."""
        former = self._gateways.get(gateway_id)
        if former is not None:
            former.put_nowait(None)
            await self._abort_gateway(former)
        queue: asyncio.Queue[list[Delivery] | None] = asyncio.Queue(10_000)
        self._gateways[gateway_id] = queue
        try:
            while (batch := await queue.get()) is not None:
                yield batch
        finally:
            if self._gateways.get(gateway_id) is queue:
                del self._gateways[gateway_id]
            await self._abort_gateway(queue)

    async def status(self) -> ReplicaStatus:
        """The load now."""
        limit, running = self.settings.max_num_seqs, len(self.running)
        return ReplicaStatus(
            self.replica_id, self.incarnation, limit, running, len(self.waiting), running / limit, self.steps
        )

    async def _abort_gateway(self, queue: asyncio.Queue[list[Delivery] | None]) -> None:
        jobs = [*self.running.values(), *self.waiting]
        await self.abort([job.submission.request_id for job in jobs if job.gateway is queue])

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.step_us / 1e6)
            while self.waiting and len(self.running) < self.settings.max_num_seqs:
                job = self.waiting.popleft()
                self.running[job.submission.request_id] = job
            if self.running:
                self.step()

    def step(self) -> None:
        """One token for every choice of every running request; one list per gateway."""
        self.steps += 1
        batches: dict[int, tuple[asyncio.Queue[list[Delivery] | None], list[Delivery]]] = {}
        for job in list(self.running.values()):
            _, batch = batches.setdefault(id(job.gateway), (job.gateway, []))
            batch.extend(self._advance(job))
        for queue, batch in batches.values():
            if batch:
                queue.put_nowait(batch)

    def _advance(self, job: _Job) -> list[Delivery]:
        request_id, fake = job.submission.request_id, job.fake
        if job.made == fake.get("stall_after", -1):
            return []
        if job.made == fake.get("kill_after", -1):
            os.kill(os.getpid(), signal.SIGKILL)
        failing = (job.made == 0 and "fail_before" in fake) or job.made == fake.get("fail_after", -1)
        if failing:
            del self.running[request_id]
            return [_failure(job, int(fake.get("fail_before", 500)))]
        job.made += 1
        job.text += f"w{job.made - 1} "
        done = job.made >= job.prepared.max_tokens
        if done:
            del self.running[request_id]
        if job.prepared.stream:
            return self._chunks(job, done)
        return [_whole(job)] if done else []

    def _chunks(self, job: _Job, done: bool) -> list[Delivery]:
        request_id = job.submission.request_id
        word = f"w{job.made - 1} "
        hold_us = self._paced_us(job) if self.pace else self.hold_us
        made = [
            Delivery(request_id, _event(job, index, word, done), hold_us, tokens=1, index=index)
            for index in range(job.prepared.choices)
        ]
        if done:
            made.append(Delivery(request_id, "data: [DONE]\n\n", hold_us, last=True))
        return made

    def _paced_us(self, job: _Job) -> int:
        now_us = int(asyncio.get_running_loop().time() * 1e6)
        first = job.made == 1
        job.release_us = now_us if first else max(now_us, job.release_us + job.submission.promise.tbt_us)
        return job.release_us - now_us


def _prompt(submission: Submission) -> str | None:
    body = submission.body
    if submission.endpoint is Endpoint.COMPLETIONS:
        prompt = body.get("prompt")
        return prompt if isinstance(prompt, str) else None
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    return " ".join(str(message.get("content")) for message in messages)


def _failure(job: _Job, status: int) -> Delivery:
    body = json.dumps(envelope(status, "the fake engine was asked to fail"))
    data = body if job.made == 0 or not job.prepared.stream else f"data: {body}\n\n"
    return Delivery(job.submission.request_id, data, last=True, status=status)


def _event(job: _Job, index: int, word: str, done: bool) -> str:
    chat = job.submission.endpoint is Endpoint.CHAT
    content: dict[str, Any] = {"delta": {"role": "assistant", "content": word}} if chat else {"text": word}
    choice = {"index": index, "finish_reason": "length" if done else None} | content
    return f"data: {json.dumps(_frame(job, chat, 'chat.completion.chunk') | {'choices': [choice]})}\n\n"


def _whole(job: _Job) -> Delivery:
    chat = job.submission.endpoint is Endpoint.CHAT
    content: dict[str, Any] = {"message": {"role": "assistant", "content": job.text}} if chat else {"text": job.text}
    choices = [{"index": index, "finish_reason": "length"} | content for index in range(job.prepared.choices)]
    tokens = job.made * job.prepared.choices
    usage = {
        "prompt_tokens": job.prepared.prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": job.prepared.prompt_tokens + tokens,
    }
    body = _frame(job, chat, "chat.completion") | {"choices": choices, "usage": usage}
    return Delivery(job.submission.request_id, json.dumps(body), tokens=tokens, last=True)


def _frame(job: _Job, chat: bool, chat_object: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{job.submission.request_id}",
        "object": chat_object if chat else "text_completion",
        "created": 0,
        "model": job.submission.service,
    }
