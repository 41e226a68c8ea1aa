"""The instant at which a token may go out, for each release policy."""

from hypothesis import given
from hypothesis import strategies as st

from scheduling.release import release_time_us
from scheduling.request import ReleasePolicy
from tests.fakes.step_host import decoding, request

HOLD_US = 250_000


def test_slo_holds_first_token_to_ttft_and_next_to_tbt():
    """Under `slo` the first token goes at arrival + TTFT, the next a TBT after it, both later if not ready."""
    first = request("r", 1_000, 5, 9, 100_000, 50_000, release=ReleasePolicy.SLO)
    assert release_time_us(first, 20_000, HOLD_US) == 101_000
    assert release_time_us(first, 300_000, HOLD_US) == 300_000
    later = decoding(first, 1, 101_000)
    assert release_time_us(later, 30_000, HOLD_US) == 151_000
    assert release_time_us(later, 160_000, HOLD_US) == 160_000


def test_bounded_sends_first_token_at_once_and_caps_the_hold():
    """Under `bounded` the first token goes when ready; a later one waits for its TBT but at most the hold."""
    state = request("r", 0, 5, 9, 100_000, 50_000)
    assert release_time_us(state, 20_000, HOLD_US) == 20_000
    decoding(state, 1, 20_000)
    assert release_time_us(state, 30_000, HOLD_US) == 70_000
    decoding(state, 9, 1_000_000)
    assert release_time_us(state, 760_000, HOLD_US) == 1_010_000
    assert release_time_us(state, 700_000, HOLD_US) == 1_000_000, "never before the token before it"
    assert release_time_us(state, 1_200_000, HOLD_US) == 1_200_000


def test_off_sends_as_generated():
    """Under `off` a token goes when ready, never before the one before it."""
    state = decoding(request("r", 0, 5, 9, 100_000, 50_000, release=ReleasePolicy.OFF), 3, 90_000)
    assert release_time_us(state, 91_000, HOLD_US) == 91_000
    assert release_time_us(state, 89_000, HOLD_US) == 90_000


def test_a_response_that_does_not_stream_is_not_held():
    """A response in one piece gains nothing from pacing."""
    state = request("r", 0, 5, 9, 100_000, 50_000, release=ReleasePolicy.SLO, streaming=False)
    assert release_time_us(state, 20_000, HOLD_US) == 20_000


@given(
    release=st.sampled_from(ReleasePolicy),
    generated=st.integers(0, 5),
    previous_us=st.integers(0, 2_000_000),
    after_us=st.integers(-1_000_000, 1_000_000),
    hold_us=st.integers(0, 500_000),
)
def test_never_early_never_out_of_order(release, generated, previous_us, after_us, hold_us):
    """No token is released before it is ready nor before its predecessor, and `bounded` holds no longer than it may."""
    state = request("r", 500, 5, 9, 100_000, 50_000, release=release)
    state.generated_tokens, state.last_release_us = generated, previous_us
    ready_us = max(0, previous_us + after_us)
    released_us = release_time_us(state, ready_us, hold_us)
    assert released_us >= ready_us
    if generated:
        assert released_us >= previous_us
    if release is ReleasePolicy.BOUNDED:
        assert released_us <= max(ready_us + hold_us, previous_us if generated else 0)
    if release is ReleasePolicy.OFF:
        assert released_us == max(ready_us, previous_us if generated else 0)
