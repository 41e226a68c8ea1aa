"""The admission queue is exactly "earliest deadline first", whatever is pushed, taken and removed in between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.admission_queue import AdmissionQueue, QueuedRequest

requests = st.builds(
    QueuedRequest,
    request_id=st.text("abcdef", min_size=1, max_size=3),
    arrival_us=st.integers(0, 9),
    deadline_us=st.integers(0, 9),
)
operations = st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), requests))


@given(operations)
def test_like_a_sorted_list(steps: list[tuple[str, QueuedRequest]]) -> None:
    """Head, order, length, membership and rank agree with a plain list that is sorted anew each time."""
    queue = AdmissionQueue()
    model: dict[str, QueuedRequest] = {}
    for operation, request in steps:
        if operation == "push" and request.request_id not in model:
            queue.push(request)
            model[request.request_id] = request
        elif operation == "pop" and model:
            first = min(model.values(), key=lambda waiting: waiting.edf_key)
            assert queue.pop() == first
            del model[first.request_id]
        elif operation == "remove":
            assert queue.remove(request.request_id) == model.pop(request.request_id, None)
        expected = sorted(model.values(), key=lambda waiting: waiting.edf_key)
        assert list(queue) == expected
        assert len(queue) == len(expected)
        assert queue.head() == (expected[0] if expected else None)
        for deadline_us in range(-1, 11):
            assert queue.ahead_of(deadline_us) == sum(waiting.deadline_us <= deadline_us for waiting in expected)


@given(st.lists(requests, unique_by=lambda request: request.request_id), st.randoms(use_true_random=False))
def test_order_does_not_depend_on_insertion(waiting: list[QueuedRequest], random) -> None:
    """The same requests leave in the same order, however they came."""
    orders = []
    for _ in range(2):
        queue = AdmissionQueue()
        random.shuffle(waiting)
        for request in waiting:
            queue.push(request)
        orders.append([queue.pop() for _ in waiting])
    assert orders[0] == orders[1]


def test_an_id_waits_once() -> None:
    """A second push of a waiting id is refused and changes nothing."""
    queue = AdmissionQueue()
    queue.push(QueuedRequest("a", 0, 5))
    with pytest.raises(ValueError, match="already waits"):
        queue.push(QueuedRequest("a", 0, 1))
    assert list(queue) == [QueuedRequest("a", 0, 5)]
    with pytest.raises(IndexError):
        AdmissionQueue().pop()
