"""What one engine step still has room for, and the plan as it grows.

Every policy fills a :class:`Room` in its own order; the room alone knows the engine's limits, so no policy can break
them. KV blocks are checked when a request is admitted: its whole prompt and one more token must fit, after every
running request has got what it needs for its unfinished prompt, for this step's token and for the next. The papers
leave KV memory open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduling.adapters import AdapterSlots
from scheduling.policy import PrefillChunk, StepPlan, View
from scheduling.request import RequestState


def split(running: Sequence[RequestState]) -> tuple[list[RequestState], list[RequestState]]:
    """Return (decodes, unfinished prefills) of ``running``."""
    decodes = [state for state in running if state.computed_tokens >= state.prompt_tokens]
    if len(decodes) == len(running):
        return decodes, []
    return decodes, [state for state in running if state.computed_tokens < state.prompt_tokens]


def blocks_for(tokens: int, block_tokens: int) -> int:
    """KV blocks that hold ``tokens``."""
    return -(-tokens // block_tokens)


class Room:
    """Room of one step: ``tokens``, places for running requests, KV blocks and adapter slots."""

    def __init__(self, view: View, tokens: int, slots: AdapterSlots) -> None:
        self.tokens = min(tokens, view.limits.step_tokens)
        self._view = view
        self._slots = slots
        self._places = view.limits.running - len(view.running)
        self._blocks: int | None = None
        self._decode: list[str] = []
        self._prefill: list[PrefillChunk] = []
        self._cut = False

    @property
    def full(self) -> bool:
        """Whether no chunk fits any more: no token left, or the last chunk was cut."""
        return self.tokens <= 0 or self._cut

    @property
    def accepts_waiting(self) -> bool:
        """Whether a waiting request could be admitted, KV blocks and adapter slots aside."""
        return self._places > 0 and not self.full

    @property
    def slots(self) -> AdapterSlots:
        """The adapter slots of the step."""
        return self._slots

    def decode(self, states: Sequence[RequestState]) -> list[RequestState]:
        """Let as many of ``states`` decode as fit, in their order. Return those refused."""
        most = self.tokens
        if most <= 0:
            return list(states)
        if len(states) <= most and self._slots.take_all(states):
            self._decode.extend([state.request_id for state in states])
            self.tokens -= len(states)
            return []
        refused = []
        for state in states:
            if self.tokens > 0 and self._slots.take(state.adapter):
                self._decode.append(state.request_id)
                self.tokens -= 1
            else:
                refused.append(state)
        return refused

    def chunk(self, state: RequestState, most: int | None = None) -> int:
        """Give a running prefill what fits of its prompt, at most ``most`` tokens. Return the tokens given."""
        left = state.prompt_tokens - state.computed_tokens
        tokens = min(left, self.tokens if most is None else min(most, self.tokens))
        if tokens <= 0 or self._cut or not self._slots.take(state.adapter):
            return 0
        self._prefill.append(PrefillChunk(state.request_id, tokens))
        self.tokens -= tokens
        self._cut = tokens < left
        return tokens

    def admit(self, state: RequestState, most: int | None = None) -> int:
        """Admit a waiting request with what fits of its prompt. Return the tokens given, 0 if it is refused.

        A refusal for want of an adapter slot concerns this adapter only; :meth:`fits_blocks` tells the other cause.
        """
        if not self.accepts_waiting or not self.fits_blocks(state):
            return 0
        tokens = self.chunk(state, most)
        if tokens:
            self._places -= 1
            self._blocks = self._blocks_left() - self._blocks_of(state)
        return tokens

    def fits_blocks(self, state: RequestState) -> bool:
        """Whether the KV cache has room for the whole prompt of a waiting request and its next token."""
        return self._blocks_of(state) <= self._blocks_left()

    def never_fits(self, state: RequestState) -> bool:
        """Whether the prompt is larger than the whole KV cache."""
        return self._blocks_of(state) > self._view.limits.kv_blocks

    def plan(self, waiting: Iterable[RequestState] = ()) -> StepPlan:
        """Return the plan.

        With nothing running and nothing planned, the first of ``waiting`` gets what free KV blocks hold: an engine
        with nothing else to do must not stand still because its free blocks are a few short of a whole prompt.
        """
        if not self._decode and not self._prefill and not self._view.running:
            self._admit_into_idle(waiting)
        return StepPlan(tuple(self._decode), tuple(self._prefill))

    def _admit_into_idle(self, waiting: Iterable[RequestState]) -> None:
        self._slots.open_kept()
        most = self._view.kv_blocks_free * self._view.limits.kv_block_tokens
        for state in waiting:
            if self._places > 0 and not self.never_fits(state) and self.chunk(state, most):
                return

    def _blocks_of(self, state: RequestState) -> int:
        bt = self._view.limits.kv_block_tokens
        return -(-(state.prompt_tokens + 1) // bt) - state.kv_blocks

    def _blocks_left(self) -> int:
        """Free blocks less those the running requests will need; computed once per step, when first asked for."""
        if self._blocks is None:
            bt = self._view.limits.kv_block_tokens
            needed = 0
            for state in self._view.running:
                computed = state.computed_tokens
                target = computed + 2 if computed >= state.prompt_tokens else state.prompt_tokens + 1
                missing = -(-target // bt) - state.kv_blocks
                if missing > 0:
                    needed += missing
            self._blocks = self._view.kv_blocks_free - needed
        return self._blocks
