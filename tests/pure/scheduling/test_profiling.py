"""The profiling pass shows a policy steps of many shapes and finds the batch that meets the strictest TBT."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.halo import Halo
from scheduling.policy import Limits, View
from scheduling.profiling import BATCH_PCT, ProfilingPass, prompt_lengths
from tests.fakes.step_host import StepHost, Work, check_plan, request

SERVER = Limits(step_tokens=256, running=32, adapters=4, kv_blocks=4_000, kv_block_tokens=16)


def step_time(work: Work) -> int:
    """40 ms, 1 ms a token, a little for contexts."""
    return 40_000 + 1_000 * work.tokens + sum(work.decode_contexts) // 10


def run_pass(limits: Limits, context_tokens: int, *, missing: int = 0) -> ProfilingPass:
    """Run a pass to its end, every plan checked against the contract."""
    lengths = prompt_lengths(limits, context_tokens)
    profiling = ProfilingPass(limits, len(lengths))
    host = StepHost(profiling, limits, step_time)
    host.submit(
        *(
            request(f"p{i}", 0, length, 512, 60_000_000, 60_000_000, adapter=i % 5)
            for i, length in enumerate(lengths[missing:])
        )
    )
    for _ in range(500):
        host._arrive()
        view = host.view()
        plan = profiling.plan(view)
        if profiling.done:
            return profiling
        check_plan(plan, view)
        if not plan.decode and not plan.prefill:
            host.now_us += 10_000
            continue
        host._carry_out(plan)
    raise AssertionError("the pass does not end")


def test_the_pass_sees_every_chunk_size_and_many_batch_sizes() -> None:
    """With and without decodes beside; enough steps for the step-time model to be warm in both kinds."""
    profiling = run_pass(SERVER, 4_096)
    chunks = {record.prefill_tokens for record in profiling.records if record.prefill_tokens}
    decodes = {record.decode_tokens for record in profiling.records if not record.prefill_tokens}
    assert {8, 16, 32, 64, 128} <= chunks
    assert max(chunks) >= 200
    assert {1, 2, 4, 8, 16} <= decodes
    assert max(decodes) >= 28
    assert any(record.prefill_tokens and record.decode_tokens for record in profiling.records)
    assert any(record.chunk_prefix_tokens > 200 for record in profiling.records)
    assert len(profiling.records) < 100
    policy = Halo(batch=64)
    for record in profiling.records:
        policy.observe(record)
    assert policy.model.warm
    assert policy.model.predict_us(16, 4_000) == pytest.approx(step_time(Work((250,) * 16, ())), rel=0.1)
    assert policy.model.predict_us(8, 2_000, [(100, 300)]) == pytest.approx(
        step_time(Work((250,) * 8, ((100, 300),))), rel=0.1
    )


@pytest.mark.parametrize("tbt_ms", [80, 100, 150, 250])
def test_the_batch_meets_the_strictest_tbt_and_is_no_smaller_than_that(tbt_ms: int) -> None:
    """Against the step times that the pass ran on: 40 ms and 1 ms a token, contexts aside."""
    batch = run_pass(SERVER, 4_096).largest_batch(tbt_ms * 1_000)
    assert batch is not None
    aimed_ms = tbt_ms * BATCH_PCT / 100
    assert aimed_ms * 0.9 - 8 <= 40 + batch <= aimed_ms + 2


def test_a_target_that_no_batch_meets_gets_the_smallest() -> None:
    """Prompts must move at all."""
    assert run_pass(SERVER, 4_096).largest_batch(10_000) == 8


@given(
    st.builds(
        Limits,
        step_tokens=st.integers(1, 600),
        running=st.integers(1, 80),
        adapters=st.integers(0, 5),
        kv_blocks=st.integers(2, 600),
        kv_block_tokens=st.sampled_from((1, 8, 16, 128)),
    ),
    st.integers(2, 5_000),
)
def test_the_pass_ends_on_any_engine(limits: Limits, context_tokens: int) -> None:
    """Whatever fits: plans within the limits, no step beyond the script, an end."""
    lengths = prompt_lengths(limits, context_tokens)
    assert lengths
    assert all(0 < length < context_tokens for length in lengths)
    run_pass(limits, context_tokens)


def test_requests_that_never_come_do_not_hold_the_pass_up() -> None:
    """It waits two seconds for the last one, then runs with what is there."""
    assert run_pass(SERVER, 4_096, missing=10).records


def test_nothing_left_to_run_ends_the_pass() -> None:
    """Its requests may be aborted at any time."""
    profiling = ProfilingPass(SERVER, 0)
    profiling.plan(View(0, (), (), 100, SERVER))
    assert profiling.done
    assert profiling.largest_batch(100_000) is None
