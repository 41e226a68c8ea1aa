"""Which LoRA adapters may run in a step when there are more services than adapter slots.

The papers assume a slot per service. vLLM has ``max_loras`` slots and, with fewer slots than services, its stock
scheduler shuts a service out for as long as another one's requests run. Here requests take slots in the policy's order,
and an adapter that was refused in :data:`PATIENCE_STEPS` plans since it last ran gets its slot before the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from scheduling.policy import StepPlan, View
from scheduling.request import RequestState

PATIENCE_STEPS = 8

_adapter = attrgetter("adapter")


class AdapterSlots:
    """The adapter slots of one step. Adapter 0, the base model, needs none; a limit of 0 means no bound.

    ``kept`` are slots nobody else may take until :meth:`open_kept`.
    """

    __slots__ = ("_kept", "_limit", "refused", "used")

    def __init__(self, limit: int, kept: Iterable[int] = ()) -> None:
        self._limit = limit
        self._kept = set(kept)
        self.used: set[int] = set()
        self.refused: set[int] = set()

    def take(self, adapter: int) -> bool:
        """Take a slot for ``adapter`` if it has none; False if there is none left."""
        if self._limit <= 0 or not adapter or adapter in self.used:
            return True
        if adapter not in self._kept and len(self.used | self._kept) >= self._limit:
            self.refused.add(adapter)
            return False
        self.used.add(adapter)
        return True

    def take_all(self, states: Sequence[RequestState]) -> bool:
        """Take slots for all of ``states`` at once, or none and return False."""
        if self.too_few_for(states):
            return False
        if self._limit > 0:
            self.used.update(map(_adapter, states))
            self.used.discard(0)
        return True

    def too_few_for(self, states: Iterable[RequestState]) -> bool:
        """Whether ``states`` need more slots than there are left."""
        if self._limit <= 0:
            return False
        adapters = set(map(_adapter, states))
        adapters.discard(0)
        return len(self.used | self._kept | adapters) > self._limit

    @property
    def has_kept(self) -> bool:
        """Whether slots are kept for adapters that did not take them."""
        return not self._kept <= self.used

    def open_kept(self) -> None:
        """Give up the slots that were kept for adapters which then could not run."""
        self._kept = set()


class AdapterRotation:
    """Remembers between steps how often each adapter was refused a slot since it last ran."""

    def __init__(self) -> None:
        self._refusals: dict[int, int] = {}

    def plan(self, view: View, fill: Callable[[AdapterSlots], StepPlan]) -> StepPlan:
        """Return what ``fill`` plans with the slots of this step, and learn from it who was refused and who ran.

        Slots kept for an adapter whose requests then cannot run must not leave the step empty: it is filled again
        without them.
        """
        slots = self._open(view)
        plan = fill(slots)
        if slots.has_kept and not plan.decode and not plan.prefill:
            slots = AdapterSlots(view.limits.adapters)
            plan = fill(slots)
        self._close(slots)
        return plan

    def _open(self, view: View) -> AdapterSlots:
        """Return the slots of the step about to be planned, with slots kept for adapters refused too often."""
        limit = view.limits.adapters
        if limit <= 0 or not self._refusals or max(self._refusals.values()) < PATIENCE_STEPS:
            return AdapterSlots(limit)
        wanted = set(map(_adapter, view.running)) | set(map(_adapter, view.waiting))
        self._refusals = {adapter: count for adapter, count in self._refusals.items() if adapter in wanted}
        overdue = sorted((-count, adapter) for adapter, count in self._refusals.items() if count >= PATIENCE_STEPS)
        return AdapterSlots(limit, [adapter for _, adapter in overdue[:limit]])

    def _close(self, slots: AdapterSlots) -> None:
        """Learn from a finished plan who was refused and who ran."""
        for adapter in slots.refused - slots.used:
            self._refusals[adapter] = self._refusals.get(adapter, 0) + 1
        for adapter in slots.used:
            self._refusals.pop(adapter, None)
