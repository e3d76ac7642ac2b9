#!/usr/bin/env bash
# What the Makefile needs from the system, installed with apt-get where it is missing and that is allowed.
#
#   tools/system.sh python                     print a Python that can make virtual environments
#   tools/system.sh commands NAME:PACKAGE...   see that each command NAME is there, or each library, of which NAME is
#                                              the soname (libz.so.1); PACKAGE is what has it
set -euo pipefail

# Debian and Ubuntu ship ensurepip, which `python -m venv` needs, in the package python3-venv.
readonly usable='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c "$usable" 2>/dev/null; then
            echo "$name"
            return 0
        fi
    done
    return 1
}

install_packages() {
    local as_root=()
    if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
    if ! command -v apt-get >/dev/null; then
        echo "error: missing: $*. Install what your system has under these names" >&2
        return 1
    fi
    # `sudo -n` fails instead of asking for a password: a build must not stop at a question.
    if ! ${as_root[@]+"${as_root[@]}"} true 2>/dev/null; then
        echo "error: missing: $*. Install with: sudo apt-get install $*" >&2
        return 1
    fi
    echo "installing with apt-get: $*" >&2
    {
        ${as_root[@]+"${as_root[@]}"} apt-get update -qq -o DPkg::Lock::Timeout=300
        ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive \
            apt-get install -qq -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
    } >&2
}

python() {
    if find_python; then return 0; fi
    local packages=(python3 python3-venv)
    if python3 -c 'import sys; sys.exit(sys.version_info >= (3, 11))' 2>/dev/null; then
        # The release's own Python is too old (Ubuntu 22.04); it has a newer one beside it.
        packages=(python3.11 python3.11-venv)
    fi
    install_packages "${packages[@]}"
    find_python || { echo "error: no Python 3.11 or newer with venv was found" >&2; return 1; }
}

is_there() {
    case "$1" in
        # Read to its end: where grep stopped at a match, ldconfig's broken pipe would fail the line.
        lib*.so.*) { ldconfig -p 2>/dev/null || /sbin/ldconfig -p; } | grep -F "$1 " >/dev/null ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

commands() {
    local pair missing=()
    for pair in "$@"; do
        is_there "${pair%%:*}" || missing+=("${pair#*:}")
    done
    if [ ${#missing[@]} -gt 0 ]; then install_packages "${missing[@]}"; fi
}

case "${1:-}" in
    python | commands) "$@" ;;
    *) echo "usage: $0 python | commands NAME:PACKAGE..." >&2; exit 2 ;;
esac
