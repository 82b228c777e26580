// SPDX-License-Identifier: Apache-2.0
// The server's API: JSON, and server-sent events read with fetch, so that a
// key can go along.

export function key() { return sessionStorage.getItem('key') || ''; }
export function setKey(value) {
  if (value) sessionStorage.setItem('key', value);
  else sessionStorage.removeItem('key');
}

function headers(more) {
  return key() ? {...more, Authorization: `Bearer ${key()}`} : {...more};
}

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    if (body.error && body.error.message) message = body.error.message;
  } catch { /* not JSON: the status says it */ }
  const error = new Error(message);
  error.code = response.status;
  return error;
}

export async function get(path) {
  const response = await fetch(path, {headers: headers(), cache: 'no-store'});
  if (!response.ok) throw await failure(response);
  return response.json();
}

export async function post(path, body, signal) {
  const response = await fetch(path, {
    method: 'POST', signal, body: JSON.stringify(body),
    headers: headers({'Content-Type': 'application/json'}),
  });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Yields {event, data} of a stream.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    rest += value;
    for (let end = rest.indexOf('\n\n'); end >= 0; end = rest.indexOf('\n\n')) {
      let event = 'message';
      const data = [];
      for (const line of rest.slice(0, end).split('\n')) {
        if (line.startsWith('data: ')) data.push(line.slice(6));
        else if (line.startsWith('event: ')) event = line.slice(7);
      }
      rest = rest.slice(end + 2);
      if (data.length) yield {event, data: data.join('\n')};
    }
  }
}

// Yields the chunks of a streamed answer; an `error` event is thrown.
export async function* stream(path, body, signal, requestId) {
  const response = await fetch(path, {
    method: 'POST', signal, body: JSON.stringify({...body, stream: true}),
    headers: headers({'Content-Type': 'application/json', 'X-Request-Id': requestId}),
  });
  if (!response.ok) throw await failure(response);
  for await (const {data} of events(response)) {
    if (data === '[DONE]') return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error('the stream broke off');
}

// Calls back with each event of the live feed until `signal`; comes back after
// a break. `told` hears whether it is connected.
export async function watch(signal, onEvent, told) {
  while (!signal.aborted) {
    try {
      const response = await fetch('/v1/tandem/events', {signal, headers: headers()});
      if (!response.ok) throw await failure(response);
      told(true);
      for await (const {event, data} of events(response)) onEvent(event, JSON.parse(data));
    } catch (error) {
      if (signal.aborted) return;
      told(false, error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

// As the server's feed names a request: FNV-1a, 64 bits.
export function label(requestId) {
  let hash = 0xcbf29ce484222325n;
  for (const byte of new TextEncoder().encode(requestId)) {
    hash = BigInt.asUintN(64, (hash ^ BigInt(byte)) * 0x100000001b3n);
  }
  return hash.toString(16).padStart(16, '0');
}
