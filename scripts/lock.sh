#!/bin/sh
# Locks the requirements again: hashes, and no index addresses.
set -eu
cd "$(dirname "$0")/../requirements"
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools"
"$tools/bin/pip" install --quiet pip-tools
for name in run build dev mutants; do
	"$tools/bin/pip-compile" --quiet --upgrade --generate-hashes --no-emit-index-url --no-emit-trusted-host \
		--no-emit-find-links --allow-unsafe --strip-extras --no-header --output-file "$name.txt" "$name.in"
done
