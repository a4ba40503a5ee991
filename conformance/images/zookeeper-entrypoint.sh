#!/bin/sh
# The environment of the official image, as far as a single server needs it; its command is `start-foreground`.
set -e
conf=/conf/zoo.cfg
if [ ! -f "$conf" ]; then
  {
    echo "dataDir=/data"
    echo "dataLogDir=/datalog"
    echo "tickTime=${ZOO_TICK_TIME:-2000}"
    echo "initLimit=${ZOO_INIT_LIMIT:-5}"
    echo "syncLimit=${ZOO_SYNC_LIMIT:-2}"
    echo "maxClientCnxns=${ZOO_MAX_CLIENT_CNXNS:-60}"
    echo "standaloneEnabled=${ZOO_STANDALONE_ENABLED:-true}"
    echo "admin.enableServer=${ZOO_ADMINSERVER_ENABLED:-true}"
    echo "4lw.commands.whitelist=${ZOO_4LW_COMMANDS_WHITELIST:-srvr}"
    for line in ${ZOO_SERVERS:-server.1=localhost:2888:3888;2181} ${ZOO_CFG_EXTRA:-}; do
      echo "$line"
    done
  } >"$conf"
fi
[ -f /data/myid ] || echo "${ZOO_MY_ID:-1}" >/data/myid
[ "${1:-}" = start-foreground ] || exec "$@"
# shellcheck disable=SC2086 # several flags in one variable
exec java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto -XX:-UsePerfData -Xmx"${ZK_SERVER_HEAP:-256}m" \
  -Dorg.slf4j.simpleLogger.logFile=System.out ${SERVER_JVMFLAGS:-} ${JVMFLAGS:-} \
  -cp "/conf:/opt/zookeeper/*" org.apache.zookeeper.server.quorum.QuorumPeerMain "$conf"
