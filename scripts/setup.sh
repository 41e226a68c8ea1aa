#!/bin/sh
# Find a Python that HALO Serve runs on and hand over to scripts/setup.py.
# HALO_PYTHON names an interpreter to use instead of searching.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

supported() {
    "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] < (3, 13)))' >/dev/null 2>&1
}

if [ -n "${HALO_PYTHON:-}" ]; then
    if ! supported "$HALO_PYTHON"; then
        echo "setup: HALO_PYTHON=$HALO_PYTHON is not a working Python 3.11 or 3.12" >&2
        exit 1
    fi
    exec "$HALO_PYTHON" "$here/setup.py" "$@"
fi

for candidate in python3.11 python3.12 python3 python; do
    if supported "$candidate"; then
        exec "$candidate" "$here/setup.py" "$@"
    fi
done

found=$(python3 --version 2>/dev/null || echo "no python3 at all")
echo "setup: HALO Serve needs Python 3.11 or 3.12; on PATH there is $found." >&2
echo "setup: on Debian 12 install the packages python3.11 and python3.11-venv, or set HALO_PYTHON to an interpreter." >&2
exit 1
