"""Which replicas Serve's router in this process can reach, by deployment name.

Written by ``replica_router`` from Serve's router thread, read by the gateway. The dictionary's values are immutable and
replaced whole, so no lock is needed.
"""

from __future__ import annotations

_replicas: dict[str, frozenset[str]] = {}


def publish(deployment: str, replica_ids: frozenset[str]) -> None:
    """The router of ``deployment`` now knows exactly these replicas."""
    _replicas[deployment] = replica_ids


def replicas(deployment: str) -> frozenset[str] | None:
    """The replicas known to the router of ``deployment``; None before its first update."""
    return _replicas.get(deployment)
