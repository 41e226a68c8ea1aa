"""Arrivals, prompts and traces: one seed, one workload; a bad trace is refused with its line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.workload import (
    PlannedRequest,
    ServiceLoad,
    WorkloadError,
    compose,
    example_prompts,
    gamma_arrivals,
    generated_prompts,
    lengthened,
    poisson_arrivals,
    trace,
)


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def some_workload(seed: int) -> list[PlannedRequest]:
    source = rng(seed)
    loads = [
        ServiceLoad("a", generated_prompts(8, (5, 9), source)),
        ServiceLoad("b", generated_prompts(8, (5, 9), source), 3),
    ]
    return compose(poisson_arrivals(20, 60, source), loads, source)


def test_same_seed_same_workload() -> None:
    """And another seed another one."""
    assert some_workload(1) == some_workload(1)
    assert some_workload(1) != some_workload(2)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_arrivals_have_the_rate_and_the_burstiness_asked_for(cv: float) -> None:
    """Within what 200,000 gaps allow; times ascend and stay in the window."""
    times = np.array(gamma_arrivals(100, cv, 2000, rng()))
    gaps = np.diff(times) / 1e6
    assert (gaps >= 0).all()
    assert times[0] >= 0
    assert times[-1] < 2000e6
    assert gaps.mean() == pytest.approx(0.01, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_even_arrivals() -> None:
    """A coefficient of variation of 0 is a metronome."""
    assert gamma_arrivals(4, 0, 1.01, rng()) == [250_000, 500_000, 750_000, 1_000_000]


@pytest.mark.parametrize(
    ("rate", "cv", "seconds"), [(0, 1, 1), (-1, 1, 1), (1, -1, 1), (1, 1, 0), (float("nan"), 1, 1)]
)
def test_impossible_arrivals_are_refused(rate: float, cv: float, seconds: float) -> None:
    """Rather than looping for ever or sending nothing."""
    with pytest.raises(WorkloadError):
        gamma_arrivals(rate, cv, seconds, rng())


def test_shares_and_output_lengths() -> None:
    """Three quarters go to the service with three times the share; lengths fill their closed range."""
    requests = some_workload(3)
    to_b = sum(request.service == "b" for request in requests) / len(requests)
    assert to_b == pytest.approx(0.75, abs=0.05)
    assert {request.max_tokens for request in requests} == set(range(24, 49))


def test_example_prompts_leave_the_answer_out(tmp_path: Path) -> None:
    """A byte order mark and blank lines do no harm; a bad line is named."""
    path = tmp_path / "x.jsonl"
    path.write_text(
        '\ufeff{"messages": [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "!"}]}\n\n', "utf-8"
    )
    assert example_prompts(path) == [({"role": "user", "content": "é?"},)]
    path.write_text('{"messages": [{"role": "user", "content": "?"}]}\n{"messages": 5}\n')
    with pytest.raises(WorkloadError, match="line 2"):
        example_prompts(path)


def test_lengthened_prompts_keep_the_question_last() -> None:
    """The history has the number of words asked for and the earlier messages stay."""
    system = {"role": "system", "content": "short"}
    (messages,) = lengthened([(system, {"role": "user", "content": "the question"})], (30, 30), rng())
    assert messages[0] == system
    history, question = messages[1]["content"].rsplit("\n", 1)
    assert question == "the question"
    assert len(history.split()) == 31


HEADER = "at_s,service,prompt_words,output_tokens\n"


def test_trace_is_sorted_and_tolerates_a_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    """The same requests as from a clean file."""
    clean, odd = tmp_path / "clean.csv", tmp_path / "odd.csv"
    clean.write_text(HEADER + "0.5,a,3,4\n1,b,5,6\n")
    odd.write_bytes(("\ufeff" + HEADER + "0.5,a,3,4\n1,b,5,6\n").replace("\n", "\r\n").encode())
    expected = trace(clean, rng())
    assert trace(odd, rng()) == expected
    assert [(r.at_us, r.service, r.max_tokens) for r in expected] == [(500_000, "a", 4), (1_000_000, "b", 6)]
    clean.write_text(HEADER + "1,b,5,6\n0.5,a,3,4\n")
    assert [r.at_us for r in trace(clean, rng())] == [500_000, 1_000_000]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at_s,service,prompt_words\n1,a,3\n", "no column output_tokens"),
        (HEADER, "no requests"),
        (HEADER + "0,a,3,4\n-1,a,3,4\n", "line 3: at_s is -1"),
        (HEADER + "nan,a,3,4\n", "line 2: at_s is nan"),
        (HEADER + "inf,a,3,4\n", "line 2: at_s is inf"),
        (HEADER + "1,a,3,0\n", "line 2: output_tokens is 0"),
        (HEADER + "1,,3,4\n", "line 2: no service"),
        (HEADER + "1,a,3\n", "line 2: output_tokens is None"),
        (HEADER + "0,a,3,4\n" + HEADER, "line 3: at_s is 'at_s'"),
    ],
)
def test_bad_traces_are_refused_with_line_and_reason(tmp_path: Path, text: str, message: str) -> None:
    """Missing columns, negative or senseless values, a repeated header, no rows."""
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        trace(path, rng())
