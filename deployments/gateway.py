"""The gateway: OpenAI's HTTP surface in front, admission and engine replicas behind, tokens released in between.

A plain class: its ports are injected, so it runs without Ray in tests. http_app.py puts it behind HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from deployments.background import BackgroundTasks
from deployments.clock import Clock, monotonic_us
from deployments.exchange import Call, Exchange, Ports
from deployments.gateway_ports import GatewayMetrics, KeyHolder, Keys
from deployments.key_rates import KeyRates
from deployments.openai_errors import ApiError
from deployments.pacer import Pacer
from deployments.protocol import (
    AdmissionPort,
    Endpoint,
    EnginePool,
    GatewayReport,
    Promise,
    ReplicaAddress,
    ReplicaUnavailableError,
)
from deployments.replica_streams import ReplicaStreams
from deployments.settings import GatewaySettings, ServiceSettings

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
REPORT_TIMEOUT_S = 5.0
STOP_GRACE_S = 5.0


class Gateway:
    """One gateway process. ``start`` before the first request, ``stop`` after the last."""

    def __init__(
        self,
        settings: GatewaySettings,
        engines: EnginePool,
        admission: AdmissionPort,
        metrics: GatewayMetrics,
        *,
        keys: Keys | None = None,
        clock: Clock = monotonic_us,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.gateway_id = uuid.uuid4().hex
        self._engines = engines
        self._admission = admission
        self._metrics = metrics
        self._keys = keys
        self._rates = KeyRates(clock)
        self._exchanges: dict[str, Exchange] = {}
        self._replicas = 0
        self._background = BackgroundTasks()
        self._pacer = Pacer(settings.pacer_tick_us, clock)
        self._streams = ReplicaStreams(engines, self.gateway_id, self._pacer, self._lost)
        self._reports: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to report to admission."""
        self._reports = self._background.start(self._report_for_ever(), "reports to admission")

    async def stop(self) -> None:
        """Close the streams, deliver what is owed to admission, end every task."""
        if self._reports is not None:
            self._reports.cancel()
        await self._streams.stop()
        await self._background.stop(STOP_GRACE_S)
        self._pacer.close()

    @property
    def ready(self) -> bool:
        """Whether a request could be granted a replica."""
        return self._replicas > 0

    @property
    def services(self) -> list[ServiceSettings]:
        """Every service that can be asked for, the base model last."""
        return [*self.settings.services, self.settings.base_promise]

    def authenticate(self, authorization: str | None) -> KeyHolder | None:
        """The key's holder; None on a server without keys. ApiError 401 for a missing or unknown key."""
        if self._keys is None:
            return None
        holder = self._keys.authenticate(authorization)
        if holder is None:
            raise ApiError(
                401,
                "A valid API key is needed: Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return holder

    def admit(self, holder: KeyHolder | None) -> None:
        """Count a request against its key's rate. ApiError 429 when the key has used it up."""
        wait_s = None if holder is None else self._rates.wait_s(holder)
        if wait_s is not None:
            raise ApiError(
                429,
                f"This API key has sent too many requests; try again in {wait_s} s.",
                code="rate_limit_exceeded",
                headers={"retry-after": str(wait_s), "x-halo-shed-reason": "key_rate"},
            )

    def call(self, endpoint: Endpoint, body: dict[str, Any], holder: KeyHolder | None, arrival_us: int) -> Call:
        """The call a request body asks for. ApiError when it names no service, or none that its key may use."""
        service = self.service_for(body.get("model"), holder)
        promise = Promise(service.ttft_us, service.tbt_us, service.release, service.hold_max_us)
        return Call(uuid.uuid4().hex, endpoint, service.name, promise, body, arrival_us)

    def service_for(self, model: Any, holder: KeyHolder | None) -> ServiceSettings:
        """The service called ``model``. ApiError 400, 403 or 404."""
        if model is None:
            raise ApiError(400, "The request names no model.", param="model", code="missing_required_parameter")
        if not isinstance(model, str):
            raise ApiError(400, "model must be a string.", param="model", code="invalid_type")
        service = self.settings.service(model)
        if service is None:
            raise ApiError(
                404, f"The model {model[:200]!r} does not exist; GET /v1/models lists those that do.",
                param="model", code="model_not_found",
            )  # fmt: skip
        if holder is not None and not holder.may_use(service.name):
            raise ApiError(
                403, f"This API key may not use the model {service.name!r}.", param="model", code="model_not_allowed"
            )
        return service

    def exchange(self, call: Call) -> Exchange:
        """The exchange that answers a call."""
        ports = Ports(
            self.gateway_id,
            self.settings,
            self._engines,
            self._admission,
            self._streams,
            self._metrics,
            self._background,
            self.clock,
            self._register,
            self._unregister,
        )
        return Exchange(ports, call)

    async def slo(self) -> dict[str, Any]:
        """The cluster's SLO table. ApiError 503 when admission does not answer."""
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                return await self._admission.slo()
        except (ReplicaUnavailableError, TimeoutError):
            raise ApiError(503, "Admission does not answer.", code="no_admission") from None

    async def report(self) -> None:
        """Tell admission what this gateway holds, and learn which replicas live."""
        routable = self._engines.routable()
        open_ids = {address.replica_id for address in self._streams.addresses()}
        unroutable = frozenset() if routable is None else open_ids - routable
        held = tuple(held for exchange in self._exchanges.values() if (held := exchange.held) is not None)
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                state = await self._admission.sync(GatewayReport(self.gateway_id, held, tuple(sorted(unroutable))))
        except (ReplicaUnavailableError, TimeoutError) as error:
            logger.warning("admission does not answer: %s", error or type(error).__name__)
            self._replicas = 0
            return
        self._replicas = state.replicas
        self._rates.gateways = state.gateways
        for address in state.silent:
            self._streams.lose(address)
        self._streams.close_idle(lambda address: address.replica_id not in unroutable)
        self._metrics.held(self._pacer.held)

    async def _report_for_ever(self) -> None:
        while True:
            try:
                await self.report()
            except Exception:
                logger.exception("the report to admission failed")
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _lost(self, address: ReplicaAddress) -> None:
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await self._admission.report_lost(address)
        except (ReplicaUnavailableError, TimeoutError) as error:
            logger.warning("admission was not told of a lost replica: %s", error or type(error).__name__)

    def _register(self, exchange: Exchange) -> None:
        self._exchanges[exchange.call.request_id] = exchange

    def _unregister(self, exchange: Exchange) -> None:
        self._exchanges.pop(exchange.call.request_id, None)
