"""The ``args`` section of cluster.yaml: what may be written there, and the settings the deployments get from it.

Only the form is checked here, value by value. What depends on other values or on files is in
``app.args_checks``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PrivateAttr

from app.durations import between, format_duration, parse_duration
from deployments.adapters import AdapterReport
from deployments.base_model import directory_fault
from deployments.settings import (
    AdmissionSettings,
    AuthSettings,
    EngineSettings,
    GatewaySettings,
    Overload,
    ServiceSettings,
)
from scheduling.registry import POLICIES
from scheduling.request import ReleasePolicy

# The ranks vLLM builds its LoRA kernels for (vllm.config.lora.MaxLoRARanks).
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
MAX_STEP_TOKENS = 1_048_576
"""vLLM sets memory aside for every token of a step: beyond this a value can only be a mistake."""
_STRICTEST_TBT = "tbt_min_us"

Dtype = Literal["auto", "float16", "bfloat16", "float32", "half", "float"]


def _service_name(name: str) -> str:
    allowed = "letters, digits and . _ : / - are allowed, starting with a letter or digit"
    if not (name.isascii() and name[:1].isalnum() and all(c.isalnum() or c in "._:/-" for c in name)):
        raise ValueError(f"is not usable as a model name: {allowed}")
    return name


def _release(value: object) -> object:
    # YAML 1.1, which Ray reads the file with, takes a bare `off` for the boolean false.
    if value is False:
        return ReleasePolicy.OFF
    return _choice(ReleasePolicy, value)


def _choice(kind: type[ReleasePolicy] | type[Overload], value: object) -> object:
    if not isinstance(value, str) or value not in list(kind):
        raise ValueError(f"has to be one of {', '.join(kind)}")
    return kind(value)


_Us = PlainSerializer(format_duration)
Ttft = Annotated[int, BeforeValidator(parse_duration), AfterValidator(between("1ms", "60min")), _Us]
Tbt = Annotated[int, BeforeValidator(parse_duration), AfterValidator(between("1ms", "1min")), _Us]
HoldMax = Annotated[int, BeforeValidator(parse_duration), AfterValidator(between("1ms", "1min")), _Us]
Wait = Annotated[int, BeforeValidator(parse_duration), AfterValidator(between("1s", "1440min")), _Us]
Tick = Annotated[int, BeforeValidator(parse_duration), AfterValidator(between("0.5ms", "50ms")), _Us]
Name = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_service_name)]
FilePath = Annotated[str, Field(min_length=1, max_length=4096)]
Release = Annotated[ReleasePolicy, BeforeValidator(_release), PlainSerializer(str)]
OverloadPolicy = Annotated[Overload, BeforeValidator(lambda value: _choice(Overload, value)), PlainSerializer(str)]


def resolve(root: Path, written: str) -> Path:
    """A path of the file, absolute; a relative one starts at ``root``, ``~`` is the home directory."""
    # os.path, because Path.expanduser raises for a user that there is not.
    return (root / os.path.expanduser(written)).absolute()  # noqa: PTH111


class Section(BaseModel):
    """No unknown keys, no silent conversions, no changes after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class PromiseArgs(Section):
    """What a service promises: first token within ``ttft``, every next one within ``tbt``."""

    name: Name
    ttft: Ttft
    tbt: Tbt
    release: Release = ReleasePolicy.BOUNDED
    hold_max: HoldMax = 250_000
    overload: OverloadPolicy = Overload.QUEUE

    def settings(self, scale: float, adapter: Path | None) -> ServiceSettings:
        """The promise in force: ``ttft`` and ``tbt`` multiplied by ``scale``."""
        return ServiceSettings(
            name=self.name,
            adapter=adapter,
            ttft_us=round(self.ttft * scale),
            tbt_us=round(self.tbt * scale),
            release=self.release,
            hold_max_us=self.hold_max,
            overload=self.overload,
        )


class ServiceArgs(PromiseArgs):
    """One service. ``adapter`` is a directory, or null for a service that is the base model itself."""

    adapter: FilePath | None


class SchedulerArgs(Section):
    """Which policy of ``scheduling.registry`` decides every engine step, and its options.

    ``trace_dir`` is where engines write every view and plan, to look into a policy; nothing is written without it.
    """

    policy: str = "halo"
    options: dict[str, Any] = {}
    trace_dir: FilePath | None = None


class AdmissionArgs(Section):
    """How many requests wait, and for how long. ``inflight_per_replica`` is ``max_num_seqs`` unless given."""

    inflight_per_replica: Annotated[int, Field(ge=1, le=65536)] | None = None
    queue_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    queue_timeout: Wait = 120_000_000
    heartbeat_timeout: Wait = 10_000_000


class AuthArgs(Section):
    """``keys_file`` is written by ``halo keys add``."""

    keys_file: FilePath | None = None


class LimitsArgs(Section):
    """What a gateway allows one client: size of a request, length of a stream; and the pacer's resolution."""

    body_mb: Annotated[float, Field(gt=0, le=1024)] = 8.0
    stream_timeout: Wait = 600_000_000
    pacer_tick: Tick = 2_000


