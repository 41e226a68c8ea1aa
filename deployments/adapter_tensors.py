"""Read the header of a LoRA safetensors file: which tensors there are, in which shapes. No torch, no full load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

_PREFIX = "base_model.model."
_PAIR = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_EMBEDDING_PAIR = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<half>[AB])")
_FULL = re.compile(r".*(embed_tokens|lm_head)(\.base_layer)?\.(weight|bias)|.*\.(score|classifier)\.(weight|bias)")

# Bit patterns whose set exponent means infinity or NaN, by the format's own type names.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
_CHUNK_VALUES = 4 * 1024 * 1024


class TensorFileError(ValueError):
    """A file that is not a whole safetensors file; the message goes on after the file's name."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A LoRA pair of one module: A is (rank, inputs), B is (outputs, rank_b); the ranks should be equal."""

    inputs: int
    outputs: int
    rank: int
    rank_b: int

    @property
    def parameters(self) -> int:
        """Trained numbers in the pair."""
        return self.rank * self.inputs + self.outputs * self.rank_b


@dataclass(slots=True)
class AdapterTensors:
    """The tensors of an adapter, sorted by what they are.

    ``pairs`` by the module's name in the base model; ``full_weights`` are whole layers by tensor name, with their
    shapes; ``half_pairs``, ``magnitudes`` (DoRA), ``wrong_dtypes``, ``repeated`` and ``unknown`` are names.
    """

    pairs: dict[str, Weight] = field(default_factory=dict)
    half_pairs: list[str] = field(default_factory=list)
    full_weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    magnitudes: list[str] = field(default_factory=list)
    wrong_dtypes: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def read_tensors(path: Path) -> AdapterTensors:
    """Sort the tensors of a file. Raises :class:`TensorFileError`, also for a truncated file."""
    result = AdapterTensors()
    halves: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, dtype, shape in _headers(path):
        bare = name.removeprefix(_PREFIX)
        pair = _PAIR.fullmatch(bare) or _EMBEDDING_PAIR.fullmatch(bare)
        if pair is not None and len(shape) == 2:
            known = halves.setdefault(pair["module"], {})
            if pair["half"] in known:
                result.repeated.append(name)
            known[pair["half"]] = shape
        elif "lora_magnitude_vector" in bare:
            result.magnitudes.append(name)
        elif _FULL.fullmatch(bare) and shape:
            result.full_weights[name] = shape
        else:
            result.unknown.append(name)
        if dtype not in _EXPONENTS:
            result.wrong_dtypes.append(f"{name} ({dtype})")
    for module, found in halves.items():
        if found.keys() == {"A", "B"}:
            (rank, inputs), (outputs, rank_b) = found["A"], found["B"]
            result.pairs[module] = Weight(inputs, outputs, rank, rank_b)
        else:
            result.half_pairs.append(module)
    return result


def first_non_finite(path: Path) -> str | None:
    """The name of a tensor that holds an infinity or NaN, None when there is none. The file has to be whole."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in _EXPONENTS:
            continue
        code, exponent = _EXPONENTS[entry["dtype"]]
        integer = np.dtype(code)
        start, end = entry["data_offsets"]
        offset, count = 8 + header_bytes + start, (end - start) // integer.itemsize
        for first in range(0, count, _CHUNK_VALUES):
            length = min(_CHUNK_VALUES, count - first)
            values = np.fromfile(path, integer, length, offset=offset + first * integer.itemsize)
            if bool(np.any((values & exponent) == exponent)):
                return str(name)
    return None


def _headers(path: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    try:
        with safe_open(str(path), framework="np") as file:
            for name in sorted(file.keys()):
                part = file.get_slice(name)
                yield name, str(part.get_dtype()), tuple(part.get_shape())
    except SafetensorError as error:
        raise TensorFileError(f"is damaged or cut off ({error})") from None
    except OSError as error:
        raise TensorFileError(f"cannot be read: {error.strerror or error}") from None
