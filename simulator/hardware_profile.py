"""A model on some hardware, as a data file: what steps cost, what the engine holds, and where the numbers come from.

Files are JSON (``simulator/data/profiles/*.json``, or one that ``halo profile`` measured). Every source says whether it
was measured, derived from measurements, or assumed, and under which licence it is published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scheduling.policy import Limits
from simulator.curve import Curve
from simulator.step_times import StepCosts
from simulator.workload import WorkloadError

FORMAT = "halo-profile-1"
SHIPPED = Path(__file__).parent / "data" / "profiles"
KINDS = ("measured", "derived", "assumed")

_PRICES = (
    "per_decode_us",
    "per_context_token_us",
    "per_prefill_token_us",
    "per_pair_us",
    "per_prefix_token_us",
    "per_chunk_us",
    "overlap_share",
    "overlap_rows_max",
    "host_us",
    "host_per_request_us",
    "eager_us",
    "per_finetune_token_us",
    "noise_pct",
)
_CURVES = ("dense", "communication", "head")


class ProfileError(WorkloadError):
    """A profile that cannot be used; the message names the file, the key and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where some of a profile's numbers come from. ``kind`` is one of :data:`KINDS`."""

    what: str
    kind: str
    source: str
    licence: str


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """``batch`` is the paper's B, the batch that meets the strictest TBT; ``gpus`` is per replica.

    ``parameters_b`` is the size of the model in billions of weights.
    """

    name: str
    model: str
    hardware: str
    gpus: int
    parameters_b: float
    batch: int
    limits: Limits
    costs: StepCosts
    sources: tuple[Source, ...]
    checks: tuple[Mapping[str, Any], ...] = ()

    @property
    def assumed(self) -> tuple[str, ...]:
        """What of it nobody measured."""
        return tuple(source.what for source in self.sources if source.kind == "assumed")


def profile_names() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load_profile(name: str | Path) -> HardwareProfile:
    """Read a shipped profile by name, or a file by path. Raises :class:`ProfileError`."""
    path = Path(name)
    if path.suffix != ".json":
        path = SHIPPED / f"{name}.json"
        if not path.is_file():
            raise ProfileError(
                f"no profile {str(name)!r}; there are {', '.join(profile_names())}, or name a .json file"
            )
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ProfileError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProfileError(f"{path}: has to be an object with the keys of {FORMAT}")
    return parse_profile(data, str(path))


def parse_profile(data: Mapping[str, Any], where: str = "profile") -> HardwareProfile:
    """Check plain values. Raises :class:`ProfileError`."""
    if data.get("format") != FORMAT:
        raise ProfileError(f"{where}: format is {data.get('format')!r}, this release reads {FORMAT}")
    try:
        engine = data["engine"]
        return HardwareProfile(
            name=str(data["name"]),
            model=str(data["model"]),
            hardware=str(data["hardware"]),
            gpus=_count(data["gpus"], "gpus", where),
            parameters_b=_price(data["parameters_b"], "parameters_b", where),
            batch=_count(data["batch"], "batch", where),
            limits=Limits(
                step_tokens=_count(engine["step_tokens"], "engine.step_tokens", where),
                running=_count(engine["running"], "engine.running", where),
                adapters=_count(engine["adapters"], "engine.adapters", where, least=0),
                kv_blocks=_count(engine["kv_blocks"], "engine.kv_blocks", where),
                kv_block_tokens=_count(engine["kv_block_tokens"], "engine.kv_block_tokens", where),
            ),
            costs=_costs(data["costs"], where),
            sources=_sources(data["sources"], where),
            checks=tuple(data.get("checks", ())),
        )
    except KeyError as error:
        raise ProfileError(f"{where}: the key {error.args[0]!r} is missing") from None
    except (TypeError, AttributeError) as error:
        raise ProfileError(f"{where}: a section has the wrong form: {error}") from None


def dump_costs(costs: StepCosts) -> dict[str, Any]:
    """The ``costs`` section of a profile file."""
    curves = {key: getattr(costs, key) for key in _CURVES}
    return {
        **{key: _points(curve) for key, curve in curves.items() if curve is not None},
        **{key: getattr(costs, key) for key in _PRICES},
        "lora": {group: _points(curve) for group, curve in costs.lora.items()},
        "host_overlapped": costs.host_overlapped,
        "graph_sizes": list(costs.graph_sizes),
    }


def _points(curve: Curve) -> list[list[float]]:
    return [[count, round(value, 3)] for count, value in curve.points]


def _costs(data: Mapping[str, Any], where: str) -> StepCosts:
    known = {*_PRICES, *_CURVES, "lora", "host_overlapped", "graph_sizes"}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ProfileError(f"{where}: unknown costs {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    prices = {key: _price(data[key], f"costs.{key}", where) for key in _PRICES if key in data}
    overlap_rows = int(prices.pop("overlap_rows_max", 0))
    if prices.get("overlap_share", 0.0) > 1:
        raise ProfileError(f"{where}: costs.overlap_share is a share, 0 to 1, got {prices['overlap_share']}")
    sizes = tuple(_count(size, "costs.graph_sizes", where) for size in data.get("graph_sizes", ()))
    if any(b <= a for a, b in pairwise(sizes)):
        raise ProfileError(f"{where}: costs.graph_sizes have to rise")
    return StepCosts(
        dense=_curve(data["dense"], "costs.dense", where),
        communication=_curve(data["communication"], "costs.communication", where) if "communication" in data else None,
        head=_curve(data["head"], "costs.head", where) if "head" in data else None,
        lora={group: _curve(points, f"costs.lora.{group}", where) for group, points in data.get("lora", {}).items()},
        overlap_rows_max=overlap_rows,
        host_overlapped=bool(data.get("host_overlapped", False)),
        graph_sizes=sizes,
        **prices,
    )


def _sources(listed: Any, where: str) -> tuple[Source, ...]:
    sources = tuple(Source(str(s["what"]), str(s["kind"]), str(s["source"]), str(s["licence"])) for s in listed)
    for source in sources:
        if source.kind not in KINDS:
            raise ProfileError(
                f"{where}: source {source.what!r} has kind {source.kind!r}; use one of {', '.join(KINDS)}"
            )
    if not sources:
        raise ProfileError(f"{where}: sources is empty; a profile says where its numbers come from")
    return sources


def _curve(points: Any, key: str, where: str) -> Curve:
    try:
        return Curve([(_price(x, key, where), _price(y, key, where)) for x, y in points], key)
    except ProfileError:
        raise
    except (TypeError, ValueError) as error:
        raise ProfileError(
            f"{where}: {key} has to be a list of [count, microseconds] with rising counts: {error}"
        ) from None


def _price(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ProfileError(f"{where}: {key} has to be a number of 0 or more, got {value!r}")
    return float(value)


def _count(value: Any, key: str, where: str, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ProfileError(f"{where}: {key} has to be a whole number of {least} or more, got {value!r}")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")
