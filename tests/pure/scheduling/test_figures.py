"""Schedules that can be checked by hand: the paper's Figures 4 and 8 and three of our own."""

import pytest

from scheduling.policy import Limits, PrefillChunk
from scheduling.registry import make_policy
from scheduling.request import ReleasePolicy
from tests.fakes.step_host import StepHost, decoding, request

ROOMY = Limits(step_tokens=8192, running=1024, adapters=0, kv_blocks=100_000, kv_block_tokens=16)


def ms(*values: float) -> list[int]:
    return [round(value * 1000) for value in values]


def unit_50_ms(_):
    return 50_000


def affine(work):
    """T = 10 + 0.1 n ms, no attention."""
    return 10_000 + 100 * work.tokens


def figure_4(policy_name: str, **options) -> StepHost:
    """R1, R2 (LoRA1), R3 (LoRA2) run and have just been served when R4 (LoRA2) and R5 (LoRA1) arrive at T1."""
    host = StepHost(make_policy(policy_name, batch=4, **options), ROOMY, unit_50_ms)
    lora1 = {"ttft_us": 200_000, "tbt_us": 100_000, "service": "LoRA1", "adapter": 1}
    lora2 = {"ttft_us": 100_000, "tbt_us": 50_000, "service": "LoRA2", "adapter": 2}
    for name, promise in (("R1", lora1), ("R2", lora1), ("R3", lora2)):
        host.submit(request(name, 0, 1, 20, release=ReleasePolicy.OFF, **promise))
    host.submit(request("R4", 150_000, 1, 20, release=ReleasePolicy.OFF, **lora2))
    host.submit(request("R5", 150_000, 1, 20, release=ReleasePolicy.OFF, **lora1))
    host.run(until_us=600_000)
    return host


@pytest.mark.parametrize("name", ["fcfs", "vtc-t", "vtc-r", "qoserve"])
def test_figure_4_baselines_miss_r5(name):
    """FCFS, VTC and QoServe serve R4 first and R5 misses its TTFT, for nobody leaves the batch of 4."""
    host = figure_4(name)
    assert host.lives["R4"].ready_us[0] == 200_000
    assert 0 not in host.lives["R4"].late
    assert not host.lives["R5"].ready_us, "R5 is not served before its deadline at 350 ms, nor long after"
    for served in ("R1", "R2", "R3", "R4"):
        assert not host.lives[served].late


def test_figure_4_halo_keeps_every_promise():
    """HALO lets R1 and R2 share a place in turn: R5 is served at once and nobody is late."""
    host = figure_4("halo-paper")
    assert host.lives["R4"].ready_us[0] == 200_000
    assert host.lives["R5"].ready_us[0] == 200_000
    assert [life.late for life in host.lives.values()] == [[]] * 5
    at_200, at_250 = (
        {name for name in ("R1", "R2") if instant_us in host.lives[name].ready_us} for instant_us in (200_000, 250_000)
    )
    assert len(at_200) == 1, "one of R1 and R2 gave its place to R5"
    assert {"R1", "R2"} - at_200 <= at_250, "and had it back in the next step"


def figure_8(policy_name: str) -> StepHost:
    """128 decodes, B = 256: half TBT 50 ms without slack to spare, half 100 ms with a bank. R1 has 384 tokens."""
    host = StepHost(make_policy(policy_name, batch=256), ROOMY, unit_50_ms)
    for i in range(64):
        strict = request(f"s{i:02}", 0, 100, 20, 1_000_000, 50_000)
        relaxed = request(f"r{i:02}", 0, 100, 20, 1_000_000, 100_000)
        host.place(decoding(strict, 5, 0))
        host.place(decoding(relaxed, 5, 200_000))
    host.submit(request("R1", 0, 384, 3, 1_000_000, 100_000))
    return host


def test_figure_8a_chunked_prefill_needs_three_mixed_steps():
    """Default chunked prefill: three chunks of 256 - 128 tokens, then a decode step of 129."""
    host = figure_8("fcfs")
    for _ in range(4):
        host.step()
    assert [(len(step.plan.decode), [c.tokens for c in step.plan.prefill]) for step in host.steps] == [
        (128, [128]),
        (128, [128]),
        (128, [128]),
        (129, []),
    ]


