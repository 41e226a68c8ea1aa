"""The profiling pass at start-up: steps of many shapes, run by the engine itself, before there is traffic.

DeltaServe (section 3.4) calibrates its step-time model before it serves; HALO (section 5.4) takes for granted a batch B
that meets the strictest TBT. Both are measured here. The host submits requests of :func:`prompt_lengths`, lets
:class:`ProfilingPass` plan them like any policy, and afterwards shows the records to the real policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from scheduling.adapters import AdapterSlots
from scheduling.latency_model import StepTimeModel
from scheduling.policy import Limits, StepPlan, StepRecord, View
from scheduling.request import RequestState
from scheduling.room import Room, split

CHUNKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_REPEATS = 4
MIXED_REPEATS = 5
SHORT_PROMPT = 32
LONG_PROMPT = 512
LONG_PROMPTS = 3
# The share of the strictest TBT that a full batch may take on average: engines are asked for a tenth less than the
# promise, and steps vary. A tail measured on so few steps would mostly tell how noisy those seconds were.
BATCH_PCT = 60
CONTEXT = 512
# How long to wait for the last request after the first.
PATIENCE_US = 2_000_000


def chunk_sizes(limits: Limits) -> list[int]:
    """The chunk sizes of the pass."""
    return [tokens for tokens in CHUNKS if tokens <= limits.step_tokens] or [limits.step_tokens]


def prompt_lengths(limits: Limits, context_tokens: int) -> list[int]:
    """Prompt lengths of the requests of a pass; each is decoded until the pass has ended.

    As many as may run and KV blocks hold: a few long ones, whose contexts and chunks reach far, after short ones, so
    that there are decodes from the beginning. Together they have at least about the tokens of the mixed steps.
    ``context_tokens`` is the longest request that the engine takes.
    """
    room = limits.kv_blocks * limits.kv_block_tokens // 2
    wanted = MIXED_REPEATS * sum(chunk_sizes(limits))
    short = min(SHORT_PROMPT, max(1, context_tokens // 2))
    count = max(1, min(limits.running, room // (2 * short)))
    long = max(LONG_PROMPT, (wanted - count * short) // LONG_PROMPTS + 1)
    long = min(long, context_tokens // 2, room // LONG_PROMPTS // 2)
    longs = [max(short, long)] * min(LONG_PROMPTS, count - 1)
    return [short] * (count - len(longs)) + longs


class ProfilingPass:
    """Plans the steps of the pass; a :class:`scheduling.policy.Policy`.

    The script first feeds all prompts in chunks of every size beside changing numbers of decodes, then runs decode-only
    steps. It begins when all ``expected`` requests have come, or some time after the first.
    """

    name = "profiling"

    def __init__(self, limits: Limits, expected: int) -> None:
        self._limits = limits
        self._expected = expected
        self._begin_us: int | None = None
        self._script = self._shapes()
        self.records: list[StepRecord] = []
        self.done = False

    def _shapes(self) -> Iterator[tuple[int, int]]:
        """(decodes, prompt tokens) of the steps, as far as requests allow."""
        decodes = [count for count in (0, *DECODES) if count <= self._limits.running]
        for repeat in range(MIXED_REPEATS):
            for place, tokens in enumerate(chunk_sizes(self._limits)):
                yield decodes[(place * 2 + repeat * 3) % len(decodes)], tokens
        for _ in range(DECODE_REPEATS):
            for count in decodes[1:]:
                yield count, 0

    def plan(self, view: View) -> StepPlan:
        """Return the next step of the script, an empty one while requests are still to come.

        Once the script has ended, or nothing is left of the requests, :attr:`done` is set and the plan has no meaning.
        """
        if self._begin_us is None:
            self._begin_us = view.now_us
        if not self.records and len(view.running) + len(view.waiting) < self._expected:
            if view.now_us < self._begin_us + PATIENCE_US:
                return StepPlan()
            self._expected = 0
        decodes, prefills = split(view.running)
        decodes.sort(key=lambda state: (state.generated_tokens, state.request_id))
        prompts = [*prefills, *sorted(view.waiting, key=lambda state: (state.prompt_tokens, state.request_id))]
        for count, tokens in self._script:
            plan = self._step(view, decodes, count, prompts if tokens else [], tokens)
            if (plan.prefill or not tokens) and (plan.decode or plan.prefill):
                return plan
        self.done = True
        return StepPlan()

    def _step(
        self, view: View, ready: Sequence[RequestState], count: int, prompts: Sequence[RequestState], tokens: int
    ) -> StepPlan:
        """``count`` decodes and ``tokens`` prompt tokens, as far as the engine's limits allow."""
        room = Room(view, view.limits.step_tokens, AdapterSlots(view.limits.adapters))
        for state in ready:
            if count and not room.decode([state]):
                count -= 1
        running = set(view.running)
        for state in prompts:
            tokens -= room.chunk(state, tokens) if state in running else room.admit(state, tokens)
        return room.plan(prompts)

    def observe(self, record: StepRecord) -> None:
        """Keep a finished step. It is nobody's service."""
        self.records.append(replace(record, service_tokens={}, first_tokens={}))

    def forget(self, request_id: str) -> None:
        """Nothing is kept about single requests."""

    def largest_batch(self, tbt_min_us: int) -> int | None:
        """The largest batch, decodes and prompt tokens together, whose steps keep ``tbt_min_us`` as a rule.

        They take :data:`BATCH_PCT` of it on average. None when too few steps were seen. Half the batch, as far as
        requests can run, is decodes at a context of :data:`CONTEXT`, the rest one chunk behind as long a prefix. At
        least 8: below that prompts hardly move.
        """
        model = StepTimeModel()
        for _ in range(2):  # a pass on a small engine has too few steps to fit if each counts once
            for record in self.records:
                model.observe(record)
        if not model.warm:
            return None
        most = self._limits.step_tokens
        low, high = min(8, most), most
        while low < high:
            batch = (low + high + 1) // 2
            decodes = min(self._limits.running, batch // 2)
            time_us = model.predict_us(decodes, decodes * CONTEXT, [(batch - decodes, CONTEXT)])
            if time_us is not None and 100 * time_us <= BATCH_PCT * tbt_min_us:
                low = batch
            else:
                high = batch - 1
        return low
