#!/bin/sh
# Installs what the tests need where it can, runs them all, and says what it had to skip.
set -eu
cd "$(dirname "$0")/.."

packages="busybox-static chromium cpio debootstrap faketime fonts-dejavu-core fuse3 libvirt-clients libvirt-daemon-system libxml2-utils linux-image-cloud-amd64 openssl ovmf qemu-system-arm qemu-system-x86 qemu-utils strace umockdev wrk"

missing=""
for package in $packages; do
	dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing="$missing $package"
done
if [ -n "$missing" ]; then
	if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
		printf 'installing for the tests:%s\n' "$missing"
		apt-get update -qq
		# shellcheck disable=SC2086
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
	else
		printf 'not installed, so the tests that need them are skipped:%s\n' "$missing"
		printf 'hint: run as root, or apt-get install%s\n' "$missing"
	fi
fi
# CI sets this: there a test that is skipped is a test that fails
strict=""
[ -z "${CI:-}" ] || strict="--no-skips"
# shellcheck disable=SC2086
exec .venv/bin/python -m pytest -n 2 --dist worksteal $strict "$@"