def test_figure_8b_halo_needs_two():
    """HALO: 64 decodes yield, two chunks of 192 tokens, then a decode step of 129."""
    host = figure_8("halo-paper")
    for _ in range(3):
        host.step()
    assert [(len(step.plan.decode), [c.tokens for c in step.plan.prefill]) for step in host.steps] == [
        (64, [192]),
        (64, [192]),
        (129, []),
    ]
    assert not any(life.late for life in host.lives.values())


def test_figure_8b_requests_compute_in_turn():
    """384 running requests with a batch of 256: 128 at TBT 50 ms in every step, 256 at 100 ms in every other one."""
    host = StepHost(make_policy("halo-paper", batch=256), ROOMY, unit_50_ms)
    for i in range(128):
        host.place(decoding(request(f"s{i:03}", 0, 100, 40, 1_000_000, 50_000), 5, 0))
    for i in range(256):
        host.place(decoding(request(f"r{i:03}", 0, 100, 25, 1_000_000, 100_000), 5, 0))
    for _ in range(20):
        host.step()
    assert {len(step.plan.decode) for step in host.steps} == {256}
    assert {len(life.ready_us) for life in host.lives.values() if life.state.tbt_us == 50_000} == {20}
    assert {len(life.ready_us) for life in host.lives.values() if life.state.tbt_us == 100_000} == {10}
    assert not any(life.late for life in host.lives.values())


def test_pacing_by_hand():
    """`slo`: ready at 20, 30.1, 40.2, 50.3 ms, released at 100, 150, 200, 250."""
    host = StepHost(make_policy("fcfs", batch=1000), ROOMY, affine)
    host.submit(request("r", 0, 100, 4, 100_000, 50_000, release=ReleasePolicy.SLO))
    host.run()
    assert host.lives["r"].ready_us == ms(20, 30.1, 40.2, 50.3)
    assert host.lives["r"].released_us == ms(100, 150, 200, 250)


@pytest.mark.parametrize(("release", "late"), [("off", [3]), ("slo", []), ("bounded", [])])
def test_bank_by_hand(release, late):
    """A mixed step from 35.2 to 125.3 ms breaks A's TBT once when tokens go out as generated, never when paced."""
    host = StepHost(make_policy("fcfs", batch=1000), ROOMY, affine)
    host.submit(request("A", 0, 50, 6, 100_000, 50_000, release=ReleasePolicy(release)))
    host.submit(request("X", 30_000, 800, 2, 500_000, 200_000, release=ReleasePolicy(release)))
    host.run()
    mixed = next(step for step in host.steps if step.plan.decode and step.plan.prefill)
    assert [mixed.start_us, mixed.end_us] == ms(35.2, 125.3)
    assert host.lives["A"].late == late
    assert host.lives["X"].late == []


def three_and_one(policy_name: str) -> StepHost:
    host = StepHost(make_policy(policy_name, batch=4), ROOMY, affine)
    host.submit(
        request("R0", 0, 1, 9, 20_000, 100_000),
        request("R1", 0, 1, 9, 20_000, 100_000),
        request("R2", 0, 1, 9, 60_000, 50_000),
        request("R3", 25_000, 6, 2, 60_000, 50_000),
    )
    host.run()
    return host


def test_halo_paper_by_hand():
    """At 30.9 ms nobody decodes and the chunk is 4; at 41.3 R2 and R0 decode beside a chunk of 2; R3 ready at 51.7."""
    host = three_and_one("halo-paper")
    plans = {step.start_us: step.plan for step in host.steps}
    assert plans[30_900].decode == ()
    assert plans[30_900].prefill == (PrefillChunk("R3", 4),)
    assert plans[41_300].decode == ("R2", "R0")
    assert plans[41_300].prefill == (PrefillChunk("R3", 2),)
    assert host.lives["R3"].ready_us[0] == 51_700
    assert not any(life.late for life in host.lives.values())


def test_fcfs_on_the_same_requests():
    """`fcfs` computes R3 one token a step: ready at 93.3 ms, due at 85."""
    host = three_and_one("fcfs")
    assert host.lives["R3"].ready_us[0] == 93_300
    assert host.lives["R3"].due_us[0] == 85_000
    assert host.lives["R3"].late == [0]
