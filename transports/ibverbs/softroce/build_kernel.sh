#!/bin/bash
# Builds the test kernel, a User-Mode Linux with SoftRoCE (rxe), siw and netem, and prints its path.
#
#   build_kernel.sh [--only-cached]     (--only-cached: end with 4 instead of building)
#
# The source is Debian's package linux-source-*; the result is kept in
# ${XDG_CACHE_HOME:-~/.cache}/uccl_ep/linux-uml-<source version>-<hash of kernel.config>, so a second
# call returns at once. About four minutes on two idle cores, 4 GB of temporary disk space.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
say() { echo "softroce: $*" >&2; }

archive=$(ls /usr/src/linux-source-*.tar.xz 2>/dev/null | sort -V | tail -1 || true)
if [ -z "$archive" ]; then
    echo "softroce: no kernel source in /usr/src; run: apt-get install -y linux-source" >&2
    exit 3
fi
package=$(basename "$archive" .tar.xz)
version=$(dpkg-query -W -f '${Version}' "$package" 2>/dev/null || echo unpackaged)
recipe=1 # raise it whenever this script does something else to the source, so that no old cache is hit
key=$( (cat "$here/kernel.config"; echo $recipe) | sha256sum | cut -c1-12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/uccl_ep
kernel=$cache/linux-uml-$version-$key
if [ -x "$kernel" ]; then
    echo "$kernel"
    exit 0
fi

if [ "${1:-}" = --only-cached ]; then
    echo "$kernel is not built" >&2
    exit 4
fi

missing=()
for tool in gcc make flex bison bc xz; do command -v $tool >/dev/null || missing+=($tool); done
if [ ${#missing[@]} -gt 0 ]; then
    echo "softroce: building the kernel needs ${missing[*]}; run: apt-get install -y gcc make flex bison bc xz-utils" >&2
    exit 3
fi

mkdir -p "$cache"
exec 9>"$kernel.lock"
flock 9 # a second caller waits for the first one's build instead of racing it
if [ -x "$kernel" ]; then
    echo "$kernel"
    exit 0
fi
work=$(mktemp -d "${TMPDIR:-/tmp}/uccl_ep-kernel.XXXXXX")
trap 'rm -rf "$work"' EXIT

say "unpacking $package $version"
# Kconfig reads every folder's Kconfig file, so only the C files of what is never built are left out.
tar xf "$archive" -C "$work" --wildcards \
    --exclude='*/drivers/gpu/*.[ch]' --exclude='*/drivers/media/*.[ch]' --exclude='*/drivers/staging/*.[ch]' \
    --exclude='*/sound/*.[ch]' --exclude='*/Documentation/*.rst' --exclude='*/Documentation/*.yaml' \
    --exclude='*/Documentation/*.txt'
cd "$work"/linux-source-*
# A guest has one CPU; two processes that poll there take turns by time slice. User-Mode Linux has no
# menu for the tick rate, so its default is edited: 1 ms slices instead of 10 ms.
sed -i '/^config HZ$/,/^$/s/default 100/default 1000/' arch/um/Kconfig
make -s ARCH=um KCONFIG_ALLCONFIG="$here/kernel.config" allnoconfig >&2
for option in INFINIBAND_USER_ACCESS RDMA_RXE RDMA_SIW HOSTFS DUMMY VETH NET_SCH_NETEM UML_NET_VECTOR; do
    if ! grep -q "^CONFIG_$option=y" .config; then
        echo "softroce: Kconfig dropped CONFIG_$option in $package $version; kernel.config needs what it depends on" >&2
        exit 1
    fi
done
say "building (log: $kernel.log)"
if ! make -s ARCH=um -j"$(nproc)" linux >"$kernel.log" 2>&1; then
    tail -20 "$kernel.log" >&2
    exit 1
fi
strip -o "$work/kernel" linux
mv "$work/kernel" "$kernel.new"
mv "$kernel.new" "$kernel"
say "built $kernel"
echo "$kernel"
