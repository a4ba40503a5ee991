#!/usr/bin/env bash
# redis:7 from the installed redis-server, whatever 7.x that is.
. "$(dirname "$0")/lib.sh"
base
need "apt-get install redis-server" /usr/bin/redis-server
put /usr/bin/redis-server
entrypoint <<'END'
#!/bin/sh
# As in the official image, flags go to redis-server, and protected mode is off: its clients do not come from loopback.
case "${1:-}" in "" | -*) set -- redis-server "$@" ;; esac
[ "$1" != redis-server ] || set -- "$@" --protected-mode no
exec "$@"
END
import redis:7 "$path" 'WORKDIR /data' 'VOLUME /data' 'EXPOSE 6379' 'CMD ["redis-server"]'
