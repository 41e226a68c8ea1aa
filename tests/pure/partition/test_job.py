"""The partition job on fake GPUs in a real child process."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import app
from deployments.lora_overlap import DUAL_STREAM_VARIABLE, TABLE_VARIABLE, prepare_lora_overlap
from deployments.partition_cache import only_searcher, table_path
from deployments.partition_host import MeasuringProcess
from deployments.partition_job import JobReport, ModelShapeError, model_groups, run_partition_job, token_counts
from deployments.settings import EngineSettings, ServiceSettings
from partition.configs import MeasurementError, Split, Unsplit
from partition.cpu_paths import CpuLoraCosts
from partition.pair_shapes import LLAMA3_8B, LayerPair
from partition.search_result import Verdict
from partition.table import PartitionTable, from_text, to_text
from vllm_plugin import cpu_costs

COUNTING, HARMFUL, NONE = (
    f"tests.fakes.pair_devices:{name}" for name in ("CountingDevice", "HarmfulDevice", "NoDevice")
)
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336,
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    """An engine for Llama3-8B with one adapter and 8 tokens a step: four batch sizes."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    service = ServiceSettings("triage", tmp_path / "adapter", 1, 1)
    base = ServiceSettings("base", None, 1, 1)
    return EngineSettings(str(model), "base", (service,), base, max_num_batched_tokens=8)


def job(settings: EngineSettings, tmp_path: Path, *device: str, **options: object) -> tuple[JobReport, list[str], list]:
    """Run the job; its report, the pair runs of the device, and the progress."""
    log = tmp_path / "log"
    log.write_text("")
    lines: list[str] = []
    arguments = (device[0], str(log), *device[1:]) if device[0] != NONE else device
    options = {"time_box_s": 60.0, "vllm": "0.32.0"} | options
    report = run_partition_job(settings, device=arguments, cache=tmp_path / "cache", progress=lines.append, **options)
    return report, log.read_text().splitlines(), lines


def test_it_searches_once_and_reuses_after_verifying(settings: EngineSettings, tmp_path: Path) -> None:
    """The first replica searches every group and size, the second measures one entry again and shares the table."""
    first, runs, progress = job(settings, tmp_path, COUNTING)
    assert first.table is not None
    assert {(entry.group, entry.tokens) for entry in first.table.entries} == {
        (group.name, tokens) for group in LLAMA3_8B for tokens in (1, 2, 4, 8)
    }
    assert first.useful
    assert len(progress) == 16
    assert "1 of 16" in progress[0]
    second, again, _ = job(settings, tmp_path, COUNTING)
    assert second.table == first.table
    assert second.reason == "reused the stored table"
    assert len(again) == 2 < len(runs)


@pytest.mark.parametrize("damage", ["truncated", "drift", "other engine"])
def test_a_table_that_does_not_hold_is_searched_anew(settings: EngineSettings, tmp_path: Path, damage: str) -> None:
    """A truncated file, and one whose times no longer hold, are refused with the reason and replaced."""
    first, _, _ = job(settings, tmp_path, COUNTING)
    assert first.path is not None
    if damage == "truncated":
        first.path.write_text(first.path.read_text()[:500])
    if damage == "other engine":
        settings = EngineSettings(**{**_fields(settings), "max_num_batched_tokens": 4})
    report, _, progress = job(settings, tmp_path, COUNTING, *(("1.3",) if damage == "drift" else ()))
    reason = {"truncated": "truncated", "drift": "us now, stored are", "other engine": "batch sizes"}[damage]
    assert reason in progress[0]
    assert "searching anew" in progress[0]
    assert report.path is not None
    assert from_text(report.path.read_text(), first.table.key if first.table else None) == report.table


def _fields(settings: EngineSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in EngineSettings.__dataclass_fields__}


