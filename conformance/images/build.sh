#!/usr/bin/env bash
# Builds the images that the tests use, if the engine has none of that name. `build.sh redis` builds that one.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
images=(redis:7 mariadb:10.11 postgres:15 mongo:6 etcd:3.6 zookeeper:3.8)

for image in "${images[@]}"; do
  [ $# -eq 0 ] || [[ " $* " == *" ${image%%:*} "* ]] || continue
  if docker image inspect "$image" >/dev/null 2>&1; then
    echo "$image is there"
  else
    began=$SECONDS
    "$here/${image%%:*}.sh"
    echo "  in $((SECONDS - began))s"
  fi
done