class AppArgs(Section):
    """Everything under ``applications[].args``. Built by :func:`app.config.parse_args`, which knows ``root``."""

    model: FilePath
    allow_hub: bool = False
    base: PromiseArgs
    services: Annotated[tuple[ServiceArgs, ...], Field(strict=False)]
    slo_scale: Annotated[float, Field(ge=0.01, le=100)] = 1.0

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    gateways: Annotated[int, Field(ge=1, le=256)] = 1
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    dtype: Dtype = "auto"
    max_model_len: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] = 32
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=MAX_STEP_TOKENS)] = 256
    max_lora_rank: LoraRank = 16
    max_loras: Annotated[int, Field(ge=1, le=1024)] | None = None
    kv_cache_gb: Annotated[float, Field(gt=0, le=10_000)] | None = None
    lora_overlap: bool = False
    engine_args: dict[str, Any] = {}

    scheduler: SchedulerArgs = SchedulerArgs()
    admission: AdmissionArgs = AdmissionArgs()
    auth: AuthArgs = AuthArgs()
    limits: LimitsArgs = LimitsArgs()

    _root: Path = PrivateAttr(default_factory=Path.cwd)
    _reports: dict[str, AdapterReport] = PrivateAttr(default_factory=dict)
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    def attach(self, root: Path, reports: dict[str, AdapterReport], warnings: tuple[str, ...]) -> AppArgs:
        """Remember what relative paths start from and what was found in the files. Returns self."""
        self._root, self._reports, self._warnings = root, reports, warnings
        return self

    @property
    def adapter_reports(self) -> dict[str, AdapterReport]:
        """What was found in each service's adapter, by service; empty when files were not checked."""
        return dict(self._reports)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know but need not change."""
        return self._warnings

    def path(self, written: str) -> Path:
        """A path of the file; relative ones start at the directory of cluster.yaml."""
        return resolve(self._root, written)

    @property
    def model_location(self) -> str:
        """The model's directory, or its hub name where that is allowed and there is no such directory."""
        directory = self.path(self.model)
        return self.model if self.allow_hub and directory_fault(directory) is not None else str(directory)

    @property
    def adapters(self) -> int:
        """How many services have an adapter."""
        return sum(service.adapter is not None for service in self.services)

    def service_settings(self) -> tuple[ServiceSettings, ...]:
        """The services with their promises in force."""
        return tuple(
            service.settings(self.slo_scale, None if service.adapter is None else self.path(service.adapter))
            for service in self.services
        )

    def base_settings(self) -> ServiceSettings:
        """The base model's promise in force."""
        return self.base.settings(self.slo_scale, None)

    def policy_options(self) -> dict[str, Any]:
        """The policy's options; a policy that wants to know the strictest TBT is told the promised one."""
        options = dict(self.scheduler.options)
        if _STRICTEST_TBT in POLICIES[self.scheduler.policy].options:
            promises = (*self.service_settings(), self.base_settings())
            options.setdefault(_STRICTEST_TBT, min(promise.tbt_us for promise in promises))
        return options

    def engine_settings(self) -> EngineSettings:
        """What one engine replica is built with."""
        return EngineSettings(
            model=self.model_location,
            base_name=self.base.name,
            services=self.service_settings(),
            base_promise=self.base_settings(),
            policy=self.scheduler.policy,
            policy_options=self.policy_options(),
            trace_dir=None if self.scheduler.trace_dir is None else self.path(self.scheduler.trace_dir),
            tensor_parallel_size=self.tensor_parallel_size,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_lora_rank=self.max_lora_rank,
            max_loras=self.max_loras or max(1, self.adapters),
            kv_cache_gb=self.kv_cache_gb,
            lora_overlap=self.lora_overlap,
            allow_hub=self.allow_hub,
            engine_args=dict(self.engine_args),
        )

    def gateway_settings(self) -> GatewaySettings:
        """What one gateway is built with."""
        keys_file = self.auth.keys_file
        return GatewaySettings(
            services=self.service_settings(),
            base_name=self.base.name,
            base_promise=self.base_settings(),
            auth=AuthSettings(keys_file=None if keys_file is None else self.path(keys_file)),
            max_body_bytes=int(self.limits.body_mb * 1024 * 1024),
            pacer_tick_us=self.limits.pacer_tick,
            stream_timeout_us=self.limits.stream_timeout,
        )

    def admission_settings(self) -> AdmissionSettings:
        """What the admission actor is built with."""
        return AdmissionSettings(
            inflight_per_replica=self.admission.inflight_per_replica,
            queue_requests=self.admission.queue_requests,
            queue_timeout_us=self.admission.queue_timeout,
            heartbeat_timeout_us=self.admission.heartbeat_timeout,
        )

    def dump(self, *, absolute_paths: bool = False) -> dict[str, Any]:
        """The section as plain values that ``parse_args`` reads back to an equal one.

        ``absolute_paths`` makes it independent of where the file is kept.
        """
        data = self.model_dump(mode="json", exclude_unset=True)
        if absolute_paths:
            data["model"] = self.model_location
            for service in data["services"]:
                if service["adapter"] is not None:
                    service["adapter"] = str(self.path(service["adapter"]))
            if data.get("auth", {}).get("keys_file") is not None:
                data["auth"]["keys_file"] = str(self.path(data["auth"]["keys_file"]))
        return data
