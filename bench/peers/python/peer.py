"""redis-py's asyncio lock as a contestant; ../README.md defines the protocol."""

import asyncio
import json
import platform
import random
import sys
import threading
import time

import redis
import redis.asyncio


class Peer:
    def __init__(self, url, lease):
        self.url, self.lease, self.clients, self.kept, self.waiting = url, lease, {}, [], []

    def lock(self, client, name):
        """A lock of its own; the client has connections of its own. It retries every 100 ms, its default."""
        if client not in self.clients:
            pool = redis.asyncio.BlockingConnectionPool.from_url(self.url, max_connections=64, timeout=None)
            self.clients[client] = redis.asyncio.Redis(connection_pool=pool)
        return self.clients[client].lock("redis-py:" + name, timeout=self.lease, thread_local=False)

    async def obey(self, words):
        match words:
            case ["cycle", "main" | "task" as which, tasks, millis]:
                return await self.cycle(which, int(tasks), int(millis) / 1e3)
            case ["cycle", which, *_]:
                what = {"again": "re-entry", "read": "shared locks", "permit": "permits"}[which]
                raise ValueError("it has no " + what)
            case ["contend", waiters, millis]:
                return await self.contend(int(waiters), int(millis) / 1e3)
            case ["keep", _]:
                raise ValueError("it has no renewal")
            case ["free"]:
                kept, self.kept = self.kept, []
                done = await asyncio.gather(*(lock.release() for lock in kept), return_exceptions=True)
                return {"lost": sum(isinstance(one, Exception) for one in done)}
            case ["names", count, millis]:
                began, visited = time.perf_counter_ns(), 0

                async def visit(first):
                    nonlocal visited
                    for at in range(first, int(count), 128):
                        if time.perf_counter_ns() - began > int(millis) * 1e6:
                            break
                        lock = self.lock(0, f"named:{count}:{at}")
                        await lock.acquire()
                        await lock.release()
                        visited += 1

                await asyncio.gather(*(visit(first) for first in range(128)))
                return {"ops": visited, "nanos": time.perf_counter_ns() - began}
            case ["wait", count]:
                await self.lock(0, "waited").acquire()
                self.waiting = [asyncio.create_task(self.lock(0, "waited").acquire()) for _ in range(int(count))]
                await asyncio.sleep(0.5)
                return {"ops": int(count)}
            case ["take", name]:
                lock = self.lock(0, name)
                await lock.acquire()
                self.kept.append(lock)
                return {"got": time.time_ns() // 1000}
            case _:
                raise ValueError(f"no command {words}")

    async def cycle(self, which, tasks, span):
        latencies, began = [], time.perf_counter_ns()

        async def task(at):
            lock, last = self.lock(0, f"{which}:{at}"), began
            while last - began < span * 1e9:
                await lock.acquire()
                await lock.release()
                now = time.perf_counter_ns()
                latencies.append(now - last)
                last = now

        await asyncio.gather(*(task(at) for at in range(tasks)))
        took, last = time.perf_counter_ns() - began, len(latencies) - 1
        latencies.sort()
        return {"ops": len(latencies), "nanos": took, "q": [latencies[last * at // 1000] for at in range(1001)]}

    async def contend(self, waiters, span):
        turns, began, changed, turn = [], time.perf_counter_ns(), asyncio.Condition(), 0

        def since():
            return time.perf_counter_ns() - began

        async def client(at):
            nonlocal turn
            lock = self.lock(at + 1, f"contended:{waiters}")
            while since() < span * 1e9:
                asked = since()
                await lock.acquire()
                got = since()
                async with changed:
                    turn += 1
                    mine = turn
                    changed.notify_all()
                if since() < span * 1e9:
                    await asyncio.sleep(random.uniform(0.003, 0.008))
                freed = since()
                await lock.release()
                turns.append([at, asked, got, freed])

                async def another():
                    async with changed:
                        await changed.wait_for(lambda: turn > mine)

                try:
                    await asyncio.wait_for(another(), max(0, span - since() / 1e9))
                except TimeoutError:
                    pass

        await asyncio.gather(*(client(at) for at in range(waiters + 1)))
        return {"turns": turns}


def say(answer):
    print("= " + json.dumps(answer), flush=True)


async def main():
    peer = Peer(sys.argv[2], int(sys.argv[3]) / 1e3)
    loop, lines = asyncio.get_running_loop(), asyncio.Queue()

    def read():
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    say({"ready": f"redis-py {redis.__version__}, Python {platform.python_version()}"})
    while (line := await lines.get()) is not None:
        try:
            answer = await peer.obey(line.split())
        except Exception as error:
            answer = {"error": str(error) if str(error).startswith("it has no ") else repr(error)}
        say(answer)


asyncio.run(main())
