// Live charts of /metrics: a line per quantity over the last minutes, drawn as SVG.

import { metrics } from "./api.js";

const EVERY_MS = 1000;
const KEPT = 60;
const WIDTH = 150;
const HEIGHT = 48;
const SVG = "http://www.w3.org/2000/svg";

const whole = (value) => String(Math.round(value));
const per = (name, over) => (now, before) => {
  const below = now[over] - before[over];
  return below > 0 ? (now[name] - before[name]) / below : null;
};
const rate = (name) => (now, before) => (now[name] - before[name]) / (now.time - before.time);
const level = (name) => (now) => now[name] ?? null;

const DRAFTED = "slipstream_spec_decode_num_draft_tokens_total";
const ACCEPTED = "slipstream_spec_decode_num_accepted_tokens_total";
const CHARTS = [
  { title: "tokens/s", show: (value) => value.toFixed(1), read: [rate("slipstream_generation_tokens_total")] },
  {
    title: "tokens per pass", show: (value) => value.toFixed(2),
    read: [per("slipstream_generation_tokens_total", "slipstream_decode_steps_total")],
  },
  { title: "acceptance", show: (value) => `${whole(100 * value)} %`, read: [per(ACCEPTED, DRAFTED)], top: 1 },
  {
    title: "running, waiting", show: whole,
    read: [level("slipstream_requests_running"), level("slipstream_requests_waiting")],
  },
  { title: "KV cache", show: (value) => `${(100 * value).toFixed(1)} %`, read: [level("slipstream_kv_cache_usage_ratio")], top: 1 },
  { title: "speed-up", show: (value) => `${value.toFixed(2)}×`, read: [level("slipstream_speedup_estimate")] },
];

function element(kind, attributes = {}) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

class Chart {
  constructor(spec, parent) {
    this.spec = spec;
    this.series = spec.read.map(() => []);
    const box = document.createElement("div");
    box.className = "chart";
    const head = document.createElement("p");
    const title = document.createElement("span");
    title.textContent = spec.title;
    this.value = document.createElement("b");
    this.value.textContent = "–";
    head.append(title, this.value);
    this.svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.svg.setAttribute("aria-label", spec.title);
    this.area = element("path", { class: "area" });
    this.lines = spec.read.map((_, place) => element("path", { class: place ? "line second" : "line" }));
    this.svg.append(this.area, ...this.lines);
    box.append(head, this.svg);
    parent.append(box);
  }

  add(now, before) {
    this.series.forEach((values, place) => {
      values.push(this.spec.read[place](now, before));
      if (values.length > KEPT) values.shift();
    });
    this.draw();
  }

  draw() {
    const known = this.series.flat().filter((value) => value !== null && Number.isFinite(value));
    const top = this.spec.top ?? Math.max(1, ...known) * 1.1;
    this.series.forEach((values, place) => this.lines[place].setAttribute("d", path(values, top)));
    this.area.setAttribute("d", filled(this.series[0], top));
    const last = this.series.map((values) => values.findLast((value) => value !== null));
    const shown = last.map((value) => (value === undefined ? "–" : this.spec.show(value))).join(", ");
    this.value.textContent = shown;
    this.svg.setAttribute("aria-label", `${this.spec.title}: ${shown}`);
  }
}

function points(values, top) {
  const step = WIDTH / (KEPT - 1);
  const start = WIDTH - step * (values.length - 1);
  return values
    .map((value, place) => [start + step * place, value === null ? null : HEIGHT - 2 - (HEIGHT - 4) * Math.min(1, value / top)])
    .filter(([, y]) => y !== null);
}

function path(values, top) {
  return points(values, top).map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

function filled(values, top) {
  const line = points(values, top);
  if (line.length < 2) return "";
  return `${path(values, top)}L${line.at(-1)[0].toFixed(1)} ${HEIGHT}L${line[0][0].toFixed(1)} ${HEIGHT}Z`;
}

// What somebody has to look at: the shadow check found a token that differs from plain decoding.
function alarm(now) {
  const count = now.slipstream_shadow_alarms_total ?? 0;
  const box = document.getElementById("alarm");
  box.hidden = !count;
  box.textContent = count ? `The shadow check found ${count} answers that differ from plain decoding.` : "";
}

export function startCharts(parent) {
  const charts = CHARTS.map((spec) => new Chart(spec, parent));
  let before = null;
  async function tick() {
    if (document.visibilityState === "visible") {
      try {
        const now = { ...(await metrics()), time: performance.now() / 1000 };
        if (before) charts.forEach((chart) => chart.add(now, before));
        before = now;
        alarm(now);
      } catch {
        before = null; // The server is away; the gap shows.
      }
    }
    setTimeout(tick, EVERY_MS);
  }
  tick();
}
