"""Traces are read strictly: a wrong one is refused with file, line and reason."""

from itertools import pairwise

import numpy as np
import pytest

from simulator.arrivals import burst_dense, burst_light, compress, envelope, gamma, poisson, production_like, thin
from simulator.capacity_plan import busiest_window
from simulator.lengths import Pairs, Quantiles, Zipf, load_pairs
from simulator.scenario import load_scenario, scenario_names
from simulator.trace_files import Trace, TraceError, TraceRow, load_azure, load_burstgpt, load_own
from simulator.workload import WorkloadError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
# Rows of BurstGPT (HPMLL/BurstGPT, CC-BY-4.0), the third changed to a failed request.
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
185,ChatGPT,1360,647,2007,Conversation log
"""


def write(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode(encoding))
    return path


def test_azure(tmp_path):
    """Times count from the first request, to the microsecond."""
    trace = load_azure(write(tmp_path, AZURE))
    assert trace.rows == (TraceRow(0, 374, 44), TraceRow(4_314_579, 396, 109), TraceRow(4_541_877, 879, 55))


@pytest.mark.parametrize("change", [lambda t: "\ufeff" + t, lambda t: t.replace("\n", "\r\n"), lambda t: t + "\n\n"])
def test_marks_and_line_ends_change_nothing(tmp_path, change):
    """A byte order mark, Windows line ends and empty last lines give the same trace as the clean file."""
    assert load_azure(write(tmp_path, change(AZURE))).rows == load_azure(write(tmp_path, AZURE)).rows


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("ContextTokens", "Context", 1, "no column ContextTokens"),
        ("396,109", "396,0", 3, "GeneratedTokens is 0"),
        ("396,109", "nan,109", 3, "ContextTokens is nan"),
        ("396,109", "396,1.5", 3, "GeneratedTokens is 1.5"),
        ("396,109", "-3,109", 3, "ContextTokens is -3"),
        ("396,109", "396,inf", 3, "GeneratedTokens is inf"),
        ("396,109", "396", 3, "2 fields, the header has 3"),
        ("396,109", ",109", 3, "ContextTokens is '', not a number"),
        ("18:15:50.9951690", "yesterday", 3, "not a time as"),
        ("18:15:51.2224670", "18:15:45.0", 4, "before that of an earlier row"),
        ("2023-11-16 18:15:50.9951690,396,109", "TIMESTAMP,ContextTokens,GeneratedTokens", 3, "the header again"),
    ],
)
def test_wrong_azure_rows(tmp_path, old, new, line, reason):
    """File, line and reason are named."""
    assert old in AZURE
    path = write(tmp_path, AZURE.replace(old, new))
    with pytest.raises(TraceError) as caught:
        load_azure(path)
    assert f"{path} line {line}: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["", "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_empty_traces(tmp_path, text):
    """A file without requests is refused."""
    with pytest.raises(TraceError):
        load_azure(write(tmp_path, text))


def test_files_that_are_no_text(tmp_path):
    """Another encoding, broken gzip and a missing file are refused by name, not with a traceback."""
    (tmp_path / "x.csv.gz").write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(TraceError, match="line 1: not UTF-8"):
        load_azure(write(tmp_path, AZURE, "utf-16"))
    for name in ("x.csv.gz", "none.csv"):
        with pytest.raises(TraceError, match=f"{name}: cannot be read"):
            load_azure(tmp_path / name)


def test_failed_requests_of_burstgpt_are_dropped_and_counted(tmp_path):
    """0 response tokens are a failure, not an instant success (HPMLL/BurstGPT issue 11)."""
    trace = load_burstgpt(write(tmp_path, BURSTGPT))
    assert [row.at_us for row in trace.rows] == [0, 40_000_000, 180_000_000]
    assert trace.dropped == {"failed requests (0 response tokens)": 1}
    assert "1 rows dropped" in trace.describe()
    with pytest.raises(TraceError, match="line 2: Timestamp is -5"):
        load_burstgpt(write(tmp_path, BURSTGPT.replace("\n5,", "\n-5,")))


def test_own_traces_name_services(tmp_path):
    """Our own form has the service in it."""
    text = "at_s,service,prompt_tokens,output_tokens\n0.5,a,10,5\n0.75,b,3,1\n"
    assert load_own(write(tmp_path, text)).rows == (TraceRow(0, 10, 5, "a"), TraceRow(250_000, 3, 1, "b"))
    with pytest.raises(TraceError, match="line 3: service is empty"):
        load_own(write(tmp_path, text.replace("b", " ")))


def test_the_peak_counts_not_the_mean():
    """400 quiet three-minute bins before a busy one: the plan's window is the busy one."""
    quiet = [TraceRow(round(i * 1e6 / 0.03), 10, 10, "a") for i in range(round(400 * 180 * 0.03))]
    start = 400 * 180_000_000
    busy = [TraceRow(start + round(i * 1e6 / 3), 10, 10, "a") for i in range(540)]
    peak = busiest_window(Trace("t", tuple(quiet + busy)))
    assert peak.rate == pytest.approx(3, rel=0.01)
    assert peak.start_s == pytest.approx(72_000, abs=40)
    assert peak.mean_rate < 0.04


