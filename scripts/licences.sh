#!/bin/sh
# `make licences`: the licence of everything that pcinuma runs with; exit status 1 for one that is not allowed here.
# LGPL: pyudev, used as the library it is, unchanged, and replaceable by its user.
set -eu
cd "$(dirname "$0")/.."
packages=$(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/\1/p' "${1:-requirements/run.txt}")
# shellcheck disable=SC2086
exec .venv/bin/pip-licenses --python=.venv/bin/python --from=mixed --with-system --packages $packages \
	--allow-only="MIT;MIT-0;MIT License;BSD License;BSD-3-Clause;3-Clause BSD License;Apache-2.0;Apache-2.0 OR BSD-3-Clause;Apache-2.0 AND BSD-2-Clause;LGPL-2.1-or-later"
