// The Java libraries as contestants; ../README.md defines the protocol.

import com.mongodb.client.MongoClients;
import com.zaxxer.hikari.HikariDataSource;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URI;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.Collectors;
import net.javacrumbs.shedlock.core.LockConfiguration;
import net.javacrumbs.shedlock.core.LockProvider;
import net.javacrumbs.shedlock.core.SimpleLock;
import net.javacrumbs.shedlock.provider.jdbctemplate.JdbcTemplateLockProvider;
import net.javacrumbs.shedlock.provider.mongo.MongoLockProvider;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessLock;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.framework.recipes.locks.InterProcessSemaphoreV2;
import org.apache.curator.framework.recipes.locks.Lease;
import org.apache.curator.retry.RetryOneTime;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;
import org.springframework.jdbc.core.JdbcTemplate;

public class Peer {
    /** Acquires, waiting, and returns what releases. */
    interface Lock {
        Release acquire() throws Exception;
    }

    interface Release {
        void run() throws Exception;
    }

    /** A client with connections of its own. */
    interface Client {
        /** Sort: exclusive, read or permit, of so many. */
        Lock lock(String sort, String name, int of) throws Exception;
    }

    interface Work {
        void run(int at) throws Exception;
    }

    static class No extends Exception {
        No(String what) {
            super("it has no " + what);
        }
    }

    final String kind;
    final String url;
    final long lease;
    final Map<Integer, Client> clients = new ConcurrentHashMap<>();
    final List<Release> kept = new ArrayList<>();

    Peer(String kind, String url, long lease) {
        this.kind = kind;
        this.url = url;
        this.lease = lease;
    }

