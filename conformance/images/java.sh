#!/usr/bin/env bash
# Prints the home of a Java that ZooKeeper 3.8 runs on: from 11 to 23, since 24 removed what its authentication needs.
set -euo pipefail

for home in "${JAVA_HOME:-}" "$(readlink -f "$(command -v java || true)" | sed 's|/bin/java$||')" \
  /usr/lib/jvm/*17* /usr/lib/jvm/*21* /usr/lib/jvm/*11*; do
  # Without a home, the file is that of no Java.
  version=$(sed -n 's/^JAVA_VERSION="\([0-9]*\).*/\1/p' "${home:-/nowhere}/release" 2>/dev/null || true)
  if [ -x "$home/bin/java" ] && [ "${version:-0}" -ge 11 ] && [ "$version" -lt 24 ]; then
    readlink -f "$home"
    exit
  fi
done
echo "no Java from 11 to 23: apt-get install default-jre-headless, or set JAVA_HOME" >&2
exit 1
