#!/usr/bin/env bash
# Docker engine for the tests, where none answers: `engine.sh up` starts one and `engine.sh down` stops it.
#
# Its images and containers are in a folder of their own. So an installed engine that is not running keeps its own, and
# none of those is started. It listens on the default socket. Needs root or sudo, iptables and cgroups.
set -euo pipefail

data=${XDG_CACHE_HOME:-${HOME:-/var/tmp}/.cache}/dlock/engine
run=/run/dlock-engine
log=$data/log

up() {
  if answers; then
    echo "an engine answers already"
    return
  fi
  command -v dockerd >/dev/null || refuse "there is no dockerd: apt-get install docker.io"
  # It would compete with our engine for the bridge.
  if grep -qsx dockerd /proc/[0-9]*/comm; then
    docker version 2>&1 | tail -n 1 >&2
    refuse "an engine runs, and does not answer us: become a member of its group (usually docker), or set DOCKER_HOST"
  fi
  mkdir -p "$data"
  : >"$log"
  "${root[@]}" mkdir -p "$run"
  # In a session of its own: neither the end of this shell nor a Ctrl-C ends the engine; `down` ends it in order.
  "${root[@]}" setsid dockerd --log-level warn --data-root "$data/data" --exec-root "$run/exec" --pidfile "$run/pid" --group "$(id -gn)" \
    >"$log" 2>&1 </dev/null &
  local began=$SECONDS
  until answers; do
    if [ -z "$(jobs -rp)" ] || [ $((SECONDS - began)) -ge 30 ]; then
      down
      tail -n 20 "$log" >&2
      refuse "no engine can be started on this machine (its log is above)"
    fi
    sleep 0.05
  done
  # Containers left by killed tests; this engine has no other users.
  docker ps -aq --filter label=dlock.testbed | xargs -r docker rm -fv >/dev/null
  echo "engine up after $((SECONDS - began))s, pid $(cat "$run/pid")"
}

# Kills it by its pid, and only if that is still an engine. Its containers end with it.
down() {
  local pid
  pid=$(cat "$run/pid" 2>/dev/null) || return 0
  [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] || return 0
  "${root[@]}" kill -TERM "$pid"
  for _ in $(seq 300); do
    [ -d "/proc/$pid" ] || return 0
    sleep 0.1
  done
  echo "engine.sh: the engine did not end within 30 s; killing it" >&2
  "${root[@]}" kill -KILL "$pid"
}

answers() {
  docker version --format '{{.Server.Version}}' >/dev/null 2>&1
}

refuse() {
  echo "engine.sh: $1" >&2
  echo "Without one, DLOCK_TEST_UNPRIVILEGED=1 marks the trials in containers as ignored." >&2
  exit 1
}

root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || refuse "neither root nor sudo"
  root=(sudo)
fi
case "${1:-}" in
  up) up ;;
  down) down ;;
  *) echo "usage: engine.sh up | down" >&2; exit 64 ;;
esac
