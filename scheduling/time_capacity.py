"""Capacity in time: HALO's capacity units (section 5.4) priced by the step-time model instead of a fixed batch."""

from __future__ import annotations

from collections import Counter
from math import ceil
from operator import attrgetter

from scheduling.latency_model import StepTimeModel
from scheduling.policy import View
from scheduling.request import RequestState

USE_PCT = 90

_tbt = attrgetter("tbt_us")


class TimeCapacity:
    """Whether the engine can run all admitted requests at their TBT.

    In one period, the strictest TBT, a request with k times that target decodes 1/k times on average. The decodes of
    one period, with their contexts, must take no longer than :data:`USE_PCT` of the period on average: what counts is
    how much work there is, and how long a slow step takes is the step limit's concern. Sums are whole thousandths of a
    decode and whole context tokens, so that the order of requests does not matter.
    """

    def __init__(self, model: StepTimeModel, view: View, tbt_min_us: int) -> None:
        self._model = model
        one_us = ceil(model.decode_mean_us(1, 0) * 100 / USE_PCT)
        # A target below the shortest step cannot be kept, so it must not decide what others may have.
        self._period_us = tbt_min_us if tbt_min_us > one_us else 2 * one_us
        contexts: dict[int, int] = {}
        for state in view.running:
            computed, prompt = state.computed_tokens, state.prompt_tokens
            contexts[state.tbt_us] = contexts.get(state.tbt_us, 0) + (computed if computed > prompt else prompt)
        self._milli = 0
        self._context = 0
        for tbt_us, requests in Counter(map(_tbt, view.running)).items():
            self._add(tbt_us, requests, contexts[tbt_us])

    def add(self, state: RequestState) -> None:
        """Count a request as admitted."""
        self._add(state.tbt_us, 1, state.prompt_tokens)

    def fits(self, state: RequestState) -> bool:
        """Whether a request can be admitted; always into an empty engine."""
        milli, context = self._share(state.tbt_us, 1, state.prompt_tokens)
        places = -(-(self._milli + milli) // 1000)
        return (
            not self._milli
            or self._model.decode_mean_us(places, self._context + context) <= self._period_us * USE_PCT // 100
        )

    def _add(self, tbt_us: int, requests: int, context: int) -> None:
        milli, tokens = self._share(tbt_us, requests, context)
        self._milli += milli
        self._context += tokens

    def _share(self, tbt_us: int, requests: int, context: int) -> tuple[int, int]:
        tbt_us = max(tbt_us, self._period_us)
        return 1000 * requests * self._period_us // tbt_us, context * self._period_us // tbt_us
