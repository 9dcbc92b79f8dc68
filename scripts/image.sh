#!/bin/sh
# The steps that make the image's file system, shared by the Dockerfile and tests/integration/test_image.py.
#
#   image.sh list               what the next step installs
#   image.sh packages           install what the other step needs (as root, in a Debian of its own)
#   image.sh tree SOURCE TREE   make in TREE all that is in the image, from this project in SOURCE
#
# The tree holds Python, the libraries that it and our wheels are linked with, ldconfig, and pcinuma: no shell, no
# package manager, nothing setuid. Debian's packages stay known in /var/lib/dpkg/status.d, where vulnerability scanners look.
set -eu

VENV=/opt/pcinuma
PACKAGES="libudev1 python3 python3-venv"

packages() {
	apt-get update -qq
	# shellcheck disable=SC2086
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $PACKAGES
	rm -rf /var/lib/apt/lists/*
}

tree() {
	source=$1
	tree=$2
	version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	python=/usr/bin/python$version
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	umask 022
	export PIP_NO_COMPILE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

	step 'what we depend on, by hash, and pcinuma'
	"$python" -m venv "$work/build"
	"$work/build/bin/pip" install -q --require-hashes -r "$source/requirements/build.txt"
	rm -rf "$VENV"
	"$python" -m venv --without-pip "$VENV"
	"$work/build/bin/pip" --python "$VENV/bin/python" install -q --require-hashes -r "$source/requirements/run.txt"
	# the build backend writes nothing into the source, which may be read-only
	PATH="$work/build/bin:$PATH" "$work/build/bin/pip" wheel -q --no-deps --no-build-isolation -w "$work" "$source"
	"$work/build/bin/pip" --python "$VENV/bin/python" install -q --no-deps --no-index "$work"/pcinuma-*.whl

	step 'only what runs'
	site=$VENV/lib/python$version/site-packages
	rm -rf "$site/lxml/includes" "$site/lxml/isoschematron" "$site/lxml/html" "$site"/lxml/objectify.* \
		"$VENV"/bin/activate* "$VENV"/bin/Activate* "$VENV/include"
	find "$site" \( -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.c' -o -name '*.h' -o -name '*.pyi' \) -delete
	for script in "$VENV"/bin/*; do
		case ${script##*/} in pcinuma | onDefineDomain | python*) ;; *) rm -f "$script" ;; esac
	done

	step 'Python'
	rm -rf "$tree"
	mkdir -p "$tree"/usr/lib "$tree"/usr/lib64 "$tree"/etc "$tree"/opt "$tree"/var/run "$tree"/var/lib/dpkg/status.d \
		"$tree"/proc "$tree"/sys "$tree"/dev "$tree"/tmp
	ln -s usr/lib "$tree/lib"
	ln -s usr/lib64 "$tree/lib64"
	copy "python$version-minimal"
	copy "libpython$version-minimal"
	copy "libpython$version-stdlib"
	copy libudev1
	lib=$tree/usr/lib/python$version
	rm -rf "$lib"/config-* "$lib"/curses "$lib"/dbm "$lib"/distutils "$lib"/ensurepip "$lib"/idlelib "$lib"/lib2to3 \
		"$lib"/pydoc_data "$lib"/sqlite3 "$lib"/test "$lib"/tkinter "$lib"/turtledemo "$lib"/unittest "$lib"/venv \
		"$lib/sitecustomize.py" "$tree/etc/python$version"
	for module in _crypt _curses _curses_panel _dbm _sqlite3 _tkinter _xxsubinterpreters _xxtestfuzz audioop nis \
		ossaudiodev readline xxlimited xxlimited_35 _testbuffer _testcapi _testclinic _testimportmultiple \
		_testinternalcapi _testmultiphase _ctypes_test; do
		rm -f "$lib/lib-dynload/$module".*
	done
	mkdir -p "$tree$VENV"
	cp -a "$VENV/." "$tree$VENV/"

	step 'the libraries that these are linked with'
	find "$tree" -type f \( -name '*.so' -o -name '*.so.*' -o -name 'python3*' \) -exec ldd {} + 2>/dev/null |
		sed -n 's/.*=> \(\/[^ ]*\) (.*/\1/p; s/^\t\(\/[^ ]*\) (.*/\1/p' | sort -u >"$work/libraries"
	while read -r library; do
		case $library in "$tree"* | "$VENV"*) continue ;; esac
		# dpkg knows a file by the name it was packed under, which may or may not begin with /usr
		owner=$(dpkg -S "$library" 2>/dev/null || dpkg -S "/usr$library" 2>/dev/null || dpkg -S "$(readlink -f "$library")")
		echo "${owner%%:*}"
	done <"$work/libraries" | sort -u >"$work/owners"
	while read -r package; do
		copy "$package"
	done <"$work/owners"

	# Python's ctypes, and so pyudev, finds a library by what ldconfig prints
	mkdir -p "$tree/usr/sbin"
	ln -s usr/sbin "$tree/sbin"
	cp "$(command -v ldconfig)" "$tree/usr/sbin/ldconfig"
	dpkg-query -s libc-bin >"$tree/var/lib/dpkg/status.d/libc-bin"
	echo 'include /etc/ld.so.conf.d/*.conf' >"$tree/etc/ld.so.conf"
	ldconfig -r "$tree" -X

	step 'accounts, and byte code that no clock decides about'
	# 107 is the user of virt-launcher's containers, and who may write into the folder of a hook's sockets
	printf 'root:x:0:0:root:/:/usr/sbin/nologin\npcinuma:x:107:107:pcinuma:/:/usr/sbin/nologin\n' >"$tree/etc/passwd"
	printf 'root:x:0:\npcinuma:x:107:\n' >"$tree/etc/group"
	"$python" -m compileall -q -f --invalidation-mode unchecked-hash -s "$tree" -p / "$tree/usr/lib/python$version" "$tree$VENV"
	find "$tree" -type f ! -path '*/bin/*' ! -path '*/sbin/*' ! -name '*.so' ! -name '*.so.*' -exec chmod a-x {} +
	chmod 1777 "$tree/tmp"
	find "$tree" -exec touch -h -d "@${SOURCE_DATE_EPOCH:-0}" {} +
}

# The files of a Debian package, without what only people or a build need; its status, for scanners.
copy() {
	[ ! -e "$tree/var/lib/dpkg/status.d/$1" ] || return 0
	dpkg -L "$1" | grep -vE '^/usr/share/(man|locale|lintian|bug|binfmts|python3|doc-base|gcc|gdb)|^/usr/lib/binfmt.d|/gconv/|/__pycache__/' |
		grep -vE '^/usr/share/doc/[^/]+/[^/]+$|^/(usr/)?s?bin/(ldd|pdb|pydoc|pygettext|2to3|py3)' >"$work/files" || true
	dpkg -L "$1" | grep -E '^/usr/share/doc/[^/]+/copyright$' >>"$work/files" || true
	while read -r path; do
		if [ -d "$path" ] && ! [ -L "$path" ]; then continue; fi
		printf '%s\n' "$path"
	done <"$work/files" | tar -C / --no-recursion -cf - -T - 2>/dev/null | tar -C "$tree" --keep-directory-symlink -xf -
	dpkg-query -s "$1" >"$tree/var/lib/dpkg/status.d/$1"
}

step() { printf 'image: %s\n' "$*"; }

case ${1:-} in
list) echo "$PACKAGES" ;;
packages) packages ;;
tree) tree "$2" "$3" ;;
*)
	echo 'usage: image.sh list | packages | tree SOURCE TREE' >&2
	exit 2
	;;
esac
