"""A deterministic host for policies: discrete steps, a clock that moves only by them, KV blocks and preemption.

It stands for vLLM behind :class:`scheduling.policy.Policy` and, like vLLM, preempts the youngest running request when
a scheduled one lacks a KV block. Every plan is checked against the contract of :class:`StepPlan` before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduling.policy import Limits, Policy, StepPlan, StepRecord, View
from scheduling.release import release_time_us
from scheduling.request import ReleasePolicy, RequestState


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: contexts of the decodes, and (tokens, tokens computed before) of the chunks."""

    decode_contexts: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        """All tokens of the step."""
        return len(self.decode_contexts) + sum(tokens for tokens, _ in self.chunks)


StepTime = Callable[[Work], int]


@dataclass(frozen=True, slots=True)
class Step:
    """A step that ran."""

    start_us: int
    end_us: int
    plan: StepPlan


@dataclass(slots=True)
class Life:
    """What became of one request: when each token was ready, when it was released and when it was due."""

    state: RequestState
    ready_us: list[int] = field(default_factory=list)
    released_us: list[int] = field(default_factory=list)
    due_us: list[int] = field(default_factory=list)
    preempted: int = 0

    @property
    def done(self) -> bool:
        """Whether every token was generated."""
        return len(self.ready_us) >= self.state.max_tokens

    @property
    def late(self) -> list[int]:
        """Indices of the tokens released after they were due."""
        return [i for i, (got, due) in enumerate(zip(self.released_us, self.due_us, strict=True)) if got > due]

    @property
    def met(self) -> bool:
        """Whether all tokens came in time."""
        return self.done and not self.late


class StepHost:
    """Runs requests through a policy, one step after the other."""

    def __init__(
        self, policy: Policy, limits: Limits, step_time: StepTime, *, hold_max_us: int = 250_000, now_us: int = 0
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.now_us = now_us
        self.steps: list[Step] = []
        self.lives: dict[str, Life] = {}
        self._step_time = step_time
        self._hold_max_us = hold_max_us
        self._coming: list[RequestState] = []
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        self._kv_blocks_used = 0

    def submit(self, *states: RequestState) -> None:
        """Let requests arrive at their arrival time."""
        for state in states:
            self.lives[state.request_id] = Life(state)
        self._coming = sorted([*self._coming, *states], key=lambda s: (s.arrival_us, s.request_id))

    def place(self, state: RequestState) -> None:
        """Put a request that already runs into the engine as it is, its KV blocks counted."""
        self.lives[state.request_id] = Life(state)
        self._hold(state, self._blocks(state.computed_tokens))
        self._running.append(state)

    @property
    def kv_blocks_free(self) -> int:
        """KV blocks nobody holds."""
        return self.limits.kv_blocks - self._kv_blocks_used

    def view(self) -> View:
        """What the policy sees now."""
        self._waiting.sort(key=lambda state: state.edf_key)
        return View(self.now_us, tuple(self._running), tuple(self._waiting), self.kv_blocks_free, self.limits)

    def run(self, max_steps: int = 100_000, until_us: int | None = None) -> None:
        """Step until nothing is left, the time is reached or the steps are used up."""
        for _ in range(max_steps):
            if until_us is not None and self.now_us >= until_us:
                return
            if not self.step():
                return
        raise AssertionError(f"still running after {max_steps} steps")

    def step(self) -> bool:
        """Run one step; when idle, move to the next arrival first. False when nothing is left."""
        self._arrive()
        if not self._running and not self._waiting:
            if not self._coming:
                return False
            self.now_us = max(self.now_us, self._coming[0].arrival_us)
            self._arrive()
        view = self.view()
        plan = self.policy.plan(view)
        check_plan(plan, view)
        assert plan.decode or plan.prefill, f"nothing planned with {len(view.running)} running at {self.now_us}"
        self._carry_out(plan)
        return True

    def _arrive(self) -> None:
        while self._coming and self._coming[0].arrival_us <= self.now_us:
            self._waiting.append(self._coming.pop(0))

    def _carry_out(self, plan: StepPlan) -> None:
        states = {state.request_id: state for state in (*self._running, *self._waiting)}
        decodes_planned = set(plan.decode)
        scheduled: dict[str, int] = {}
        for request_id, tokens in (*((i, 1) for i in plan.decode), *((c.request_id, c.tokens) for c in plan.prefill)):
            state = states[request_id]
            if (state in self._running or request_id not in decodes_planned) and self._allocate(
                state, tokens, scheduled
            ):
                scheduled[request_id] = tokens
        decodes = [states[i] for i in plan.decode if i in scheduled]
        chunks = [(states[c.request_id], c.tokens) for c in plan.prefill if c.request_id in scheduled]
        work = Work(tuple(s.computed_tokens for s in decodes), tuple((n, s.computed_tokens) for s, n in chunks))
        duration_us = self._step_time(work)
        start_us = self.now_us
        self.now_us += duration_us
        self.steps.append(Step(start_us, self.now_us, plan))
        generated: dict[str, int] = {}
        first: dict[str, tuple[int, int]] = {}
        for state in decodes:
            state.computed_tokens += 1
            self._token(state, generated, first)
        for state, tokens in chunks:
            state.computed_tokens += tokens
            if not state.prefill_left:
                self._token(state, generated, first)
        self.policy.observe(_record(duration_us, work, generated, first))

    def _allocate(self, state: RequestState, tokens: int, scheduled: dict[str, int]) -> bool:
        needed = self._blocks(state.computed_tokens + tokens) - state.kv_blocks
        while needed > self.kv_blocks_free:
            victim = self._running[-1] if self._running else state
            if victim.request_id in scheduled or victim is state:
                others = [s for s in self._running if s.request_id not in scheduled and s is not state]
                if not others:
                    return False
                victim = others[-1]
            self._preempt(victim)
        if state not in self._running:
            self._waiting.remove(state)
            self._running.append(state)
        self._hold(state, state.kv_blocks + max(0, needed))
        return True

    def _preempt(self, state: RequestState) -> None:
        self._running.remove(state)
        self._waiting.append(state)
        self.lives[state.request_id].preempted += 1
        state.prompt_tokens = max(state.prompt_tokens, state.computed_tokens + 1 if state.generated_tokens else 0)
        state.computed_tokens = 0
        self._hold(state, 0)

    def _token(self, state: RequestState, generated: dict[str, int], first: dict[str, tuple[int, int]]) -> None:
        life = self.lives[state.request_id]
        release_us = release_time_us(state, self.now_us, self._hold_max_us)
        due_us = state.deadline_us
        life.ready_us.append(self.now_us)
        life.released_us.append(release_us)
        life.due_us.append(due_us)
        generated[state.service] = generated.get(state.service, 0) + 1
        if state.generated_tokens == 0:
            count, late = first.get(state.service, (0, 0))
            first[state.service] = (count + 1, late + (release_us > due_us))
        state.generated_tokens += 1
        state.last_release_us = release_us
        if state.generated_tokens >= state.max_tokens:
            self._running.remove(state)
            self._hold(state, 0)
            self.policy.forget(state.request_id)

    def _hold(self, state: RequestState, blocks: int) -> None:
        self._kv_blocks_used += blocks - state.kv_blocks
        state.kv_blocks = blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.kv_block_tokens)


