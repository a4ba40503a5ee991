#!/usr/bin/env bash
# zookeeper:3.8 from Debian's jars and the Java of this machine.
. "$(dirname "$0")/lib.sh"

main() {
  local jre=$rootfs/opt/jre
  base
  need "apt-get install libzookeeper-java libslf4j-java" /usr/share/java/{zookeeper,slf4j-simple}.jar
  need "apt-get install unzip" "$(command -v unzip || true)"
  java_home=$("$(dirname "$0")/java.sh")
  # A Java with jlink gives 57 MB, a copy of one without 184.
  small_jre "$jre" || { rm -rf "$jre" && copied_jre "$jre"; }
  for file in "$jre/bin/java" $(find "$jre" -name '*.so'); do
    for library in $(libraries "$file" | grep -v "^$rootfs"); do
      put_one "$library"
    done
  done
  # Class data shared between starts: 0.1 s off each. Without it Java starts as well.
  "$jre/bin/java" -Xshare:dump -XX:+UseSerialGC >/dev/null 2>&1 || true
  mkdir -p "$rootfs"/{opt/zookeeper,conf,datalog,logs}
  for jar in /usr/share/java/{zookeeper,slf4j-simple,servlet-api}.jar $(manifest_jars); do
    [ ! -e "$jar" ] || cp -L "$jar" "$rootfs/opt/zookeeper/"
  done
  entrypoint <"$(dirname "$0")/zookeeper-entrypoint.sh"
  import zookeeper:3.8 'ENV PATH=/opt/jre/bin:/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin' 'ENV JAVA_HOME=/opt/jre' \
    'EXPOSE 2181 2888 3888 8080' 'VOLUME /data /datalog /logs' 'CMD ["start-foreground"]'
}

small_jre() {
  [ -x "$java_home/bin/jlink" ] && "$java_home/bin/jlink" --output "$1" --strip-java-debug-attributes --no-man-pages --no-header-files \
    --add-modules java.base,java.logging,java.management,java.xml,java.naming,java.security.sasl,java.security.jgss,jdk.management,jdk.unsupported
}

# Debian's has links to packages that are not installed; those are of no use to a server.
copied_jre() {
  mkdir -p "$1"
  cp -rL "$java_home"/{bin,lib,conf} "$1/" 2>/dev/null || true
  rm -f "$1"/lib/{src.zip,ct.sym}
  [ -x "$1/bin/java" ]
}

# Debian's zookeeper.jar names what it needs, in lines of at most 72 bytes that go on after a blank.
manifest_jars() {
  unzip -p /usr/share/java/zookeeper.jar META-INF/MANIFEST.MF | tr -d '\r' |
    awk '/^Class-Path: /{on = 1; printf "%s", substr($0, 13); next} on && /^ /{printf "%s", substr($0, 2); next} {on = 0}'
}

main
