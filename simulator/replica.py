"""One simulated engine replica: policy, KV cache and steps, with vLLM's behaviour around them.

What :mod:`vllm_plugin.scheduler` does with a plan in vLLM happens here in the same order: decodes, then chunks of
running prompts, then those that sit the step out by deadline, and whoever stands last is preempted when a scheduled
request lacks a KV block; a step that preempts admits nobody. A preempted request computes its prompt and everything
generated again. A step's tokens are ready, and its time is known to the policy, when it ends; host work between steps
is part of a step's time, as it is in the plug-in's own records.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

from scheduling.policy import Limits, PrefillChunk, StepPlan, StepRecord, View
from scheduling.request import RequestState
from simulator.kv_cache import KvCache
from simulator.step import Step, StepCounts, record_of, shape_of
from simulator.step_shape import StepTime
from simulator.token_release import first_token, next_tokens
from simulator.track import Track

_edf = attrgetter("edf_key")
_state = attrgetter("state")
_context = attrgetter("computed_tokens")
_service = attrgetter("service")


class SimulationError(RuntimeError):
    """The simulated engine cannot go on, which is a fault of a policy or of the simulator."""


class PlansSteps(Protocol):
    """The part of :class:`scheduling.policy.Policy` that a replica needs."""

    def plan(self, view: View) -> StepPlan:
        """Return the plan of one step."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Learn from a finished step."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request."""
        ...


Finetune = Callable[[View, StepPlan], int]
"""Gives the tokens of fine-tuning samples that ride in a step, from the view and the plan of its requests."""


class Replica:
    """Runs the requests it is given, one step after the other. The caller owns the clock.

    ``step_time`` may be noisy; ``finetune`` adds fine-tuning rows to steps; ``on_step`` sees every finished step.
    """

    def __init__(
        self,
        policy: PlansSteps,
        limits: Limits,
        step_time: StepTime,
        *,
        prefix_caching: bool = False,
        finetune: Finetune | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.counts = StepCounts()
        self.kv = KvCache(limits.kv_blocks, limits.kv_block_tokens, prefix_caching=prefix_caching)
        self.running: list[RequestState] = []
        self.waiting: list[RequestState] = []
        self.tracks: dict[str, Track] = {}
        self._step_time = step_time
        self._finetune = finetune
        self._on_step = on_step
        self._step: Step | None = None

    @property
    def stepping(self) -> bool:
        """Whether a step is in progress."""
        return self._step is not None

    def submit(self, track: Track) -> None:
        """Queue a request. It takes part from the next step on."""
        self.tracks[track.state.request_id] = track
        insort(self.waiting, track.state, key=_edf)

    def place(self, track: Track) -> None:
        """Put a request that already runs into the engine as its state says, its KV blocks counted."""
        state = track.state
        self.tracks[state.request_id] = track
        state.kv_blocks = -(-state.computed_tokens // self.limits.kv_block_tokens)
        self.kv.take(state.kv_blocks)
        self.running.append(state)

    def view(self, now_us: int) -> View:
        """What the policy sees."""
        return View(now_us, self.running, self.waiting, self.kv.free, self.limits)

    def start(self, now_us: int) -> int | None:
        """Begin a step and return when it ends; None when there is nothing to do."""
        view = self.view(now_us)
        plan = self.policy.plan(view) if self.running or self.waiting else StepPlan()
        extra = self._finetune(view, plan) if self._finetune else 0
        if not (plan.decode or plan.prefill or extra):
            if self.running or self.waiting:
                raise SimulationError(
                    f"policy {getattr(self.policy, 'name', '?')} plans nothing at {now_us} us with {len(self.running)} "
                    f"requests running and {len(self.waiting)} waiting"
                )
            return None
        decodes, prompts = self._schedule(plan)
        shape = shape_of(decodes, prompts, extra)
        duration_us, graph = self._step_time(shape)
        self._step = Step(now_us, now_us + duration_us, plan, shape, graph, decodes, prompts)
        return self._step.end_us

    def finish(self) -> list[Track]:
        """End the step in progress: hand out its tokens and tell the policy. Return the requests that are done."""
        step = self._step
        if step is None:
            raise SimulationError("no step is in progress")
        self._step = None
        now_us = step.end_us
        for state in map(_state, step.decodes):
            state.computed_tokens += 1
        served = Counter([track.state.service for track in step.decodes])
        done = next_tokens(step.decodes, now_us)
        first: dict[str, tuple[int, int]] = {}
        for track, tokens in step.prompts:
            if self._computed(track, tokens):
                served[track.state.service] += 1
                done += _end_prompt(track, now_us, first)
        self._count(step)
        self._leave(done)
        self.policy.observe(record_of(step, served, first))
        if self._on_step:
            self._on_step(step)
        return done

    # -- what vLLM's schedule() does with a plan -----------------------------------------------------------------------

    def _schedule(self, plan: StepPlan) -> tuple[list[Track], list[tuple[Track, int]]]:
        tracks = self.tracks
        decodes = [tracks[request_id] for request_id in plan.decode]
        admitted: list[tuple[Track, int]] = []
        chunks: list[tuple[Track, int]] = []
        for chunk in plan.prefill:
            self._sort_chunk(chunk, chunks, admitted)
        self._reorder(decodes, chunks)
        before = self.counts.preemptions
        if not self._allocate_all(decodes, chunks):
            decodes, chunks = self._allocate_slowly(decodes, chunks)
        if admitted and self.counts.preemptions == before:
            chunks.extend(self._admit(admitted))
        return decodes, chunks

    def _sort_chunk(
        self, chunk: PrefillChunk, chunks: list[tuple[Track, int]], admitted: list[tuple[Track, int]]
    ) -> None:
        """File a chunk under running prompts or admissions."""
        track = self.tracks[chunk.request_id]
        index = bisect_left(self.waiting, track.state.edf_key, key=_edf)
        waits = index < len(self.waiting) and self.waiting[index] is track.state
        (admitted if waits else chunks).append((track, chunk.tokens))

    def _reorder(self, decodes: Sequence[Track], chunks: Sequence[tuple[Track, int]]) -> None:
        planned = list(map(_state, decodes))
        planned += [track.state for track, _ in chunks]
        if len(planned) < len(self.running):
            known = set(planned)
            planned += [state for state in self.running if state not in known]
        self.running = planned

    def _allocate_all(self, decodes: Sequence[Track], chunks: Sequence[tuple[Track, int]]) -> bool:
        """Give everybody the blocks they need, if there are enough; otherwise nobody gets any."""
        size = self.limits.kv_block_tokens
        short = [state for state in map(_state, decodes) if state.computed_tokens >= state.kv_blocks * size]
        wanted = [(state, 1) for state in short]
        for track, tokens in chunks:
            state = track.state
            needed = -(-(state.computed_tokens + tokens) // size) - state.kv_blocks
            if needed > 0:
                wanted.append((state, needed))
        total = sum(blocks for _, blocks in wanted)
        if total > self.kv.free:
            return False
        if total:
            self.kv.take(total)
            for state, blocks in wanted:
                state.kv_blocks += blocks
        return True

    def _allocate_slowly(
        self, decodes: Sequence[Track], chunks: Sequence[tuple[Track, int]]
    ) -> tuple[list[Track], list[tuple[Track, int]]]:
        """Allocate one request after the other, preempting from the end of ``running``: latest deadline first."""
        planned = len(decodes) + len(chunks)
        self.running[planned:] = sorted(self.running[planned:], key=lambda state: state.deadline_us)
        gone: set[RequestState] = set()
        kept_decodes = [t for t in decodes if t.state not in gone and self._allocate(t, 1, gone)]
        kept_chunks = [(t, n) for t, n in chunks if t.state not in gone and self._allocate(t, n, gone)]
        return kept_decodes, kept_chunks

    def _allocate(self, track: Track, tokens: int, gone: set[RequestState]) -> bool:
        state = track.state
        needed = -(-(state.computed_tokens + tokens) // self.limits.kv_block_tokens) - state.kv_blocks
        if needed <= 0:
            return True
        while needed > self.kv.free:
            victim = self.running.pop()
            gone.add(victim)
            self._preempt(victim)
            if victim is state:
                return False
        self.kv.take(needed)
        state.kv_blocks += needed
        return True

    def _preempt(self, state: RequestState) -> None:
        track = self.tracks[state.request_id]
        self._free(track)
        state.prompt_tokens = track.arrival.prompt_tokens + state.generated_tokens
        state.computed_tokens = 0
        track.preempted += 1
        self.counts.preemptions += 1
        insort(self.waiting, state, key=_edf)

    def _admit(self, admitted: Sequence[tuple[Track, int]]) -> list[tuple[Track, int]]:
        scheduled = []
        for track, tokens in admitted:
            state = track.state
            if len(self.running) >= self.limits.running:
                break
            shared = self.kv.reuse(track.prefix_key, state.prompt_tokens, track.arrival.prefix_tokens)
            found = shared * self.limits.kv_block_tokens
            chunk = min(tokens, state.prompt_tokens - found)
            needed = -(-(found + chunk) // self.limits.kv_block_tokens) - shared
            if needed > self.kv.free:
                self.kv.drop(track.prefix_key, shared, shared)
                break
            self.kv.take(needed)
            track.shared, state.computed_tokens, state.kv_blocks = shared, found, shared + needed
            del self.waiting[bisect_left(self.waiting, state.edf_key, key=_edf)]
            self.running.append(state)
            scheduled.append((track, chunk))
        return scheduled

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def _computed(self, track: Track, tokens: int) -> bool:
        """Count a chunk as computed; True when its prompt is complete."""
        state = track.state
        state.computed_tokens += tokens
        if track.arrival.prefix_key:
            track.shared = self.kv.publish(
                track.prefix_key, track.shared, state.computed_tokens, track.arrival.prefix_tokens
            )
        return state.computed_tokens >= state.prompt_tokens

    def _free(self, track: Track) -> None:
        state = track.state
        if track.shared:
            self.kv.drop(track.prefix_key, track.shared, state.kv_blocks)
            track.shared = 0
        else:
            self.kv.give_back(state.kv_blocks)
        state.kv_blocks = 0

    def _leave(self, done: Sequence[Track]) -> None:
        if not done:
            return
        gone = {track.state for track in done}
        self.running = [state for state in self.running if state not in gone]
        for track in done:
            self._free(track)
            del self.tracks[track.state.request_id]
            self.policy.forget(track.state.request_id)

    def _count(self, step: Step) -> None:
        counts, shape = self.counts, step.shape
        counts.steps += 1
        counts.busy_us += step.end_us - step.start_us
        counts.decode_tokens += shape.decodes
        counts.prefill_tokens += shape.prefill_tokens
        counts.finetune_tokens += shape.finetune_tokens


def _end_prompt(track: Track, now_us: int, first: dict[str, tuple[int, int]]) -> list[Track]:
    """Hand out the token at the end of a prompt: the first one, or the next after a preemption."""
    state = track.state
    if state.generated_tokens:
        return next_tokens((track,), now_us)
    count, late = first.get(state.service, (0, 0))
    # As in the plug-in: late is a first token computed after its deadline, however long it is held.
    first[state.service] = (count + 1, late + (now_us > state.arrival_us + state.ttft_us))
    return [track] if first_token(track, now_us) else []
