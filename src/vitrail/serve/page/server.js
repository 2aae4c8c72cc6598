// Requests to the server: authentication, retries and error messages.

const KEY = "vitrail-token";  // in session storage: until the tab is closed
const RETRIES = 3;            // automatic retries while the server is busy

/** An error to show. `kind`: "refused" (do not retry), "later" (a retry may help), "token". */
export class ServerError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (text) => sessionStorage.setItem(KEY, text),
};

/** A successful response; throws ServerError, or AbortError if the caller aborts. */
export async function request(path, { body, signal, onWait = () => {} } = {}) {
  for (let attempt = 1; ; attempt++) {
    const response = await send(path, body, signal);
    if (response.ok) return response;
    if (response.status !== 503 || attempt > RETRIES) throw await errorOf(response);
    const seconds = Math.min(Number(response.headers.get("Retry-After")) || 2 ** (attempt - 1), 10);
    onWait(`The server is busy. Trying again in ${seconds} s …`);
    await pause(1000 * seconds, signal);
  }
}

export const fetchJSON = async (path, options) => (await request(path, options)).json();

async function send(path, body, signal) {
  const bearer = token.get() ?? "";
  if (/[^ -~]/.test(bearer)) throw new ServerError("token", "The token contains invalid characters.");  // headers are ASCII
  const headers = bearer ? { Authorization: `Bearer ${bearer}` } : {};
  if (body) headers["Content-Type"] = body.type.startsWith("image/") ? body.type : "application/octet-stream";
  try {
    return await fetch(path, { method: body ? "POST" : "GET", body, headers, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("later", "The server does not respond. Check that it is running and that the network is up.");
  }
}

async function errorOf(response) {
  if (response.status === 401) return new ServerError("token", "The server needs a token.");
  const { error } = await response.json().catch(() => ({}));
  const message = error?.message ?? "";
  if (response.status === 503) return new ServerError("later", message || "The server is busy.");
  const kind = response.status >= 500 || response.status === 408 ? "later" : "refused";
  return new ServerError(kind, message || `The server returned an error (${response.status}).`);
}

function pause(time, signal) {
  return new Promise((done, fail) => {
    const timer = setTimeout(done, time);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      fail(new DOMException("aborted", "AbortError"));
    });
  });
}
