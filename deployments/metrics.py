"""Every metric of the gateways, declared once with its help text.

Ray puts them on each node's metrics port with the prefix ``ray_``, and adds deployment and replica labels.
"""

from __future__ import annotations

from collections.abc import Iterable

from ray.serve import metrics

from deployments.protocol import Outcome
from deployments.settings import ServiceSettings
from deployments.slo_ledger import judge

EDGE_FACTORS = (0.5, 0.9, 1.0, 1.1, 1.5, 2.0, 4.0)
"""Histogram edges as multiples of each service's target. One histogram serves all services, with all their edges."""

QUEUE_EDGES_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


def edges_s(targets_us: Iterable[int]) -> list[float]:
    """Histogram edges in seconds for times with these targets, ascending, each target among them."""
    return sorted({round(target_us * factor) / 1e6 for target_us in targets_us for factor in EDGE_FACTORS})


class RayMetrics:
    """``GatewayMetrics`` on Ray's metrics. Create it inside a Serve replica."""

    def __init__(self, services: Iterable[ServiceSettings]) -> None:
        services = tuple(services)
        self._requests = metrics.Counter(
            "halo_requests_total",
            "Requests by how they ended: completed, cancelled by the client, failed, shed, refused as invalid.",
            ("service", "outcome"),
        )
        self._slo_requests = metrics.Counter(
            "halo_slo_requests_total",
            "Completed and failed requests by promise (ttft; tbt: every gap; deadlines: every token by "
            "arrival + TTFT + i * TBT; whole: responses that are not streamed) and whether it was met.",
            ("service", "kind", "result"),
        )
        self._tokens = metrics.Counter("halo_tokens_total", "Tokens released to clients.", ("service",))
        self._ttft = metrics.Histogram(
            "halo_ttft_seconds",
            "Time from arrival at the gateway to the release of the first token of a streamed response.",
            edges_s(service.ttft_us for service in services),
            ("service",),
        )
        self._tbt = metrics.Histogram(
            "halo_tbt_seconds",
            "Time between released tokens of a streamed response.",
            edges_s(service.tbt_us for service in services),
            ("service",),
        )
        self._queue = metrics.Histogram(
            "halo_queue_seconds", "Time a granted request waited for admission.", list(QUEUE_EDGES_S), ("service",)
        )
        self._shed = metrics.Counter("halo_shed_total", "Requests turned away, by reason.", ("service", "reason"))
        self._held = metrics.Gauge("halo_held_tokens", "Deliveries that the pacer holds back now.")
        self._labels = {service.name: {"service": service.name} for service in services}

    def refused(self, service: str) -> None:
        """See ``GatewayMetrics``."""
        self._requests.inc(1, {"service": service, "outcome": "refused"})

    def ended(self, outcome: Outcome) -> None:
        """See ``GatewayMetrics``. Attainment is counted by the rules of ``slo_ledger``."""
        service = outcome.service
        self._requests.inc(1, {"service": service, "outcome": outcome.end.value})
        if outcome.tokens:
            self._tokens.inc(outcome.tokens, {"service": service})
        for kind, met in judge(outcome):
            self._slo_requests.inc(1, {"service": service, "kind": kind, "result": "met" if met else "missed"})

    def first_token(self, service: str, ttft_us: int) -> None:
        """See ``GatewayMetrics``."""
        self._ttft.observe(ttft_us / 1e6, self._labels[service])

    def gap(self, service: str, gap_us: int, count: int) -> None:
        """See ``GatewayMetrics``."""
        for _ in range(count):
            self._tbt.observe(max(gap_us, 1) / 1e6, self._labels[service])

    def queued(self, service: str, queued_us: int) -> None:
        """See ``GatewayMetrics``."""
        self._queue.observe(max(queued_us, 1) / 1e6, self._labels[service])

    def shed(self, service: str, reason: str) -> None:
        """See ``GatewayMetrics``."""
        self._shed.inc(1, {"service": service, "reason": reason})

    def held(self, deliveries: int) -> None:
        """See ``GatewayMetrics``."""
        self._held.set(deliveries)
