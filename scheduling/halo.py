"""``halo``: HALO with deadlines kept exactly, from predicted step times instead of a fixed batch.

HALO's rules (sections 5.3 and 5.4; see :mod:`scheduling.halo_paper`) stay: decodes with slack yield to prompts, slack
evens out, capacity counts a request by its TBT. What the paper fixes with a batch size, which ignores how long contexts
and chunks are, comes from :class:`scheduling.latency_model.StepTimeModel` here:

- **Step limit** ``T*``: the step ends before the earliest deadline of any decode that can still be met, a margin
  earlier, and after :data:`~scheduling.due_decodes.STEP_MAX_US` on average at the latest, for requests arrive
  meanwhile.
- **Urgent with look-ahead**: a decode is in when its slack is less than ``T*`` plus a decode step of those due soon, at
  least one strictest TBT. Without the look-ahead deadlines drift apart, and steps shrink.
- **Chunk**: the most prompt tokens for which urgent decodes and chunk together take at most ``T*``, in the order of
  :mod:`scheduling.prompt_order`. Then decodes with the least slack join while ``T*`` holds.
- **Capacity**: in the time of one strictest TBT the engine must be able to run, on average, every admitted request's
  share of decodes with its context: ``T(sum(tbt_min / tbt), sum(context * tbt_min / tbt)) <= 0.9 tbt_min``.
- **The lost** do not drag down the savable: a decode that is late whatever happens does not set ``T*``, and is left out
  while that keeps others in time; see :mod:`scheduling.due_decodes`.
- **KV pressure**: a request that yields keeps its memory, so above :data:`KV_PRESSURE` use nobody yields.
- **No starvation**: after :data:`PATIENT_STEPS` steps in which prompts got nothing, each further one shrinks the margin
  that chunks are judged with, from the model's upper quantile towards its mean: where times vary much, a chunk that
  always fits would never come. After :data:`DRY_STEPS` one gets :data:`DRY_CHUNK` tokens whatever it costs.

All times are the model's upper quantile, but for the capacity, which takes the mean. Until the model is warm the plan
is ``halo-paper``'s with ``batch``, which is also how the model gets to see steps; a chunk is at most twice the largest
seen.
"""

from __future__ import annotations

from operator import attrgetter

from scheduling.adapters import AdapterRotation, AdapterSlots
from scheduling.capacity import StrictestTbt
from scheduling.due_decodes import STEP_MAX_US, DueDecodes, longest_prefix
from scheduling.halo_paper import HaloPaper, by_deadline
from scheduling.latency_model import StepTimeModel, pairs_of
from scheduling.policy import StepPlan, StepRecord, View
from scheduling.prompt_order import PromptOrder
from scheduling.request import RequestState
from scheduling.room import Room, split
from scheduling.time_capacity import TimeCapacity

MARGIN_PCT = 5
KV_PRESSURE_PCT = 90
PATIENT_STEPS = 4
DRY_STEPS = 32
DRY_CHUNK = 32
LEAST_CHUNK = 8

_context = attrgetter("computed_tokens")


