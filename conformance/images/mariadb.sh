#!/usr/bin/env bash
# mariadb:10.11 from the installed mariadbd. Its system tables are created here, not at each start.
. "$(dirname "$0")/lib.sh"
base
need "apt-get install mariadb-server-core mariadb-client-core" /usr/sbin/mariadbd /usr/bin/{mariadb-install-db,my_print_defaults}
put /usr/sbin/mariadbd
mkdir -p "$rootfs"/{run/mysqld,etc/mysql,usr/share/mysql,usr/lib/mysql/plugin}
cp -r /usr/share/mysql/{charsets,english} "$rootfs/usr/share/mysql/"
cat >"$rootfs/etc/mysql/my.cnf" <<'END'
[mariadbd]
user = root
datadir = /var/lib/mysql
socket = /run/mysqld/mysqld.sock
pid-file = /run/mysqld/mysqld.pid
bind-address = *
skip-name-resolve
host-cache-size = 0
innodb-use-native-aio = 0
innodb-log-file-size = 10M
innodb-buffer-pool-size = 64M
END
# In the image and not in a volume, which would be copied at each start.
said=$(mariadb-install-db --no-defaults --user="$(id -un)" --auth-root-authentication-method=normal --skip-test-db \
  --skip-name-resolve --innodb-log-file-size=10M --datadir="$rootfs/var/lib/mysql" 2>&1) || {
  echo "$said" >&2
  exit 1
}
entrypoint <<'END'
#!/bin/sh
# MARIADB_ROOT_PASSWORD, _DATABASE, _USER and _PASSWORD as in the official image. At each start, since it may have been killed
# in the first; so every statement can be repeated.
case "${1:-}" in "" | -*) set -- mariadbd "$@" ;; esac
quoted() { printf %s "$1" | sed "s/[\\\\']/\\\\&/g; s/^/'/; s/\$/'/"; }
if [ "$1" = mariadbd ]; then
  {
    echo "CREATE USER IF NOT EXISTS root@'%' IDENTIFIED BY $(quoted "${MARIADB_ROOT_PASSWORD:-}");"
    echo "GRANT ALL ON *.* TO root@'%' WITH GRANT OPTION;"
    [ -z "${MARIADB_DATABASE:-}" ] || echo "CREATE DATABASE IF NOT EXISTS \`$MARIADB_DATABASE\`;"
    if [ -n "${MARIADB_USER:-}" ]; then
      echo "CREATE USER IF NOT EXISTS $(quoted "$MARIADB_USER")@'%' IDENTIFIED BY $(quoted "${MARIADB_PASSWORD:-}");"
      [ -z "${MARIADB_DATABASE:-}" ] || echo "GRANT ALL ON \`$MARIADB_DATABASE\`.* TO $(quoted "$MARIADB_USER")@'%';"
    fi
  } >/tmp/init.sql
  set -- "$@" --init-file=/tmp/init.sql
fi
exec "$@"
END
import mariadb:10.11 "$path" 'EXPOSE 3306' 'CMD ["mariadbd"]'
