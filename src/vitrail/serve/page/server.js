// The one way in which this page speaks with its server: a token where one is asked for, errors in words.

const KEY = "vitrail-token";  // kept while the tab is open, and in no file
const PATIENCE = 3;           // how often a busy server is asked again before the user is

/** What went wrong, to be shown. `kind`: "refused" (asking again is no use), "later" (it may be), "token". */
export class Trouble extends Error {
  constructor(kind, words) {
    super(words);
    this.kind = kind;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (text) => sessionStorage.setItem(KEY, text),
};

/** An answer of the server; every other end is a Trouble, but for an AbortError when the caller gave up. */
export async function ask(path, { body, signal, waiting = () => {} } = {}) {
  for (let turn = 1; ; turn++) {
    const answer = await send(path, body, signal);
    if (answer.ok) return answer;
    if (answer.status !== 503 || turn > PATIENCE) throw await troubleOf(answer);
    const seconds = Math.min(Number(answer.headers.get("Retry-After")) || 2 ** (turn - 1), 10);
    waiting(`The server is busy. Asking again in ${seconds} s …`);
    await pause(1000 * seconds, signal);
  }
}

export const askJSON = async (path, options) => (await ask(path, options)).json();

async function send(path, body, signal) {
  const known = token.get() ?? "";
  if (/[^ -~]/.test(known)) throw new Trouble("token", "A token has no such letters.");  // nor has a header
  const headers = known ? { Authorization: `Bearer ${known}` } : {};
  if (body) headers["Content-Type"] = body.type.startsWith("image/") ? body.type : "application/octet-stream";
  try {
    return await fetch(path, { method: body ? "POST" : "GET", body, headers, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("later", "The server does not answer. Is it still running, and is the network there?");
  }
}

async function troubleOf(answer) {
  if (answer.status === 401) return new Trouble("token", "The server asks for a token.");
  const { error } = await answer.json().catch(() => ({}));
  const words = error?.message ?? "";
  if (answer.status === 503) return new Trouble("later", `The server is busy. ${words}`);
  const kind = answer.status >= 500 || answer.status === 408 ? "later" : "refused";
  return new Trouble(kind, words || `The server answered with an error (${answer.status}).`);
}

function pause(time, signal) {
  return new Promise((done, fail) => {
    const timer = setTimeout(done, time);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      fail(new DOMException("given up", "AbortError"));
    });
  });
}