def test_what_hangs_or_dies_is_skipped_and_the_search_goes_on(settings: EngineSettings, tmp_path: Path) -> None:
    """A hanging, a dying and a failing measurement each have their reason; the process is replaced."""
    pair = LayerPair(LLAMA3_8B[0], 8, 16, 4)
    with MeasuringProcess((HARMFUL, str(tmp_path / "log")), measure_timeout_s=0.5) as process:
        for config, reason in (
            (Split(64, 64), "no result within 0.5 s; the measuring process was ended"),
            (Split(72, 56), "the measuring process died"),
            (Unsplit.DUAL_STREAM, "RuntimeError: CUDA error: an illegal memory access"),
        ):
            with pytest.raises(MeasurementError, match=reason):
                process.measure(pair, config)
        assert process.measure(pair, Unsplit.SEQUENTIAL).time_us > 0


def test_without_a_gpu_it_says_so(settings: EngineSettings, tmp_path: Path) -> None:
    """No CUDA device: no table, a sentence, no exception."""
    report, _, _ = job(settings, tmp_path, NONE)
    assert (report.table, report.path, report.useful) == (None, None, False)
    assert report.reason == "no partition: this machine has no CUDA device that torch can use"


def test_it_ends_when_its_time_is_up_and_goes_on_at_the_next_start(settings: EngineSettings, tmp_path: Path) -> None:
    """What was not reached stays sequential; the next start searches only that."""
    ticks = iter(range(10_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deployments.partition_job.time.monotonic", lambda: next(ticks) * 0.2)
        report, _, _ = job(settings, tmp_path, COUNTING, time_box_s=60.0)
    assert report.table is not None
    reached = [entry for entry in report.table.entries if entry.verdict is not Verdict.UNMEASURED]
    assert 0 < len(reached) < 16
    assert "the time was up" in report.reason
    later, runs, _ = job(settings, tmp_path, COUNTING)
    assert later.table is not None
    assert all(entry.verdict is not Verdict.UNMEASURED for entry in later.table.entries)
    assert {tuple(line.split()[:2]) for line in runs[2:]}.isdisjoint({(e.group, str(e.tokens)) for e in reached})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "JSONDecodeError"),
        ('{"hidden_size": 64}', "num_attention_heads"),
        ("[]", "TypeError"),
        (None, "No such file"),
    ],
)
def test_unknown_models_are_served_without_overlap(
    settings: EngineSettings, tmp_path: Path, config: str | None, reason: str
) -> None:
    """A model whose layers are not known gives a reason."""
    path = Path(settings.model) / "config.json"
    path.unlink()
    if config is not None:
        path.write_text(config)
    with pytest.raises(ModelShapeError):
        model_groups(Path(settings.model), 1)
    report, _, _ = job(settings, tmp_path, COUNTING)
    assert report.table is None
    assert reason in report.reason


def test_a_cache_that_cannot_be_written_is_a_reason(settings: EngineSettings, tmp_path: Path) -> None:
    """Where a file lies in the cache's place, the engine serves without overlap."""
    (tmp_path / "cache").write_text("")
    report, _, _ = job(settings, tmp_path, COUNTING)
    assert report.table is None
    assert "no partition" in report.reason


