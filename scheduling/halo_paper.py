"""``halo-paper``: the SLO-aware stage-unified scheduler as the paper writes it (HALO sections 5.3 and 5.4, Figure 8b).

Per step, with a fixed batch B that bounds decodes plus prompt tokens:

1. Decodes that would miss their next deadline if they sat this step out are in, least slack first.
2. Waiting requests enter in EDF order while the capacity, the sum of strictest TBT / own TBT, stays within B.
3. When a prompt waits, all other decodes yield and the prompts take the room, earliest deadline first.
4. Room that is left goes to the decodes with the least slack, which evens slack out between requests.

Left open by the paper and chosen here:

- "Would miss if it sat this step out": its slack is less than this step and the next. Step times are not modelled; the
  estimate is the longest of the newest :data:`STEPS` steps that carried prompt tokens, or until there are such,
  of those that did not. Before any step was seen, the strictest TBT stands in, which B is chosen to meet.
- The strictest TBT is that of any service (``tbt_min_us``) or, without it, the strictest seen so far.
- EDF covers unfinished prompts and waiting ones together. Waiting requests queue behind the first that lacks capacity
  or KV blocks; one that lacks an adapter slot is passed over.
- The paper is silent on KV memory; a yielding decode keeps its blocks. See :mod:`scheduling.room` for admission.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from scheduling.adapters import AdapterRotation, AdapterSlots
from scheduling.capacity import CapacityMeter, StrictestTbt
from scheduling.policy import StepPlan, StepRecord, View
from scheduling.request import RequestState
from scheduling.room import Room, split
from scheduling.sliding_quantile import SlidingQuantile

STEPS = 64

_tbt = attrgetter("tbt_us")
Keyed = tuple[int, int, str, RequestState]


def by_deadline(states: list[RequestState]) -> list[Keyed]:
    """Return ``states`` keyed and sorted by (deadline, arrival, id), :attr:`RequestState.edf_key`."""
    keyed = [
        (
            state.last_release_us + state.tbt_us if state.streaming and state.generated_tokens else state.deadline_us,
            state.arrival_us,
            state.request_id,
            state,
        )
        for state in states
    ]
    keyed.sort()
    return keyed


class HaloPaper:
    """HALO with a fixed batch ``batch``; ``tbt_min_us`` is the strictest TBT of any service."""

    name = "halo-paper"

    def __init__(self, *, batch: int, tbt_min_us: int | None = None) -> None:
        self.batch = batch
        self._strictest = StrictestTbt(tbt_min_us)
        self._mixed_us = SlidingQuantile(1.0, STEPS)
        self._decode_us = SlidingQuantile(1.0, STEPS)
        self._rotation = AdapterRotation()

    def plan(self, view: View) -> StepPlan:
        """Return the plan of one step; see :class:`scheduling.policy.Policy`."""
        self._strictest.see(view)
        return self._rotation.plan(view, lambda slots: self._fill(view, slots))

    def _fill(self, view: View, slots: AdapterSlots) -> StepPlan:
        decodes, prefills = split(view.running)
        keyed = by_deadline(decodes)
        ordered = [entry[3] for entry in keyed]
        room = Room(view, self.batch, slots)
        if prefills or view.waiting:
            urgent = bisect_left(keyed, (view.now_us + 2 * self._step_us(),))
            yielding = room.decode(ordered[:urgent])
            self._prefill(view, prefills, room)
            yielding += ordered[urgent:]
        else:
            yielding = room.decode(ordered)
        if yielding and room.tokens > 0:
            yielding = room.decode(yielding)
        if yielding and room.tokens > 0:
            slots.open_kept()
            room.decode(yielding)
        return room.plan(view.waiting)

    def _prefill(self, view: View, prefills: list[RequestState], room: Room) -> None:
        """Fill the room with prompts, earliest deadline first, admitting within capacity."""
        started = [entry[3] for entry in reversed(by_deadline(prefills))]
        waiting = iter(view.waiting)
        candidate = next(waiting, None) if room.accepts_waiting else None
        refused = room.slots.refused
        capacity: CapacityMeter | None = None
        while not room.full and (started or candidate is not None):
            if candidate is None or (started and started[-1].edf_key <= candidate.edf_key):
                room.chunk(started.pop())
                continue
            if candidate.adapter in refused:
                candidate = next(waiting, None)
                continue
            if capacity is None:
                capacity = CapacityMeter(self.batch, self._strictest.us, map(_tbt, view.running))
            if not capacity.fits(candidate.tbt_us):
                candidate = None
            elif room.admit(candidate):
                capacity.add(candidate.tbt_us)
                candidate = next(waiting, None) if room.accepts_waiting else None
            elif room.fits_blocks(candidate) or room.never_fits(candidate):
                candidate = next(waiting, None)
            else:
                candidate = None

    def _step_us(self) -> int:
        """Estimate of the duration of a step that carries prompt tokens."""
        return int(self._mixed_us.value() or self._decode_us.value() or self._strictest.us)

    def observe(self, record: StepRecord) -> None:
        """Follow the duration of steps with and without prompt tokens."""
        if record.prefill_tokens:
            self._mixed_us.push(record.duration_us)
        elif record.decode_tokens:
            self._decode_us.push(record.duration_us)

    def forget(self, request_id: str) -> None:
        """Nothing is kept about single requests."""
