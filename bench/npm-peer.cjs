// The npm package distributed-locks-mongodb under the same load as the others. See src/peers/npm.rs.
const { createInterface } = require('node:readline');
const { randomUUID } = require('node:crypto');
const { MongoStorage } = require('./package/build/index.js');

const storage = new MongoStorage({ url: process.argv[2], database: 'bench_npm' });

async function task(keys, until, answer) {
  while (true) {
    const from = performance.now();
    if (from >= until) return;
    const key = `document-${String(Math.floor(Math.random() * keys)).padStart(5, '0')}`;
    const value = randomUUID();
    if (await storage.set(key, value, { ttl: 150 })) {
      await storage.unSet(key, value);
      answer.took.push((performance.now() - from) * 1e3);
    } else {
      answer.refused += 1;
    }
  }
}

async function main() {
  await storage.init();
  for await (const line of createInterface({ input: process.stdin })) {
    const [tasks, keys, ms] = line.split(' ').map(Number);
    const answer = { took: [], refused: 0, ms: 0 };
    const began = performance.now();
    await Promise.all(Array.from({ length: tasks }, () => task(keys, began + ms, answer)));
    answer.ms = performance.now() - began;
    console.log(JSON.stringify(answer));
  }
  await storage.close();
}

main();