def test_only_one_replica_searches(settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another holds the key's lock, the job waits, and gives up when its time is up."""
    report, _, _ = job(settings, tmp_path, COUNTING)
    assert report.table is not None
    key = report.table.key
    assert table_path(tmp_path / "cache", key) == report.path
    with only_searcher(tmp_path / "cache", key, 1.0):
        clock = _Clock()
        monkeypatch.setattr("deployments.partition_cache.time", clock)
        waiting, _, _ = job(settings, tmp_path, COUNTING)
    assert waiting.table is None
    assert "another replica has been searching for 60 s" in waiting.reason
    assert 60 <= clock.now_s < 61


class _Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_the_engine_gets_a_table_only_where_something_wins(
    settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched off, without a GPU, or with a table that helps: the workers' environment says which."""
    monkeypatch.setenv(TABLE_VARIABLE, "left over")
    monkeypatch.setenv(DUAL_STREAM_VARIABLE, "1")
    log = tmp_path / "log"
    counting = (COUNTING, str(log))
    assert prepare_lora_overlap(settings, device=counting, cache=tmp_path).startswith("off: lora_overlap is false")
    assert TABLE_VARIABLE not in os.environ
    assert DUAL_STREAM_VARIABLE not in os.environ
    assert not log.exists()
    wanted = EngineSettings(**{**_fields(settings), "lora_overlap": True})
    assert "no CUDA device" in prepare_lora_overlap(wanted, device=(NONE,), cache=tmp_path)
    assert TABLE_VARIABLE not in os.environ
    assert prepare_lora_overlap(wanted, device=counting, cache=tmp_path).startswith("on: ")
    assert os.environ[DUAL_STREAM_VARIABLE] == "1"
    assert from_text(Path(os.environ[TABLE_VARIABLE]).read_text(), None).entries
    monkeypatch.delenv(TABLE_VARIABLE)
    monkeypatch.delenv(DUAL_STREAM_VARIABLE)


def test_costs_of_another_cpu_are_not_used(tmp_path: Path) -> None:
    """A CPU's measured costs are taken from the table file; another CPU's, a GPU's or damaged ones are not."""
    costs = CpuLoraCosts(call_us=99.0)
    path = tmp_path / "costs.json"
    key = cpu_costs.cpu_key(16, "0.32.0")
    path.write_text(to_text(PartitionTable(key, cpu_costs=costs)))
    assert cpu_costs.measured_costs(str(path)) == costs
    path.write_text(to_text(PartitionTable(replace(key, device="another"), cpu_costs=costs)))
    assert cpu_costs.measured_costs(str(path)) == CpuLoraCosts()
    path.write_text(to_text(PartitionTable(key)))
    assert cpu_costs.measured_costs(str(path)) == CpuLoraCosts()
    path.write_text("{")
    assert cpu_costs.measured_costs(str(path)) == CpuLoraCosts()


def test_batch_sizes_are_powers_of_two_up_to_a_step(settings: EngineSettings) -> None:
    """A step of 8 tokens has sizes 1 to 8; larger steps end at 512."""
    assert token_counts(settings) == (1, 2, 4, 8)
    large = EngineSettings(**{**_fields(settings), "max_num_batched_tokens": 8192})
    assert token_counts(large)[-1] == 512


def test_halo_partition_says_plainly_that_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the command ends with a sentence; `--simulate` prints and plots what an analytic GPU gives."""
    monkeypatch.setattr("app.partition_command.CUDA_DEVICE", (NONE,))
    monkeypatch.setenv("HALO_CACHE_DIR", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr("app.cli.load_cluster", lambda path: _Cluster(model))
    result = CliRunner().invoke(app, ["partition"])
    assert result.exit_code == 1
    assert "this machine has no CUDA device" in result.output
    plot = tmp_path / "plot.png"
    result = CliRunner().invoke(app, ["partition", "--simulate", "H200/8", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "H200/8 (simulated), 132 SMs" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, ["partition", "--simulate", "H200/8", "--plot", str(plot)])
    assert "add --anew" in result.output
    assert CliRunner().invoke(app, ["partition", "--simulate", "B100"]).exit_code == 1
    assert CliRunner().invoke(app, ["partition", "--search", "guess"]).exit_code == 1


class _Cluster:
    """A configuration with one adapter and one batch size."""

    def __init__(self, model: Path) -> None:
        self.args, self._model = self, model

    def engine_settings(self) -> EngineSettings:
        service, base = ServiceSettings("triage", self._model, 1, 1), ServiceSettings("base", None, 1, 1)
        return EngineSettings(str(self._model), "base", (service,), base, max_num_batched_tokens=1)
