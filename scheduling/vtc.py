"""``vtc-t`` and ``vtc-r``: fairness between services (HALO sections 2.4.2 and 6.1.4, Figure 4b).

``vtc-t`` equalises the tokens generated for each service: the service with the smallest counter is served next.
``vtc-r`` equalises the rate of late first tokens: the service with the largest share of late ones is served next.

From VTC's own description, which HALO only cites: a service whose queue was empty does not get credit for the time it
asked for nothing, so its counter is lifted to the smallest of those that queue, or to that of the service whose queue
emptied last. Left open by HALO and chosen here: a token counts 1 for every service, prompts count nothing ("equalizing
the number of generated tokens"); a request admitted counts its first token at once, so that one plan does not admit
one service only; for ``vtc-r`` a request whose first token is overdue is a violation while it still waits, or a service
that is never served would keep a perfect record; equal rates go by arrival; within a service, requests go by arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from operator import attrgetter

from scheduling.chunked_prefill import ChunkedPrefill
from scheduling.policy import StepRecord, View
from scheduling.queues import ArrivalQueues
from scheduling.request import RequestState


class _FairShare(ChunkedPrefill):
    """Serves the service that is furthest behind, by arrival within a service."""

    def __init__(self, *, batch: int) -> None:
        super().__init__(batch=batch)
        self._waiting = ArrivalQueues(attrgetter("service"))
        self._passed_over = False

    def rank(self, service: str) -> float:
        """Return the rank of a service; the smallest is served next."""
        raise NotImplementedError

    def before_ranking(self, view: View, services: list[str]) -> None:
        """Look at the queue, in which ``services`` have requests, before they are ranked."""

    def on_passed_over(self, state: RequestState) -> None:
        """Leave the service alone for the rest of the step: its requests share the adapter that has no slot."""
        self._passed_over = True

    def waiting_order(self, view: View) -> Iterator[RequestState]:
        """Yield the next request of the service that is furthest behind, again after each."""
        self._waiting.sync(view.waiting)
        services = self._waiting.groups()
        self.before_ranking(view, services)
        walks = {service: self._waiting.walk(service) for service in services}
        heads = {service: next(walk) for service, walk in walks.items()}
        while heads:
            service = min(heads, key=lambda s: (self.rank(s), heads[s].arrival_us, heads[s].request_id))
            self._passed_over = False
            yield heads[service]
            following = None if self._passed_over else next(walks[service], None)
            if following is None:
                del heads[service]
            else:
                heads[service] = following


class VtcTokens(_FairShare):
    """Equal generated tokens per service."""

    name = "vtc-t"

    def __init__(self, *, batch: int) -> None:
        super().__init__(batch=batch)
        self._tokens: dict[str, int] = {}
        self._advance: dict[str, int] = {}
        self._queueing: set[str] = set()
        self._left_last: str | None = None

    def rank(self, service: str) -> float:
        """Tokens generated, those of requests just admitted included."""
        return self._tokens.get(service, 0) + self._advance.get(service, 0)

    def before_ranking(self, view: View, services: list[str]) -> None:
        """Lift the counters of services that begin to queue."""
        self._advance.clear()
        current = set(services)
        staying = current & self._queueing
        for service in sorted(self._queueing - current):
            self._left_last = service
        floor = min((self._tokens.get(service, 0) for service in staying), default=None)
        if floor is None and self._left_last is not None:
            floor = self._tokens.get(self._left_last, 0)
        for service in current - staying:
            self._tokens[service] = max(self._tokens.get(service, 0), floor or 0)
        self._queueing = current

    def on_admitted(self, state: RequestState) -> None:
        """Count the first token that the admitted request is about to generate."""
        self._advance[state.service] = self._advance.get(state.service, 0) + 1

    def observe(self, record: StepRecord) -> None:
        """Count the tokens generated in a step."""
        for service, tokens in record.service_tokens.items():
            self._tokens[service] = self._tokens.get(service, 0) + tokens


class VtcRate(_FairShare):
    """Equal rate of late first tokens per service."""

    name = "vtc-r"

    def __init__(self, *, batch: int) -> None:
        super().__init__(batch=batch)
        self._first: dict[str, int] = {}
        self._late: dict[str, int] = {}
        self._overdue: Counter[str] = Counter()

    def rank(self, service: str) -> float:
        """Minus the share of first tokens that were late or are overdue."""
        overdue = self._overdue[service]
        requests = self._first.get(service, 0) + overdue
        return -(self._late.get(service, 0) + overdue) / requests if requests else 0.0

    def before_ranking(self, view: View, services: list[str]) -> None:
        """Count the requests in the queue whose first token is overdue."""
        now_us = view.now_us
        overdue = takewhile(lambda state: state.deadline_us < now_us, view.waiting)
        self._overdue = Counter(state.service for state in overdue if not state.generated_tokens)

    def observe(self, record: StepRecord) -> None:
        """Count first tokens and late ones."""
        for service, (first, late) in record.first_tokens.items():
            self._first[service] = self._first.get(service, 0) + first
            self._late[service] = self._late.get(service, 0) + late
