"""Decode-first chunked prefill, the step shape all baselines share (HALO sections 2.4 and 5.1, Figure 8a).

Each step runs every decode; the prompt being computed gets the rest of the batch, ``batch - decodes`` tokens. Once a
request runs, it does not leave the batch. The baselines differ in the order of the waiting queue and in the size of
the batch.

Left open by the paper and chosen here: decodes and unfinished prompts run in order of arrival; a waiting request that
lacks an adapter slot is passed over, one that lacks KV blocks is waited for; a step without decodes gives the whole
batch to prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduling.adapters import AdapterRotation, AdapterSlots
from scheduling.policy import StepPlan, StepRecord, View
from scheduling.queues import ArrivalQueues
from scheduling.request import RequestState
from scheduling.room import Room, split


def one_group(_: RequestState) -> str:
    """Put every request in the same queue."""
    return ""


class ChunkedPrefill:
    """Base of the decode-first policies. ``batch`` bounds decodes plus prompt tokens of a step, the paper's B."""

    name: str

    def __init__(self, *, batch: int) -> None:
        self.batch = batch
        self._decodes = ArrivalQueues(one_group)
        self._rotation = AdapterRotation()

    def waiting_order(self, view: View) -> Iterator[RequestState]:
        """Yield waiting requests in the order in which they enter. Asked for only when one could enter."""
        raise NotImplementedError

    def step_tokens(self, view: View, decodes: list[RequestState]) -> int:
        """Return the batch size of this step."""
        return self.batch

    def may_enter(self, running: int) -> bool:
        """Whether another request may enter beside ``running`` others."""
        return True

    def on_admitted(self, state: RequestState) -> None:
        """Hear that ``state`` was admitted in the plan being made."""

    def on_passed_over(self, state: RequestState) -> None:
        """Hear that ``state`` waits for an adapter slot."""

    def plan(self, view: View) -> StepPlan:
        """Return the plan of one step; see :class:`scheduling.policy.Policy`."""
        return self._rotation.plan(view, lambda slots: self._fill(view, slots))

    def _fill(self, view: View, slots: AdapterSlots) -> StepPlan:
        decodes, prefills = split(view.running)
        self._decodes.sync(decodes)
        room = Room(view, self.step_tokens(view, decodes), slots)
        sitting_out = room.decode(list(self._decodes.walk("")))
        if prefills:
            prefills.sort(key=lambda state: (state.arrival_us, state.request_id))
            for state in prefills:
                room.chunk(state)
        if view.waiting:
            self._admit(view, room)
        if sitting_out and room.tokens > 0:
            slots.open_kept()
            room.decode(sitting_out)
        return room.plan(self.waiting_order(view) if view.waiting and not view.running else ())

    def _admit(self, view: View, room: Room) -> None:
        running = len(view.running)
        if not room.accepts_waiting or not self.may_enter(running):
            return
        refused = room.slots.refused
        for state in self.waiting_order(view):
            if state.adapter in refused:
                self.on_passed_over(state)
            elif room.admit(state):
                running += 1
                self.on_admitted(state)
                if not room.accepts_waiting or not self.may_enter(running):
                    return
            elif not room.fits_blocks(state) and not room.never_fits(state):
                return

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept about a request that is no longer in the view."""
