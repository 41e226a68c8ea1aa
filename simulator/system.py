"""What is compared: a policy with its release of tokens, with or without base-LoRA overlap, on some replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduling.registry import POLICIES, make_policy
from scheduling.request import ReleasePolicy
from simulator.cluster import Cluster, RunResult
from simulator.hardware_profile import HardwareProfile
from simulator.replica import Finetune, Replica
from simulator.scenario import Scenario
from simulator.step_times import StepTimes
from simulator.workload import Arrival, WorkloadError

OVERLAP = "+overlap"

# The paper's token queue belongs to HALO; the baselines send tokens as they come. Ours is the product's default.
_RELEASES = {"halo-paper": ReleasePolicy.SLO, "halo": ReleasePolicy.BOUNDED}

PAPER_SYSTEMS: Mapping[str, str] = {
    "SLoRA": "fcfs",
    "VTC-T": "vtc-t",
    "VTC-R": "vtc-r",
    "QoServe": "qoserve",
    "HALO": "halo-paper+overlap",
}
"""HALO's own comparison (section 6.1.4): only HALO overlaps base and LoRA."""

ABLATION: Mapping[str, str] = {
    "SLoRA": "fcfs",
    "HALO-P": "fcfs+overlap",
    "HALO-S": "halo-paper",
    "HALO": "halo-paper+overlap",
}
"""HALO section 6.7."""


@dataclass(frozen=True, slots=True)
class System:
    """A policy and how it is run.

    ``label`` is the policy's name, with ``+overlap`` behind it for base-LoRA overlap and ``@slo``, ``@bounded`` or
    ``@off`` for another release of tokens than the policy's own: ``halo+overlap@slo``. ``batch`` overrides the
    profile's B.
    """

    label: str
    batch: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _, at, release = self.label.partition("@")
        if self.policy not in POLICIES or (at and release not in set(ReleasePolicy)):
            raise WorkloadError(
                f"no policy {self.label!r}; there are {', '.join(POLICIES)}, each also with {OVERLAP} behind it, and "
                f"then with @ and one of {', '.join(ReleasePolicy)}"
            )

    @property
    def policy(self) -> str:
        """The policy's name."""
        return self.label.partition("@")[0].removesuffix(OVERLAP)

    @property
    def release(self) -> ReleasePolicy:
        """When tokens go to the client."""
        _, at, release = self.label.partition("@")
        return ReleasePolicy(release) if at else _RELEASES.get(self.policy, ReleasePolicy.OFF)

    @property
    def overlap(self) -> bool:
        """Whether base and LoRA products overlap."""
        return self.label.partition("@")[0].endswith(OVERLAP)

    def policy_options(self, profile: HardwareProfile, scenario: Scenario) -> dict[str, Any]:
        """Options for :func:`scheduling.registry.make_policy`."""
        known = POLICIES[self.policy].options
        options: dict[str, Any] = {"batch": self.batch or profile.batch, "tbt_min_us": scenario.tbt_min_us}
        return {**{key: value for key, value in options.items() if key in known}, **self.options}


@dataclass(frozen=True, slots=True)
class Deployment:
    """Hardware and settings that all compared systems share.

    ``inflight`` is how many requests a replica takes from the admission queue; None means as many as it runs.
    ``keep_release`` leaves every service its own release of tokens, as a cluster.yaml sets it.
    """

    profile: HardwareProfile
    replicas: int = 1
    prefix_caching: bool = False
    inflight: int | None = None
    queue_timeout_us: int = 2**62
    finetune: Finetune | None = None
    keep_release: bool = False


def simulate(
    system: System,
    deployment: Deployment,
    scenario: Scenario,
    arrivals: Sequence[Arrival],
    *,
    seed: int = 0,
    warmup_us: int = 0,
) -> RunResult:
    """Run ``arrivals`` through ``system``. The same arguments give the same result.

    Requests that arrive before ``warmup_us`` are served but not measured.
    """
    profile = deployment.profile
    if not deployment.keep_release:
        scenario = scenario.released(system.release)
    replicas = [
        Replica(
            make_policy(system.policy, **system.policy_options(profile, scenario)),
            profile.limits,
            StepTimes(profile.costs, overlap=system.overlap, seed=seed * 1000 + index),
            prefix_caching=deployment.prefix_caching,
            finetune=deployment.finetune,
        )
        for index in range(deployment.replicas)
    ]
    cluster = Cluster(
        scenario.services, replicas, inflight=deployment.inflight, queue_timeout_us=deployment.queue_timeout_us
    )
    return cluster.run(arrivals, measured_from_us=warmup_us)
