// Talks to the server: the key, errors in words, and streams of server-sent events.

const KEY = "windlass-key";
// Relative to the page, so that the console also works behind a proxy with a path prefix.
export const root = new URL(".", document.baseURI);

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

// `status` 0: the server does not answer.
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const unlock = { promise: null, ask: null };

// `ask` shows the prompt and resolves when a key was accepted.
export function onKeyNeeded(ask) {
  unlock.ask = ask;
}

function needKey() {
  unlock.promise ??= unlock.ask().finally(() => (unlock.promise = null));
  return unlock.promise;
}

export async function send(path, { body, signal, withKey = key.get() } = {}) {
  const headers = {};
  if (withKey) headers.Authorization = `Bearer ${withKey}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, root), {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      headers,
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error.message;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

// Like `send`, but asks for a key and tries again where the server wants one.
export async function request(path, options = {}) {
  for (;;) {
    if (unlock.promise) await unlock.promise;
    try {
      return await send(path, options);
    } catch (error) {
      if (error.status !== 401) throw error;
      await needKey();
    }
  }
}

export const getJson = async (path) => (await request(path)).json();

// The objects of a stream of server-sent events.
export async function* events(path, body, signal) {
  const response = await request(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(500, event.error.message);
      yield event;
    }
  }
}