class Halo:
    """HALO with a step-time model.

    ``batch`` bounds the step until the model is warm; ``tbt_min_us`` is the strictest TBT of any service, without it
    the strictest seen so far; ``margin_us`` is kept free before a deadline, without it :data:`MARGIN_PCT` of the
    strictest TBT; ``quantile_pct`` is the share of steps that shall stay within their predicted time.
    """

    name = "halo"

    def __init__(
        self,
        *,
        batch: int = 64,
        tbt_min_us: int | None = None,
        margin_us: int | None = None,
        quantile_pct: int = 99,
    ) -> None:
        self.model = StepTimeModel(quantile=quantile_pct / 100)
        self._margin_us = margin_us
        self._strictest = StrictestTbt(tbt_min_us)
        self._cold = HaloPaper(batch=batch, tbt_min_us=tbt_min_us)
        self._rotation = AdapterRotation()
        self._prompts = PromptOrder()
        self._dry_steps = 0
        self._smooth_token_us = 0.0

    def plan(self, view: View) -> StepPlan:
        """Return the plan of one step; see :class:`scheduling.policy.Policy`."""
        if not self.model.warm:
            return self._cold.plan(view)
        self._strictest.see(view)
        return self._rotation.plan(view, lambda slots: self._fill(view, slots))

    def observe(self, record: StepRecord) -> None:
        """Learn how long a step took."""
        self.model.observe(record)
        self._cold.observe(record)

    def forget(self, request_id: str) -> None:
        """Nothing is kept about single requests."""

    def _fill(self, view: View, slots: AdapterSlots) -> StepPlan:
        decodes, prefills = split(view.running)
        room = Room(view, view.limits.step_tokens, slots)
        keyed, without_slot = by_deadline(decodes), []
        if slots.too_few_for(decodes):
            without_slot = [entry for entry in keyed if not slots.take(entry[3].adapter)]
            keyed = [entry for entry in keyed if slots.take(entry[3].adapter)]
        tbt_min_us = self._strictest.us
        margin_us = MARGIN_PCT * tbt_min_us // 100 if self._margin_us is None else self._margin_us
        due = DueDecodes(
            keyed,
            view.now_us,
            self.model.decode_bound_us,
            margin_us,
            tbt_min_us,
            step_max_us=int(STEP_MAX_US * self.model.mixed_ratio),
            without_slot=without_slot,
        )
        step = _Step(self.model, room, due.limit_us, caution=1 / (1 + max(0, self._dry_steps - PATIENT_STEPS)))
        refused = [entry[3] for entry in without_slot] + step.decode(due.urgent)
        rest = due.rest
        if rest and _kv_is_scarce(view):
            refused, rest = refused + step.decode_more(rest), []
        if prefills or view.waiting:
            self._give_prompts(view, prefills, step)
        if rest:
            refused += step.decode_more(rest)
        if refused and room.tokens > 0:
            slots.open_kept()
            step.decode_more(refused)
        return room.plan(view.waiting)

    def _give_prompts(self, view: View, prefills: list[RequestState], step: _Step) -> None:
        """Give prompts the time until the step limit, admitting waiting requests within capacity."""
        room, started = step.room, set(prefills)
        capacity: TimeCapacity | None = None
        dry, full = False, False
        most = max(DRY_CHUNK, 2 * self.model.largest_chunk)
        token_us = self._token_us(step, min(most, view.limits.step_tokens))
        waiting = view.waiting if room.accepts_waiting else ()
        order = self._prompts.walk(
            prefills,
            waiting,
            now_us=view.now_us,
            token_us=token_us,
            step_us=step.limit_us,
            passed_over=room.slots.refused,
        )
        for state in order:
            if room.full:
                break
            if full and state not in started:
                continue
            left = state.prompt_tokens - state.computed_tokens
            tokens = step.largest_chunk(state.computed_tokens, min(left, most - step.tokens, room.tokens))
            if tokens < min(left, LEAST_CHUNK):
                if not step.idle and (self._dry_steps < DRY_STEPS or step.tokens):
                    dry = not step.tokens
                    break
                tokens = min(left, DRY_CHUNK)
            if state in started:
                given = step.chunk(state, tokens)
            else:
                capacity = capacity or TimeCapacity(self.model, view, self._strictest.us)
                given = step.admit(state, tokens) if capacity.fits(state) else 0
                if given:
                    capacity.add(state)
                elif state.adapter not in room.slots.refused and not room.never_fits(state):
                    full = True
                    self._prompts.close_waiting()
            if given:
                self._prompts.account(state.request_id, given)
        self._prompts.settle()
        self._dry_steps = self._dry_steps + 1 if dry else self._dry_steps // 2

    def _token_us(self, step: _Step, most: int) -> float:
        """Time per prompt token at present, smoothed over steps: the step limit over the largest chunk it allows."""
        now = step.limit_us / max(LEAST_CHUNK, step.largest_chunk(0, most))
        self._smooth_token_us += (now - self._smooth_token_us) / 8 if self._smooth_token_us else now
        return self._smooth_token_us


class _Step:
    """The step being planned: what is in it, and what else fits until its limit."""

    def __init__(self, model: StepTimeModel, room: Room, limit_us: int, *, caution: float) -> None:
        ratio = model.mixed_ratio
        # What is left of the quantile's margin when prompts are judged.
        self._prompt_factor = (1 + caution * (ratio - 1)) / ratio
        self.room = room
        self.tokens = 0
        self._model = model
        self.limit_us = limit_us
        self._decodes = 0
        self._context = 0
        self._pairs = 0
        self._prefix = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is in the step yet."""
        return not self._decodes and not self.tokens

    def decode(self, states: list[RequestState]) -> list[RequestState]:
        """Let ``states`` decode, whatever the time. Return those the engine's limits refuse."""
        refused = self.room.decode(states)
        self._decodes += len(states) - len(refused)
        self._context += sum(map(_context, states)) - sum(map(_context, refused))
        return refused

    def decode_more(self, states: list[RequestState]) -> list[RequestState]:
        """Let the first of ``states`` decode for which there is time, at least one if the step is idle."""
        count = longest_prefix(states, self._fits_decodes, self.room.tokens)
        return self.decode(states[: max(count, int(self.idle))])

    def _fits_decodes(self, count: int, context: int) -> bool:
        decodes, context = self._decodes + count, self._context + context
        if self.tokens:
            time_us = self._model.mixed_bound_us(decodes, context, self.tokens, self._pairs, self._prefix)
        else:
            time_us = self._model.decode_bound_us(decodes, context)
        return time_us <= self.limit_us

    def largest_chunk(self, prefix: int, most: int) -> int:
        """The most tokens of a prompt, up to ``most``, for which there is time behind ``prefix`` computed ones."""
        low, high = 0, most
        while low < high:
            tokens = high if low == 0 and high == most else (low + high + 1) // 2
            time_us = self._model.mixed_bound_us(
                self._decodes,
                self._context,
                self.tokens + tokens,
                self._pairs + pairs_of(tokens, prefix),
                self._prefix + prefix,
            )
            if time_us * self._prompt_factor <= self.limit_us:
                low = tokens
            else:
                high = tokens - 1
        return low

    def chunk(self, state: RequestState, most: int) -> int:
        """Give a running prefill at most ``most`` tokens."""
        return self._count(state, self.room.chunk(state, most))

    def admit(self, state: RequestState, most: int) -> int:
        """Admit a waiting request with at most ``most`` tokens; 0 if the engine's limits refuse it."""
        return self._count(state, self.room.admit(state, most))

    def _count(self, state: RequestState, tokens: int) -> int:
        if tokens:
            self.tokens += tokens
            self._pairs += pairs_of(tokens, state.computed_tokens)
            self._prefix += state.computed_tokens
        return tokens


def _kv_is_scarce(view: View) -> bool:
    """Whether so much KV memory is in use that a request that yields costs others theirs."""
    return 100 * view.kv_blocks_free < (100 - KV_PRESSURE_PCT) * view.limits.kv_blocks
