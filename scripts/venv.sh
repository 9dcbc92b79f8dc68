#!/bin/sh
# Makes $VENV with the locked requirements named as arguments (requirements/NAME.txt) and pcinuma itself, editable.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

command -v "$PYTHON" >/dev/null 2>&1 || { say "pcinuma: error: no $PYTHON here"; say "hint: install Python 3.11 or newer"; exit 2; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	say "pcinuma: error: $PYTHON is older than 3.11"; say "hint: make PYTHON=/path/to/python3.11"; exit 2; }

if ! [ -x "$VENV/bin/pip" ]; then
	say "setting up $VENV"
	if ! "$PYTHON" -c 'import ensurepip' >/dev/null 2>&1; then
		# Debian keeps ensurepip in a package of its own
		if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
			apt-get update -qq
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
		else
			say "pcinuma: error: $PYTHON cannot make a virtual environment"; say "hint: apt-get install python3-venv"; exit 2
		fi
	fi
	"$PYTHON" -m venv "$VENV"
fi
for name in "$@"; do
	"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "requirements/$name.txt"
done
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
"$VENV/bin/python" -m compileall -q hook/pcinuma
