"""Read cluster.yaml: the whole file strictly, every error at once.

``serve run cluster.yaml`` hands ``app.main.build_app`` only the ``args`` of its application, so that these can be
checked alone (:func:`parse_args`). ``halo check``, ``make serve`` and the benchmarks read the file
(:func:`load_cluster`).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from app.args_checks import ArgsView, check_files, check_values
from app.args_schema import AppArgs
from app.machine_checks import check_machine
from app.problems import ABSENT, ConfigErrors, Problem, unknown_key, with_lines
from app.problems import Path as KeyPath
from app.schema_walk import section_model, sections_by_key, value_problems
from app.yaml_source import MAX_BYTES, YamlSource, placeholders, read_yaml
from deployments.durable_file import write_durably
from deployments.regular_file import FileRefusedError, read_regular

IMPORT_PATH = "app.main:build_app"
DEPLOYMENTS = ("gateway", "admission", "engine")
_COUNTED_IN_ARGS = {"gateway": "args.gateways", "engine": "args.replicas"}

__all__ = ["DEPLOYMENTS", "IMPORT_PATH", "AppArgs", "ClusterConfig", "ConfigErrors", "load_cluster", "parse_args"]


def parse_args(args: Mapping[str, Any], root: Path | None = None, *, files: bool = True) -> AppArgs:
    """Check the ``args`` of the application. Relative paths in it start at ``root``, by default where we run.

    With ``files`` off neither model, adapters, keys nor this machine are looked at. Raises :class:`ConfigErrors`.
    """
    parsed, problems = _parse(args, (root or Path.cwd()).absolute(), sections_by_key(AppArgs, "args"), files=files)
    problems += [*placeholders(args)]
    if problems or parsed is None:
        raise ConfigErrors(_one_per_fault(problems), "args")
    return parsed


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A checked cluster.yaml. ``data`` is the file as plain values, ``application`` the index of ours in it."""

    path: Path
    data: Mapping[str, Any]
    application: int
    args: AppArgs

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the server listens on."""
        options = self.data["http_options"]
        return str(options["host"]), int(options.get("port", 8000))

    def dump(self, *, absolute_paths: bool = False) -> dict[str, Any]:
        """The file as plain values; :func:`load_cluster` reads them back to an equal configuration."""
        data = deepcopy(dict(self.data))
        data["applications"][self.application]["args"] = self.args.dump(absolute_paths=absolute_paths)
        return data

    def derive(self, path: Path, args: Mapping[str, Any] | None = None, **options: Any) -> ClusterConfig:
        """Write a variant of this file to ``path`` and read it back: what benchmarks run instead of this one.

        ``args`` is laid over ours, section by section (lists are replaced); ``options`` go to ``http_options``.
        Paths become absolute. Raises :class:`ConfigErrors` when the variant is wrong, OSError when it cannot be
        written.
        """
        data = self.dump(absolute_paths=True)
        application = data["applications"][self.application]
        application["args"] = _overlaid(application["args"], args or {})
        data["http_options"] = {**data["http_options"], **options}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
        return load_cluster(path)


def load_cluster(path: Path, *, files: bool = True) -> ClusterConfig:
    """Read and check a whole Serve config file. Relative paths in it start at its directory.

    Raises :class:`ConfigErrors`, with line numbers, also when the file cannot be read.
    """
    try:
        raw = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise ConfigErrors([Problem((), f"cannot be read: {error.strerror}")], str(path)) from None
    except FileRefusedError as error:
        raise ConfigErrors([Problem((), str(error))], str(path)) from None
    source = read_yaml(raw, str(path))
    problems = [*source.problems, *placeholders(source.data)]
    if not isinstance(source.data, dict):
        problems.append(Problem((), "has to be a mapping, starting with keys like applications:"))
        raise ConfigErrors(with_lines(problems, source.lines), str(path))
    # Imported late: Ray's schema takes most of a second, and parse_args alone does not need it.
    from app.serve_schema import check_serve_sections  # noqa: PLC0415

    problems += check_serve_sections(source.data, _key_places())
    problems += _check_listening(source.data)
    index, found = _our_application(source.data)
    problems += found
    args = None
    if index is not None:
        args, found = _check_application(source, index, path.absolute().parent, files=files)
        problems += found
    if problems or args is None or index is None:
        raise ConfigErrors(with_lines(_one_per_fault(problems), source.lines), str(path))
    return ClusterConfig(path, source.data, index, args)


@cache
def _key_places() -> Mapping[str, tuple[str, ...]]:
    from ray.serve.schema import ServeDeploySchema  # noqa: PLC0415

    ours = sections_by_key(AppArgs, "applications[].args")
    rays = sections_by_key(ServeDeploySchema)
    return {key: (*ours.get(key, ()), *rays.get(key, ())) for key in [*ours, *rays]}


def _parse(
    args: Any, root: Path, places: Mapping[str, tuple[str, ...]], *, files: bool
) -> tuple[AppArgs | None, list[Problem]]:
    """``args`` and everything wrong with them, with paths below them."""
    if not isinstance(args, Mapping):
        return None, [Problem((), "has to be a section of keys and values", args)]
    parsed, problems = None, []
    try:
        parsed = AppArgs.model_validate(dict(args))
    except ValidationError as error:
        problems = [*_unknown_args(error, places), *value_problems(error, args)]
    bad = {problem.path for problem in [*problems, *placeholders(args)]}
    view = ArgsView(args, bad, root)
    check_values(view)
    if files:
        check_files(view)
        check_machine(view)
    problems += view.problems
    if parsed is not None and not problems:
        parsed.attach(root, view.reports, tuple(view.warnings))
    return parsed, problems


def _unknown_args(error: ValidationError, places: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    for item in error.errors(include_url=False):
        if item["type"] == "extra_forbidden":
            section = section_model(AppArgs, item["loc"][:-1])
            valid = section.model_fields if section is not None else {}
            yield unknown_key(item["loc"], item["input"], valid, places)


def _our_application(data: Mapping[str, Any]) -> tuple[int | None, list[Problem]]:
    """The index of the one application that is HALO's."""
    listed = data.get("applications")
    if not isinstance(listed, list):
        return None, []  # Ray's schema has reported it.
    paths = [item.get("import_path") if isinstance(item, Mapping) else None for item in listed]
    ours = [index for index, path in enumerate(paths) if path in (IMPORT_PATH, IMPORT_PATH.replace(":", "."))]
    if len(ours) == 1:
        return ours[0], []
    if not ours:
        place: KeyPath = ("applications", 0, "import_path") if len(listed) == 1 else ("applications",)
        value = paths[0] if len(listed) == 1 and paths[0] is not None else ABSENT
        # With one application it can only be ours, and its args are worth checking too.
        problem = Problem(place, f"does not name HALO's application; its import_path is {IMPORT_PATH}", value)
        return (0 if len(listed) == 1 and isinstance(listed[0], Mapping) else None), [problem]
    message = f"is a second application with import_path {IMPORT_PATH}; one file serves one base model"
    return ours[0], [Problem(("applications", index), message) for index in ours[1:]]