def test_shipped_traces():
    """The shipped Azure traces are the published ones."""
    conv, code = load_azure(), load_azure(kind="code")
    assert (len(conv.rows), len(code.rows)) == (19_366, 8_819)
    assert len(conv.rows) / conv.seconds == pytest.approx(5.53, abs=0.01)


@pytest.mark.parametrize("cv", [0.0, 1.0, 3.0])
def test_gamma_arrivals(cv):
    """Rate and burstiness are as asked for, and the same seed gives the same times."""
    times = gamma(20, cv, 2000, 4)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(50_000, rel=0.05)
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 / mean == pytest.approx(cv, abs=0.1)
    assert times == gamma(20, cv, 2000, 4)


def test_published_bursts():
    """DeltaServe's patterns: 2-second peaks at 80 requests per second, and 4-second ones at 120."""
    light, dense = burst_light(), burst_dense()
    assert sum(5_000_000 <= t < 7_000_000 for t in light) == 160
    assert not [t for t in light if 7_000_000 <= t < 11_000_000]
    assert sum(3_000_000 <= t < 7_000_000 for t in dense) == 480
    times = production_like(seed=2)
    per_second = [0] * 1200
    for t in times:
        per_second[t // 1_000_000] += 1
    assert max(per_second) > 100
    assert sum(n <= 3 for n in per_second) > 100
    assert times == sorted(times)


def test_scaling():
    """Each method reaches the rate and keeps what it says it keeps."""
    times = [row.at_us for row in load_azure().rows]
    fast = compress(times, 13)
    assert (len(fast), (len(fast) - 1) / fast[-1] * 1e6) == (len(times), pytest.approx(13, rel=1e-3))
    kept = thin(times, 2, 1)
    assert len(kept) / len(times) == pytest.approx(2 / 5.53, rel=0.05)
    with pytest.raises(WorkloadError, match="thinning cannot raise"):
        thin(times, 20, 1)
    shaped = envelope(times, 13, 1200, 1)
    assert len(shaped) / 1200 == pytest.approx(13, rel=0.03)
    assert shaped == sorted(shaped)


def test_lengths():
    """Quantiles, Zipf and pairs stay in their range and are reproducible."""
    drawn = Quantiles((1, 10, 100), (5, 6, 7)).sample(2000, np.random.default_rng(1))
    assert 0.45 < sum(p <= 10 for p, _ in drawn) / 2000 < 0.55
    assert {o for _, o in drawn} <= {5, 6, 7}
    zipf = Zipf(2048, 512).sample(3000, np.random.default_rng(1))
    assert min(p for p, _ in zipf) >= 1
    assert max(o for _, o in zipf) <= 512
    assert sum(p == 1 for p, _ in zipf) > sum(p == 2 for p, _ in zipf) > sum(p == 9 for p, _ in zipf)
    assert Pairs(((3, 4),)).sample(2, np.random.default_rng(1)) == [(3, 4), (3, 4)]
    with pytest.raises(WorkloadError, match="no lengths 'shargpt'"):
        load_pairs("shargpt")
    with pytest.raises(WorkloadError, match="that rise"):
        Quantiles((5, 1), (1, 2))


def test_scenarios():
    """The two scenarios have the paper's targets, by model size."""
    assert scenario_names() == ["hospital", "service-center"]
    small, large = load_scenario("hospital"), load_scenario("hospital", parameters_b=34)
    assert [s.tbt_us for s in small.services] == [200_000, 100_000, 50_000, 50_000]
    assert [s.tbt_us for s in large.services] == [200_000, 200_000, 100_000, 100_000]
    assert [s.ttft_us for s in load_scenario("service-center").services] == [2_000_000, 3_000_000, 1_000_000, 1_000_000]
    arrivals = small.compose(poisson(10, 60, 1), 1)
    assert {a.service for a in arrivals} == {s.name for s in small.services}
    assert arrivals == small.compose(poisson(10, 60, 1), 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("services: []", "needs a list of services"),
        ("services: [{name: a, ttft_ms: 0, tbt_ms: 5, lengths: {pairs: azure-conv}}]", "ttft_ms has to be"),
        ("services: [{name: a, ttft_ms: 5, tbt_ms: 5}]", "lengths needs either"),
        ("services: [{name: a, ttft: 5}]", "unknown key ttft"),
        ("services: [{name: a, ttft_ms: 5, tbt_ms: .nan, lengths: {pairs: azure-conv}}]", "tbt_ms has to be"),
        ("services: [{name: a", "not YAML"),
    ],
)
def test_wrong_scenarios(tmp_path, text, reason):
    """A wrong scenario is refused with file and reason."""
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=f"s.yaml.*{reason}"):
        load_scenario(path)
