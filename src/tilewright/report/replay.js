"use strict";

(() => {
  const SPEEDS = [20, 10, 5, 2, 1, 1 / 2, 1 / 5, 1 / 10, 1 / 20, 1 / 50, 1 / 100, 1 / 200, 1 / 500, 1 / 1000];
  const COMFORTABLE = 15; // seconds that a passage should play for
  const SHAPES = { play: "M4.5 2.8v10.4L13 8z", pause: "M4.4 3h2.2v10H4.4zM9.4 3h2.2v10H9.4z" };
  const KINDS = {
    accepted: "accepted draft",
    target: "from the target",
    rejected: "rejected draft",
    plain: "plain decoding",
    committed: "committed",
  };
  const MASK = "▒";
  const SPANS = { block: "its block", response: "the response", whole: "everything" };

  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const denoising = data.kind === "denoising"; // masks give way all over a text, and steps take the part of rounds
  const word = denoising ? "step" : "round";
  const capital = denoising ? "Step" : "Round";

  let run; // the passage that is shown, see `load`
  let index = 0;
  let time = 0; // seconds on the clock of both texts
  let speed = 1;
  let playing = false;
  let lastFrame = 0;

  // Small helpers.

  function make(tag, className = "", text = "") {
    const element = document.createElement(tag);
    element.className = className;
    element.textContent = text;
    return element;
  }

  function shape(name, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  /** How many of the ascending `ends` the clock has passed. */
  function passed(ends) {
    let low = 0;
    let high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] <= time * (1 + 1e-9)) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function sums(values) {
    let total = 0;
    return values.map((value) => (total += value));
  }

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const seconds = (s) => (run.total < 1 ? `${(1000 * s).toFixed(run.total < 0.1 ? 1 : 0)} ms` : `${s.toFixed(2)} s`);
  const number = (x, digits) => x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const rate = (x) => number(x, x < 100 ? 1 : 0);
  const visible = (text) =>
    text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(/^ +| +$/g, (spaces) => "·".repeat(spaces.length)) || "no text";

  // A passage: its tokens as elements, its times as sums.

  function tokenElement(entry) {
    const element = make("span", `t ${entry.kind}`);
    element.tabIndex = -1;
    const { text } = entry.token;
    if (text === "") element.classList.add("blank");
    text.split("\n").forEach((line, n, lines) => {
      element.append(line);
      if (n + 1 === lines.length) return;
      element.append(make("i", "end"));
      // A draft that came to nothing breaks no line.
      if (entry.kind !== "rejected") element.append("\n");
    });
    entry.element = element;
    entry.nodes = [...element.childNodes];
    return element;
  }

  /** Shows a token, or what stands in its place until it is there. */
  function uncover(entry, on) {
    if (!denoising) {
      entry.element.hidden = !on;
      return;
    }
    entry.element.replaceChildren(...(on ? entry.nodes : [MASK]));
    entry.element.classList.toggle("masked", !on);
  }

  function plainEntries(passage) {
    return passage.baseline.map((step, n) => [{ kind: "plain", token: step.token, position: n, seconds: step.seconds }]);
  }

  /** For each round its tokens, rejected drafts last. */
  function fastEntries(passage) {
    let position = 0;
    return passage.rounds.map((round, n) => {
      const first = position;
      const entries = round.emitted.map((token, slot) => ({
        kind: slot < round.accepted ? "accepted" : "target",
        instead: slot === round.accepted ? round.drafted[slot] : undefined,
        bonus: slot === round.accepted && slot === round.drafted.length && slot > 0,
        token,
        position: position++,
        round: n,
        slot: slot + 1,
      }));
      // Where the text ended inside the round, nothing is known of the drafts beyond.
      const rejected = round.emitted.length > round.accepted ? round.drafted.slice(round.accepted) : [];
      rejected.forEach((token, at) => {
        const slot = round.accepted + at;
        entries.push({
          kind: "rejected",
          beyond: at > 0,
          by: round.emitted[round.accepted],
          token,
          position: first + slot,
          round: n,
          slot: slot + 1,
        });
      });
      return entries;
    });
  }

  /** For each denoising step its tokens, wherever they stand. */
  function unmaskedEntries(steps) {
    return steps.map((step, n) =>
      step.committed.map(({ position, token }) => ({ kind: "committed", token, position, round: n, seconds: step.seconds })),
    );
  }

  function pane(id, prompt, groups, ends) {
    const box = $(id);
    box.replaceChildren(make("span", "given", promptTail(prompt)));
    const all = groups.flat();
    if (denoising) all.sort((a, b) => a.position - b.position);
    for (const entry of all) {
      const element = tokenElement(entry);
      uncover(entry, false);
      if (entry.beyond) element.classList.add("beyond");
      known.set(element, entry);
      box.append(element);
    }
    const lengths = groups.map((group) => group.filter((entry) => entry.kind !== "rejected").length);
    return { box, groups, ends, counts: [0, ...sums(lengths)], shown: 0, all };
  }

  const known = new WeakMap(); // what is known of a token's element

  /** The end of a prompt, enough to see what the text goes on from. */
  function promptTail(prompt) {
    const lines = prompt.split("\n");
    return lines.length > 9 ? "⋯\n" + lines.slice(-8).join("\n") : prompt;
  }

  function load(which) {
    index = which;
    const passage = data.passages[which];
    const plainEnds = sums(passage.baseline.map((step) => step.seconds));
    const fastEnds = sums(passage.rounds.map((round) => round.seconds));
    run = {
      passage,
      plain: pane("plain", passage.prompt, denoising ? unmaskedEntries(passage.baseline) : plainEntries(passage), plainEnds),
      fast: pane("fast", passage.prompt, denoising ? unmaskedEntries(passage.rounds) : fastEntries(passage), fastEnds),
      total: Math.max(plainEnds.at(-1), fastEnds.at(-1)),
    };
    $("passage").value = which;
    $("prompt").textContent = passage.prompt;
    showVerdict();
    drawStrip();
    setSpeed(SPEEDS.reduce((a, b) => (nearness(b) < nearness(a) ? b : a)));
  }

  /** How far a speed is from playing the passage in comfort. */
  const nearness = (s) => Math.abs(Math.log(run.total / COMFORTABLE / s));

  function showVerdict() {
    const [plain, fast] = [run.plain, run.fast].map((side) => side.all.filter((entry) => entry.kind !== "rejected"));
    const most = Math.max(plain.length, fast.length);
    let at = 0;
    while (at < most && plain[at]?.token.id === fast[at]?.token.id) at++;
    if (at === most) {
      $("verdict").textContent = `✓ the same ${number(most, 0)} tokens`;
      return;
    }
    if (denoising) {
      const there = new Map(plain.map((entry) => [entry.position, entry.token.id]));
      const other = fast.filter((entry) => there.get(entry.position) !== entry.token.id);
      for (const entry of other) entry.element.classList.add("differs");
      $("verdict").textContent = `${number(fast.length - other.length, 0)} of ${number(most, 0)} tokens as in dense steps`;
      return;
    }
    fast[at]?.element.classList.add("differs");
    const margin = fast[at]?.token.margin;
    const close = margin == null ? "" : `, where the margin is ${margin.toPrecision(3)}`;
    $("verdict").textContent = `the texts differ from token ${number(at + 1, 0)} on${close}`;
  }

  // The strip of rounds, which is also the scrubber.

  function drawStrip() {
    const { rounds } = run.passage;
    // Of denoising, layers stand below the bars, each step's salient share in each.
    const layers = denoising ? Math.max(...rounds.map((round) => round.salient.length)) : 0;
    const height = layers ? 62 : 100;
    const most = denoising ? Math.max(...rounds.map((round) => round.committed.length), 1) : data.block_size;
    const svg = shape("svg", { viewBox: `0 0 ${rounds.length} 100`, preserveAspectRatio: "none", "aria-hidden": "true" });
    const gap = rounds.length > 250 ? 0 : 0.14;
    run.bars = rounds.map((round, n) => {
      const group = shape("g", {});
      const bar = (kind, from, to) => {
        const box = { x: n + gap / 2, width: 1 - gap, y: height * (1 - to / most), height: (height * (to - from)) / most };
        group.append(shape("rect", { class: kind, ...box }));
      };
      svg.append(group);
      if (denoising) {
        bar("accepted", 0, round.committed.length);
        round.salient.forEach((share, layer) => {
          const at = { x: n, width: 1, y: 66 + (34 * layer) / layers, height: 34 / layers };
          svg.append(shape("rect", { class: "heat", ...at, "fill-opacity": warmth(share) }));
        });
        return group;
      }
      const accepted = Math.min(round.accepted, round.emitted.length);
      bar("ghost", round.emitted.length, Math.max(round.drafted.length + 1, round.emitted.length));
      bar("accepted", 0, accepted);
      bar("target", accepted, round.emitted.length);
      return group;
    });
    run.line = shape("rect", { class: "head-line", y: -4, height: 108 });
    svg.append(run.line);
    $("strip").replaceChildren(svg);
    $("strip").setAttribute("aria-valuemax", rounds.length);
  }

  /** How strongly a salient share is coloured: small ones are told from none. */
  const warmth = (share) => (share > 0 ? 0.06 + 0.94 * share : 0).toFixed(3);
  const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  /** What the step that ended last looked at, and what was salient in it. */
  function renderStep(n) {
    const step = run.passage.rounds[n - 1];
    $("looked").textContent = step ? SPANS[step.span] : "–";
    const cells = (step?.salient ?? []).map((share, layer) => {
      const cell = make("i", "cell");
      cell.style.setProperty("--share", warmth(share));
      cell.title = `layer ${layer + 1}: ${percent(share)}`;
      return cell;
    });
    const shown = cells.length ? percent(average(step.salient)) : step ? "all" : "–";
    $("heat").replaceChildren(shown, ...cells);
  }

  function stripRound(event) {
    const box = $("strip").getBoundingClientRect();
    return clamp(Math.ceil(((event.clientX - box.left) / box.width) * run.passage.rounds.length), 0, run.passage.rounds.length);
  }

  function roundText(n) {
    const round = run.passage.rounds[n - 1];
    if (denoising) {
      return [
        ["step", `${n} of ${run.passage.rounds.length}`],
        ["looked at", SPANS[round.span]],
        ["committed", `${round.committed.length} ${round.committed.length === 1 ? "token" : "tokens"}`],
        ["salient", round.salient.length ? percent(average(round.salient)) : "all"],
        ["took", seconds(round.seconds)],
      ];
    }
    return [
      ["round", `${n} of ${run.passage.rounds.length}`],
      ...(round.drafter == null ? [] : [["chosen", round.drafter === "none" ? "plain step" : `${round.drafter}, block ${round.width}`]]),
      ["accepted", `${round.accepted} of ${round.drafted.length} drafts`],
      ["added", `${round.emitted.length} ${round.emitted.length === 1 ? "token" : "tokens"}`],
      ["took", seconds(round.seconds)],
    ];
  }

  // Showing the state at `time`.

  function reveal(side, until) {
    const keep = $("keep").checked;
    const set = (n, on) => {
      for (const entry of side.groups[n]) {
        const kept = entry.kind !== "rejected" || n === until - 1 || (keep && !entry.beyond);
        uncover(entry, on && kept);
        entry.element.classList.toggle("now", on && n === until - 1);
      }
    };
    const [low, high] = [Math.min(side.shown, until), Math.max(side.shown, until)];
    for (let n = Math.max(low - 1, 0); n < high; n++) set(n, n < until);
    const newest = side.groups[until - 1]?.[0]?.element;
    if (side.stop) side.stop.tabIndex = -1;
    side.stop = newest ?? null;
    if (side.stop && !side.box.contains(document.activeElement)) side.stop.tabIndex = 0;
    if (until !== side.shown) follow(side, until);
    side.shown = until;
  }

  /** Keeps the newest tokens in view. */
  function follow(side, until) {
    const last = side.groups[until - 1]?.findLast((entry) => !entry.element.hidden);
    if (!last) {
      side.box.scrollTop = 0;
      return;
    }
    const [box, at] = [side.box.getBoundingClientRect(), last.element.getBoundingClientRect()];
    if (at.bottom > box.bottom - 20) side.box.scrollTop += at.bottom - box.bottom + 20;
    else if (at.top < box.top) side.box.scrollTop -= box.top - at.top + box.height / 2;
  }

  function render() {
    const { plain, fast } = run;
    const [steps, rounds] = [passed(plain.ends), passed(fast.ends)];
    reveal(plain, steps);
    reveal(fast, rounds);
    const figures = [
      [plain, steps, "plain"],
      [fast, rounds, "fast"],
    ].map(([side, done, name]) => {
      const spent = Math.min(time, side.ends.at(-1));
      const tokens = side.counts[done];
      const perSecond = spent > 0 ? tokens / spent : 0;
      $(`${name}-rate`).replaceChildren(...(tokens ? [rate(perSecond), make("small", "", "tokens/s")] : ["–"]));
      $(`${name}-count`).textContent = `${number(tokens, 0)} of ${number(side.counts.at(-1), 0)} tokens · ${seconds(spent)}`;
      $(`${name}-bar`).style.transform = `scaleX(${spent / run.total})`;
      return perSecond;
    });
    const tau = rounds ? fast.counts[rounds] / rounds : 0;
    $("tau").replaceChildren(...(rounds ? [number(tau, 2), make("small", "", denoising ? "" : `of ${data.block_size}`)] : ["–"]));
    $("speedup").textContent = figures[0] && figures[1] ? `${number(figures[1] / figures[0], 2)}×` : "–";
    if (denoising) renderStep(rounds);
    renderTransport(rounds);
  }

  function renderTransport(rounds) {
    const all = run.passage.rounds.length;
    $("round").textContent = `${capital} ${rounds} of ${all}`;
    $("time").textContent = `${seconds(time)} of ${seconds(run.total)}`;
    $("play-shape").setAttribute("d", playing ? SHAPES.pause : SHAPES.play);
    $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
    $("strip").setAttribute("aria-valuenow", rounds);
    $("strip").setAttribute("aria-valuetext", rounds ? roundText(rounds).flat().join(" ") : `before ${word} 1 of ${all}`);
    run.bars.forEach((bar, n) => bar.classList.toggle("ahead", n >= rounds));
    const width = (1.5 * all) / Math.max($("strip").clientWidth, 1);
    run.line.setAttribute("width", width);
    run.line.setAttribute("x", clamp(rounds - width / 2, 0, all - width));
  }

  // Moving through time.

  function seek(to) {
    time = clamp(to, 0, run.total);
    render();
  }

  function seekRound(n) {
    stop();
    const { ends } = run.fast;
    seek(n <= 0 ? 0 : n > ends.length ? run.total : ends[n - 1]);
    remember();
  }

  /** Rounds that end before now, and whether the clock stands past the last one. */
  const roundNow = () => passed(run.fast.ends) + (time > run.fast.ends.at(-1) * (1 + 1e-9) ? 1 : 0);

  function frame(now) {
    if (!playing) return;
    const next = time + ((now - lastFrame) / 1000) * speed;
    lastFrame = now;
    if (next >= run.total) stop();
    seek(next);
    if (playing) requestAnimationFrame(frame);
    else remember();
  }

  function stop() {
    playing = false;
  }

  function toggle() {
    playing = !playing;
    if (!playing) {
      render();
      remember();
      return;
    }
    if (time >= run.total * (1 - 1e-9)) time = 0;
    lastFrame = performance.now();
    hideTip();
    render();
    requestAnimationFrame(frame);
  }

  function setSpeed(to) {
    speed = to;
    $("speed").value = SPEEDS.indexOf(to);
  }

  function changeSpeed(by) {
    setSpeed(SPEEDS[clamp(SPEEDS.indexOf(speed) - by, 0, SPEEDS.length - 1)]);
  }

  // A link to this place.

  function remember() {
    const rounds = roundNow();
    const at = rounds > run.fast.ends.length ? "" : `&round=${rounds}`;
    history.replaceState(null, "", `#prompt=${index + 1}${at}`);
  }

  function followLink() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const prompt = clamp((parseInt(asked.get("prompt"), 10) || 1) - 1, 0, data.passages.length - 1);
    if (!run || prompt !== index) load(prompt);
    stop();
    const round = parseInt(asked.get("round"), 10);
    seek(Number.isNaN(round) ? run.total : round <= 0 ? 0 : run.fast.ends[Math.min(round, run.fast.ends.length) - 1]);
  }

  // What is known of a token.

  function tokenFacts(entry) {
    const { token } = entry;
    const length = (entry.kind === "plain" ? run.plain : run.fast).counts.at(-1);
    const facts = [
      ["position", denoising ? entry.position + 1 : `${entry.position + 1} of ${length}`],
      ["token id", token.id],
    ];
    if (token.probability != null) facts.push(["target's probability", percent(token.probability)]);
    if (token.margin != null) facts.push(["top-1/top-2 margin", `${token.margin.toFixed(2)} logits`]);
    if (entry.instead) facts.push(["drafter proposed", `${visible(entry.instead.text)} (${entry.instead.id})`]);
    if (entry.by) facts.push(entry.beyond ? ["dropped", "after a rejection"] : ["target put", `${visible(entry.by.text)} (${entry.by.id})`]);
    if (entry.round !== undefined) {
      facts.push([word, entry.round + 1]);
      if (entry.slot !== undefined) facts.push(["slot", `${entry.slot}${entry.bonus ? ", after the last draft" : ""}`]);
    }
    if (entry.seconds !== undefined) facts.push(["step took", seconds(entry.seconds)]);
    return facts;
  }

  function percent(p) {
    if (p > 0.9999 && p < 1) return "> 99.99 %";
    return p < 0.0001 && p > 0 ? "< 0.01 %" : `${number(100 * p, p < 0.1 ? 2 : 1)} %`;
  }

  function list(facts) {
    const rows = make("dl");
    for (const [name, value] of facts) rows.append(make("dt", "", name), make("dd", "", String(value)));
    return rows;
  }

  function showToken(element) {
    const entry = known.get(element);
    const kind = make("div", "kind");
    kind.append(make("code", "", visible(entry.token.text)));
    if (entry.kind !== "plain") kind.append(make("i", `swatch ${entry.kind}`));
    kind.append(KINDS[entry.kind]);
    const parts = [kind, list(tokenFacts(entry))];
    if (entry.token.probability != null) {
      const meter = make("div", "meter");
      meter.append(make("div"));
      meter.firstChild.style.width = `${100 * entry.token.probability}%`;
      parts.push(meter);
    }
    element.setAttribute("aria-describedby", "tip");
    placeTip(parts, element.getClientRects()[0]);
  }

  function placeTip(parts, at) {
    const tip = $("tip");
    tip.replaceChildren(...parts);
    tip.hidden = false;
    const left = clamp(at.left - 12, 8, innerWidth - tip.offsetWidth - 8);
    const below = at.bottom + 8;
    const top = below + tip.offsetHeight < innerHeight - 8 ? below : Math.max(at.top - tip.offsetHeight - 8, 8);
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }

  function hideTip() {
    $("tip").hidden = true;
    for (const element of document.querySelectorAll("[aria-describedby]")) element.removeAttribute("aria-describedby");
  }

  /** Arrow keys within a text go from token to token. */
  function walk(event, side) {
    const current = side.all.findIndex((entry) => entry.element === document.activeElement);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (current < 0 || step === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    let next = current + step;
    while (side.all[next]?.element.hidden) next += step;
    side.all[next]?.element.focus();
  }

  function listenToText(side) {
    const box = $(side);
    const tokenAt = (event) => event.target.closest(".t");
    box.addEventListener("pointerover", (event) => (tokenAt(event) ? showToken(tokenAt(event)) : hideTip()));
    box.addEventListener("pointerleave", hideTip);
    box.addEventListener("focusin", (event) => tokenAt(event) && showToken(tokenAt(event)));
    box.addEventListener("focusout", hideTip);
    box.addEventListener("scroll", hideTip);
    box.addEventListener("keydown", (event) => walk(event, run[side]));
  }

  function listenToStrip() {
    const strip = $("strip");
    strip.addEventListener("pointerdown", (event) => {
      strip.setPointerCapture(event.pointerId);
      seekRound(stripRound(event));
    });
    strip.addEventListener("pointermove", (event) => {
      const n = stripRound(event);
      if (event.buttons) seekRound(n);
      const box = strip.getBoundingClientRect();
      if (n) placeTip([list(roundText(n))], new DOMRect(event.clientX, box.top, 1, box.height));
    });
    strip.addEventListener("pointerleave", hideTip);
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, summary, pre")) return;
    const now = roundNow();
    const actions = {
      ArrowLeft: () => seekRound(now - 1),
      ArrowRight: () => seekRound(now + 1),
      PageUp: () => seekRound(now - 10),
      PageDown: () => seekRound(Math.min(now + 10, run.fast.ends.length)),
      Home: () => seekRound(0),
      End: () => seekRound(Infinity),
      "-": () => changeSpeed(-1),
      "+": () => changeSpeed(1),
      "=": () => changeSpeed(1),
      Escape: hideTip,
    };
    if (!event.target.closest("button, input")) actions[" "] = toggle;
    if (event.key.startsWith("Page") && event.target !== $("strip")) return;
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  function listen() {
    $("passage").addEventListener("change", (event) => {
      stop();
      load(Number(event.target.value));
      seek(run.total);
      remember();
    });
    $("speed").addEventListener("change", (event) => setSpeed(SPEEDS[event.target.value]));
    $("keep").addEventListener("change", () => {
      for (const side of [run.plain, run.fast]) side.shown = 0;
      render();
    });
    $("play").addEventListener("click", toggle);
    $("back").addEventListener("click", () => seekRound(roundNow() - 1));
    $("on").addEventListener("click", () => seekRound(roundNow() + 1));
    ["plain", "fast"].forEach(listenToText);
    listenToStrip();
    document.addEventListener("keydown", onKey);
    addEventListener("hashchange", followLink);
    addEventListener("resize", () => render());
  }

  data.passages.forEach((passage, n) => $("passage").append(new Option(passage.title, n)));
  $("choice").hidden = data.passages.length < 2;
  SPEEDS.forEach((s, n) => {
    $("speed").append(new Option(s === 1 ? "real time" : s > 1 ? `${s}×` : `1/${Math.round(1 / s)}`, n));
  });
  listen();
  followLink();
})();
