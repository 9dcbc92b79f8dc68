#!/bin/sh
# The tests that ask libvirt or boot a guest, against Debian trixie's libvirt 11 and QEMU 10, which are nearer to what
# KubeVirt ships: in a root of its own, made once (TRIXIE_ROOT, about 2 GB). Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."

root=${TRIXIE_ROOT:-/var/tmp/pcinuma-trixie}
packages="busybox-static ca-certificates cpio libvirt-clients libvirt-daemon-system libxml2-utils linux-image-cloud-amd64 ovmf
	python3-venv qemu-efi-aarch64 qemu-system-arm qemu-system-x86 qemu-utils umockdev"
arm64="busybox-static linux-image-cloud-arm64"

if [ "$(id -u)" != 0 ]; then
	echo 'test-trixie: needs root, for a root of Debian trixie' >&2
	exit 2
fi
for tool in debootstrap unshare chroot; do
	if ! command -v "$tool" >/dev/null; then
		printf 'test-trixie: there is no %s here; make test installs it\n' "$tool" >&2
		exit 2
	fi
done

if [ ! -e "$root/ready" ]; then
	echo "making a root of Debian trixie in $root"
	rm -rf "$root"
	debootstrap --variant=minbase trixie "$root" >"$root.log" 2>&1 || { tail "$root.log" >&2; exit 1; }
	# a policy that starts no daemon; /dev stays debootstrap's own while packages are installed, whose scripts change it
	printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
	chmod +x "$root/usr/sbin/policy-rc.d"
	chroot "$root" apt-get update -qq
	# shellcheck disable=SC2086
	DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y -qq --no-install-recommends $packages >>"$root.log" 2>&1 ||
		{ tail "$root.log" >&2; exit 1; }
	# an arm64 kernel and its busybox are only unpacked: nothing of that machine runs here
	chroot "$root" dpkg --add-architecture arm64
	chroot "$root" apt-get update -qq
	mkdir -p "$root/opt/arm64"
	for package in $arm64; do
		while depends=$(chroot "$root" apt-cache depends "$package:arm64" | sed -n 's/^ *Depends: \(linux-image-[^: ]*\).*/\1/p' | head -n 1) && [ -n "$depends" ]; do
			package=$depends
		done
		chroot "$root" sh -c "cd /opt/arm64 && apt-get download -qq $package:arm64 && dpkg -x ./${package}_*.deb . && rm ./${package}_*.deb"
	done
	cat >>"$root/etc/libvirt/qemu.conf" <<-'CONF'
		namespaces = []
		cgroup_controllers = []
		security_driver = "none"
		user = "root"
		group = "root"
	CONF
	touch "$root/ready"
fi

# everything mounted goes with the namespace
export ROOT="$root" SOURCE="$PWD"
exec unshare --mount --propagation private sh -euc '
	mkdir -p "$ROOT/src"
	mount --bind "$SOURCE" "$ROOT/src"
	mount -o remount,bind,ro "$ROOT/src"
	mount -t proc proc "$ROOT/proc"
	mount --rbind /sys "$ROOT/sys"
	mount --rbind /dev "$ROOT/dev"
	mount -t tmpfs tmpfs "$ROOT/run"
	# pip trusts there whom it trusts here
	if [ -d /etc/ssl/certs ]; then mount --bind -o ro /etc/ssl/certs "$ROOT/etc/ssl/certs"; fi
	exec chroot "$ROOT" /src/scripts/in-trixie.sh "$@"
' sh "$@"
