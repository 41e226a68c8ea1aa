"""HaloScheduler: vLLM's scheduler, steered by a policy of ``scheduling``.

It never copies the stock ``schedule()``. Before each step it shows the policy a view of all requests and then sets four
things the stock code obeys: the order of ``running``, the order of ``waiting``, the token budget of the step and the
number of requests that may run. A decode that sits a step out is marked through ``Request.next_decode_eligible_step``.
After the step it works out when each new token may reach the client and stamps that on the output.

Source of the stock behaviour: ``vllm.v1.core.sched.scheduler.Scheduler.schedule`` of vLLM 0.32.0.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from scheduling.policy import Limits, Policy, StepPlan, StepRecord, View
from scheduling.profiling import ProfilingPass
from scheduling.registry import POLICIES, make_policy
from scheduling.request import RequestState
from vllm_plugin.promise import PROFILED_KEY, RequestPromise, attach_hold, profiling_requests
from vllm_plugin.request_book import RequestBook, Track
from vllm_plugin.trace_file import TraceFile

# Below vLLM's own logger, whose handlers print it; a logger of any other name would be silent.
logger = init_logger(f"vllm.{__name__}")

CONFIG_KEY = "halo"
# Until the profiling pass has measured the batch, where the configuration does not give it.
COLD_BATCH = 64


def monotonic_us() -> int:
    """CLOCK_MONOTONIC in microseconds."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class _StepInFlight:
    """A step that was scheduled and has not returned yet."""

    output: SchedulerOutput
    start_us: int
    decode_tokens: int = 0
    context_tokens: int = 0
    chunks: list[int] = field(default_factory=list)
    chunk_prefixes: list[int] = field(default_factory=list)


class HaloScheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM is not typed for us
    """Chooses decodes, prefill chunks and admissions of every step by deadline (HALO section 5).

    Configured by ``additional_config={"halo": {"policy": NAME, "options": {...}}}``.
    """

    running: list[Request]
    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = dict(self.vllm_config.additional_config or {}).get(CONFIG_KEY, {})
        self._policy_name: str = config.get("policy", "halo")
        self._options: dict[str, Any] = dict(config.get("options", {}))
        self._tbt_min_us: int | None = config.get("tbt_min_us")
        self._measures_batch = "batch" in POLICIES[self._policy_name].options and "batch" not in self._options
        if self._measures_batch:
            self._options["batch"] = min(COLD_BATCH, self.max_num_scheduled_tokens)
        self._trace_dir = Path(config["trace_dir"]) if config.get("trace_dir") else None
        self._trace: TraceFile | None = None
        self._book = RequestBook()
        self._blocked: dict[str, Request] = {}
        self._leaving: dict[str, Track] = {}
        self._steps_in_flight: deque[_StepInFlight] = deque()
        self._last_step_end_us = 0
        self._plan_failures = 0
        self._limits = Limits(
            step_tokens=self.max_num_scheduled_tokens,
            running=self.max_num_running_reqs,
            adapters=self.lora_config.max_loras if self.lora_config else 0,
            kv_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks(),  # vLLM's null block is not usable
            kv_block_tokens=self.block_size,
        )
        self._profiling: ProfilingPass | None = None
        self._profiled: dict[str, Any] | None = None
        self.halo_policy: Policy = make_policy(self._policy_name, **self._options)
        self._open_trace()
        logger.info("HaloScheduler active with policy %s", self.halo_policy.name)

    def _end_profiling(self, profiling: ProfilingPass) -> None:
        """Start the policy anew with what the pass has measured, and tell the client on its requests' outputs."""
        self._profiling = None
        if self._measures_batch and self._tbt_min_us:
            self._options["batch"] = profiling.largest_batch(self._tbt_min_us) or self._options["batch"]
        self.halo_policy = make_policy(self._policy_name, **self._options)
        self._open_trace()
        for record in profiling.records:
            self._learn(record)
        self._profiled = {"steps": len(profiling.records), "batch": self._options.get("batch", 0)}
        logger.info(
            "Profiling pass: %d steps; %s runs with %s", len(profiling.records), self._policy_name, self._options
        )

    def shutdown(self) -> None:
        """End the trace too."""
        if self._trace:
            self._trace.close()
        super().shutdown()

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a new request under its promise."""
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new and request.request_id in self.requests:
            self._track(request)

    def _track(self, request: Request) -> None:
        params = request.sampling_params
        extra_args = params.extra_args if params else None
        promise = RequestPromise.from_extra_args(extra_args, monotonic_us())
        profiling = profiling_requests(extra_args)
        if profiling and self._profiling is None and self._profiled is None:
            self._profiling = ProfilingPass(self._limits, profiling)
        state = RequestState(
            request_id=request.request_id,
            service=promise.service,
            arrival_us=promise.arrival_us,
            ttft_us=promise.ttft_us,
            tbt_us=promise.tbt_us,
            prompt_tokens=request.num_tokens,
            max_tokens=request.max_tokens,
            adapter=request.lora_request.lora_int_id if request.lora_request else 0,
            release=promise.release,
            streaming=promise.streaming,
        )
        self._book.add(Track(state, promise, profiling=bool(profiling)))
        if self._is_blocked_waiting_status(request.status):
            self._blocked[request.request_id] = request
        else:
            self._book.enqueue(state)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        track = self._book.tracks.get(request.request_id)
        if track is None:
            return
        # Its KV cache is gone: prompt and generated tokens are computed again. The deadline stays what it was.
        track.state.prompt_tokens = request.num_tokens
        track.state.computed_tokens = 0
        track.project(0, 0)
        self._book.enqueue(track.state)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        request_id = request.request_id
        self._blocked.pop(request_id, None)
        track = self._book.drop(request_id)
        if track is not None:
            # The last output of a finished request is stamped after vLLM has freed it.
            self._leaving[request_id] = track
            self.halo_policy.forget(request_id)
            if self._trace:
                self._trace.forget(request_id)
        return super()._free_request(request, *args, **kwargs)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan the step, steer the stock scheduler, and note what it did."""
        now_us = monotonic_us()
        self._leaving.clear()
        self._unblock()
        plan = self._make_plan(now_us)
        if plan is None:
            output = super().schedule(throttle_prefills)
        else:
            budget, active = self.max_num_scheduled_tokens, self.max_num_active_reqs
            try:
                self._steer(plan)
                output = super().schedule(throttle_prefills)
            finally:
                self.max_num_scheduled_tokens, self.max_num_active_reqs = budget, active
        self._note_scheduled(output, now_us)
        return output

    def _unblock(self) -> None:
        """Queue requests whose grammar has been compiled in the meantime; only the stock code can tell."""
        for request_id, request in list(self._blocked.items()):
            if self._handle_blocked_waiting_request(request):
                del self._blocked[request_id]
                self._book.enqueue(self._book.tracks[request_id].state)

    def _make_plan(self, now_us: int) -> StepPlan | None:
        """The policy's plan, or None when the stock scheduler should decide alone."""
        tracks = self._book.tracks
        running = [tracks[request.request_id].state for request in self.running if request.request_id in tracks]
        if not running and not self._book.waiting:
            if self._profiling is not None and self._profiling.records:
                self._end_profiling(self._profiling)  # its requests were aborted
            return None
        view = View(
            now_us=now_us,
            running=running,
            waiting=self._book.waiting,
            kv_blocks_free=self.kv_cache_manager.block_pool.get_num_free_blocks(),
            limits=self._limits,
        )
        try:
            if self._profiling is not None:
                plan = self._profiling.plan(view)
                if not self._profiling.done:
                    return plan
                self._end_profiling(self._profiling)
            plan = self.halo_policy.plan(view)
            if self._trace is not None:
                self._trace.step(view, plan)
        except Exception:
            # A fault in a policy must cost deadlines, never the engine: the stock scheduler takes this step.
            self._plan_failures += 1
            logger.exception("Policy %s failed; vLLM's own schedule takes this step", self.halo_policy.name)
            return None
        return plan if plan.decode or plan.prefill else None

    def _open_trace(self) -> None:
        """Begin the trace of a new policy."""
        if self._trace is not None:
            self._trace.close()
        if self._trace_dir is not None:
            self._trace = TraceFile(self._trace_dir, self._policy_name, self._options, self._limits)

    def _steer(self, plan: StepPlan) -> None:
        by_id = {request.request_id: request for request in self.running}
        decodes = [by_id[request_id] for request_id in plan.decode if request_id in by_id]
        chunks = [by_id[chunk.request_id] for chunk in plan.prefill if chunk.request_id in by_id]
        admitted = [
            self.requests[chunk.request_id] for chunk in plan.prefill if self._book.is_waiting(chunk.request_id)
        ]

        planned = {request.request_id for request in decodes}
        planned.update(request.request_id for request in chunks)
        resting = [request for request in self.running if request.request_id not in planned]
        for request in resting:
            request.next_decode_eligible_step = self.current_step + 2
        # The stock code preempts from the end of this list: the request with the latest deadline goes first.
        resting.sort(key=self._deadline_us)
        self.running = [*decodes, *chunks, *resting]

        for request in reversed(admitted):
            with suppress(ValueError):  # a request that already holds KV blocks waits in a queue of its own
                self.waiting.remove_request(request)
                self.waiting.prepend_request(request)

        tokens = sum(self._decode_tokens(request) for request in decodes) + sum(c.tokens for c in plan.prefill)
        self.max_num_scheduled_tokens = min(self.max_num_scheduled_tokens, tokens)
        active = len(self.running) + self.num_waiting_for_streaming_input + len(admitted)
        self.max_num_active_reqs = min(self.max_num_active_reqs, active)

    def _deadline_us(self, request: Request) -> int:
        track = self._book.tracks.get(request.request_id)
        return track.state.deadline_us if track else 0

    @staticmethod
    def _decode_tokens(request: Request) -> int:
        """Tokens the stock scheduler gives a decode: one, and the drafts to verify with speculative decoding."""
        left: int = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        return max(1, left)

    def _note_scheduled(self, output: SchedulerOutput, now_us: int) -> None:
        step = _StepInFlight(output, now_us)
        for request_id, tokens in output.num_scheduled_tokens.items():
            track = self._book.tracks.get(request_id)
            if track is None:
                continue
            request, state = self.requests[request_id], track.state
            self._book.dequeue(request_id)
            computed_before = request.num_computed_tokens - tokens
            if computed_before < state.prompt_tokens:
                step.chunks.append(tokens)
                step.chunk_prefixes.append(computed_before)
            else:
                step.decode_tokens += tokens
                step.context_tokens += computed_before
            state.computed_tokens = request.num_computed_tokens
            state.kv_blocks = -(-request.num_computed_tokens // self.block_size)
            if request.num_output_placeholders:
                track.project(request.num_output_placeholders, now_us)
        self._steps_in_flight.append(step)

    # -- after the step ------------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Stamp each new token with the time for which the gateway holds it, and tell the policy how the step went."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        now_us = monotonic_us()
        first_tokens: dict[str, tuple[int, int]] = {}
        service_tokens: dict[str, int] = {}
        for core_outputs in outputs.values():
            for output in core_outputs.outputs:
                self._stamp(output, now_us, first_tokens, service_tokens)
        self._leaving.clear()
        self._observe(scheduler_output, now_us, first_tokens, service_tokens)
        return outputs

    def _stamp(
        self,
        output: EngineCoreOutput,
        now_us: int,
        first_tokens: dict[str, tuple[int, int]],
        service_tokens: dict[str, int],
    ) -> None:
        request_id, tokens = output.request_id, len(output.new_token_ids)
        track = self._book.tracks.get(request_id) or self._leaving.get(request_id)
        if track is None:
            return
        hold_us = 0
        if tokens:
            service = track.state.service
            if track.released_tokens == 0:
                count, late = first_tokens.get(service, (0, 0))
                is_late = now_us > track.state.arrival_us + track.state.ttft_us
                first_tokens[service] = (count + 1, late + is_late)
            service_tokens[service] = service_tokens.get(service, 0) + tokens
            release_us = track.release(tokens, now_us)
            request = self.requests.get(request_id)
            if request is not None and request.num_output_placeholders:
                track.project(request.num_output_placeholders, now_us)
            hold_us = max(0, release_us - now_us)
        output.kv_transfer_params = attach_hold(output.kv_transfer_params, hold_us)
        if self._profiled is not None and track.profiling:
            output.kv_transfer_params[PROFILED_KEY] = self._profiled

    def _learn(self, record: StepRecord) -> None:
        if self._trace is not None:
            self._trace.record(record)
        self.halo_policy.observe(record)

    def _observe(
        self,
        scheduler_output: SchedulerOutput,
        now_us: int,
        first_tokens: dict[str, tuple[int, int]],
        service_tokens: dict[str, int],
    ) -> None:
        while self._steps_in_flight and self._steps_in_flight[0].output is not scheduler_output:
            self._steps_in_flight.popleft()
        if not self._steps_in_flight:
            return
        step = self._steps_in_flight.popleft()
        # With async scheduling the step was planned while its predecessor still ran.
        start_us, self._last_step_end_us = max(step.start_us, self._last_step_end_us), now_us
        if not step.decode_tokens and not step.chunks:
            return
        record = StepRecord(
            duration_us=now_us - start_us,
            decode_tokens=step.decode_tokens,
            prefill_tokens=sum(step.chunks),
            prefill_chunks=tuple(step.chunks),
            context_tokens=step.context_tokens,
            chunk_prefix_tokens=sum(step.chunk_prefixes),
            chunk_prefixes=tuple(step.chunk_prefixes),
            service_tokens=service_tokens,
            first_tokens=first_tokens,
        )
        try:
            if self._profiling is not None:
                self._profiling.observe(record)
                return
            self._learn(record)
        except Exception:
            logger.exception("Policy %s failed to learn from a step", self.halo_policy.name)
