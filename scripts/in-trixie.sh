#!/bin/sh
# The part of test-trixie.sh that runs inside the root, with the project at /src, read-only.
set -eu
cd /src
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=/tmp PYTHONDONTWRITEBYTECODE=1
export PCINUMA_ARM64=/opt/arm64 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis

lock=$(cat requirements/*.txt | sha256sum)
if [ "$(cat /opt/venv/lock 2>/dev/null)" != "$lock" ]; then
	rm -rf /opt/venv
	python3 -m venv /opt/venv
	/opt/venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/run.txt -r requirements/dev.txt
	printf '%s' "$lock" >/opt/venv/lock
fi
# the program itself is run from /src
printf '#!/opt/venv/bin/python\nimport sys\nfrom pcinuma.cli import main\nsys.exit(main())\n' >/opt/venv/bin/pcinuma
chmod +x /opt/venv/bin/pcinuma
echo "$(libvirtd --version), $(qemu-system-x86_64 --version | head -n 1), $(/opt/venv/bin/python --version)"
[ $# -gt 0 ] || set -- tests
exec env PYTHONPATH=/src/hook /opt/venv/bin/python -m pytest -p no:cacheprovider -n 2 --dist worksteal -m 'libvirt or guest' "$@"
