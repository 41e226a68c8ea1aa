"""Services with their promises and lengths, as a data file, and the requests they get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from scheduling.request import ReleasePolicy
from simulator.lengths import Lengths, Quantiles, load_pairs
from simulator.trace_files import Trace
from simulator.workload import Arrival, Service, WorkloadError

SHIPPED = Path(__file__).parent / "data" / "scenarios"
LARGE_MODEL_B = 20.0
_KEYS = {"name", "ttft_ms", "tbt_ms", "tbt_large_ms", "lengths", "lengths_from", "assumed", "share"}


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """A service, how long its requests are, and its share of all requests relative to the others'."""

    service: Service
    lengths: Lengths
    share: float = 1.0
    assumed: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Services that share an engine."""

    name: str
    source: str
    loads: tuple[ServiceLoad, ...]

    @property
    def services(self) -> tuple[Service, ...]:
        """The services, in the file's order."""
        return tuple(load.service for load in self.loads)

    @property
    def tbt_min_us(self) -> int:
        """The strictest TBT."""
        return min(service.tbt_us for service in self.services)

    def released(self, release: ReleasePolicy) -> Scenario:
        """The same scenario with another release policy for every service."""
        loads = tuple(replace(load, service=replace(load.service, release=release)) for load in self.loads)
        return replace(self, loads=loads)

    def compose(self, at_us: Sequence[int], seed: int) -> list[Arrival]:
        """Give every arrival a service, by share, and lengths."""
        rng = np.random.default_rng([seed, 1])
        shares = np.array([load.share for load in self.loads])
        edges = np.cumsum(shares / shares.sum())
        chosen = np.minimum(np.searchsorted(edges, rng.random(len(at_us)), side="right"), len(shares) - 1).tolist()
        # Lengths are drawn per service, so that the n-th request of a service is the same at every rate.
        drawn = [
            iter(load.lengths.sample(chosen.count(index), np.random.default_rng([seed, 2, index])))
            for index, load in enumerate(self.loads)
        ]
        names = [load.service.name for load in self.loads]
        return [
            Arrival(time_us, names[index], *next(drawn[index])) for time_us, index in zip(at_us, chosen, strict=True)
        ]

    def replay(self, trace: Trace) -> list[Arrival]:
        """The requests of a trace that names services and lengths."""
        return [Arrival(row.at_us, row.service, row.prompt_tokens, row.output_tokens) for row in trace.rows]


def scenario_names() -> list[str]:
    """Names of the shipped scenarios."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_scenario(name: str | Path, *, parameters_b: float = 8.0) -> Scenario:
    """Read a shipped scenario by name or a YAML file by path. Raises :class:`WorkloadError`.

    Models of 20 billion weights or more get the looser TBT targets (HALO's TBT-2).
    """
    path = Path(name)
    if path.suffix not in {".yaml", ".yml"}:
        path = SHIPPED / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(scenario_names())
            raise WorkloadError(f"no scenario {str(name)!r}; there are {known}, or name a .yaml file")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: not YAML: {error}") from None
    if not isinstance(data, Mapping) or not isinstance(data.get("services"), list) or not data["services"]:
        raise WorkloadError(f"{path}: needs a list of services")
    loads = tuple(
        _load(entry, index, f"{path} services[{index}]", large=parameters_b >= LARGE_MODEL_B)
        for index, entry in enumerate(data["services"])
    )
    if len({load.service.name for load in loads}) < len(loads):
        raise WorkloadError(f"{path}: two services have the same name")
    return Scenario(str(data.get("name", path.stem)), str(data.get("source", path)), loads)


def _load(entry: Any, index: int, where: str, *, large: bool) -> ServiceLoad:
    if not isinstance(entry, Mapping):
        raise WorkloadError(f"{where}: has to be a section of keys and values")
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise WorkloadError(
            f"{where}: unknown key {', '.join(map(str, unknown))}; known are {', '.join(sorted(_KEYS))}"
        )
    tbt = "tbt_large_ms" if large and "tbt_large_ms" in entry else "tbt_ms"
    service = Service(
        str(entry.get("name") or f"service-{index}"),
        _millis(entry, "ttft_ms", where),
        _millis(entry, tbt, where),
        adapter=index + 1,
    )
    share = entry.get("share", 1.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1e9:
        raise WorkloadError(f"{where}: share has to be a number above 0, got {share!r}")
    return ServiceLoad(service, _lengths(entry.get("lengths"), where), float(share), str(entry.get("assumed", "")))


def _lengths(value: Any, where: str) -> Lengths:
    if isinstance(value, Mapping) and set(value) == {"pairs"}:
        return load_pairs(str(value["pairs"]))
    if isinstance(value, Mapping) and set(value) == {"prompt", "output"}:
        try:
            return Quantiles(tuple(map(int, value["prompt"])), tuple(map(int, value["output"])))
        except (TypeError, ValueError) as error:
            raise WorkloadError(f"{where} lengths: {error}") from None
    raise WorkloadError(f"{where}: lengths needs either pairs: NAME, or prompt and output: lists of quantiles")


def _millis(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise WorkloadError(f"{where}: {key} has to be a number of milliseconds above 0, got {value!r}")
    return round(value * 1000)
