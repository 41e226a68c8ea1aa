"""Whatever is written into the file, the answer is a configuration or a list of errors."""

from __future__ import annotations

import contextlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.config import ConfigErrors, load_cluster
from app.problems import Problem
from app.yaml_source import read_yaml
from tests.fakes.checkpoints import write_adapter, write_model

SHIPPED = Path(__file__).parents[3] / "cluster.yaml"

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["", "5m", "2s", "${X}", "off", "/", "..", "a" * 300, "\x00", "auto", "app.main:build_app"]),
    st.dates(),
    st.binary(max_size=4),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "ttft", "policy", "port", "args", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in children:
        found += places(value, (*path, key))
    return found


def problems(file: Path) -> tuple[Problem, ...]:
    try:
        load_cluster(file)
    except ConfigErrors as errors:
        return errors.problems
    return ()


def base_data() -> dict[str, Any]:
    """The shipped file with overrides of every deployment added, so that Ray's inner sections are reached too."""
    data: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())
    data["applications"][0]["deployments"] = [
        {
            "name": "engine",
            "max_ongoing_requests": 5,
            "num_replicas": None,
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 2, "policy": {"policy_kwargs": {}}},
            "ray_actor_options": {"num_cpus": 1, "runtime_env": {"env_vars": {}}, "label_selector": {"a": "b"}},
            "request_router_config": {"initial_backoff_s": 1},
            "gang_scheduling_config": {"gang_size": 1},
            "logging_config": {"log_level": "INFO"},
        },
        {"name": "gateway", "placement_group_bundles": [{"CPU": 1}], "deployment_actors": []},
    ]
    data["applications"][0]["runtime_env"] = {"py_modules": []}
    return data


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    write_model(root / ".cache/models/smollm2-135m-instruct", max_position_embeddings=8192)
    for service in base_data()["applications"][0]["args"]["services"]:
        write_adapter(root / service["adapter"])
    return root


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.sampled_from(places(base_data())), values), min_size=1, max_size=3))
def test_any_value_anywhere(project: Path, changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    """Values of any kind at any place give ConfigErrors with readable lines, never another exception."""
    data = deepcopy(base_data())
    for path, value in changes:
        section: Any = data
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for part in path[:-1]:
                section = section[part]
            section[path[-1]] = value
    file = project / "cluster.yaml"
    file.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    for problem in problems(file):
        assert str(problem)
        assert "\n" not in str(problem)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet="a:-[]{}&*!|>'\"%\n\t #<1.~?,", max_size=60).map(str.encode))
def test_any_bytes(raw: bytes) -> None:
    """Bytes of any kind are read or refused."""
    with contextlib.suppress(ConfigErrors):
        read_yaml(raw, "file")
