#!/usr/bin/env bash
# kernel.sh - compile the guest's kernel from Debian's linux-source into $CACHE/linux. Five to six minutes on two idle cores, once.
#
#   JOBS=n                      compilers at a time (default: all CPUs, at low priority)
#   RDMA_GUEST_SOURCE=tarball  a linux-*.tar.xz to use instead of Debian's
#   RDMA_GUEST_MIRROR=url      where Debian's packages come from (default: what apt uses here)
#   RDMA_GUEST_SUITE=suite     where linux-source is looked for (default: trixie-backports; it must be 6.19 or newer: the
#                               architecture's seccomp mode and its registers wider than AVX came then)
set -euo pipefail
. "$(dirname "$0")/lib.sh"

[ "$(uname -m)" = x86_64 ] || fail "the guest kernel is for x86-64, this machine is $(uname -m)"
need gcc gcc; need make make; need xz xz-utils; need perl perl-base
[ -e /usr/include/stdio.h ] || fail "C headers are missing (Debian package: libc6-dev)"
[ -d /usr/include/linux ] || fail "kernel headers are missing (Debian package: linux-libc-dev)"

WORK=$CACHE/build; TOOLS=$WORK/tools
mkdir -p "$WORK/source"

# flex, bison and bc where the host has none: unpacked, and told where they are.
missing=()
for tool in flex bison bc m4; do command -v "$tool" >/dev/null || missing+=("$tool"); done
if ((${#missing[@]})); then
  need apt-get apt; need dpkg-deb dpkg
  private_apt host
  unpack_packages "$TOOLS" "${missing[@]}"
  export PATH=$TOOLS/usr/bin:$PATH
  [ ! -d "$TOOLS/usr/share/bison" ] || export BISON_PKGDATADIR=$TOOLS/usr/share/bison
  [ ! -x "$TOOLS/usr/bin/m4" ] || export M4=$TOOLS/usr/bin/m4
fi

SOURCE=${RDMA_GUEST_SOURCE:-}
if [ -z "$SOURCE" ]; then
  SOURCE=$(find "$WORK/source" -name 'linux-source-*.tar.xz' 2>/dev/null | sort -V | tail -1)
fi
if [ -z "$SOURCE" ]; then
  need apt-get apt; need dpkg-deb dpkg
  mirror=${RDMA_GUEST_MIRROR:-}
  [ -n "$mirror" ] || mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | sort -u | grep -E '/debian/?$' | head -1 || true)
  [ -n "$mirror" ] || fail "apt knows no Debian mirror; name one: RDMA_GUEST_MIRROR=http://.../debian"
  suite=${RDMA_GUEST_SUITE:-trixie-backports}
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$WORK/sources.list"
  private_apt "$suite" "$WORK/sources.list"
  package=$(apt-cache "${APT[@]}" search --names-only '^linux-source-[0-9.]+$' | cut -d' ' -f1 | sort -V | tail -1)
  [ -n "$package" ] || { tail -3 "$CACHE/apt/$suite/update.log" >&2; fail "no linux-source in $suite of $mirror"; }
  say "fetching $package"
  unpack_packages "$WORK/source" "$package"
  SOURCE=$(find "$WORK/source" -name 'linux-source-*.tar.xz' | sort -V | tail -1)
fi

TREE=$WORK/$(basename "$SOURCE" .tar.xz)
if [ ! -e "$TREE/.unpacked" ]; then
  say "unpacking $(basename "$SOURCE")"
  rm -rf "$TREE"; mkdir -p "$TREE"
  tar -xJf "$SOURCE" --strip-components=1 -C "$TREE"
  touch "$TREE/.unpacked"
fi
cd "$TREE"

make -s ARCH=um KCONFIG_ALLCONFIG="$HERE/uml.config" allnoconfig >"$WORK/config.log" 2>&1 || { tail -5 "$WORK/config.log" >&2; fail "the configuration failed"; }
for option in SMP HOSTFS OVERLAY_FS VETH NET_SCH_NETEM NET_SCH_TBF IPV6 INFINIBAND_USER_ACCESS RDMA_RXE; do
  grep -q "^CONFIG_$option=y" .config || fail "$(basename "$TREE") does not take CONFIG_$option"
done
[ "${1:-}" != --configure-only ] || { say "configured $TREE"; exit 0; }

say "compiling $(basename "$TREE") (minutes; log: $WORK/make.log)"
nice -n 19 make -s ARCH=um -j"${JOBS:-$(nproc)}" linux >"$WORK/make.log" 2>&1 || { grep -E 'error|Error' "$WORK/make.log" | tail -5 >&2; fail "the kernel did not compile"; }
strip -o "$CACHE/linux.part" linux
chmod 755 "$CACHE/linux.part"
mv "$CACHE/linux.part" "$CACHE/linux"
rm -rf "$WORK"
say "made $CACHE/linux"
