// node-redlock as a contestant; ../README.md defines the protocol.
const readline = require("node:readline");
const { performance } = require("node:perf_hooks");
const Redis = require("ioredis");
const Redlock = require("redlock");

const [, , , url, millis] = process.argv;
const lease = Number(millis);
const clients = new Map();
let kept = [];
const sleep = (millis) => new Promise((done) => setTimeout(done, millis));
const nanos = () => Math.round(performance.now() * 1e6);
const LACKS = { again: "re-entry", read: "shared locks", permit: "permits" };

// A client has a connection of its own. It retries after 200 ms, its default, but not only ten times.
function client(at) {
  if (!clients.has(at)) clients.set(at, new Redlock([new Redis(url)], { retryCount: -1 }));
  return clients.get(at);
}

async function acquire(at, name) {
  const held = await client(at).lock("redlock:" + name, lease);
  return () => held.unlock();
}

async function obey(words) {
  switch (words[0]) {
    case "cycle":
      if (LACKS[words[1]]) throw new Error("it has no " + LACKS[words[1]]);
      return cycle(words[1], Number(words[2]), Number(words[3]) * 1e6);
    case "contend":
      return contend(Number(words[1]), Number(words[2]) * 1e6);
    case "keep":
      throw new Error("it has no renewal");
    case "free": {
      const done = await Promise.allSettled(kept.map((release) => release()));
      kept = [];
      return { lost: done.filter((one) => one.status === "rejected").length };
    }
    case "names": {
      const [count, span, began] = [Number(words[1]), Number(words[2]) * 1e6, nanos()];
      let visited = 0;
      const visit = async (first) => {
        for (let at = first; at < count && nanos() - began < span; at += 128, visited++)
          await (await acquire(0, "named:" + count + ":" + at))();
      };
      await Promise.all(Array.from({ length: 128 }, (_, first) => visit(first)));
      return { ops: visited, nanos: nanos() - began };
    }
    case "wait":
      await acquire(0, "waited");
      for (let at = 0; at < Number(words[1]); at++) acquire(0, "waited");
      await sleep(500);
      return { ops: Number(words[1]) };
    case "take":
      kept.push(await acquire(0, words[1]));
      return { got: Date.now() * 1000 };
  }
  throw new Error("no command " + words);
}

async function cycle(which, tasks, span) {
  const [latencies, began] = [[], nanos()];
  const task = async (at) => {
    for (let last = began; last - began < span; ) {
      await (await acquire(0, which + ":" + at))();
      const now = nanos();
      latencies.push(now - last);
      last = now;
    }
  };
  await Promise.all(Array.from({ length: tasks }, (_, at) => task(at)));
  const [took, last] = [nanos() - began, latencies.length - 1];
  latencies.sort((one, other) => one - other);
  const q = Array.from({ length: 1001 }, (_, at) => latencies[Math.floor((last * at) / 1000)]);
  return { ops: latencies.length, nanos: took, q };
}

async function contend(waiters, span) {
  const [turns, began] = [[], nanos()];
  const since = () => nanos() - began;
  let other = () => {}; // wakes the last releaser
  const one = async (at) => {
    while (since() < span) {
      const asked = since();
      const release = await acquire(at + 1, "contended:" + waiters);
      const got = since();
      other();
      const another = new Promise((done) => (other = done));
      if (since() < span) await sleep(3 + Math.random() * 5);
      const freed = since();
      await release();
      turns.push([at, asked, got, freed]);
      await Promise.race([another, sleep(Math.max(0, (span - since()) / 1e6))]);
    }
  };
  await Promise.all(Array.from({ length: waiters + 1 }, (_, at) => one(at)));
  return { turns };
}

const say = (answer) => console.log("= " + JSON.stringify(answer));
const version = (name) => require(name + "/package.json").version;
say({ ready: `node-redlock ${version("redlock")} on ioredis ${version("ioredis")}, Node ${process.versions.node}` });
let before = Promise.resolve();
readline
  .createInterface({ input: process.stdin })
  .on("line", (line) => {
    before = before
      .then(() => obey(line.split(" ")))
      .then(say, (error) => say({ error: error.message.startsWith("it has no ") ? error.message : String(error) }));
  })
  .on("close", () => process.exit());
