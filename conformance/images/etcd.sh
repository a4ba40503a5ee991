#!/usr/bin/env bash
# etcd:3.6 from the program that servers.sh builds, which is linked to nothing.
. "$(dirname "$0")/lib.sh"
base
etcd=${ETCD:-${XDG_CACHE_HOME:-$HOME/.cache}/dlock/etcd-3.6.16}
need "run servers.sh, which builds it, or set ETCD" "$etcd"
cp -L "$etcd" "$rootfs/usr/local/bin/etcd"
entrypoint <<'END'
#!/bin/sh
# The official image has no entrypoint: its command names the program.
exec "$@"
END
import etcd:3.6 "$path" 'EXPOSE 2379 2380' 'CMD ["/usr/local/bin/etcd"]'
