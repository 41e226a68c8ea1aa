"""The step-time model: accurate on unseen mixes, careful with tails, never finished learning."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.latency_model import StepTimeModel, pairs_of
from scheduling.nnls import solve_nnls
from scheduling.policy import StepRecord
from scheduling.sliding_quantile import SlidingQuantile
from scheduling.step_fit import CELLS, RATIOS


def true_us(decodes: int, context: int, tokens: int, prefix: int) -> float:
    """A CPU-like engine: 50 ms, 1.2 ms per decode, and a chunk price with a knee at 64 tokens."""
    chunk = 900 * min(tokens, 64) + 1_900 * max(0, tokens - 64) + 3 * prefix + pairs_of(tokens, prefix) / 5
    return 50_000 + 1_200 * decodes + 2 * context + (chunk if tokens else 0)


def record(decodes: int, context: int, tokens: int, prefix: int, duration_us: float, **more) -> StepRecord:
    return StepRecord(
        round(duration_us),
        decodes,
        tokens,
        (tokens,) if tokens else (),
        context,
        prefix if tokens else 0,
        chunk_prefixes=(prefix,) if tokens else (),
        **more,
    )


def shape(rng: random.Random, most_decodes: int = 32, most_tokens: int = 256) -> tuple[int, int, int, int]:
    decodes = rng.randrange(most_decodes + 1)
    tokens = 0 if decodes and rng.random() < 0.5 else rng.randrange(1, most_tokens + 1)
    prefix = rng.choice((0, rng.randrange(800))) if tokens else 0
    return decodes, decodes * rng.randrange(20, 600), tokens, prefix


def teach(model: StepTimeModel, rng: random.Random, steps: int, *, factor: float = 1.0, **limits) -> None:
    for _ in range(steps):
        found = shape(rng, **limits)
        model.observe(record(*found, factor * true_us(*found) * rng.lognormvariate(0, 0.04)))


def predict(model: StepTimeModel, found: tuple[int, int, int, int]) -> int | None:
    decodes, context, tokens, prefix = found
    return model.predict_us(decodes, context, [(tokens, prefix)] if tokens else ())


def mape(model: StepTimeModel, rng: random.Random, *, factor: float = 1.0, **limits) -> float:
    errors = []
    for _ in range(400):
        found = shape(rng, **limits)
        errors.append(abs(predict(model, found) / (factor * true_us(*found)) - 1))
    return sum(errors) / len(errors)


def test_a_cold_model_predicts_nothing():
    """Without steps of a kind there is no number that could be mistaken for a prediction."""
    model = StepTimeModel()
    assert not model.warm
    assert model.predict_us(4, 100, [(32, 0)]) is None
    for decodes in range(1, 40):
        model.observe(record(decodes, 100 * decodes, 0, 0, 50_000))
    assert model.predict_us(4, 400) is not None
    assert model.predict_us(4, 400, [(32, 0)]) is None
    assert not model.warm


@pytest.mark.parametrize("seed", range(3))
def test_unseen_mixes_are_within_five_percent_and_the_bound_covers(seed):
    """Learned on a narrow mix, the model prices a wider one within 5 % on average; at least 97 % of noisy steps stay
    within the 99 % bound."""
    rng = random.Random(seed)
    model = StepTimeModel()
    teach(model, rng, 1_500, most_decodes=24, most_tokens=160)
    assert mape(model, rng) < 0.05
    covered = 0
    for _ in range(2_000):
        found = decodes, context, tokens, prefix = shape(rng)
        duration_us = true_us(*found) * rng.lognormvariate(0, 0.04)
        covered += duration_us <= model.bound_us(decodes, context, [(tokens, prefix)] if tokens else ())
        model.observe(record(*found, duration_us))
    assert covered / 2_000 >= 0.97


def test_prefix_and_context_are_priced():
    """A chunk behind a long prefix and decodes with long contexts cost what they cost, not what short ones do."""
    model = StepTimeModel()
    teach(model, random.Random(5), 2_000)
    assert model.predict_us(8, 800, [(128, 700)]) == pytest.approx(true_us(8, 800, 128, 700), rel=0.05)
    assert model.predict_us(8, 800, [(128, 0)]) == pytest.approx(true_us(8, 800, 128, 0), rel=0.05)
    assert model.predict_us(8, 4_000) == pytest.approx(true_us(8, 4_000, 0, 0), rel=0.05)


@given(
    seed=st.integers(0, 10),
    small=st.tuples(st.integers(0, 64), st.integers(0, 20_000), st.integers(1, 300), st.integers(0, 900)),
    more=st.tuples(st.integers(0, 64), st.integers(0, 20_000), st.integers(0, 300), st.integers(0, 900)),
)
@settings(max_examples=60, deadline=None)
def test_more_work_never_costs_less(seed, small, more):
    """No coefficient is negative, so adding work to a step never lowers the prediction, far from the data too."""
    model = StepTimeModel()
    teach(model, random.Random(seed), 120)
    d, k, n, p = small
    bigger = model.predict_us(d + more[0], k + more[1], [(n + more[2], p + more[3])])
    assert bigger >= model.predict_us(d, k, [(n, p)]) > 0


def test_learning_does_not_stop_and_does_not_grow():
    """Twice the steps that fill its memory go by, and the model follows a machine that became 1.5 times slower."""
    rng = random.Random(11)
    model = StepTimeModel()
    for _ in range(2):
        teach(model, rng, 10_000)
        fit = model.snapshot()["mixed"]["False"]
        assert (len(fit["cells"]), len(fit["ratios"])) == (CELLS, RATIOS)
    assert mape(model, rng) < 0.02
    teach(model, rng, 6_000, factor=1.5)
    assert mape(model, rng, factor=1.5) < 0.05


def test_shapes_not_seen_for_long_are_not_forgotten():
    """A night of small decode steps does not cost what was learned of large batches and of prompts."""
    rng = random.Random(3)
    model = StepTimeModel()
    teach(model, rng, 3_000)
    teach(model, rng, 20_000, most_decodes=3, most_tokens=1)
    assert mape(model, rng) < 0.05


def test_outliers_widen_the_bound_but_not_the_mean():
    """One step in fifty takes four times as long: the prediction moves by less than 5 %, the bound covers 97 %."""
    rng = random.Random(4)
    model = StepTimeModel()
    covered = 0
    for index in range(6_000):
        found = decodes, context, tokens, prefix = shape(rng)
        duration_us = true_us(*found) * rng.lognormvariate(0, 0.03) * (4 if rng.random() < 0.02 else 1)
        if index >= 3_000:
            covered += duration_us <= model.bound_us(decodes, context, [(tokens, prefix)] if tokens else ())
        model.observe(record(*found, duration_us))
    assert mape(model, rng) < 0.05
    assert covered / 3_000 >= 0.97


def test_graph_and_eager_steps_are_learned_apart():
    """Steps replayed from a CUDA graph and eager ones have coefficients of their own."""
    rng = random.Random(6)
    model = StepTimeModel()
    for _ in range(1_000):
        found = shape(rng)
        model.observe(record(*found, true_us(*found), graph=True))
        model.observe(record(*found, 3 * true_us(*found), graph=False))
    for graph, factor in ((True, 1), (False, 3)):
        assert model.predict_us(8, 800, [(64, 0)], graph=graph) == pytest.approx(
            factor * true_us(8, 800, 64, 0), rel=0.05
        )
        assert model.predict_us(8, 800, graph=graph) == pytest.approx(factor * true_us(8, 800, 0, 0), rel=0.05)
    assert model.predict_us(8, 800) == model.predict_us(8, 800, graph=False), "the mode of the latest step"


def test_fast_paths_agree_with_the_bound():
    """The bounds used in inner loops are the same numbers."""
    model = StepTimeModel()
    teach(model, random.Random(8), 1_000)
    assert model.decode_bound_us(9, 900) == pytest.approx(model.bound_us(9, 900), abs=1.5)
    fast_us = model.mixed_bound_us(9, 900, 100 + 28, pairs_of(100, 0) + pairs_of(28, 60), 60)
    assert fast_us == pytest.approx(model.bound_us(9, 900, [(100, 0), (28, 60)]), abs=1.5)


def test_a_restart_starts_warm():
    """A snapshot survives JSON and gives a new model the same predictions."""
    rng = random.Random(9)
    model, restored = StepTimeModel(), StepTimeModel()
    teach(model, rng, 997)
    restored.restore(json.loads(json.dumps(model.snapshot())))
    assert restored.warm
    for _ in range(50):
        found = shape(rng)
        assert predict(restored, found) == pytest.approx(predict(model, found), rel=0.03)
    teach(restored, rng, 500, factor=2)


@pytest.mark.parametrize("broken", [{}, {"version": 2}, {"version": 1, "decode": 3}, "cells"])
def test_a_snapshot_of_another_form_is_refused_and_changes_nothing(broken):
    """What is not a snapshot raises ValueError and leaves the model as it was."""
    model = StepTimeModel()
    teach(model, random.Random(10), 500)
    before = model.snapshot()
    with pytest.raises(ValueError, match="snapshot"):
        model.restore(broken)
    assert model.snapshot() == before


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 40), columns=st.integers(1, 12), twins=st.booleans())
@settings(max_examples=150, deadline=None)
def test_nnls_meets_the_optimality_conditions(seed, rows, columns, twins):
    """x >= 0, no descent direction is left, columns that are empty or twice there included."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rows, columns)) * 10.0 ** rng.integers(-2, 6, size=columns)
    if twins and columns > 2:
        matrix[:, 1] = matrix[:, 0]
        matrix[:, 2] = 0.0
    target = rng.normal(size=rows)
    solution = solve_nnls(matrix.T @ matrix, matrix.T @ target)
    assert (solution >= 0).all()
    scale = np.linalg.norm(matrix, axis=0) + 1e-12
    slope = matrix.T @ (target - matrix @ solution) / scale
    assert slope.max() < 1e-5
    assert abs(slope[solution * scale > 1e-6]).max(initial=0.0) < 1e-5


@given(values=st.lists(st.floats(0, 10), min_size=1, max_size=60), window=st.integers(1, 20))
def test_sliding_quantile_is_that_of_the_newest(values, window):
    """Only the newest values count, in any order of magnitude, duplicates included."""
    sliding = SlidingQuantile(0.8, window)
    sliding.extend(values)
    newest = values[-window:]
    assert sliding.newest() == newest
    assert sum(value <= sliding.value() for value in newest) >= 0.8 * len(newest)
    assert sliding.value() in newest
