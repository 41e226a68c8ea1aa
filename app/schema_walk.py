"""What a pydantic model says about the shape of a file: its sections, their keys, and pydantic's errors as problems."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from app.problems import ABSENT, Path, Problem

_MESSAGES = {
    "missing": "is missing",
    "model_type": "has to be a section of keys and values",
    "dict_type": "has to be a section of keys and values",
    "tuple_type": "has to be a list",
    "list_type": "has to be a list",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "int_type": "has to be a whole number",
    "int_from_float": "has to be a whole number",
    "float_type": "has to be a number",
    "finite_number": "has to be a finite number",
    "bool_type": "has to be true or false",
    "string_type": "has to be text",
    "invalid_key": "has to have text as its key",
}
_QUOTE_IT = "YAML reads a bare yes, no, on or off as true or false; put it in quotes"


def nested_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The pydantic model inside an annotation, and whether it stands in a list."""
    members = annotation_members(annotation)
    models = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
    return (models[0] if models else None), list in members or tuple in members


def annotation_members(annotation: Any) -> list[Any]:
    """An annotation taken apart, unions and lists alike: ``Optional[List[Union[Dict, M]]]`` has list, dict and M."""
    origin = typing.get_origin(annotation)
    if origin is dict:
        return [dict]
    inner = [part for argument in typing.get_args(annotation) for part in annotation_members(argument)]
    return [origin or annotation, *inner]


def sections_by_key(model: type[BaseModel], path: str = "") -> dict[str, tuple[str, ...]]:
    """For every key of a model and of the models inside it, the sections that have it, as ``applications[].args``."""
    places: dict[str, list[str]] = {}

    def visit(section: type[BaseModel], where: str) -> None:
        for name, info in section.model_fields.items():
            places.setdefault(name, []).append(where or "the top level")
            nested, in_list = nested_model(info.annotation)
            if nested is not None:
                visit(nested, f"{where}.{name}".lstrip(".") + ("[]" if in_list else ""))

    visit(model, path)
    return {key: tuple(sections) for key, sections in places.items()}


def section_model(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model of the section at ``path`` below ``model``, None where there is no section."""
    found: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, str) and found is not None:
            info = found.model_fields.get(part)
            found = nested_model(info.annotation)[0] if info is not None else None
    return found


def value_problems(error: ValidationError, data: Any, prefix: Path = ()) -> list[Problem]:
    """Pydantic's findings as problems, one per place; the branches of a union become one message.

    Unknown keys (``extra_forbidden``) are left out: they want a hint, see :func:`app.problems.unknown_key`.
    """
    found: dict[Path, Problem] = {}
    for item in error.errors(include_url=False):
        kind = item["type"]
        if kind == "extra_forbidden":
            continue
        path, value = _place_in_data(data, item["loc"], missing=kind == "missing")
        message = _MESSAGES.get(kind) or _sentence(item["msg"])
        if kind == "value_error" and isinstance(value, Mapping):
            message = f"is refused: {item['msg'].removeprefix('Value error, ')}"
        hint = _QUOTE_IT if kind == "string_type" and isinstance(value, bool) else None
        earlier = found.get((*prefix, *path))
        if earlier is None:
            shown = ABSENT if kind == "missing" or isinstance(value, Mapping | list) else value
            found[*prefix, *path] = Problem((*prefix, *path), message, shown, hint)
        elif message not in earlier.message:
            joined = f"{earlier.message}, or {message.removeprefix('has to be ')}"
            found[*prefix, *path] = Problem(earlier.path, joined, earlier.value, earlier.hint)
    return list(found.values())


def _place_in_data(data: Any, location: tuple[str | int, ...], *, missing: bool) -> tuple[Path, Any]:
    """Follow a pydantic location as far as it names real keys; the rest of it are names of union branches."""
    path: list[str | int] = []
    for part in location:
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if in_list or (isinstance(data, Mapping) and part in data):
            data = data[part]
        elif missing and part == location[-1]:
            return (*path, part), ABSENT
        else:
            break
        path.append(part)
    return tuple(path), data


def _sentence(message: str) -> str:
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".")
    if message.startswith("Input should be"):
        return "has to be" + message.removeprefix("Input should be")
    return message[:1].lower() + message[1:] if message[:2].istitle() else message
