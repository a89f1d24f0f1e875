// A message of the conversation, and what is known about where its tokens came from. Text is only ever set as text.

const SLOTS = 8;
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

  // Tokens per second after the first ones.
  get rate() {
    const seconds = this.firstAt === null ? 0 : (this.lastAt - this.firstAt) / 1000;
    return seconds > 0 ? (this.tokens - this.firstTokens) / seconds : null;
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

  table(head, rows) {
    const made = document.createElement("table");
    [head, ...rows].forEach((cells, place) => {
      const line = made.insertRow();
      for (const cell of cells) {
        const box = document.createElement(place ? "td" : "th");
        box.textContent = cell;
        line.append(box);
      }
    });
    this.box.append(made);
  }
}