def _check_application(
    source: YamlSource, index: int, root: Path, *, files: bool
) -> tuple[AppArgs | None, list[Problem]]:
    prefix: KeyPath = ("applications", index)
    application = source.data["applications"][index]
    problems = list(_check_deployments(application.get("deployments"), (*prefix, "deployments")))
    if "args" not in application:
        return None, [*problems, Problem((*prefix, "args"), "is missing: it says what is served")]
    args, found = _parse(application["args"], root, _key_places(), files=files)
    for problem in found:
        moved = Problem((*prefix, "args", *problem.path), problem.message, problem.value, problem.hint)
        problems.append(moved)
    return args, problems


def _check_deployments(deployments: Any, path: KeyPath) -> Iterator[Problem]:
    """Overrides name deployments that exist, and leave to ``args`` what is set there."""
    for index, deployment in enumerate(deployments if isinstance(deployments, list) else []):
        name = deployment.get("name") if isinstance(deployment, Mapping) else None
        if not isinstance(name, str):
            continue
        if name not in DEPLOYMENTS:
            unknown = unknown_key((name,), None, DEPLOYMENTS, {})
            hint = (unknown.hint or "").replace("The keys here", "The deployments")
            yield Problem((*path, index, "name"), "is not a deployment of this application", name, hint)
        for key in ("num_replicas", "autoscaling_config"):
            if name == "admission" and deployment.get(key) not in (None, 1):
                yield Problem((*path, index, key), "cannot be set: admission is one actor, it orders all requests")
        if name in _COUNTED_IN_ARGS and isinstance(deployment.get("num_replicas"), int):
            message = f"is set in another place: write {_COUNTED_IN_ARGS[name]}"
            yield Problem((*path, index, "num_replicas"), message, deployment["num_replicas"])


def _check_listening(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Without API keys only this machine may reach the server; Ray's default is every interface."""
    options = data.get("http_options", {})
    if not isinstance(options, Mapping):
        return
    if "host" not in options:
        message = "is missing: Ray Serve would listen on all interfaces"
        yield Problem(("http_options", "host"), message, hint="Write host: 127.0.0.1, or 0.0.0.0 with auth.keys_file")
    elif isinstance(options["host"], str) and not _is_loopback(options["host"]) and not _has_keys(data):
        message = "opens the server to the network without API keys"
        hint = "Set args.auth.keys_file (see `halo keys add`), or write 127.0.0.1"
        yield Problem(("http_options", "host"), message, options["host"], hint)
    for key in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        file = options.get(key)
        if isinstance(file, str) and not os.path.isfile(file):  # noqa: PTH113 - Path.is_file raises for some texts
            yield Problem(("http_options", key), "is not a file", file)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _has_keys(data: Mapping[str, Any]) -> bool:
    try:
        return any(application["args"]["auth"]["keys_file"] for application in data["applications"])
    except (KeyError, TypeError):
        return False


def _one_per_fault(problems: list[Problem]) -> list[Problem]:
    """Drop what only repeats another: a placeholder is reported as that and nothing else, the same fault once."""
    held = {problem.path for problem in problems if "holds the placeholder" in problem.message}
    result: dict[tuple[KeyPath, str], Problem] = {}
    for problem in problems:
        if problem.path not in held or "holds the placeholder" in problem.message:
            result.setdefault((problem.path, problem.message), problem)
    return list(result.values())


def _overlaid(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        earlier = result.get(key)
        if isinstance(earlier, Mapping) and isinstance(value, Mapping):
            value = _overlaid(earlier, value)  # noqa: PLW2901
        result[key] = value
    return result
