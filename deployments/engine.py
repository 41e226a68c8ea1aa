"""The engine replica: vLLM's AsyncLLM with all adapters, under HaloScheduler, behind ``EnginePort``.

A plain class: ``deployments.builders`` makes it a Serve deployment. vllm is imported in :meth:`EngineReplica.start`,
after the environment is set.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.adapters import prepare_adapters
from deployments.engine_args import build_engine_args, set_engine_environment
from deployments.engine_profile import profile_engine
from deployments.lora_overlap import prepare_lora_overlap
from deployments.outbox import Outbox, OutboxFullError
from deployments.protocol import (
    Delivery,
    Endpoint,
    NoStreamError,
    Prepared,
    Promise,
    Refusal,
    ReplicaStatus,
    Submission,
)
from deployments.settings import EngineSettings

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from deployments.engine_load import EngineLoad
    from deployments.openai_surface import OpenAISurface

logger = logging.getLogger(__name__)

OUTBOX_LIMIT = 65_536
KEEPALIVE_S = 5.0
STALL_S = 120.0
WARM_UP_TIMEOUT_S = 120.0


class EngineNotActiveError(RuntimeError):
    """The engine came up without one of our parts; serving would silently break promises."""


class EngineReplica:
    """One vLLM engine and the requests that run on it."""

    def __init__(self, settings: EngineSettings, replica_id: str) -> None:
        self._settings = settings
        self._replica_id = replica_id
        self._incarnation = uuid.uuid4().hex
        self._llm: AsyncLLM
        self._surface: OpenAISurface
        self._load: EngineLoad
        self._outboxes: dict[str, Outbox] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._gateway_of: dict[str, str] = {}
        self._progress = (0, time.monotonic())
        self._scratch: Path | None = None

    async def start(self) -> None:
        """Load the model and every adapter, and prove that our scheduler and LoRA path are in the engine.

        Raises what vLLM raises when the model cannot be loaded, an ExceptionGroup of ``AdapterError`` for adapters that
        cannot be served, and :class:`EngineNotActiveError`.
        """
        set_engine_environment(self._settings)
        await asyncio.to_thread(prepare_lora_overlap, self._settings)
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        from deployments.engine_load import EngineLoad  # noqa: PLC0415
        from deployments.openai_surface import OpenAISurface  # noqa: PLC0415

        engine_args = build_engine_args(self._settings)
        # Checked here as well: the file may have been checked on another machine.
        self._scratch = Path(tempfile.mkdtemp(prefix="halo-adapters-"))
        adapters = await asyncio.to_thread(prepare_adapters, self._settings, self._scratch)
        self._load = EngineLoad()
        self._llm = AsyncLLM.from_engine_args(engine_args, stat_loggers=[self._load.factory])
        self._surface = await OpenAISurface.build(self._llm, engine_args, adapters, self._settings.base_name)
        await self._check_parts()
        await self._warm_up()
        await profile_engine(self._llm, self._surface.lora_requests)

    async def _check_parts(self) -> None:
        """vLLM only logs a plug-in that fails and serves on without it; a replica must not."""
        for worker, parts in enumerate(await self._llm.collective_rpc("halo_parts", timeout=WARM_UP_TIMEOUT_S)):
            if not parts:
                raise EngineNotActiveError(
                    f"worker {worker} did not load HALO's vLLM plug-in: install the project into this environment "
                    "(pip install -e .), so that its vllm.general_plugins entry point exists"
                )
            failed = [f"{part} {state}" for part, state in parts.items() if state.startswith("failed")]
            if failed:
                raise EngineNotActiveError(f"worker {worker}: {'; '.join(failed)}")
            logger.info("worker %d: %s", worker, "; ".join(f"{part} {state}" for part, state in parts.items()))

    async def _warm_up(self) -> None:
        """Run one short request per service through the whole path, and check that HaloScheduler stamped it."""
        from vllm import SamplingParams  # noqa: PLC0415

        from vllm_plugin.promise import detach_hold  # noqa: PLC0415

        async with asyncio.timeout(WARM_UP_TIMEOUT_S):
            params = SamplingParams(max_tokens=2, temperature=0.0)
            async for output in self._llm.generate({"prompt_token_ids": [1, 2, 3]}, params, f"warm-{uuid.uuid4().hex}"):
                if detach_hold(output.kv_transfer_params)[1] is None:
                    raise EngineNotActiveError(
                        "vLLM runs, but HaloScheduler does not: see scheduler_cls in the engine log"
                    )
            for name in [service.name for service in self._settings.services]:
                await self._warm_service(name)

    async def _warm_service(self, name: str) -> None:
        submission = Submission(
            request_id=f"warm-{uuid.uuid4().hex}",
            gateway_id="",
            endpoint=Endpoint.COMPLETIONS,
            service=name,
            body={"model": name, "prompt": "Warm up.", "max_tokens": 2, "temperature": 0},
            promise=Promise(60_000_000, 60_000_000, self._settings.base_promise.release, 0),
        )
        deliveries: list[Delivery] = []
        await self._surface.respond(submission, _monotonic_us(), deliveries.append)
        if deliveries[-1].status >= 400:
            raise EngineNotActiveError(f"service {name} does not answer: {deliveries[-1].data}")

    # -- EnginePort ----------------------------------------------------------------------------------------------------

    async def prepare(self, submission: Submission) -> Prepared | Refusal:
        """Validate a request completely, without queueing it."""
        return await self._surface.prepare(submission)

    async def submit(self, submission: Submission) -> None:
        """Start a granted request; everything about it, errors included, arrives on its gateway's stream."""
        arrival_us = _monotonic_us() - submission.age_us
        outbox = self._outboxes.get(submission.gateway_id)
        if outbox is None:
            raise NoStreamError(f"gateway {submission.gateway_id} has no delivery stream at replica {self._replica_id}")
        request_id = submission.request_id
        if request_id in self._tasks:
            raise ValueError(f"request {request_id} is already running at replica {self._replica_id}")
        task = asyncio.create_task(self._run(submission, arrival_us, outbox), name=f"request {request_id}")
        self._tasks[request_id] = task
        self._gateway_of[request_id] = submission.gateway_id
        task.add_done_callback(lambda _: self._forget(request_id))

    async def _run(self, submission: Submission, arrival_us: int, outbox: Outbox) -> None:
        try:
            await self._surface.respond(submission, arrival_us, outbox.put)
        except OutboxFullError:
            logger.warning("request %s: gateway %s takes no deliveries", submission.request_id, submission.gateway_id)

    def _forget(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)
        self._gateway_of.pop(request_id, None)

    async def abort(self, request_ids: list[str]) -> None:
        """Stop requests and free their KV cache. Unknown ids are ignored."""
        for request_id in request_ids:
            task = self._tasks.get(request_id)
            if task is not None:
                # vLLM's generate() aborts in the engine when its task is cancelled.
                task.cancel()

    async def deliveries(self, gateway_id: str) -> AsyncIterator[list[Delivery]]:
        """All deliveries for one gateway. Opening the stream again closes the former one and aborts its requests."""
        self._close_stream(gateway_id)
        outbox = self._outboxes[gateway_id] = Outbox(OUTBOX_LIMIT)
        try:
            async for batch in outbox.batches(KEEPALIVE_S):
                yield batch
        finally:
            if self._outboxes.get(gateway_id) is outbox:
                # The scope may be cancelled: only schedule the clean-up, never await it here.
                self._outboxes.pop(gateway_id)
                outbox.close()
                self._cancel_requests_of(gateway_id)

    def _close_stream(self, gateway_id: str) -> None:
        former = self._outboxes.pop(gateway_id, None)
        if former is not None:
            former.close()
            self._cancel_requests_of(gateway_id)

    def _cancel_requests_of(self, gateway_id: str) -> None:
        for request_id, owner in self._gateway_of.items():
            if owner == gateway_id:
                self._tasks[request_id].cancel()

    async def status(self) -> ReplicaStatus:
        """The replica's load now."""
        return ReplicaStatus(
            replica_id=self._replica_id,
            incarnation=self._incarnation,
            max_requests=self._settings.max_num_seqs,
            running=self._load.running,
            waiting=self._load.waiting,
            kv_usage=self._load.kv_usage,
            steps=self._load.steps,
        )

    # -- life of the replica -------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise when the engine is dead, or has work and made no step for ``STALL_S`` seconds. Load alone is health."""
        await self._llm.check_health()
        now = time.monotonic()
        steps, since = self._progress
        if self._load.steps != steps or not self._tasks:
            self._progress = (self._load.steps, now)
        elif now - since > STALL_S:
            raise RuntimeError(f"engine made no step for {STALL_S:.0f} s with {len(self._tasks)} requests to run")

    async def stop(self) -> None:
        """End all requests and the engine's processes."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for outbox in self._outboxes.values():
            outbox.close()
        if hasattr(self, "_llm"):
            self._llm.shutdown()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    async def engine_state(self) -> dict[str, Any]:
        """Counters for tests and operators: requests held, engine load."""
        return {"requests": sorted(self._tasks), "gateways": sorted(self._outboxes), **self._load.as_dict()}


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000
