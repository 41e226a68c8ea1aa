"""The policies by name, with their options checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from scheduling.fcfs import Fcfs
from scheduling.halo import Halo
from scheduling.halo_paper import HaloPaper
from scheduling.policy import Policy
from scheduling.qoserve import QoServe
from scheduling.vtc import VtcRate, VtcTokens


@dataclass(frozen=True, slots=True)
class Option:
    """A whole-number option of a policy, from ``minimum`` to ``maximum``.

    A ``measured`` one may be left out of a configuration: the host finds it in the profiling pass.
    """

    minimum: int
    meaning: str
    required: bool = False
    maximum: int = 2**53
    measured: bool = False

    def fault(self, value: object) -> str | None:
        """Return what is wrong with ``value``, or None."""
        if isinstance(value, bool) or not isinstance(value, int):
            return f"must be a whole number, got {value!r}"
        if value < self.minimum:
            return f"must be at least {self.minimum}, got {value}"
        if value > self.maximum:
            return f"must be at most {self.maximum}, got {value}"
        return None


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """How a policy is made and what can be set."""

    make: Callable[..., Policy]
    options: Mapping[str, Option]
    meaning: str


_BATCH = Option(
    1, "decodes plus prompt tokens in a step: the batch that meets the strictest TBT", required=True, measured=True
)
_COLD_BATCH = Option(1, "decodes plus prompt tokens in a step until the step-time model is warm", measured=True)
_MARGIN = Option(0, "microseconds kept free before a deadline; without it, 5 % of the strictest TBT")
_QUANTILE = Option(50, "percentage of steps that shall stay within their predicted time", maximum=99)
_TBT_MIN = Option(1, "strictest TBT of any service in microseconds; without it, the strictest seen so far")

POLICIES: Mapping[str, PolicyEntry] = MappingProxyType(
    {
        "fcfs": PolicyEntry(Fcfs, {"batch": _BATCH}, "first come, first served, decodes first (S-LoRA, vLLM)"),
        "vtc-t": PolicyEntry(VtcTokens, {"batch": _BATCH}, "equal generated tokens per service"),
        "vtc-r": PolicyEntry(VtcRate, {"batch": _BATCH}, "equal rate of late first tokens per service"),
        "qoserve": PolicyEntry(
            QoServe,
            {"batch": _BATCH, "tbt_min_us": _TBT_MIN},
            "earliest deadline first, batch follows the running TBTs",
        ),
        "halo-paper": PolicyEntry(
            HaloPaper, {"batch": _BATCH, "tbt_min_us": _TBT_MIN}, "HALO as the paper writes it, fixed batch"
        ),
        "halo": PolicyEntry(
            Halo,
            {"batch": _COLD_BATCH, "tbt_min_us": _TBT_MIN, "margin_us": _MARGIN, "quantile_pct": _QUANTILE},
            "HALO with deadlines kept exactly, from predicted step times",
        ),
    }
)


def check_policy(name: str, options: Mapping[str, Any]) -> list[str]:
    """Return everything that is wrong with a policy's name and options; an empty list when nothing is."""
    entry = POLICIES.get(name)
    if entry is None:
        return [f"unknown policy {name!r}{_nearest(name, POLICIES)}; valid policies: {', '.join(POLICIES)}"]
    faults = []
    for key, value in options.items():
        option = entry.options.get(key)
        if option is None:
            valid = ", ".join(entry.options) or "none"
            faults.append(
                f"policy {name}: unknown option {key!r}{_nearest(key, entry.options)}; valid options: {valid}"
            )
        elif fault := option.fault(value):
            faults.append(f"policy {name}: option {key} {fault}")
    faults += [
        f"policy {name}: option {key} is missing ({option.meaning})"
        for key, option in entry.options.items()
        if option.required and key not in options
    ]
    return faults


def make_policy(name: str, **options: Any) -> Policy:
    """Return a new policy. Raises ValueError with every fault of ``name`` and ``options``, one a line."""
    faults = check_policy(name, options)
    if faults:
        raise ValueError("\n".join(faults))
    return POLICIES[name].make(**options)


def _nearest(word: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
