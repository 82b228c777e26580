// SPDX-License-Identifier: Apache-2.0
// A cluster of real processes for the page's tests, and what its API says.
import {execFileSync, spawn} from 'node:child_process';
import {createServer} from 'node:net';

function freePort() {
  return new Promise((resolve) => {
    const server = createServer().listen(0, '127.0.0.1', () => {
      const {port} = server.address();
      server.close(() => resolve(port));
    });
  });
}

export async function start(binaries, model, more = []) {
  const port = await freePort();
  const child = spawn(`${binaries}/tandem`, ['serve', model, '--prefill', '1', '--decode', '2',
    '--grpc-port', String(await freePort()), '--port', String(port), '--admin-port', String(await freePort()),
    '--kv-cache-memory-bytes', '4MiB', '--enable-attention-output', '--enable-no-kv-cache', ...more]);
  let output = '';
  child.stdout.on('data', (data) => { output += data; });
  child.stderr.on('data', (data) => { output += data; });
  for (let i = 0; i < 300 && !output.includes('Tandem is ready'); ++i) {
    if (child.exitCode !== null) throw new Error(`the cluster ended: ${output.slice(-600)}`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  return {
    url: `http://127.0.0.1:${port}`, output: () => output,
    // The process of a worker by its name.
    pid: (name) => {
      const lines = execFileSync('ps', ['--ppid', String(child.pid), '-o', 'pid=,args=']).toString().split('\n');
      const found = lines.find((line) => line.includes(`${name} `) || line.trimEnd().endsWith(name));
      if (!found) throw new Error(`no ${name} among:\n${lines.join('\n')}`);
      return Number(found.trim().split(/\s+/)[0]);
    },
    stop: () => new Promise((resolve) => {
      child.on('exit', resolve);
      child.kill('SIGTERM');
    }),
  };
}

export async function post(url, path, body) {
  const response = await fetch(url + path, {
    method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body)});
  const answer = await response.json();
  if (!response.ok) throw new Error(JSON.stringify(answer));
  return answer;
}

// Hears the live feed until `close`.
export async function feed(url) {
  const abort = new AbortController();
  const heard = {state: null, ended: [], close: () => abort.abort()};
  const response = await fetch(`${url}/v1/tandem/events`, {signal: abort.signal});
  (async () => {
    let rest = '';
    try {
      for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
        rest += piece;
        for (let end = rest.indexOf('\n\n'); end >= 0; end = rest.indexOf('\n\n')) {
          const found = /^event: (\w+)\ndata: (.*)$/.exec(rest.slice(0, end));
          rest = rest.slice(end + 2);
          if (!found) continue;
          if (found[1] === 'state') heard.state = JSON.parse(found[2]);
          else heard.ended.push(JSON.parse(found[2]));
        }
      }
    } catch { /* closed */ }
  })();
  for (let i = 0; i < 50 && !heard.state; ++i) await new Promise((resolve) => setTimeout(resolve, 100));
  return heard;
}
