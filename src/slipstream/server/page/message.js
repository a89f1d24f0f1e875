// A message of the conversation, and what is known about where its tokens came from. Text is only ever set as text.

const SLOTS = 8;
const SHORTEST_S = 0.1; // What comes within this time comes together and tells no speed.
const slots = new Map();

// Every source keeps its colour while the page is open; the target's own tokens have none.
export function colour(source) {
  if (!slots.has(source)) slots.set(source, slots.size % SLOTS);
  return `s${slots.get(source)}`;
}

export class Message {
  constructor(role, log) {
    this.role = role;
    this.content = "";
    this.counts = new Map();
    this.tokens = 0;
    this.passes = 0;
    this.firstAt = this.lastAt = null;
    this.firstTokens = 0;
    this.statistics = null;
    this.box = document.createElement("article");
    this.box.className = `message ${role}`;
    this.box.setAttribute("aria-label", role === "user" ? "You" : "The model");
    this.text = document.createElement("div");
    this.text.className = "text";
    this.foot = document.createElement("footer");
    this.box.append(this.text);
    log.append(this.box);
  }

  // One run of tokens of one source. Each pass of the target ends with one token of its own, so those count passes.
  add(text, source, count) {
    this.content += text;
    const now = performance.now();
    if (count) {
      if (this.firstAt === null) {
        this.firstAt = now;
        this.firstTokens = count;
      }
      this.lastAt = now;
      this.tokens += count;
      if (source === "") this.passes += count;
      this.counts.set(source, (this.counts.get(source) ?? 0) + count);
    }
    if (!text) return;
    if (source === "") {
      this.text.append(text);
      return;
    }
    const span = document.createElement("span");
    span.className = `drafted ${colour(source)}`;
    span.title = `${count} drafted by ${source} and accepted`;
    span.dataset.source = source;
    span.append(text);
    this.text.append(span);
  }

  get perPass() {
    return this.passes ? this.tokens / this.passes : null;
  }

  // Tokens per second: as the server has timed it or, until it says so, as they come here after the first ones.
  get rate() {
    const decode = this.statistics?.decode_s;
    if (decode) return this.tokens / decode;
    const seconds = this.firstAt === null ? 0 : (this.lastAt - this.firstAt) / 1000;
    return seconds > SHORTEST_S ? (this.tokens - this.firstTokens) / seconds : null;
  }

  working(is) {
    this.box.classList.toggle("working", is);
  }

  fail(message) {
    this.box.classList.add("failed");
    this.note(message);
  }

  note(...parts) {
    const line = document.createElement("span");
    line.append(...parts);
    this.foot.append(line);
    this.box.append(this.foot);
  }

  button(label, action) {
    const made = document.createElement("button");
    made.type = "button";
    made.className = "small";
    made.textContent = label;
    made.addEventListener("click", () => action(made));
    this.foot.append(made);
    this.box.append(this.foot);
  }

  // Answers beside each other, by name: a bar for the speed of each, and their numbers.
  table(answers) {
    const made = document.createElement("table");
    const fastest = Math.max(...Object.values(answers).map((one) => one.rate ?? 0), 1e-9);
    for (const [name, one] of Object.entries(answers)) {
      const line = made.insertRow();
      const head = document.createElement("th");
      head.scope = "row";
      head.textContent = name;
      const bar = document.createElement("div");
      bar.className = `speed ${name}`;
      bar.style.width = `${(100 * (one.rate ?? 0)) / fastest}%`;
      line.append(head);
      line.insertCell().append(bar);
      line.insertCell().textContent = one.rate ? `${one.rate.toFixed(1)} tokens/s` : "–";
      line.insertCell().textContent = one.perPass ? `${one.perPass.toFixed(2)} per pass` : "–";
    }
    this.foot.before(made);
  }
}
