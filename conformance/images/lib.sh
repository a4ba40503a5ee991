# shellcheck shell=bash
# Image builder without a registry: `docker import` of a folder with a server's binary, the libraries that `ldd` names, and
# a static busybox as its shell. The script of each image sources it.
set -euo pipefail

rootfs=$(mktemp -d)
trap 'rm -rf "$rootfs"' EXIT

# need HINT FILE...: fails with the hint unless this machine has the files
need() {
  local hint=$1 file
  shift
  for file in "$@"; do
    [ -e "$file" ] || { echo "${0##*/}: no ${file:-file}: $hint" >&2; exit 1; }
  done
}

# base: folders, a shell, name resolution
base() {
  local applet
  need "apt-get install busybox-static" /bin/busybox
  mkdir -p "$rootfs"/{bin,sbin,dev,proc,sys,etc,tmp,run,root,data,var/log,var/tmp,usr/bin,usr/sbin,usr/local/bin,lib64}
  chmod 1777 "$rootfs/tmp" "$rootfs/var/tmp"
  cp /bin/busybox "$rootfs/bin/"
  for applet in $(/bin/busybox --list); do
    [ -e "$rootfs/bin/$applet" ] || ln -s busybox "$rootfs/bin/$applet"
  done
  printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$rootfs/etc/passwd"
  printf 'root:x:0:\nnogroup:x:65534:\n' >"$rootfs/etc/group"
  printf 'passwd: files\ngroup: files\nhosts: files dns\n' >"$rootfs/etc/nsswitch.conf"
}

# put FILE...: each at its own path, links followed, with the libraries it is linked to
put() {
  local file library
  for file in "$@"; do
    put_one "$file"
    for library in $(libraries "$file"); do
      put_one "$library"
    done
  done
}

put_one() {
  [ ! -e "$rootfs$1" ] || return 0
  mkdir -p "$rootfs$(dirname "$1")"
  cp -L "$1" "$rootfs$1"
}

# A file that is not ELF, or is statically linked, has none.
libraries() {
  { ldd "$1" 2>/dev/null || true; } | awk '/=> \//{print $3} /^[ \t]*\/lib/{print $1}'
}

# entrypoint: what the container runs, from stdin
entrypoint() {
  cat >"$rootfs/usr/local/bin/entrypoint"
  chmod 755 "$rootfs/usr/local/bin/entrypoint"
}

# import NAME:TAG CHANGE...: makes the image. The label distinguishes it from an image of a registry.
import() {
  local image=$1 change changes=()
  shift
  for change in 'LABEL dlock.stand-in=true' 'ENTRYPOINT ["entrypoint"]' "$@"; do
    changes+=(--change "$change")
  done
  tar -C "$rootfs" --numeric-owner --owner=0 --group=0 -cf - . | docker import "${changes[@]}" - "$image" >/dev/null
  docker image inspect --format '{{.Size}}' "$image" | awk -v image="$image" '{printf "built %s, %.0f MB\n", image, $1 / 1e6}'
}

# shellcheck disable=SC2034 # of the images that need no other
path='ENV PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin'
