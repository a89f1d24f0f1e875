// The chat playground: sends the conversation, shows each run of tokens by its source, and measures as it goes.

import { ServerError, chat, model } from "./api.js";
import { startCharts } from "./charts.js";
import { Message, colour } from "./message.js";

const $ = (id) => document.getElementById(id);
const conversation = [];
let running = null; // The AbortController of the answer in work.
let plainRate = null; // Tokens per second without speculation: measured, or until then as the server estimates it.

function number(id) {
  const value = $(id).value.trim();
  return value === "" ? null : Number(value);
}

function speculation() {
  if (!$("speculate").checked) return false;
  const boxes = [...document.querySelectorAll("#drafters input")];
  const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
  const found = {};
  if (chosen.length < boxes.length) found.drafter = chosen.length ? chosen : "none";
  if (number("max-nodes") !== null) found.max_nodes = number("max-nodes");
  return Object.keys(found).length ? found : true;
}

function form() {
  const type = $("form").value;
  if (type === "text") return null;
  if (type === "json_object") return { type };
  let schema;
  try {
    schema = JSON.parse($("schema").value);
  } catch (error) {
    throw new ServerError(`the schema is no JSON: ${error.message}`, 400);
  }
  return { type, json_schema: { name: "answer", schema } };
}

function request() {
  const messages = conversation.map(({ role, content }) => ({ role, content }));
  const system = $("system").value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const body = {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    include_sources: true,
    temperature: number("temperature") ?? 0,
    seed: number("seed") ?? Math.floor(Math.random() * 2 ** 32),
    speculation: speculation(),
  };
  const most = number("max-tokens");
  if (most !== null) body.max_completion_tokens = most;
  const format = form();
  if (format) body.response_format = format;
  return body;
}

const times = (value) => `${value.toFixed(2)}×`;

function measure(message, plain) {
  $("per-pass").textContent = message.perPass ? message.perPass.toFixed(2) : "–";
  $("rate").textContent = message.rate ? message.rate.toFixed(1) : "–";
  $("count").textContent = message.tokens;
  const estimate = message.statistics?.speedup_estimate;
  if (plainRate === null && estimate && message.rate) plainRate = message.rate / estimate;
  const gain = plain ? 1 : message.rate && plainRate ? message.rate / plainRate : null;
  $("gain").textContent = gain ? times(gain) : "–";
  origins([...message.counts].sort(([one], [other]) => (one === "") - (other === "")));
}

// How many tokens came from where: as a bar, and as its legend.
function origins(counts) {
  const made = (kind, source) => {
    const part = document.createElement(kind);
    if (source) part.className = colour(source);
    return part;
  };
  const bar = counts.map(([source, count]) => {
    const part = made("span", source);
    part.style.flexGrow = count;
    return part;
  });
  const legend = counts.map(([source, count]) => {
    const item = made("li", source);
    item.textContent = `${source || "the target's own"} ${count}`;
    return item;
  });
  $("share").replaceChildren(...bar);
  $("legend").replaceChildren(...legend);
}

// Streams one answer into a message; true when it came to its end.
async function stream(body, message) {
  running = new AbortController();
  busy(true);
  message.working(true);
  const log = $("log");
  try {
    for await (const chunk of chat(body, $("key").value, running.signal)) {
      const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      for (const choice of chunk.choices) {
        message.add(choice.delta.content ?? "", choice.source ?? "", choice.token_ids?.length ?? 0);
      }
      if (chunk.speculative_decoding) message.statistics = chunk.speculative_decoding;
      measure(message, body.speculation === false);
      if (near) log.scrollTop = log.scrollHeight;
    }
    return true;
  } catch (error) {
    if (error.name === "AbortError") message.note("stopped");
    else failed(message, error);
    return false;
  } finally {
    message.working(false);
    running = null;
    busy(false);
  }
}

function failed(message, error) {
  const text = error instanceof ServerError ? error.message : "the server cannot be reached";
  if (error.status === 401) $("key-field").hidden = false;
  message.fail(text);
  $("status").textContent = text;
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  document.querySelectorAll(".message button").forEach((button) => (button.disabled = is));
}

async function ask(text) {
  const log = $("log");
  new Message("user", log).add(text, "", 0);
  conversation.push({ role: "user", content: text });
  const message = new Message("assistant", log);
  log.scrollTop = log.scrollHeight;
  let body;
  try {
    body = request();
  } catch (error) {
    failed(message, error);
    conversation.pop();
    return;
  }
  const whole = await stream(body, message);
  if (message.content) conversation.push({ role: "assistant", content: message.content });
  else conversation.pop();
  summary(message);
  if (body.speculation === false && message.rate) plainRate = message.rate;
  if (whole && body.speculation !== false) message.button("Compare with plain", (button) => compare(body, message, button));
}

function summary(message) {
  if (!message.tokens) return;
  const parts = [`${message.tokens} tokens`];
  if (message.perPass) parts.push(`${message.perPass.toFixed(2)} per pass`);
  if (message.rate) parts.push(`${message.rate.toFixed(1)} per second`);
  message.note(parts.join(", "));
  $("status").textContent = `Answer: ${parts.join(", ")}.`;
}

// The same request once more without speculation: the tokens must be the same, and the time shows what it saved.
async function compare(body, message, button) {
  button.remove();
  const plain = new Message("assistant", document.createDocumentFragment());
  $("status").textContent = "The same request, plainly decoded …";
  if (!(await stream({ ...body, speculation: false }, plain))) {
    $("status").textContent = "The comparison did not finish.";
    return;
  }
  if (plain.rate) plainRate = plain.rate;
  const same = plain.content === message.content;
  message.table({ speculative: message, plain });
  const gain = message.rate && plain.rate ? `, ${times(message.rate / plain.rate)} as fast` : "";
  message.note(same ? `same text as plain decoding${gain}` : "the text differs from plain decoding");
  $("status").textContent = same ? `Same text as plain decoding${gain}.` : "The text differs from plain decoding.";
  measure(message, false);
  message.box.scrollIntoView({ block: "end" });
}

function checkbox(name) {
  const label = document.createElement("label");
  const box = document.createElement("input");
  box.type = "checkbox";
  box.checked = true;
  box.value = name;
  const swatch = document.createElement("span");
  swatch.className = `drafted ${colour(name)}`;
  swatch.textContent = name;
  label.append(box, swatch);
  return label;
}

// Again until the server is there: it listens while the model is still being read.
async function greet() {
  try {
    const found = await model($("key").value);
    $("model").textContent = `${found.id}, ${found.max_model_len} tokens of context`;
    const names = found.drafters ?? [];
    $("drafters").append(...names.map(checkbox));
    $("drafters").hidden = names.length === 0;
  } catch (error) {
    if (error.status === 401) $("key-field").hidden = false;
    $("model").textContent = error instanceof ServerError ? error.message : "the server cannot be reached";
    setTimeout(greet, 2000);
  }
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  ask(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  $("log").replaceChildren();
  $("status").textContent = "";
  $("prompt").focus();
});
$("speculate").addEventListener("change", () => ($("drafters").disabled = !$("speculate").checked));
$("form").addEventListener("change", () => ($("schema-field").hidden = $("form").value !== "json_schema"));
$("theme").addEventListener("click", theme);
if (matchMedia("(max-width: 760px)").matches) $("settings").open = false;

greet();
startCharts($("charts"));
