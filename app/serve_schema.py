"""Check Ray Serve's own sections of cluster.yaml as strictly as ours.

Ray reads the file with pydantic models that ignore unknown keys, so that newer files work with older releases. For an
operator that means that ``http_option:`` silently leaves the server on all interfaces. Here the same models are
walked and every key they do not have is reported; nothing of Ray's schema is copied.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.runtime_env import RuntimeEnv
from ray.serve.schema import ServeDeploySchema

from app.problems import Path, Problem, unknown_key
from app.schema_walk import annotation_members, nested_model, value_problems

# Ray imports what these keys name as soon as the model is built. A check must not run anybody's code.
_IMPORT_PATH_KEYS = frozenset({"policy", "policy_function", "request_router_class", "actor_class"})

_PORTS = range(1, 65536)
_ROUTE_PREFIX = re.compile(r"/|(/[^/{}\s]+)+")


def check_serve_sections(data: Mapping[str, Any], places: Mapping[str, tuple[str, ...]]) -> list[Problem]:
    """Everything wrong with the file outside ``applications[].args``: unknown keys, wrong values, ports.

    ``places`` names for every key of the whole format the sections that have it.
    """
    walk = _Walk(places)
    walk.section(ServeDeploySchema, data, ())
    found = list(_ray_problems(ServeDeploySchema, walk.repaired(data), ()))
    masked = [problem.path for problem in found if problem.path in walk.sections]
    for path, (model, section) in walk.sections.items():
        # A rule about a whole section hides what is wrong with the single values in it.
        if any(path[: len(hidden)] == hidden for hidden in masked if hidden):
            found.extend(_values_alone(model, section, path))
    broken = [problem.path for problem in walk.problems]
    seen: set[Path] = set()
    for problem in found:
        if problem.path not in seen and not any(problem.path[: len(path)] == path for path in broken):
            walk.problems.append(problem)
            seen.add(problem.path)
    return [*walk.problems, *_unchecked_by_ray(data)]


@dataclass(slots=True)
class _Walk:
    """One pass over the file beside Ray's models: unknown keys, and values that are not sections or lists."""

    places: Mapping[str, tuple[str, ...]]
    problems: list[Problem] = field(default_factory=list)
    sections: dict[Path, tuple[type[BaseModel], Mapping[str, Any]]] = field(default_factory=dict)
    _replacements: dict[Path, Any] = field(default_factory=dict)

    def section(self, model: type[BaseModel], data: Any, path: Path) -> None:
        if not isinstance(data, Mapping):
            self.problems.append(Problem(path, "has to be a section of keys and values", data))
            self._replacements[path] = {}
            return
        self.sections[path] = (model, data)
        for key, value in data.items():
            here = (*path, key)
            info = model.model_fields.get(key)
            if info is None:
                self.problems.append(unknown_key(here, value, model.model_fields, self.places))
            elif value is not None:
                self._known(info.annotation, value, here)

    def repaired(self, data: Any, path: Path = ()) -> Any:
        """The data in the shape Ray's validators expect; they trip over a number where they expect a section."""
        if path in self._replacements:
            return self._replacements[path]
        if isinstance(data, Mapping):
            return {key: self.repaired(value, (*path, key)) for key, value in data.items()}
        if isinstance(data, list):
            return [self.repaired(item, (*path, index)) for index, item in enumerate(data)]
        return data

    def _known(self, annotation: Any, value: Any, path: Path) -> None:
        if path[-1] == "runtime_env":
            self.problems.extend(_unknown_runtime_env_keys(value, path))
        nested, in_list = nested_model(annotation)
        if nested is None:
            return
        if not in_list:
            self.section(nested, value, path)
            if dict in annotation_members(annotation) and isinstance(value, Mapping):
                # Ray's type is "a dict or this model": a file's dict is taken as it is and fails on deployment.
                self.problems.extend(_ray_problems(nested, value, path))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.section(nested, item, (*path, index))
        else:
            self.problems.append(Problem(path, "has to be a list", value))
            self._replacements[path] = []


def _ray_problems(model: type[BaseModel], data: Any, path: Path) -> Iterator[Problem]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.model_validate(_without_import_paths(data))
    except ValidationError as error:
        yield from (p for p in value_problems(error, data, path) if not _IMPORT_PATH_KEYS.intersection(p.path[-1:]))
    except Exception as error:  # A validator of Ray's met a type that it did not expect.
        yield Problem(path, f"is refused by Ray Serve: {error}")


def _values_alone(model: type[BaseModel], section: Mapping[str, Any], path: Path) -> Iterator[Problem]:
    """Check each plain value of a section as if it were the only one."""
    for key, value in section.items():
        info = model.model_fields.get(key)
        if info is not None and nested_model(info.annotation)[0] is None:
            here = (*path, key)
            alone = _ray_problems(model, {key: value}, path)
            yield from (problem for problem in alone if problem.path[: len(here)] == here)


def _unknown_runtime_env_keys(data: Any, path: Path) -> Iterator[Problem]:
    if isinstance(data, Mapping):
        for key in data.keys() - RuntimeEnv.known_fields:
            yield unknown_key((*path, str(key)), data[key], RuntimeEnv.known_fields, {})


def _unchecked_by_ray(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Values that Ray takes as they come and that fail, or mislead, only when the server starts."""
    for section in ("http_options", "grpc_options"):
        options = data.get(section)
        port = options.get("port") if isinstance(options, Mapping) else None
        if isinstance(port, int) and not isinstance(port, bool) and port not in _PORTS:
            yield Problem((section, "port"), f"has to be between {_PORTS[0]} and {_PORTS[-1]}", port)
    applications = data.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else []):
        prefix = application.get("route_prefix") if isinstance(application, Mapping) else None
        if isinstance(prefix, str) and not _ROUTE_PREFIX.fullmatch(prefix):
            message = "has to start with / and, unless it is / alone, not to end with one"
            yield Problem(("applications", index, "route_prefix"), message, prefix)


def _without_import_paths(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _without_import_paths(value) for key, value in data.items() if key not in _IMPORT_PATH_KEYS}
    if isinstance(data, list):
        return [_without_import_paths(item) for item in data]
    return data