def profile(policy: Policy, step_time: StepTime, limits: Limits, *, longest_context: int = 1024) -> None:
    """Show a policy steps of many shapes, as the engine's profiling pass does at start-up."""
    chunks = [n for n in (8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048) if n <= limits.step_tokens]
    for decodes in sorted({0, 1, 4, 8, 16, 32, 64, 128, 256, 512} & set(range(limits.running + 1))):
        for context in sorted({16, longest_context // 4, longest_context}):
            contexts = (context,) * decodes
            works = [Work(contexts, ((tokens, prefix),)) for tokens in chunks for prefix in (0, context)]
            if decodes:
                works += [Work(contexts, ())] * 3
            for work in works:
                policy.observe(_record(step_time(work), work, {}, {}))


def _record(
    duration_us: int, work: Work, generated: Mapping[str, int], first: Mapping[str, tuple[int, int]]
) -> StepRecord:
    return StepRecord(
        duration_us=duration_us,
        decode_tokens=len(work.decode_contexts),
        prefill_tokens=sum(tokens for tokens, _ in work.chunks),
        prefill_chunks=tuple(tokens for tokens, _ in work.chunks),
        context_tokens=sum(work.decode_contexts),
        chunk_prefix_tokens=sum(prefix for _, prefix in work.chunks),
        chunk_prefixes=tuple(prefix for _, prefix in work.chunks),
        service_tokens=dict(generated),
        first_tokens=dict(first),
    )


def check_plan(plan: StepPlan, view: View) -> None:
    """Assert that ``plan`` keeps the contract of :class:`StepPlan` and the limits of ``view``."""
    running = {state.request_id: state for state in view.running}
    waiting = {state.request_id: state for state in view.waiting}
    named = [*plan.decode, *(chunk.request_id for chunk in plan.prefill)]
    assert len(named) == len(set(named)), "a request is named twice"
    for request_id in plan.decode:
        assert request_id in running, f"{request_id} does not run"
        assert not running[request_id].prefill_left, f"{request_id} is not in decode"
    for index, chunk in enumerate(plan.prefill):
        state = running.get(chunk.request_id) or waiting[chunk.request_id]
        assert 0 < chunk.tokens <= state.prefill_left, f"chunk {chunk} of {state.prefill_left}"
        assert chunk.tokens == state.prefill_left or index == len(plan.prefill) - 1, "a chunk before the last is cut"
    tokens = len(plan.decode) + sum(chunk.tokens for chunk in plan.prefill)
    assert tokens <= view.limits.step_tokens, f"{tokens} tokens"
    admitted = [waiting[chunk.request_id] for chunk in plan.prefill if chunk.request_id in waiting]
    assert len(running) + len(admitted) <= view.limits.running or not admitted, "too many running"
    adapters = {(running.get(i) or waiting[i]).adapter for i in named} - {0}
    assert view.limits.adapters <= 0 or len(adapters) <= view.limits.adapters, f"adapters {adapters}"


def request(  # noqa: PLR0917
    request_id: str,
    arrival_us: int,
    prompt: int,
    output: int,
    ttft_us: int,
    tbt_us: int,
    *,
    service: str = "svc",
    adapter: int = 0,
    release: ReleasePolicy = ReleasePolicy.BOUNDED,
    streaming: bool = True,
) -> RequestState:
    """Return a request that has not run yet."""
    return RequestState(
        request_id=request_id,
        service=service,
        arrival_us=arrival_us,
        ttft_us=ttft_us,
        tbt_us=tbt_us,
        prompt_tokens=prompt,
        max_tokens=output,
        adapter=adapter,
        release=release,
        streaming=streaming,
    )


def decoding(state: RequestState, generated: int, last_release_us: int) -> RequestState:
    """Return ``state`` as it is after ``generated`` tokens."""
    state.generated_tokens = generated
    state.computed_tokens = state.prompt_tokens + generated - 1
    state.last_release_us = last_release_us
    return state
