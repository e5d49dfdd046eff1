"use strict";

(() => {
  const ROW = 13; // pixels of a request where there is room
  const TALLEST = 560; // pixels of all of them
  const AXIS = 20; // pixels below a plot for its numbers
  const LEFT = 46; // and beside it
  const RIGHT = 6;
  const PLOT = 92; // pixels of the plots below
  const CLOSEST = 0.002; // seconds that can be seen at once

  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const plots = $("plots");
  const tip = $("tip");
  const whole = Math.max(...data.requests.map((r) => r.end_s), 1e-3);
  const rates = data.tokens_per_bin.map((tokens) => tokens / data.bin_s);

  let from = 0; // seconds at the left edge
  let to = whole;
  let shown = data.requests; // those that are under way or due between the two
  let chosen = -1; // of these, the one that the keyboard is at
  let drag = null; // where the pointer went down
  let colours = {};

  // Small helpers.

  function make(tag, text = "") {
    const element = document.createElement(tag);
    element.textContent = text;
    return element;
  }

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const number = (x, digits = 0) => x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const width = () => plots.clientWidth;
  const across = (seconds) => LEFT + ((seconds - from) / (to - from)) * (width() - LEFT - RIGHT);
  const secondsAt = (x) => from + clamp((x - LEFT) / (width() - LEFT - RIGHT), 0, 1) * (to - from);

  function duration(seconds) {
    const ms = 1000 * seconds;
    return ms < 10 ? `${number(ms, 2)} ms` : ms < 1000 ? `${number(ms, 1)} ms` : `${number(seconds, 2)} s`;
  }

  /** The smallest of 1, 2, 5 and their decimal multiples that is not less. */
  function round(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return power * [1, 2, 5, 10].find((factor) => power * factor >= least * (1 - 1e-9));
  }

  function ticks(low, high, most) {
    const step = round((high - low) / Math.max(most, 1));
    const first = Math.ceil(low / step - 1e-9);
    const values = [];
    for (let n = first; n * step <= high * (1 + 1e-9); n++) values.push(n * step || 0); // never -0
    return { values, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
  }

  // How many requests are under way, and how many wait, as steps (time, count).

  function steps(intervals) {
    const changes = intervals.filter(([a, b]) => b > a).flatMap(([a, b]) => [[a, 1], [b, -1]]);
    changes.sort((x, y) => x[0] - y[0] || x[1] - y[1]);
    let count = 0;
    return changes.map(([at, by]) => [at, (count += by)]);
  }

  const active = steps(data.requests.map((r) => [r.sent_s, r.end_s]));
  const waiting = steps(data.requests.map((r) => [r.due_s, r.sent_s]));
  // Every timer is late by a little; that is no queue.
  const queued = data.requests.some((r) => r.held_s > 0.001);
  $("waiting-name").hidden = !queued;

  function countAt(series, at) {
    let low = 0;
    let high = series.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (series[middle][0] <= at) low = middle + 1;
      else high = middle;
    }
    return low ? series[low - 1][1] : 0;
  }

  // Drawing.

  function canvas(id, height) {
    const element = $(id);
    const scale = window.devicePixelRatio || 1;
    element.style.height = `${height}px`;
    element.width = Math.round(width() * scale);
    element.height = Math.round(height * scale);
    const pen = element.getContext("2d");
    pen.scale(scale, scale);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    return pen;
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["line", "faint", "soft", "ink", "waiting", "first", "rest", "failed", "area"];
    colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  function timeAxis(pen, height) {
    const { values, digits } = ticks(from, to, (width() - LEFT - RIGHT) / 90);
    pen.textAlign = "center";
    for (const at of values) {
      const x = Math.round(across(at)) + 0.5;
      line(pen, x, 0, x, height, colours.line);
      const half = pen.measureText(`${number(at, digits)} s`).width / 2;
      pen.fillStyle = colours.soft;
      pen.fillText(`${number(at, digits)} s`, clamp(x, half, width() - half), height + 14);
    }
    line(pen, LEFT, height + 0.5, width() - RIGHT, height + 0.5, colours.faint);
  }

  function line(pen, x1, y1, x2, y2, colour) {
    pen.strokeStyle = colour;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
  }

  const rowsHeight = () => clamp(shown.length * ROW, 4 * ROW, TALLEST);
  const rowHeight = () => Math.min(rowsHeight() / Math.max(shown.length, 1), ROW);

  function drawRows() {
    const height = rowsHeight();
    const pen = canvas("rows", height + AXIS);
    timeAxis(pen, height);
    const each = rowHeight();
    const thick = Math.max(each > 4 ? each - 2 : each, 0.8);
    const edge = width() - RIGHT;
    const bar = (a, b, y, tall, colour) => {
      const [x1, x2] = [clamp(across(a), LEFT, edge), clamp(across(b), LEFT, edge)];
      pen.fillStyle = colour;
      if (b >= from && a <= to) pen.fillRect(x1, y, Math.max(x2 - x1, 0.75), tall);
    };
    shown.forEach((r, n) => {
      const y = n * each + (each - thick) / 2;
      const first = r.first_s ?? r.end_s;
      const thin = Math.max(Math.min(thick / 4, 2), 0.4);
      if (r.sent_s - r.due_s > 0.001) bar(r.due_s, r.sent_s, y + (thick - thin) / 2, thin, colours.waiting);
      // A failure may take no time at all.
      if (r.failure) bar(r.sent_s, Math.max(r.end_s, r.sent_s + (2 * (to - from)) / width()), y, thick, colours.failed);
      else bar(r.sent_s, first, y, thick, colours.first);
      if (!r.failure) bar(first, r.end_s, y, thick, colours.rest);
      if (n === chosen) {
        pen.strokeStyle = colours.ink;
        pen.strokeRect(LEFT + 0.5, n * each + 0.5, edge - LEFT - 1, Math.max(each - 1, 1));
      }
    });
    pen.fillStyle = colours.soft;
    pen.textAlign = "right";
    const every = Math.max(1, round(shown.length / Math.max(height / 60, 1)));
    shown.forEach((r, n) => {
      if (n % every === 0) pen.fillText(number(r.number + 1), LEFT - 8, Math.max(n * each + each / 2 + 4, 9));
    });
  }

  function plot(id, top) {
    const height = PLOT;
    const pen = canvas(id, height + AXIS);
    timeAxis(pen, height);
    const { values, digits } = ticks(0, top, 3);
    const up = (value) => height - (value / top) * (height - 8);
    pen.textAlign = "right";
    for (const value of values) {
      const y = Math.round(up(value)) + 0.5;
      if (value) line(pen, LEFT, y, width() - RIGHT, y, colours.line);
      pen.fillStyle = colours.soft;
      pen.fillText(number(value, digits), LEFT - 8, y + 4);
    }
    pen.beginPath();
    pen.rect(LEFT, 0, width() - LEFT - RIGHT, height + 1);
    pen.clip();
    return { pen, up };
  }

  function trace(pen, up, series) {
    pen.beginPath();
    pen.moveTo(across(from), up(countAt(series, from)));
    let before = countAt(series, from);
    for (const [at, count] of series) {
      if (at < from || at > to) continue;
      pen.lineTo(across(at), up(before));
      pen.lineTo(across(at), up(count));
      before = count;
    }
    pen.lineTo(across(to), up(before));
  }

  function drawActive() {
    const most = Math.max(1, ...active.map(([, n]) => n), ...(queued ? waiting.map(([, n]) => n) : []));
    const { pen, up } = plot("active", most);
    trace(pen, up, active);
    pen.strokeStyle = colours.rest;
    pen.lineWidth = 1.5;
    pen.stroke();
    pen.lineTo(across(to), up(0));
    pen.lineTo(across(from), up(0));
    pen.fillStyle = colours.area;
    pen.globalCompositeOperation = "destination-over";
    pen.fill();
    pen.globalCompositeOperation = "source-over";
    if (!queued) return;
    trace(pen, up, waiting);
    pen.setLineDash([4, 3]);
    pen.strokeStyle = colours.soft;
    pen.stroke();
  }

  function drawRate() {
    const { pen, up } = plot("rate", Math.max(...rates, 1e-9));
    pen.fillStyle = colours.rest;
    rates.forEach((value, n) => {
      const [a, b] = [n * data.bin_s, (n + 1) * data.bin_s];
      if (b < from || a > to || !value) return;
      const [x1, x2] = [across(a), across(b)];
      const gap = x2 - x1 > 4 ? 1 : 0;
      pen.fillRect(x1, up(value), Math.max(x2 - x1 - gap, 0.5), up(0) - up(value));
    });
  }

  function draw() {
    readColours();
    shown = data.requests.filter((r) => r.end_s >= from && r.due_s <= to);
    chosen = Math.min(chosen, shown.length - 1);
    drawRows();
    drawActive();
    drawRate();
    const all = from === 0 && to === whole;
    $("span").textContent = all ? "" : `${duration(to - from)} from ${duration(from)}`;
    $("all").disabled = $("out").disabled = all;
    $("in").disabled = to - from <= CLOSEST;
  }

  function show(a, b) {
    const span = clamp(b - a, Math.min(CLOSEST, whole), whole);
    from = clamp(a + (b - a - span) / 2, 0, whole - span);
    to = span === whole ? whole : from + span;
    chosen = -1;
    hide();
    draw();
    history.replaceState(null, "", to - from < whole ? `#from=${from.toFixed(4)}&to=${to.toFixed(4)}` : "#");
  }

  /** A link may name a span of time. */
  function followLink() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const [a, b] = ["from", "to"].map((name) => parseFloat(asked.get(name)));
    if (b > a) show(a, b);
  }

  const zoom = (factor, middle = (from + to) / 2) => show(middle - (middle - from) * factor, middle + (to - middle) * factor);

  // What is known of a request, and of a moment.

  function requestFacts(r) {
    const facts = [["due", duration(r.due_s)]];
    if (r.held_s > 0.0005) facts.push(["held by the limit", duration(r.held_s)]);
    facts.push(["sent late by", duration(Math.max(r.sent_s - r.due_s - r.held_s, 0))]);
    if (r.first_s !== null) facts.push(["to the first token", duration(r.first_s - r.sent_s)]);
    if (r.tpot_ms !== null) facts.push(["for each token then", duration(r.tpot_ms / 1000)]);
    facts.push([r.failure ? "to the failure" : "end to end", duration(r.end_s - r.sent_s)]);
    if (r.prompt_tokens !== null) facts.push(["prompt", `${number(r.prompt_tokens)} tokens`]);
    facts.push(["output", `${number(r.output_tokens)} tokens in ${number(r.chunks)} chunks`]);
    if (r.finish_reason) facts.push(["ended by", r.finish_reason]);
    return facts;
  }

  function fill(title, facts, more) {
    const rows = make("dl");
    for (const [name, value] of facts) rows.append(make("dt", name), make("dd", value));
    tip.replaceChildren(make("strong", title), rows);
    if (more) tip.append(make("div", more));
    tip.hidden = false;
  }

  function place(x, y) {
    const left = x + 14 + tip.offsetWidth < innerWidth - 8 ? x + 14 : Math.max(x - 14 - tip.offsetWidth, 8);
    const top = clamp(y + 14, 8, Math.max(innerHeight - tip.offsetHeight - 8, 8));
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }

  function describe(r) {
    const what = r.failure ? `: ${r.failure.replaceAll("_", " ")}` : "";
    fill(`Request ${number(r.number + 1)}${what}`, requestFacts(r), r.message);
  }

  function hide() {
    tip.hidden = true;
    $("cross").hidden = true;
  }

  function hover(event) {
    const box = plots.getBoundingClientRect();
    const x = event.clientX - box.left;
    if (x < LEFT || x > box.width - RIGHT) return hide();
    const at = secondsAt(x);
    $("cross").hidden = false;
    $("cross").style.left = `${x}px`;
    const rows = $("rows").getBoundingClientRect();
    const n = Math.floor((event.clientY - rows.top) / rowHeight());
    if (event.clientY < rows.top + rowsHeight() && n >= 0 && n < shown.length) {
      describe(shown[n]);
    } else {
      const facts = [["under way", number(countAt(active, at))]];
      if (queued) facts.push(["not sent yet", number(countAt(waiting, at))]);
      facts.push(["output", `${number(rates[Math.floor(at / data.bin_s)] ?? 0, 1)} tokens/s`]);
      fill(`At ${duration(at)}`, facts);
    }
    place(event.clientX, event.clientY);
  }

  // Pointer and keyboard.

  function brush(event) {
    const box = plots.getBoundingClientRect();
    const [a, b] = [drag, event.clientX - box.left].map((x) => clamp(x, LEFT, box.width - RIGHT)).sort((x, y) => x - y);
    Object.assign($("brush").style, { left: `${a}px`, width: `${b - a}px` });
    $("brush").hidden = b - a < 4;
    return [a, b];
  }

  plots.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = event.clientX - plots.getBoundingClientRect().left;
    if (event.pointerType === "mouse") plots.setPointerCapture(event.pointerId);
  });
  plots.addEventListener("pointermove", (event) => {
    if (drag !== null && event.pointerType === "mouse") brush(event);
    hover(event);
  });
  plots.addEventListener("pointerup", (event) => {
    if (drag === null) return;
    const [a, b] = brush(event);
    const dragged = event.pointerType === "mouse" && b - a >= 4;
    drag = null;
    $("brush").hidden = true;
    if (dragged) show(secondsAt(a), secondsAt(b));
    else hover(event);
  });
  plots.addEventListener("pointercancel", () => {
    drag = null;
    $("brush").hidden = true;
    hide();
  });
  plots.addEventListener("pointerleave", () => drag === null && hide());
  plots.addEventListener("dblclick", () => show(0, whole));
  plots.addEventListener("blur", hide);

  function choose(n) {
    chosen = clamp(n, 0, shown.length - 1);
    if (!shown.length) return;
    draw();
    const rows = $("rows").getBoundingClientRect();
    const r = shown[chosen];
    describe(r);
    place(rows.left + clamp(across(r.first_s ?? r.end_s), LEFT, width()), rows.top + (chosen + 1) * rowHeight());
  }

  const KEYS = {
    ArrowLeft: () => show(from - (to - from) / 4, to - (to - from) / 4),
    ArrowRight: () => show(from + (to - from) / 4, to + (to - from) / 4),
    ArrowUp: () => choose(chosen - 1),
    ArrowDown: () => choose(chosen + 1),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    0: () => show(0, whole),
    Escape: hide,
  };
  plots.addEventListener("keydown", (event) => {
    const act = KEYS[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });

  $("in").addEventListener("click", () => zoom(0.5));
  $("out").addEventListener("click", () => zoom(2));
  $("all").addEventListener("click", () => show(0, whole));
  new ResizeObserver(draw).observe(plots);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("hashchange", followLink);
  draw();
  followLink();
})();
