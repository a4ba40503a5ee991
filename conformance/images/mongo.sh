#!/usr/bin/env bash
# mongo:6 from a real mongod: $MONGOD, or the one on PATH.
. "$(dirname "$0")/lib.sh"
base
mongod=${MONGOD:-$(command -v mongod || true)}
need "set MONGOD to a mongod 6.x; servers.sh fetches one" "$mongod"
put "$mongod"
[ "$rootfs$mongod" -ef "$rootfs/usr/bin/mongod" ] || mv "$rootfs$mongod" "$rootfs/usr/bin/mongod"
mkdir -p "$rootfs"/data/{db,configdb}
entrypoint <<'END'
#!/bin/sh
# As in the official image, flags go to mongod, which listens on all addresses.
case "${1:-}" in "" | -*) set -- mongod "$@" ;; esac
[ "$1" != mongod ] || set -- "$@" --bind_ip_all
exec "$@"
END
import mongo:6 "$path" 'EXPOSE 27017' 'VOLUME /data/db' 'CMD ["mongod"]'
