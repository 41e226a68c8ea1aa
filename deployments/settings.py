"""What the deployments are configured with: plain frozen values, built by ``app.config`` from cluster.yaml.

Validation happens in ``app.config``; here are only types, so that the deployments never need pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from scheduling.request import ReleasePolicy


class Overload(StrEnum):
    """What happens to a request whose promise can no longer be kept."""

    QUEUE = "queue"
    SHED = "shed"


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """One LoRA service and its promise. ``adapter`` is None for a service that is the base model itself."""

    name: str
    adapter: Path | None
    ttft_us: int
    tbt_us: int
    release: ReleasePolicy = ReleasePolicy.BOUNDED
    hold_max_us: int = 250_000
    overload: Overload = Overload.QUEUE


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine replica. ``model`` is a local directory unless ``allow_hub`` is set.

    ``base_name`` is the model name under which the base model answers; it carries ``base_promise``.
    ``trace_dir`` is where the scheduler writes what it saw and decided. ``lora_overlap`` runs base and LoRA on SM
    partitions where a search at start-up finds that to win.
    ``engine_args`` are passed to vLLM's ``AsyncEngineArgs`` as they are.
    """

    model: str
    base_name: str
    services: tuple[ServiceSettings, ...]
    base_promise: ServiceSettings
    policy: str = "halo"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    trace_dir: Path | None = None
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 256
    max_lora_rank: int = 16
    max_loras: int = 4
    kv_cache_gb: float | None = None
    lora_overlap: bool = False
    allow_hub: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def service(self, name: str) -> ServiceSettings | None:
        """The service called ``name``, the base model's promise for ``base_name``, or None."""
        if name == self.base_name:
            return self.base_promise
        return next((service for service in self.services if service.name == name), None)


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """``inflight_per_replica`` requests are handed to one replica at a time; None means ``max_num_seqs``."""

    inflight_per_replica: int | None = None
    queue_requests: int = 4096
    queue_timeout_us: int = 120_000_000
    heartbeat_timeout_us: int = 10_000_000


@dataclass(frozen=True, slots=True)
class AuthSettings:
    """``keys_file`` holds hashed API keys (see docs/configuration.md); None leaves the server open on loopback."""

    keys_file: Path | None = None


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """``max_body_bytes`` bounds a request body; ``pacer_tick_us`` is the pacer's resolution.

    ``stream_timeout_us`` bounds a response from its grant to its end, and with it the drain of a replica.
    ``max_unsent_bytes`` bounds what may wait for a client that reads slowly before it is cut. ``delivery_margin_us`` is
    what the way from the engine to the client may vary by: engines aim that much earlier than the promise, a tenth of
    a target at most. On two busy cores 5 ms were too little: one gap in five of paced tokens came up to 20 ms late.
    """

    services: tuple[ServiceSettings, ...]
    base_name: str
    base_promise: ServiceSettings
    auth: AuthSettings = AuthSettings()
    max_body_bytes: int = 8 * 1024 * 1024
    pacer_tick_us: int = 2_000
    stream_timeout_us: int = 600_000_000
    max_unsent_bytes: int = 1024 * 1024
    delivery_margin_us: int = 20_000

    def service(self, name: str) -> ServiceSettings | None:
        """The service called ``name``, the base model's promise for ``base_name``, or None."""
        if name == self.base_name:
            return self.base_promise
        return next((service for service in self.services if service.name == name), None)
