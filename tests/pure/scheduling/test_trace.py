"""Recorded runs replay through the pure policy, bit by bit, and damaged ones are refused."""

import json
import random

import pytest

from benchmarks.replay import main
from scheduling.policy import Limits, StepPlan, StepRecord, View
from scheduling.registry import POLICIES, make_policy
from scheduling.trace import Entry, TraceEncoder, TraceError, replay
from tests.fakes.step_host import StepHost, Work, profile, request

LIMITS = Limits(step_tokens=64, running=24, adapters=2, kv_blocks=120, kv_block_tokens=8)


class Recorded:
    """A policy that writes down its calls, as the engine's trace does."""

    def __init__(self, name: str, options: dict[str, int]) -> None:
        self.name = name
        self.policy = make_policy(name, **options)
        self.encoder = TraceEncoder()
        self.entries: list[Entry] = [self.encoder.header(name, options, LIMITS)]
        if name == "halo":
            profile(self, step_time, LIMITS, longest_context=100)

    def plan(self, view: View) -> StepPlan:
        plan = self.policy.plan(view)
        self.entries += [*self.encoder.view(view), self.encoder.plan(plan)]
        return plan

    def observe(self, record: StepRecord) -> None:
        self.entries.append(self.encoder.record(record))
        self.policy.observe(record)

    def forget(self, request_id: str) -> None:
        self.entries += self.encoder.forget(request_id)
        self.policy.forget(request_id)


def step_time(work: Work) -> int:
    return 10_000 + 700 * work.tokens + sum(work.decode_contexts) // 10


def recorded(name: str, seed: int = 1) -> list[Entry]:
    """A run with preemptions, more adapters than slots and all kinds of lengths, as entries read back from JSON."""
    rng = random.Random(seed)
    options = {"batch": 48, "tbt_min_us": 50_000}
    policy = Recorded(name, {key: value for key, value in options.items() if key in POLICIES[name].options})
    host = StepHost(policy, LIMITS, step_time)
    host.submit(
        *(
            request(
                f"r{i}",
                rng.randrange(2_000_000),
                rng.randint(1, 90),
                rng.randint(1, 12),
                200_000,
                rng.choice((50_000, 100_000)),
                service="abc"[i % 3],
                adapter=i % 4,
            )
            for i in range(40)
        )
    )
    host.run()
    return [json.loads(json.dumps(entry)) for entry in policy.entries]


@pytest.mark.parametrize("name", POLICIES)
def test_a_recorded_run_replays_exactly(name: str) -> None:
    """Every plan is decided again from the recorded views and step times alone."""
    result = replay(recorded(name))
    assert result.plans > 50
    assert result.mismatches == []


def test_a_changed_plan_is_found() -> None:
    """The first difference is named with its place, both plans beside it."""
    entries = recorded("halo-paper")
    position = next(i for i, entry in enumerate(entries) if entry[0] == "p" and len(entry[1]) > 1)
    entries[position][1] = entries[position][1][:-1]
    (mismatch,) = replay(entries).mismatches
    assert mismatch.entry == position
    assert len(mismatch.recorded.decode) < len(mismatch.replayed.decode)


def test_a_changed_step_time_changes_plans() -> None:
    """The replay does use the records: a machine twice as slow is planned for differently."""
    entries = recorded("halo")
    for entry in entries:
        if entry[0] == "o":
            entry[1]["duration_us"] *= 3
    assert replay(entries).mismatches


@pytest.mark.parametrize(
    "damage",
    [
        lambda entries: [],
        lambda entries: entries[1:],
        lambda entries: [["h", {**entries[0][1], "version": 99}], *entries[1:]],
        lambda entries: [["h", {**entries[0][1], "policy": "none"}], *entries[1:]],
        lambda entries: [entries[0], *(entry for entry in entries if entry[0] != "r")],
        lambda entries: [*entries, ["?", 1]],
        lambda entries: [*entries, ["v", 1]],
        lambda entries: [*entries, 7],
    ],
)
def test_what_is_no_trace_is_refused(damage) -> None:
    """With the reason, never a wrong verdict."""
    with pytest.raises(TraceError):
        replay(damage(recorded("fcfs")))


def test_the_command_reads_files(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """A last line that the engine did not finish writing is left out; a bad file costs the status, not the others."""
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    lines = [json.dumps(entry) + "\n" for entry in recorded("halo-paper")]
    good.write_text("".join(lines) + '["v", 1, 2')
    bad.write_text(lines[0] + "{\n")
    assert main([str(good), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["traces"][str(good)]["mismatches"] == 0
    assert main([str(bad), str(tmp_path / "none"), str(good)]) == 1
    assert "line 2" in capsys.readouterr().err
