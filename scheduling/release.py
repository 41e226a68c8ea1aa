"""When a generated token goes to the client (HALO section 5.3, "Decoupling Token Generation and Token Output").

The paper's token queue sends the first token at the TTFT target and every next one a TBT later. That triples the mean
end-to-end latency, so ``bounded`` sends the first token at once and never holds a later one longer than a limit.
"""

from __future__ import annotations

from scheduling.request import ReleasePolicy, RequestState


def release_time_us(state: RequestState, ready_us: int, hold_max_us: int) -> int:
    """Return when the token of ``state`` that is ready at ``ready_us`` goes to the client, in microseconds.

    ``state`` is the request before this token is counted: ``generated_tokens`` 0 means that the first token is ready,
    otherwise ``last_release_us`` is the release time of the token before. The result is never before ``ready_us`` nor
    before the token before. A response that does not stream goes out in one piece, so nothing of it is held.
    """
    first = state.generated_tokens == 0
    previous_us = ready_us if first else state.last_release_us
    if not state.streaming or state.release is ReleasePolicy.OFF:
        return max(ready_us, previous_us)
    if state.release is ReleasePolicy.SLO:
        target_us = state.arrival_us + state.ttft_us if first else previous_us + state.tbt_us
        return max(ready_us, target_us)
    if first:
        return ready_us
    return max(ready_us, min(previous_us + state.tbt_us, ready_us + hold_max_us), previous_us)
