// What the page asks the server: the model, an answer as a stream, the metrics.

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  const found = { "content-type": "application/json" };
  if (key) found.authorization = `Bearer ${key}`;
  return found;
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // It was no JSON; the status says enough.
  }
  throw new ServerError(message, response.status);
}

export async function model(key) {
  const response = await checked(await fetch("/v1/models", { headers: headers(key) }));
  return (await response.json()).data[0];
}

// The events of a chat completion, one parsed object after the other.
export async function* chat(body, key, signal) {
  const options = { method: "POST", headers: headers(key), body: JSON.stringify(body), signal };
  const response = await checked(await fetch("/v1/chat/completions", options));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("the connection was closed before the answer was complete", 0);
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const found = JSON.parse(event.slice(6));
      if (found.error) throw new ServerError(found.error.message, 500);
      yield found;
    }
  }
}

// Prometheus text as {name: sum over labels}.
export async function metrics() {
  const text = await (await checked(await fetch("/metrics"))).text();
  const found = {};
  for (const line of text.split("\n")) {
    const parts = /^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$/.exec(line);
    if (parts) found[parts[1]] = (found[parts[1]] ?? 0) + Number(parts[3]);
  }
  return found;
}
