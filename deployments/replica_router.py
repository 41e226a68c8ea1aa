"""Routes a call to the engine replica named by its ``replica_id`` argument, any other call to a random replica.

Serve pickles this module by value into every process that holds a handle, so it keeps no state of its own.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments import routable


class ReplicaRouter(RequestRouter):  # type: ignore[misc]
    """A call for a replica that is gone goes to another one, whose endpoint refuses it.

    Returning no candidate instead would block the router for every other call of this process.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's new set of running replicas."""
        super().update_replicas(replicas)
        ids = frozenset(replica.replica_id.unique_id for replica in replicas)
        routable.publish(self._deployment_id.name, ids)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One list of candidates: the named replica, or two at random."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            wanted = pending_request.kwargs.get("replica_id")
            named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
            if named:
                return [named]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
