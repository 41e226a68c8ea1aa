"""Replay recorded scheduler traces through the pure policy: does it decide the same again?

    python -m benchmarks.replay TRACE.jsonl [TRACE.jsonl ...] --json

The traces come from a server with ``scheduler: trace_dir`` in its cluster.yaml. Status 1 when a plan differs or a file
is no trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scheduling.trace import Replay, TraceError, replay


def entries(path: Path) -> Iterator[list[Any]]:
    """The entries of a file. A last line that was not written whole is left out; TraceError for any other bad one."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise TraceError(f"line {number} is not JSON: {error}") from error
            if not isinstance(entry, list) or not entry:
                raise TraceError(f"line {number} is not a trace entry")
            yield entry


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE.jsonl")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, int]] = {}
    failed = False
    for path in options.traces:
        try:
            result = replay(entries(path))
        except (TraceError, OSError) as error:
            print(f"replay: {path}: {error}", file=sys.stderr)
            failed = True
            continue
        _print(path, result)
        failed = failed or bool(result.mismatches)
        results[str(path)] = {"plans": result.plans, "mismatches": len(result.mismatches)}
    if options.json:
        print(json.dumps({"traces": results}))
    return int(failed)


def _print(path: Path, result: Replay) -> None:
    print(
        f"{path}: {result.plans} plans, {'all the same' if not result.mismatches else 'some differ'}", file=sys.stderr
    )
    for mismatch in result.mismatches:
        print(
            f"  entry {mismatch.entry}: recorded {mismatch.recorded}, replayed {mismatch.replayed}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
