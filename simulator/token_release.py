"""Tokens leave the engine: when each one goes to the client, and whether that is late.

The release time of a token is worked out here in line, without calls of min and max, for millions of tokens per run; a
test holds it equal to :func:`scheduling.release.release_time_us`, which serving uses.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduling.release import release_time_us
from scheduling.request import ReleasePolicy
from simulator.track import Track


def next_tokens(tracks: Iterable[Track], now_us: int) -> list[Track]:
    """Hand out one token after the first for each of ``tracks``, ready at ``now_us``. Return those that are done."""
    done = []
    bounded, slo = ReleasePolicy.BOUNDED, ReleasePolicy.SLO
    for track in tracks:
        state = track.state
        if not state.streaming:
            if _whole_answer(track, now_us):
                done.append(track)
            continue
        previous_us = state.last_release_us
        tbt_us = state.tbt_us
        if state.release is bounded:
            paced_us = previous_us + tbt_us
            latest_us = now_us + track.hold_max_us
            paced_us = latest_us if paced_us > latest_us else paced_us
            release_us = paced_us if paced_us > now_us else now_us
        elif state.release is slo:
            paced_us = previous_us + tbt_us
            release_us = paced_us if paced_us > now_us else now_us
        else:
            release_us = now_us
        release_us = previous_us if release_us < previous_us else release_us
        gap_us = release_us - previous_us
        track.gaps.append(gap_us)
        if gap_us > tbt_us:
            track.late_gaps += 1
            track.worst_gap_us = gap_us if gap_us > track.worst_gap_us else track.worst_gap_us
        due_us = track.due_us + tbt_us
        track.due_us = due_us
        if release_us > due_us:
            track.late_tokens += 1
        generated = state.generated_tokens + 1
        state.generated_tokens = generated
        state.last_release_us = release_us
        if generated >= track.outputs:
            track.ended_us = release_us
            done.append(track)
    return done


def first_token(track: Track, now_us: int) -> bool:
    """Hand out the first token; True when it is the only one."""
    state = track.state
    release_us = release_time_us(state, now_us, track.hold_max_us)
    track.ready_us, track.first_us = now_us, release_us
    track.due_us = state.arrival_us + state.ttft_us
    state.generated_tokens = 1
    state.last_release_us = release_us
    if track.outputs > 1:
        return False
    track.ended_us = release_us
    return True


def _whole_answer(track: Track, now_us: int) -> bool:
    """Count a token of a request that does not stream: its one deadline is the last token's."""
    state = track.state
    state.generated_tokens += 1
    state.last_release_us = max(now_us, state.last_release_us)
    if state.generated_tokens < track.outputs:
        return False
    due_us = state.arrival_us + state.ttft_us + (track.outputs - 1) * state.tbt_us
    track.ended_us = state.last_release_us
    track.late_tokens = int(track.ended_us > due_us)
    return True