    public static void main(String[] args) throws Exception {
        java.util.logging.LogManager.getLogManager().reset();
        Peer peer = new Peer(args[0], args[1], Long.parseLong(args[2]));
        peer.client(0);
        say("{\"ready\":\"" + peer.version() + ", Java " + Runtime.version().feature() + "\"}");
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String said;
            try {
                said = peer.obey(line.split(" "));
            } catch (Throwable error) {
                said = "{\"error\":\"" + why(error) + "\"}";
            }
            say(said);
        }
        System.exit(0);
    }

    static String why(Throwable error) {
        String why = String.valueOf(error.getMessage());
        if (!(error instanceof No)) {
            why = error.getClass().getSimpleName() + ": " + why;
        }
        return why.replaceAll("[\\\\\"\\p{Cntrl}]", " ");
    }

    static void say(String answer) {
        System.out.println("= " + answer);
        System.out.flush();
    }

    String version() {
        String library = kind.startsWith("Redisson") ? "redisson" : kind.equals("Curator") ? "curator-recipes"
                : kind.endsWith("MongoDB") ? "shedlock-provider-mongo" : "shedlock-provider-jdbc-template";
        String path = System.getProperty("java.class.path");
        return Arrays.stream(path.split("[:/]")).filter(jar -> jar.startsWith(library + "-")).findFirst().orElse(library).replace(".jar", "");
    }

    String obey(String[] words) throws Exception {
        switch (words[0]) {
            case "cycle":
                return cycle(words[1], Integer.parseInt(words[2]), Long.parseLong(words[3]) * 1_000_000);
            case "contend":
                return contend(Integer.parseInt(words[1]), Long.parseLong(words[2]) * 1_000_000);
            case "keep": {
                if (kind.startsWith("ShedLock")) {
                    throw new No("renewal of a lease below 30 s");
                }
                if (kind.startsWith("Redisson")) {
                    // Each time that it holds nothing and then something, it begins a renewal timer, and one that is due
                    // later than that goes on for ever beside the new one. This lets those of earlier work end.
                    Thread.sleep(lease / 3 + 500);
                }
                for (int at = 0; at < Integer.parseInt(words[1]); at++) {
                    kept.add(client(0).lock("exclusive", "kept:" + at, 1).acquire());
                }
                return "{\"ops\":" + kept.size() + "}";
            }
            case "free": {
                int lost = 0;
                for (Release release : kept) {
                    try {
                        release.run();
                    } catch (Exception error) {
                        lost++;
                    }
                }
                kept.clear();
                return "{\"lost\":" + lost + "}";
            }
            case "names": {
                int count = Integer.parseInt(words[1]);
                long span = Long.parseLong(words[2]) * 1_000_000, began = System.nanoTime();
                AtomicInteger next = new AtomicInteger(), visited = new AtomicInteger();
                long took = together(128, task -> {
                    while (System.nanoTime() - began < span) {
                        int at = next.getAndIncrement();
                        if (at >= count) {
                            break;
                        }
                        client(0).lock("exclusive", "named:" + count + ":" + at, 1).acquire().run();
                        visited.getAndIncrement();
                    }
                });
                return "{\"ops\":" + visited + ",\"nanos\":" + took + "}";
            }
            case "wait": {
                Lock lock = client(0).lock("exclusive", "waited", 1);
                waits();
                kept.add(lock.acquire());
                int count = Integer.parseInt(words[1]);
                for (int at = 0; at < count; at++) {
                    Thread thread = new Thread(() -> {
                        try {
                            lock.acquire();
                        } catch (Exception error) {
                            throw new IllegalStateException(error);
                        }
                    });
                    thread.setDaemon(true);
                    thread.start();
                }
                Thread.sleep(500);
                return "{\"ops\":" + count + "}";
            }
            case "take": {
                waits();
                kept.add(client(0).lock("exclusive", words[1], 1).acquire());
                return "{\"got\":" + wall() + "}";
            }
            case "want":
                return want(words[1], Long.parseLong(words[2]) * 1_000_000);
            case "watch":
                return watch(Long.parseLong(words[1]) * 1_000_000);
            default:
                throw new IllegalArgumentException("no command " + words[0]);
        }
    }

    /** The wall clock, in microseconds. */
    static long wall() {
        Instant now = Instant.now();
        return now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
    }

    /** Of client 0. */
    RedissonClient redisson;
    RLock wanted;

    String want(String name, long span) throws Exception {
        if (redisson == null) {
            throw new No("failover that is compared");
        }
        // Its slot in a cluster is that of the name.
        wanted = redisson.getLock("{" + name + "}");
        String why = "";
        long began = System.nanoTime();
        while (System.nanoTime() - began < span) {
            try {
                if (wanted.tryLock(1, TimeUnit.SECONDS)) {
                    long got = wall();
                    kept.add(wanted::unlock);
                    return "{\"got\":" + got + ",\"why\":\"" + why + "\"}";
                }
            } catch (RuntimeException error) {
                why = why(error);
                Thread.sleep(10); // it may have failed at once
            }
        }
        return "{\"why\":\"" + why + "\"}";
    }

    String watch(long span) throws Exception {
        String why = "";
        long began = System.nanoTime(), held = wall();
        while (System.nanoTime() - began < span) {
            try {
                long asked = wall();
                if (!wanted.isHeldByCurrentThread()) {
                    return "{\"held\":" + held + ",\"lost\":" + wall() + ",\"why\":\"" + why + "\"}";
                }
                held = asked;
            } catch (RuntimeException error) {
                why = why(error);
            }
            Thread.sleep(10);
        }
        return "{\"held\":" + held + ",\"why\":\"" + why + "\"}";
    }

    void waits() throws No {
        if (kind.startsWith("ShedLock")) {
            throw new No("waiting");
        }
    }

    String cycle(String which, int tasks, long span) throws Exception {
        boolean again = which.equals("again");
        if (again && kind.startsWith("ShedLock")) {
            throw new No("re-entry");
        }
        String sort = which.equals("read") || which.equals("permit") ? which : "exclusive";
        long[][] all = new long[tasks][];
        Lock[] locks = new Lock[tasks];
        for (int at = 0; at < tasks; at++) {
            locks[at] = client(0).lock(sort, sort.equals("exclusive") ? which + ":" + at : which, tasks);
        }
        Work task = at -> {
            Lock lock = locks[at];
            Release outer = again ? lock.acquire() : null;
            long[] latencies = new long[1024];
            int count = 0;
            long began = System.nanoTime();
            for (long last = began; last - began < span;) {
                lock.acquire().run();
                long now = System.nanoTime();
                if (count == latencies.length) {
                    latencies = Arrays.copyOf(latencies, count * 2);
                }
                latencies[count++] = now - last;
                last = now;
            }
            all[at] = Arrays.copyOf(latencies, count);
            if (outer != null) {
                outer.run();
            }
        };
        long took;
        if (which.equals("main")) {
            long began = System.nanoTime();
            task.run(0);
            took = System.nanoTime() - began;
        } else {
            took = together(tasks, task);
        }
        long[] latencies = Arrays.stream(all).flatMapToLong(Arrays::stream).sorted().toArray();
        List<String> quantiles = new ArrayList<>();
        for (int permille = 0; permille <= 1000 && latencies.length > 0; permille++) {
            quantiles.add(String.valueOf(latencies[(int) ((latencies.length - 1L) * permille / 1000)]));
        }
        return "{\"ops\":" + latencies.length + ",\"nanos\":" + took + ",\"q\":[" + String.join(",", quantiles) + "]}";
    }

    int turn;

    String contend(int waiters, long span) throws Exception {
        waits();
        List<Lock> locks = new ArrayList<>();
        for (int at = 1; at <= waiters + 1; at++) {
            locks.add(client(at).lock("exclusive", "contended:" + waiters, 1));
        }
        List<long[]> turns = new ArrayList<>();
        Object changed = new Object();
        long began = System.nanoTime();
        together(waiters + 1, at -> {
            while (System.nanoTime() - began < span) {
                long asked = System.nanoTime() - began;
                Release release = locks.get(at).acquire();
                long got = System.nanoTime() - began;
                int mine;
                synchronized (changed) {
                    mine = ++turn;
                    changed.notifyAll();
                }
                if (System.nanoTime() - began < span) {
                    TimeUnit.MICROSECONDS.sleep(ThreadLocalRandom.current().nextLong(3000, 8000));
                }
                long freed = System.nanoTime() - began;
                release.run();
                synchronized (changed) {
                    turns.add(new long[] {at, asked, got, freed});
                    while (turn == mine && System.nanoTime() - began < span) {
                        changed.wait(1 + Math.max(0, (span - (System.nanoTime() - began)) / 1_000_000));
                    }
                }
            }
        });
        return "{\"turns\":" + turns.stream().map(Arrays::toString).collect(Collectors.toList()) + "}";
    }

    /** So many threads, and the time from when all are there; an error is thrown. */
    static long together(int count, Work work) throws Exception {
        CyclicBarrier start = new CyclicBarrier(count + 1);
        List<Thread> threads = new ArrayList<>();
        Throwable[] failed = new Throwable[1];
        for (int at = 0; at < count; at++) {
            int mine = at;
            Thread thread = new Thread(() -> {
                try {
                    start.await();
                    work.run(mine);
                } catch (Throwable error) {
                    failed[0] = error;
                }
            });
            threads.add(thread);
            thread.start();
        }
        start.await();
        long began = System.nanoTime();
        for (Thread thread : threads) {
            thread.join();
        }
        long took = System.nanoTime() - began;
        if (failed[0] instanceof Exception error) {
            throw error;
        } else if (failed[0] != null) {
            throw new IllegalStateException(failed[0]);
        }
        return took;
    }

    Client client(int at) throws Exception {
        Client client = clients.get(at);
        if (client == null) {
            client = kind.startsWith("Redisson") ? redisson(at) : kind.equals("Curator") ? curator() : shedlock();
            clients.put(at, client);
        }
        return client;
    }

    /** Client 0 as its default is; the others, of which there are many in this one process, with few connections. */
    Client redisson(int at) {
        Config config = new Config();
        config.setLockWatchdogTimeout(lease);
        String[] parts = url.split("/+"); // scheme, hosts, name of a master
        String[] hosts = Arrays.stream(parts[1].split(",")).map(host -> "redis://" + host).toArray(String[]::new);
        if (url.startsWith("redis+sentinel:")) {
            config.useSentinelServers().setMasterName(parts[2]).addSentinelAddress(hosts);
        } else if (url.startsWith("redis+cluster:")) {
            config.useClusterServers().addNodeAddress(hosts);
        } else {
            var server = config.useSingleServer().setAddress(url);
            if (at > 0) {
                config.setThreads(1).setNettyThreads(1);
                server.setConnectionPoolSize(2).setConnectionMinimumIdleSize(1);
                server.setSubscriptionConnectionPoolSize(2).setSubscriptionConnectionMinimumIdleSize(1);
            }
        }
        RedissonClient client = Redisson.create(config);
        if (at == 0) {
            redisson = client;
        }
        return (sort, name, of) -> {
            String key = kind + ":" + name;
            if (!sort.equals("exclusive") && !kind.endsWith("RLock")) {
                throw new No("readers and permits of its own: they are RLock's");
            }
            if (sort.equals("permit")) {
                RPermitExpirableSemaphore semaphore = client.getPermitExpirableSemaphore(key);
                semaphore.trySetPermits(of);
                return () -> {
                    String permit = semaphore.acquire(lease, TimeUnit.MILLISECONDS);
                    return () -> semaphore.release(permit);
                };
            }
            RLock lock = sort.equals("read") ? client.getReadWriteLock(key).readLock()
                    : kind.endsWith("RFairLock") ? client.getFairLock(key)
                    : kind.endsWith("RFencedLock") ? client.getFencedLock(key) : client.getLock(key);
            return () -> {
                lock.lock();
                return lock::unlock;
            };
        };
    }

    Client curator() throws Exception {
        String hosts = url.substring(url.indexOf("://") + 3);
        CuratorFramework client = CuratorFrameworkFactory.newClient(hosts, (int) lease, 15_000, new RetryOneTime(100));
        client.start();
        client.blockUntilConnected();
        return (sort, name, of) -> {
            String path = "/curator/" + name.replace(':', '-');
            if (sort.equals("permit")) {
                InterProcessSemaphoreV2 semaphore = new InterProcessSemaphoreV2(client, path, of);
                return () -> {
                    Lease permit = semaphore.acquire();
                    return () -> semaphore.returnLease(permit);
                };
            }
            InterProcessLock lock = sort.equals("read") ? new InterProcessReadWriteLock(client, path).readLock()
                    : new InterProcessMutex(client, path);
            return () -> {
                lock.acquire();
                return lock::release;
            };
        };
    }

    Client shedlock() throws Exception {
        LockProvider provider;
        if (kind.endsWith("MongoDB")) {
            provider = new MongoLockProvider(MongoClients.create(url).getDatabase("dlock_compare_shedlock"));
        } else {
            URI at = URI.create(url);
            HikariDataSource pool = new HikariDataSource();
            pool.setJdbcUrl("jdbc:" + (kind.endsWith("MariaDB") ? "mariadb" : "postgresql") + "://" + at.getHost() + ":" + at.getPort() + at.getPath());
            String[] user = Optional.ofNullable(at.getUserInfo()).orElse("").split(":", 2);
            pool.setUsername(user[0]);
            pool.setPassword(user.length > 1 ? user[1] : "");
            pool.setMaximumPoolSize(16);
            pool.setConnectionTimeout(60_000);
            JdbcTemplate template = new JdbcTemplate(pool);
            // As its README has it: PostgreSQL would round a time of three digits up, into the future.
            String time = kind.endsWith("MariaDB") ? "TIMESTAMP(3)" : "TIMESTAMP";
            template.execute("CREATE TABLE IF NOT EXISTS dlock_compare_shedlock(name VARCHAR(64) NOT NULL PRIMARY KEY, lock_until " + time
                    + " NOT NULL, locked_at " + time + " NOT NULL, locked_by VARCHAR(255) NOT NULL)");
            provider = new JdbcTemplateLockProvider(JdbcTemplateLockProvider.Configuration.builder()
                    .withJdbcTemplate(template).withTableName("dlock_compare_shedlock").usingDbTime().build());
        }
        return (sort, name, of) -> {
            if (!sort.equals("exclusive")) {
                throw new No(sort.equals("read") ? "shared locks" : "permits");
            }
            return () -> {
                var wanted = new LockConfiguration(Instant.now(), name, Duration.ofMillis(lease), Duration.ZERO);
                Optional<SimpleLock> lock = provider.lock(wanted);
                return lock.orElseThrow(() -> new IllegalStateException("an uncontended lock was refused"))::unlock;
            };
        };
    }
}
