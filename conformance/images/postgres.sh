#!/usr/bin/env bash
# postgres:15 from the installed server. Its cluster is made here, not at each start.
. "$(dirname "$0")/lib.sh"
base
bin=$(find /usr/lib/postgresql/*/bin -maxdepth 0 2>/dev/null | sort -V | tail -n 1)
need "apt-get install postgresql" "$bin/postgres" "$bin/initdb"
share=/usr/share/postgresql/$(basename "$(dirname "$bin")")
put "$bin/postgres" /usr/share/zoneinfo/{UTC,Etc/UTC}
mkdir -p "$rootfs$share" "$rootfs"/var/lib/postgresql "$rootfs$(dirname "$bin")/lib"
cp -r "$share/timezonesets" "$rootfs$share/"
ln -s "$bin/postgres" "$rootfs/usr/local/bin/postgres"
# As root it refuses to run, and `nobody` must get into the folder.
user=()
[ "$(id -u)" -ne 0 ] || user=(setpriv --reuid=65534 --regid=65534 --clear-groups)
chmod 755 "$rootfs"
[ "$(id -u)" -ne 0 ] || chown 65534:65534 "$rootfs/var/lib/postgresql"
(cd / && "${user[@]}" env TZ=UTC "$bin/initdb" -U postgres -A trust -E UTF8 --locale=C --no-sync -D "$rootfs/var/lib/postgresql/data") >/dev/null
cat >>"$rootfs/var/lib/postgresql/data/postgresql.conf" <<'END'
listen_addresses = '*'
unix_socket_directories = '/tmp'
END
echo 'host all all all trust' >>"$rootfs/var/lib/postgresql/data/pg_hba.conf"
entrypoint <<'END'
#!/bin/sh
# As in the official image, flags go to postgres. There is no password: this one has to be told that none is wanted.
case "${1:-}" in "" | -*) set -- postgres "$@" ;; esac
if [ "$1" = postgres ]; then
  [ "${POSTGRES_HOST_AUTH_METHOD:-}" = trust ] || { echo "this stand-in needs POSTGRES_HOST_AUTH_METHOD=trust" >&2; exit 1; }
  shift
  chown -R 65534:65534 /var/lib/postgresql
  chmod 700 /var/lib/postgresql/data
  exec su -s /bin/sh nobody -c 'exec postgres -D /var/lib/postgresql/data "$@"' -- sh "$@"
fi
exec "$@"
END
import postgres:15 "$path" 'EXPOSE 5432' 'CMD ["postgres"]'
