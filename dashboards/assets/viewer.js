/* The Dyck viewer: where every head looks in one prompt, at each visit.

   window.smeltscopeViewer.mount(element, source) -> { destroy() }
   source: { kind: "server", base: "/viewer" }                     routes of dashboards/viewer.py, data on demand
           { kind: "inline", runs, headers, blocks }               all data in the page, blocks as base64 of zlib

   Used twice as it is: served beside the dashboard's pages, and inlined into the report. No build step, no library, no request
   but to `base`. Texts of tokens, prompts and files are only ever set as textContent. */

(() => {
  "use strict";

  /* ---------------------------------------------------------------- elements, numbers, text */

  /** An element: h("button", { class: "x", onclick, "aria-label": "..." }, "text", child). */
  function h(tag, props = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(props)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name in element && name !== "list") element[name === "class" ? "className" : name] = value;
      else if (name === "class") element.className = value;
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
    return element;
  }

  const MINUS = "\u2212";

  /** .123, 1.000, <.001; a dash where there is no value. */
  function mass(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
    if (value > 0 && value < 0.0005) return "<.001";
    return value === 0 ? "0" : value.toFixed(3).replace(/^0(?=\.)/, "");
  }

  const significant = (value) => Number(value.toPrecision(3)).toString();

  /** With its sign; 0 for what would be shown as .000. */
  function signed(value, form = mass) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
    if (form === mass && Math.abs(value) < 0.0005) return "0";
    return (value < 0 ? MINUS : "+") + form(Math.abs(value));
  }

  /** A token as one line: line breaks and spaces are made visible. */
  function visible(text) {
    if (text === "") return "(empty)";
    return text.replace(/\n/g, "\u23ce").replace(/\t/g, "\u21e5").replace(/^ +| +$/g, (s) => "\u00b7".repeat(s.length));
  }

  const readable = (name) => name.replaceAll("_", " ").replace("bos", "BOS");

  /* ---------------------------------------------------------------- colours */

  const STOPS = {
    light: {
      one: ["#f1f4f8", "#cfdbea", "#9db7d6", "#5f88b8", "#2f5d97", "#123a70", "#00224e"],
      two: ["#053061", "#2166ac", "#4393c3", "#92c5de", "#f2f3f5", "#f4a582", "#d6604d", "#b2182b", "#67001f"],
    },
    dark: {
      one: ["#14233b", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"],
      two: ["#a8d8ff", "#5aa9e6", "#2f6fa8", "#21405f", "#22262d", "#5e332e", "#a94a3c", "#e57a60", "#ffc2ae"],
    },
  };

  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

  function luminance([r, g, b]) {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.03928 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  }

  /** The colour of text on a colour. */
  const textOn = (colour) => (luminance(rgb(colour)) > 0.22 ? "#10141a" : "#fff");

  /** 256 colours between stops: as CSS, as pixels of ImageData, and whether text on them is dark. */
  function ramp(stops) {
    const points = stops.map(rgb);
    const css = [], dark = [], pixels = new Uint32Array(256);
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * (points.length - 1), low = Math.min(Math.floor(at), points.length - 2);
      const colour = points[low].map((c, j) => Math.round(c + (points[low + 1][j] - c) * (at - low)));
      css.push(`rgb(${colour.join(" ")})`);
      dark.push(luminance(colour) > 0.18);
      pixels[i] = (255 << 24) | (colour[2] << 16) | (colour[1] << 8) | colour[0];
    }
    return { css, dark, pixels };
  }

  const RAMPS = Object.fromEntries(
    Object.entries(STOPS).map(([theme, { one, two }]) => [theme, { one: ramp(one), two: ramp(two) }]),
  );

  const LOG_FLOOR = 1e-4; // masses below it look alike on the logarithmic scale

  /** From a mass to 0..1 of the colour scale whose end is `top`. */
  const SCALES = {
    linear: (value, top) => value / top,
    sqrt: (value, top) => Math.sqrt(value / top),
    log: (value, top) => (value <= LOG_FLOOR ? 0 : Math.log(value / LOG_FLOOR) / Math.log(Math.max(top, 2 * LOG_FLOOR) / LOG_FLOOR)),
  };

  /** The place of a mass, or of a difference of two, among the 256 colours. */
  function colourIndex(value, top, scale, diverging) {
    if (!(top > 0)) return diverging ? 128 : 0;
    if (!diverging) return Math.round(255 * Math.min(Math.max(SCALES[scale](value, top), 0), 1));
    const size = Math.min(Math.max(SCALES[scale](Math.abs(value), top), 0), 1);
    return Math.round(127.5 + 127.5 * Math.sign(value) * size);
  }

  /* ---------------------------------------------------------------- where data come from */

  class Failure extends Error {} // its message is a sentence for the reader
  class Gone extends Error {} // a live prompt that the server no longer keeps

  function serverSource({ base }) {
    async function ask(path, body) {
      const options = body === undefined ? {} : {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
      };
      let response;
      try {
        response = await fetch(`${base}/${path}`, options);
      } catch {
        throw new Failure("The server does not answer; start it again.");
      }
      if (response.ok) return response;
      if (response.status === 410) throw new Gone();
      const told = await response.json().catch(() => ({}));
      throw new Failure(told.error ?? `The server failed (${response.status}); its log says why.`);
    }
    async function json(...args) {
      const told = await (await ask(...args)).json();
      if (told.error) throw new Failure(told.error);
      return told;
    }
    return {
      list: () => json("runs"),
      header: (run, example) => json(`stored/${run}/${example}/header`),
      live: (given) => json("live", given),
      draw: (given) => json("draw", given),
      block: async (key, path) => (await ask(`${key}/${path}`)).arrayBuffer(),
    };
  }

  function inlineSource({ runs, headers, blocks }) {
    const noLive = async () => {
      throw new Failure("This file holds stored examples only; probe view runs prompts.");
    };
    return {
      list: async () => ({ runs, live: false }),
      header: async (run, example) => headers[`stored/${run}/${example}`],
      live: noLive,
      draw: noLive,
      async block(key, path) {
        const data = blocks[`${key}/${path}`];
        if (data === undefined) throw new Failure("This file leaves the head's numbers out to stay small; probe view shows them.");
        const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
        const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
        return new Response(stream).arrayBuffer();
      },
    };
  }

  const MASS_OF_BYTE = Float32Array.from({ length: 256 }, (_, byte) => (byte / 255) ** 2);

  /** The lower triangle of a pattern: masses, or bytes that stand for them. */
  class Pattern {
    constructor(buffer, encoding, tokens) {
      this.bytes = encoding === "u1";
      this.values = this.bytes ? new Uint8Array(buffer) : new Float32Array(buffer);
      this.tokens = tokens;
    }
    at(query, key) {
      if (key > query) return 0;
      const value = this.values[(query * (query + 1)) / 2 + key];
      return this.bytes ? MASS_OF_BYTE[value] : value;
    }
    row(query) {
      return Float32Array.from({ length: this.tokens }, (_, key) => this.at(query, key));
    }
    column(key) {
      return Float32Array.from({ length: this.tokens }, (_, query) => this.at(query, key));
    }
    /** This one minus `earlier`. */
    minus(earlier) {
      const masses = (pattern) => (pattern.bytes ? Float32Array.from(pattern.values, (byte) => MASS_OF_BYTE[byte]) : pattern.values);
      const [a, b] = [masses(this), masses(earlier)];
      return new Pattern(a.map((value, i) => value - b[i]).buffer, "f4", this.tokens);
    }
    /** The largest size of a value, the first key left out where it is `masked`. */
    largest(masked) {
      const { values, tokens } = this, first = masked === 0 ? 1 : 0;
      let found = 0;
      for (let query = 0, start = 0; query < tokens; start += ++query) {
        for (let i = start + first; i <= start + query; i++) if (Math.abs(values[i]) > found) found = Math.abs(values[i]);
      }
      return this.bytes ? MASS_OF_BYTE[found] : found;
    }
    /** Made smaller to `size` on a side, by the value of largest size in each cell; itself if it is small already. */
    pooled(size, masked) {
      const { values, tokens, bytes } = this;
      if (tokens <= size) return this;
      const found = new values.constructor((size * (size + 1)) / 2);
      for (let query = 0, start = 0; query < tokens; start += ++query) {
        const y = Math.floor(((query + 1) * size - 1) / tokens), row = (y * (y + 1)) / 2;
        for (let key = masked === 0 ? 1 : 0; key <= query; key++) {
          const cell = row + Math.min(Math.floor(((key + 1) * size - 1) / tokens), y), value = values[start + key];
          if (Math.abs(value) > Math.abs(found[cell])) found[cell] = value;
        }
      }
      return new Pattern(found.buffer, bytes ? "u1" : "f4", size);
    }
  }

  /** A cache of promises that forgets what was used longest ago. */
  class Recent {
    constructor(most) {
      this.most = most;
      this.kept = new Map();
    }
    get(name, make) {
      let found = this.kept.get(name);
      this.kept.delete(name);
      if (found === undefined) {
        found = make();
        found.catch(() => this.kept.delete(name));
      }
      this.kept.set(name, found);
      if (this.kept.size > this.most) this.kept.delete(this.kept.keys().next().value);
      return found;
    }
  }

  /* ---------------------------------------------------------------- state, kept in the URL */

  const DEFAULTS = { run: null, ex: 0, prompt: null, zero: "", layer: null, head: null, visit: null, q: null, dir: "from", scale: "sqrt", mask: false, sort: "bos" };
  const CHOICES = { dir: ["from", "to"], scale: ["linear", "sqrt", "log"], sort: ["bos", "ablation", "position"] };
  const NUMBERS = ["run", "ex", "layer", "head", "q"];

  /** The state that the address names, and what of it stands for nothing. */
  function readState() {
    const query = new URLSearchParams(location.search), state = { ...DEFAULTS }, unmet = [];
    for (const name of Object.keys(DEFAULTS)) {
      const text = query.get(name);
      if (text === null) continue;
      if (NUMBERS.includes(name)) {
        if (/^\d{1,6}$/.test(text)) state[name] = Number(text);
        else unmet.push(`${name} ${text}`);
      } else if (name in CHOICES) {
        if (CHOICES[name].includes(text)) state[name] = text;
        else unmet.push(`${name} ${text}`);
      } else if (name === "mask") state.mask = text === "1";
      else if (name === "zero") {
        state.zero = textOfZeroed(zeroedOf(text));
        if (state.zero !== text) unmet.push(`zero ${text}`);
      } else state[name] = text;
    }
    return { state, unmet };
  }

  /** The page's address with this state; what others keep in the query stays. */
  function addressOf(state) {
    const address = new URL(location.href);
    for (const [name, standard] of Object.entries(DEFAULTS)) {
      const value = state[name];
      const away = value === standard || (name === "ex" && state.prompt !== null);
      if (away) address.searchParams.delete(name);
      else address.searchParams.set(name, value === true ? "1" : value);
    }
    return address.href;
  }

  /** What is zeroed, as the URL has it, "5.1.*" being layer 5, head 1, all visits, and as the server takes it. */
  const zeroedOf = (text) => text.split(",").filter((part) => /^(\d+|\*)(\.(\d+|\*)){2}$/.test(part)).map((part) => {
    const [layer, head, visit] = part.split(".").map((one) => (one === "*" ? null : Number(one)));
    return { layer, head, visit };
  });
  const textOfZeroed = (zeroed) => zeroed.map((z) => [z.layer, z.head, z.visit].map((n) => n ?? "*").join(".")).join(",");
  const nameOfZeroed = ({ layer, head, visit }) =>
    `${head === null ? "all heads" : `head ${head}`} of ${layer === null ? "looped layers" : `layer ${layer}`}, ` +
    `${visit === null ? "all visits" : `visit ${visit}`}`;

  /* ---------------------------------------------------------------- what is known of the prompt */

  /** A header with what follows from it. */
  class View {
    constructor(header, source) {
      Object.assign(this, header);
      this.source = source;
      this.length = this.tokens.length;
      this.executions = this.layer.map((layer, index) => ({ index, layer, visit: this.visit[index] }));
      this.blocks = new Recent(48);
      this.small = new Recent(256);
      this.groups = this.findGroups();
    }
    /** The executions of a layer, by visit. */
    of(layer) {
      return this.executions.filter((e) => e.layer === layer && this.heads[e.index] > 0);
    }
    get layers() {
      return [...new Set(this.layer)].filter((layer) => this.of(layer).length).sort((a, b) => a - b);
    }
    headsOf(layer) {
      return this.heads[this.of(layer)[0].index];
    }
    massOn(execution, head, region = 0) {
      return this.mass[execution][head][region];
    }
    /** Mass on the start token at the second visit minus that at the first; of this prompt, or with the masses of another view of it. */
    bosChange(layer, head, masses = this.mass) {
      const [first, second] = this.of(layer);
      return second ? masses[second.index][head][0] - masses[first.index][head][0] : null;
    }
    block(path, make, kept = this.blocks) {
      return kept.get(path, async () => make(await this.source.block(this.key, path)));
    }
    thumbs(execution) {
      return this.block(`thumbs/${execution}`, (buffer) => new Uint8Array(buffer), this.small);
    }
    /** The rows of the targets: an array for each. */
    async rows(execution, head) {
      if (this.whole && this.encoding === "f4") { // the pattern has them, as exactly
        const pattern = await this.pattern(execution, head);
        return this.targets.map((target) => pattern.row(Math.max(target.position - 1, 0)));
      }
      return this.block(`rows/${execution}/${head}`, (buffer) =>
        this.targets.map((_, i) => new Float32Array(buffer, 4 * i * this.length, this.length)));
    }
    /** A head's whole pattern. */
    pattern(execution, head) {
      return this.block(`map/${execution}/${head}`, (buffer) => new Pattern(buffer, this.encoding, this.length));
    }
    /** Ask for what will probably be looked at next. */
    prefetch(layer, head) {
      for (const { index } of this.of(layer)) this.pattern(index, head).catch(() => {});
    }
    /** Stretches of the prompt with a name, separators aside: the instruction, each shot, the query, its answer. */
    findGroups() {
      const found = [];
      let shots = 0, before = "";
      this.region.forEach((number, position) => {
        const region = this.regions[number];
        if (region === "separator" || region === "bos") return;
        const again = region === "demo_input" && before !== "demo_input";
        const name = region.startsWith("demo") ? `shot ${again ? ++shots : shots}` : { query_input: "query", query_answer: "answer" }[region] ?? readable(region);
        const last = found.at(-1);
        if (last && last.name === name) last.stop = position + 1;
        else found.push({ name, start: position, stop: position + 1 });
        before = region;
      });
      return found;
    }
    /** A row over keys, summed by region, the last for what goes to no token. */
    byRegion(row) {
      const sums = new Array(this.regions.length).fill(0);
      let total = 0;
      row.forEach((value, key) => {
        sums[this.region[key]] += value;
        total += value;
      });
      sums[sums.length - 1] = Math.max(1 - total, 0);
      return sums;
    }
  }

  const mean = (rows) => Float32Array.from(rows[0], (_, key) => rows.reduce((sum, row) => sum + row[key], 0) / rows.length);
  const difference = (later, earlier) => Float32Array.from(later, (value, i) => value - earlier[i]);

  /* ---------------------------------------------------------------- drawing */

  const RATIO = Math.min(window.devicePixelRatio || 1, 2);

  /** A canvas of this size in CSS pixels, cleared, and its context in CSS pixels. */
  function prepared(canvas, width, height) {
    canvas.width = Math.round(width * RATIO);
    canvas.height = Math.round(height * RATIO);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(RATIO, 0, 0, RATIO, 0, 0);
    return context;
  }

  /** Where `number` things stand on `width` pixels: pieces [x, width, first, stop), several things in one where they are narrower than a pixel. */
  function pieces(number, width) {
    const columns = Math.min(number, Math.floor(width * RATIO));
    return Array.from({ length: columns }, (_, i) => {
      const [first, stop] = [Math.floor((i * number) / columns), Math.floor(((i + 1) * number) / columns)];
      return [(i * width) / columns, width / columns, first, stop];
    });
  }

  /** The value of largest size among values[first:stop]. */
  function largest(values, first, stop, skip) {
    let found = 0;
    for (let i = first; i < stop; i++) if (i !== skip && Math.abs(values[i]) > Math.abs(found)) found = values[i];
    return found;
  }

  const ROW = 18, GAP = 2;

  /** Rows of values as strips of colour, one beneath the other. */
  function drawStrip(canvas, rows, width, { top, scale, diverging, colours, masked, hidden }) {
    const context = prepared(canvas, width, rows.length * (ROW + GAP) - GAP);
    rows.forEach((row, number) => {
      for (const [x, size, first, stop] of pieces(row.length, width)) {
        const value = largest(row, first, stop, masked);
        context.fillStyle = masked >= first && masked < stop && stop - first === 1 ? hidden : colours.css[colourIndex(value, top, scale, diverging)];
        context.fillRect(x, number * (ROW + GAP), size + 0.4, ROW);
      }
    });
  }

  /** The region of each token as a band of colour. */
  function drawBand(canvas, region, palette, width, height, upright = false) {
    const context = prepared(canvas, upright ? height : width, upright ? width : height);
    for (const [x, size, first, stop] of pieces(region.length, width)) {
      const separator = palette.separator;
      const number = region.slice(first, stop).find((r) => r !== separator) ?? region[first];
      context.fillStyle = palette.colours[number];
      if (upright) context.fillRect(0, x, height, size + 0.4);
      else context.fillRect(x, 0, size + 0.4, height);
    }
  }

  const MOST_PIXELS = 1024;

  /** A pattern, or the difference of two, as an image of one pixel for a query and key, or for several of them. */
  function drawMap(canvas, pattern, { top, scale, diverging, colours, masked, hidden }) {
    const small = pattern.pooled(MOST_PIXELS, masked), size = small.tokens;
    canvas.width = canvas.height = size;
    const context = canvas.getContext("2d"), image = context.createImageData(size, size);
    const pixels = new Uint32Array(image.data.buffer);
    for (let y = 0, i = 0; y < size; y++) {
      for (let x = 0; x <= y; x++, i++) {
        const value = small.bytes ? MASS_OF_BYTE[small.values[i]] : small.values[i];
        pixels[y * size + x] = colours.pixels[colourIndex(value, top, scale, diverging)];
      }
    }
    context.putImageData(image, 0, 0);
    if (masked === 0 && small === pattern) {
      context.fillStyle = hidden;
      context.fillRect(0, 0, 1, size);
    }
  }

  /** A head's thumbnail; `top` is the largest byte of all that are compared. */
  function drawThumb(canvas, bytes, rows, columns, { top, colours, mask, whole }) {
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
    const pixels = new Uint32Array(image.data.buffer);
    for (let y = 0; y < rows; y++) {
      for (let x = 0; x < columns; x++) {
        if ((whole && x > y) || (mask && x === 0)) continue;
        pixels[y * columns + x] = colours.pixels[top ? Math.min(255, Math.round((255 * bytes[y * columns + x]) / top)) : 0];
      }
    }
    context.putImageData(image, 0, 0);
  }

  /** The places of the largest values, in order of size. */
  const strongestOf = (values, number) =>
    [...values.keys()].sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, number);

  /* ---------------------------------------------------------------- controls */

  /** Buttons of which one is pressed: [[value, text, title], ...]. */
  function choice(label, options, onchoose) {
    const buttons = options.map(([value, text, title]) =>
      h("button", { type: "button", title, "data-value": value, onclick: () => onchoose(value) }, text));
    const element = h("div", { class: "sv-choice", role: "group", "aria-label": label }, buttons);
    element.show = (value) => buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.value === value)));
    element.offer = (values) => buttons.forEach((b) => (b.hidden = !values.includes(b.dataset.value)));
    return element;
  }

  const labelled = (text, control) => h("label", { class: "sv-label" }, h("span", {}, text), control);
  const beside = (text, group) => h("span", { class: "sv-label" }, h("span", { "aria-hidden": "true" }, text), group);
  const number = (label, value, min, max) => h("input", { type: "number", value, min, max, step: 1, "aria-label": label });

  /* ---------------------------------------------------------------- parts of the page

     Each has an `element` and a `render()` that brings it up to date with the viewer: its `state`, `view` (the prompt), `executions`,
     `rows` and `patterns` (of the head chosen, by visit). */

  /** A prompt to type, or to draw, and to run. */
  class Composer {
    constructor(viewer) {
      this.viewer = viewer;
      this.text = h("textarea", { rows: 7, spellcheck: false, "aria-label": "Prompt to run", "aria-describedby": "sv-composer-note", onkeydown: (event) => this.onKey(event) });
      this.shots = number("Shots", 4, 0, 64);
      this.seed = number("Seed", 0, 0, 999999);
      this.types = number("Bracket types", 4, 1, 4);
      const pairs = { usual: "usual", answers: "new, shown in answers", inputs: "new, shown in inputs", both: "new, shown anywhere" };
      this.pairs = h("select", { "aria-label": "Pairs" }, Object.entries(pairs).map(([value, text]) => h("option", { value }, text)));
      this.button = h("button", { type: "button", "aria-expanded": "false", onclick: () => this.toggle() }, "Prompt\u2026");
      this.element = h("form", { class: "sv-composer", hidden: true, "aria-label": "Run a prompt", onsubmit: (event) => { event.preventDefault(); this.run(); } },
        this.text,
        h("div", { class: "sv-row" },
          h("button", { type: "submit", class: "sv-strong", title: "Ctrl+Enter" }, "Run"),
          h("span", { class: "sv-space" }),
          labelled("Shots", this.shots), labelled("Seed", this.seed), labelled("Bracket types", this.types), labelled("Pairs", this.pairs),
          h("button", { type: "button", onclick: () => this.draw() }, "Draw a prompt"),
          h("button", { type: "button", onclick: () => this.takeText() }, "Text of the example")),
        h("p", { id: "sv-composer-note", class: "sv-note" },
          this.drawn = h("b", {}),
          "Words around inputs and answers as in a prompt drawn here; the last input has no answer. Brackets close as usual, or otherwise where the prompt itself shows how. Ctrl+Enter runs."));
    }

    onKey(event) {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      }
    }

    toggle(open = this.element.hidden) {
      this.element.hidden = !open;
      this.button.setAttribute("aria-expanded", String(open));
      if (!open) return this.button.focus();
      if (this.text.value === "") this.takeText();
      this.text.focus();
    }

    /** The text of what is shown, up to its answer. */
    takeText() {
      const { view, state } = this.viewer;
      if (!view) return;
      const first = view.regions[view.region[0]] === "bos" ? 1 : 0;
      this.text.value = state.prompt ?? view.tokens.slice(first, view.targets[0].position).join("").trimEnd();
    }

    async draw() {
      const { viewer } = this, [shots, seed, types] = [this.shots, this.seed, this.types].map((input) => Number(input.value));
      await viewer.guarded(async () => {
        const drawn = await viewer.source.draw({ run: viewer.state.run, shots, seed, types, pairs: this.pairs.value });
        this.text.value = drawn.text;
        this.drawn.textContent = drawn.shots < shots ? `Of ${shots} shots ${drawn.shots} fit into the model's context. ` : "";
        this.run();
      });
    }

    run() {
      const { viewer } = this;
      if (this.text.value.trim() === "") return viewer.tell("The prompt is empty: draw one, or type an input to complete.");
      viewer.state.prompt = null; // the same text runs again
      viewer.choose({ prompt: this.text.value, q: null });
    }
  }

  /** What the model answers, what was right, and what is zeroed. */
  class Answer {
    constructor(viewer) {
      this.viewer = viewer;
      this.element = h("section", { class: "sv-answer", "aria-label": "Answer" });
    }

    render() {
      const { view, before, state } = this.viewer, rightOf = (targets) => targets.filter((t) => t.right).length;
      const zeroed = zeroedOf(state.zero);
      const putBack = (i) => this.viewer.setZeroed(zeroed.filter((_, j) => j !== i));
      this.element.replaceChildren(
        h("span", { class: "sv-lead" }, "Predicted answer"),
        ...view.targets.map((target, i) => this.chip(target, i, before?.targets[i])),
        h("span", { class: "sv-note" }, `${rightOf(view.targets)} of ${view.targets.length} right, each given the right ones before it` +
          (before ? `; ${rightOf(before.targets)} with nothing zeroed` : "")),
        ...zeroed.map((z, i) => h("span", { class: "sv-off" }, `zeroed: ${nameOfZeroed(z)}`,
          h("button", { type: "button", "aria-label": `Put back ${nameOfZeroed(z)}`, onclick: () => putBack(i) }, "\u00d7"))));
    }

    chip(target, i, before) {
      const shown = (text) => visible(text.trim() || text), known = target.probability !== null;
      const chance = !known ? "" : before ? `${mass(before.probability)} \u2192 ${mass(target.probability)}` : mass(target.probability);
      const verdict = target.right ? "right" : `wrong, the answer is ${shown(target.gold)}`;
      return h("button", {
        type: "button", class: `sv-chip ${target.right ? "sv-right" : "sv-wrong"}`,
        title: `Lock the row that predicts target ${i + 1} (${i + 1})`,
        "aria-label": `Target ${i + 1}: the model says ${shown(target.predicted)}, ${verdict}` + (known ? `, probability of the answer ${chance}` : ""),
        onclick: () => this.viewer.lock(target.position - 1),
      },
      h("span", { class: "sv-said" }, shown(target.predicted)),
      h("span", { class: "sv-verdict" }, target.right ? "\u2713" : `\u2717 answer ${shown(target.gold)}`),
      before && before.predicted !== target.predicted ? h("span", { class: "sv-was" }, `before ${shown(before.predicted)}`) : null,
      known ? h("span", { class: "sv-p", title: "probability of the answer's token" }, `p ${chance}`) : null);
    }
  }

  /** All heads: ranked, each with its visits, or as a grid of layers and visits by heads. */
  class HeadList {
    constructor(viewer) {
      this.viewer = viewer;
      this.sort = choice("Order of heads", [
        ["bos", "BOS change", "By the change of mass on the start token between visits"],
        ["ablation", "Ablation", "By the rise of perplexity when the head is ablated"],
        ["position", "Position", "Rows are layers and visits, columns heads"],
      ], (sort) => viewer.choose({ sort }));
      this.grid = h("div", { class: "sv-heads", role: "grid", "aria-label": "Heads" });
      this.note = h("p", { class: "sv-note" });
      this.element = h("aside", { class: "sv-aside", "aria-label": "List of heads" },
        h("div", { class: "sv-row" }, h("h2", {}, "Heads"), this.sort), this.grid, this.note);
    }

    render() {
      const { viewer } = this, { sort } = viewer.state, focused = this.grid.contains(document.activeElement);
      this.sort.offer(viewer.sorts());
      this.sort.show(sort);
      this.observer?.disconnect(); // thumbnails are asked for when they come into sight
      this.observer = new IntersectionObserver((entries) => {
        for (const { isIntersecting, target } of entries) {
          if (!isIntersecting) continue;
          this.observer.unobserve(target);
          viewer.guarded(() => this.draw(target));
        }
      }, { root: this.grid, rootMargin: "200px" });
      this.grid.classList.toggle("sv-matrix", sort === "position");
      this.grid.style.setProperty("--heads", Math.max(...viewer.view.heads));
      this.grid.replaceChildren(...(sort === "position" ? this.matrix() : this.ranking()));
      this.note.textContent = {
        bos: `Mass on BOS at each visit, mean over targets; largest change ${viewer.before ? "with nothing zeroed " : ""}first.`,
        ablation: `Rise of perplexity under ${viewer.ablation?.kind} ablation at all visits, on the half of the prompts that the Dyck head was not chosen on.`,
        position: "Thumbnails: the largest mass in each cell, square root scale.",
      }[sort];
      this.mark();
      if (focused) this.focus();
    }

    cell(layer, head, executions, label, content = null) {
      const cell = h("div", { class: "sv-cell", role: "gridcell", tabIndex: -1, "aria-label": label, "data-layer": layer, "data-head": head, onclick: () => this.choose(cell) },
        executions.map((e) => h("canvas", { "data-execution": e.index, "aria-hidden": "true", width: 1, height: 1 })), content);
      if (executions.length === 1) cell.dataset.visit = executions[0].visit;
      this.observer.observe(cell);
      return cell;
    }

    ranking() {
      const { viewer } = this, { view, state } = viewer, byChange = state.sort === "bos";
      const ranked = viewer.ranked(state.sort);
      const valueOf = ({ layer, head }) => (byChange ? view.bosChange(layer, head) : viewer.rise(layer, head));
      const size = Math.max(...ranked.map((place) => Math.abs(valueOf(place) ?? 0)), 1e-9);
      return ranked.map((place, rank) => {
        const { layer, head } = place, value = valueOf(place), executions = view.of(layer);
        const needle = h("i", { class: `sv-needle ${value === null ? "" : value < 0 ? "sv-down" : "sv-up"}` });
        needle.style.setProperty("--size", `${(50 * Math.abs(value ?? 0)) / size}%`);
        const text = h("div", { class: "sv-text" },
          h("span", { class: "sv-name" }, `L${layer} H${head}`, viewer.isDyck(layer, head) ? h("b", {}, "Dyck") : null),
          h("span", { class: "sv-value" }, value === null ? "" : signed(value, byChange ? mass : significant)),
          h("span", { class: "sv-small" }, `BOS ${executions.map((e) => mass(view.massOn(e.index, head))).join(" \u2192 ")}`),
          needle);
        return h("div", { class: "sv-line", role: "row" }, this.cell(layer, head, executions, `${rank + 1}. ${viewer.describeHead(layer, head)}`, text));
      });
    }

    matrix() {
      const { viewer } = this, { view } = viewer;
      const cell = (execution, head) => this.cell(execution.layer, head, [execution],
        `L${execution.layer} visit ${execution.visit} head ${head}, BOS mass ${mass(view.massOn(execution.index, head))}` +
        (viewer.isDyck(execution.layer, head) ? ", the Dyck head" : ""));
      return view.layers.flatMap((layer) => view.of(layer)).map((execution) => h("div", { class: "sv-line", role: "row" },
        h("span", { class: "sv-name", role: "rowheader" }, `L${execution.layer}`, h("small", {}, `v${execution.visit}`)),
        Array.from({ length: view.headsOf(execution.layer) }, (_, head) => cell(execution, head))));
    }

    /** A cell's thumbnails; all visits of a head have one scale. */
    async draw(cell) {
      const { viewer } = this, { view } = viewer, head = Number(cell.dataset.head);
      const executions = view.of(Number(cell.dataset.layer)), mask = viewer.masked() === 0;
      const columns = view.thumb, rows = view.whole ? columns : view.targets.length;
      let blocks;
      try {
        blocks = await Promise.all(executions.map((e) => view.thumbs(e.index)));
      } catch (error) {
        if (!(error instanceof Failure)) throw error;
        return cell.classList.add("sv-absent");
      }
      if (view !== viewer.view) return;
      const parts = blocks.map((block) => block.subarray(head * rows * columns, (head + 1) * rows * columns));
      let top = 0;
      for (const part of parts) part.forEach((byte, i) => { if (byte > top && !(mask && i % columns === 0)) top = byte; });
      for (const canvas of cell.querySelectorAll("canvas")) {
        const at = executions.findIndex((e) => e.index === Number(canvas.dataset.execution));
        drawThumb(canvas, parts[at], rows, columns, { top, colours: viewer.colours(false), mask, whole: view.whole });
      }
    }

    choose(cell) {
      const change = { layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) };
      if (cell.dataset.visit && !this.viewer.state.visit?.includes("-")) change.visit = cell.dataset.visit;
      cell.focus({ preventScroll: true });
      this.viewer.choose(change);
    }

    focus() {
      this.grid.querySelector('.sv-cell[tabindex="0"]')?.focus({ preventScroll: true });
    }

    /** Which cells are of the head chosen, the one among them that Tab stops at, and which are zeroed. */
    mark() {
      const { state, view } = this.viewer, cells = [...this.grid.querySelectorAll(".sv-cell")];
      const mine = cells.filter((c) => Number(c.dataset.layer) === state.layer && Number(c.dataset.head) === state.head);
      const stop = mine.find((c) => c === document.activeElement) ?? mine.find((c) => c.dataset.visit === state.visit) ?? mine[0] ?? cells[0];
      const off = zeroedOf(state.zero);
      for (const cell of cells) {
        const layer = Number(cell.dataset.layer), head = Number(cell.dataset.head);
        cell.tabIndex = cell === stop ? 0 : -1;
        cell.setAttribute("aria-selected", String(mine.includes(cell)));
        const here = off.filter((z) => (z.layer === null ? view.of(layer).length > 1 : z.layer === layer) && (z.head === null || z.head === head));
        const dim = [...cell.querySelectorAll("canvas")].map((canvas) =>
          canvas.classList.toggle("sv-dim", here.some((z) => z.visit === null || z.visit === view.visit[canvas.dataset.execution])));
        cell.classList.toggle("sv-zeroed", dim.some(Boolean));
      }
      if (!stop) return;
      const box = stop.getBoundingClientRect(), outer = this.grid.getBoundingClientRect();
      if (box.top < outer.top || box.bottom > outer.bottom) this.grid.scrollTop += box.top - outer.top - outer.height / 3;
    }

    /** The cells before and after that of the head chosen. */
    neighbours() {
      const cells = [...this.grid.querySelectorAll(".sv-cell")], at = cells.findIndex((cell) => cell.tabIndex === 0);
      return [cells[at + 1], cells[at - 1]].filter(Boolean);
    }

    /** Follow an arrow key from the cell that has the focus. */
    move(key) {
      const rows = [...this.grid.querySelectorAll(".sv-line")].map((row) => [...row.querySelectorAll(".sv-cell")]);
      const row = rows.findIndex((cells) => cells.includes(document.activeElement));
      if (row < 0) return false;
      const column = rows[row].indexOf(document.activeElement), single = rows[row].length === 1;
      const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: single ? [-1, 0] : [0, -1], ArrowRight: single ? [1, 0] : [0, 1] };
      let to;
      if (key === "Home") to = rows[0][0];
      else if (key === "End") to = rows.at(-1).at(-1);
      else {
        const [down, right] = steps[key], next = rows[row + down] ?? [];
        to = next[down ? Math.min(column, next.length - 1) : column + right];
      }
      if (to) this.choose(to);
      return true;
    }
  }

  /** What of the model is to be zeroed: kept while heads are chosen, so that its menus stay as they were set. */
  class ZeroControls {
    constructor(viewer) {
      this.viewer = viewer;
      this.what = h("select", { "aria-label": "What to zero" }, ["head", "layer", "span"].map((value) => h("option", { value })));
      this.when = h("select", { "aria-label": "At which visit" });
      this.back = h("button", { type: "button", onclick: () => viewer.setZeroed([]) }, "Put all back");
      this.element = h("div", { class: "sv-zero", role: "group", "aria-label": "Zero heads" },
        h("span", { "aria-hidden": "true" }, "Zero"), this.what, h("span", { "aria-hidden": "true" }, "at"), this.when,
        h("button", { type: "button", class: "sv-strong", onclick: () => this.add() }, "Zero"), this.back);
    }

    render() {
      const { viewer } = this, { layer, head, zero } = viewer.state;
      this.element.hidden = !viewer.live;
      const [ofHead, ofLayer, ofSpan] = this.what.options;
      ofHead.textContent = `head ${head} of layer ${layer}`;
      ofLayer.textContent = `all heads of layer ${layer}`;
      ofSpan.textContent = "all heads of looped layers";
      ofSpan.hidden = ofSpan.disabled = !viewer.looped();
      const visits = ["*", ...viewer.executions.map((e) => String(e.visit))];
      if ([...this.when.options].map((o) => o.value).join() !== visits.join()) {
        this.when.replaceChildren(...visits.map((v) => h("option", { value: v }, v === "*" ? "all visits" : `visit ${v}`)));
      }
      this.back.hidden = zero === "";
    }

    add() {
      const { state } = this.viewer, what = this.what.value;
      this.viewer.setZeroed([...zeroedOf(state.zero), {
        layer: what === "span" ? null : state.layer, head: what === "head" ? state.head : null, visit: this.when.value === "*" ? null : Number(this.when.value),
      }]);
    }
  }

  /** Which visit, direction and colours are shown. */
  class Tools {
    constructor(viewer) {
      this.viewer = viewer;
      this.visit = choice("Visit shown in text and map", [], () => {});
      this.direction = choice("Direction", [["from", "from", "Where the token looks (d)"], ["to", "to", "Who looks at the token (d)"]], (dir) => viewer.choose({ dir }));
      this.scale = choice("Colour scale", CHOICES.scale.map((s) => [s, s, "Colour scale (s)"]), (scale) => viewer.choose({ scale }));
      this.mask = h("button", { type: "button", title: "Leave the start token's column out of the colours (b)", onclick: () => viewer.choose({ mask: !viewer.state.mask }) }, "mask BOS");
      this.legend = h("div", { class: "sv-legend", "aria-hidden": "true" });
      this.element = h("div", { class: "sv-tools", role: "toolbar", "aria-label": "View" },
        this.visit, beside("attention", this.direction), beside("scale", this.scale), this.mask, h("span", { class: "sv-space" }), this.legend);
    }

    render() {
      const { viewer } = this, { state, view } = viewer, visits = viewer.visits();
      if (this.visit.dataset.of !== visits.join()) {
        const made = choice("Visit shown in text and map", visits.map((v) => [v, nameOfVisit(v)]), (visit) => viewer.choose({ visit }));
        made.dataset.of = visits.join();
        this.visit.replaceWith(made);
        this.visit = made;
      }
      this.visit.show(state.visit);
      this.direction.show(state.dir);
      this.scale.show(state.scale);
      this.mask.setAttribute("aria-pressed", String(state.mask));
      this.mask.disabled = view.regions[view.region[0]] !== "bos";
    }

    /** The colours of masses up to `top`, and of changes up to `change`. */
    renderLegend(top, change) {
      const bar = (diverging, low, high) => {
        const { css } = this.viewer.colours(diverging), canvas = h("canvas"), context = prepared(canvas, 96, 10);
        css.forEach((colour, i) => {
          context.fillStyle = colour;
          context.fillRect((96 * i) / 256, 0, 1, 10);
        });
        return [h("span", {}, low), canvas, h("span", {}, high)];
      };
      const low = this.viewer.state.scale === "log" ? "\u226410\u207b\u2074" : "0";
      this.legend.replaceChildren(...bar(false, low, mass(top)), ...(change === null ? [] : bar(true, signed(-change), signed(change))));
    }
  }

  const nameOfVisit = (visit) => `visit ${visit.replace("-", ` ${MINUS} `)}`;

  /** The rows of the targets over all keys: at the first visit, at a later one, and their difference. */
  class Strips {
    constructor(viewer) {
      this.viewer = viewer;
      this.element = h("section", { class: "sv-strips", "aria-label": "Where the targets' rows look" });
    }

    render() {
      const { viewer } = this, { view } = viewer, palette = viewer.palette, masked = viewer.masked();
      const panels = this.panels(masked), width = Math.max(viewer.widths.strips - 92, 200);
      viewer.tools.renderLegend(panels[0].top, panels[2]?.top ?? null);
      const band = h("canvas", { "aria-hidden": "true" });
      drawBand(band, view.region, palette, width, 7);
      this.drawn = panels.map((panel) => {
        const canvas = h("canvas", { role: "img", "aria-label": this.describe(panel) });
        drawStrip(canvas, panel.rows, width, { ...panel, scale: viewer.state.scale, colours: viewer.colours(panel.diverging), masked, hidden: palette.hidden });
        this.listen(canvas);
        return { name: panel.name, canvas };
      });
      const golds = () => h("div", { class: "sv-gutter", "aria-hidden": "true" }, view.targets.map((t) => h("span", {}, visible(t.gold.trim() || t.gold))));
      const line = (name, gutter, content) => h("div", { class: "sv-strip" }, h("span", { class: "sv-panel" }, name), gutter ?? h("span"), content);
      this.element.replaceChildren(line("", null, this.axis(width)), line("", null, band), ...this.drawn.map(({ name, canvas }) => line(name, golds(), canvas)));
    }

    panels(masked) {
      const { rows, executions, view } = this.viewer, { later } = this.viewer.shown();
      const second = executions.length > 1 ? Math.max(later, 1) : 0;
      const size = (all) => Math.max(...all.map((row) => Math.abs(largest(row, 0, view.length, masked))));
      const top = size([...rows[0], ...rows[second]]);
      const panel = (i) => ({ name: `visit ${executions[i].visit}`, rows: rows[i], top, diverging: false });
      if (!second) return [panel(0)];
      const changed = rows[second].map((row, i) => difference(row, rows[0][i]));
      return [panel(0), panel(second), { name: `${executions[second].visit} ${MINUS} ${executions[0].visit}`, rows: changed, top: size(changed), diverging: true }];
    }

    axis(width) {
      const { view } = this.viewer;
      const fits = (group) => ((group.stop - group.start) / view.length) * width > 6 * group.name.length + 4;
      return h("div", { class: "sv-axis", "aria-hidden": "true" }, view.groups.filter(fits).map((group) => {
        const label = h("span", {}, group.name);
        label.style.left = `${(100 * group.start) / view.length}%`;
        label.style.width = `${(100 * (group.stop - group.start)) / view.length}%`;
        return label;
      }));
    }

    describe({ name, rows, diverging }) {
      const { view } = this.viewer, row = mean(rows), form = diverging ? signed : mass;
      return `Rows of the targets, ${name}: ` + strongestOf(row, 3).map((key) => `${visible(view.tokens[key])} at ${key} ${form(row[key])}`).join(", ");
    }

    listen(canvas) {
      const { viewer } = this, { view, rows } = viewer;
      const place = (event) => {
        const box = canvas.getBoundingClientRect();
        const at = (part, number) => Math.min(number - 1, Math.max(0, Math.floor(part * number)));
        return { key: at((event.clientX - box.left) / box.width, view.length), target: at((event.clientY - box.top) / box.height, view.targets.length) };
      };
      canvas.addEventListener("pointermove", (event) => {
        const { key, target } = place(event);
        viewer.showTip(event, `${viewer.describeToken(key)}\ntarget ${target + 1} ${visible(view.targets[target].gold)}: ${viewer.valuesAt((i) => rows[i][target][key])}`);
      });
      canvas.addEventListener("pointerleave", () => viewer.hideTip());
      canvas.addEventListener("click", (event) => viewer.lock(view.targets[place(event).target].position - 1));
    }
  }

  /** The prompt, token by token, lit by attention. */
  class PromptText {
    constructor(viewer) {
      this.viewer = viewer;
      this.note = h("p", { class: "sv-focus" });
      this.tokens = h("div", { class: "sv-tokens", role: "group", "aria-label": "Prompt, token by token",
        onclick: (event) => this.onClick(event), onpointerover: (event) => this.onOver(event), onpointerleave: () => this.onLeave(),
        onfocusin: (event) => this.onFocus(event), onfocusout: () => this.onLeave() });
      this.element = h("section", { "aria-label": "Prompt" }, h("h3", {}, "Prompt"), this.note, this.tokens);
    }

    /** New tokens, not lit yet. */
    fill() {
      const { view } = this.viewer, answers = new Set(view.targets.map((t) => t.position));
      this.buttons = view.tokens.map((text, position) => h("button", {
        type: "button", tabIndex: -1, class: answers.has(position) ? "sv-target" : "", "data-token": position,
        "aria-label": `Token ${this.viewer.describeToken(position)}`,
      }, text.replace(/\n/g, "\u23ce").replace(/^ +$/, (s) => "\u00a0".repeat(s.length)) || "\u2205"));
      this.tokens.replaceChildren(...this.buttons.flatMap((button, i) => (view.tokens[i].includes("\n") ? [button, h("br")] : [button])));
    }

    /** `lit`: { values, top, diverging } of the token in question; `masked` has no colour. */
    render({ values, top, diverging, masked, position }) {
      const { state } = this.viewer, colours = this.viewer.colours(diverging), middle = diverging ? 127.5 : 0;
      this.buttons.forEach((button, i) => {
        const unseen = state.dir === "to" && position !== null && i < position;
        const index = i === masked || unseen ? middle : colourIndex(values[i], top, state.scale, diverging);
        const plain = Math.abs(index - middle) < 4;
        button.style.backgroundColor = plain ? "" : colours.css[index];
        button.style.color = plain ? "" : colours.dark[index] ? "#10141a" : "#fff";
        button.classList.toggle("sv-locked", i === state.q);
        button.classList.toggle("sv-at", i === position && i !== state.q);
        button.setAttribute("aria-pressed", String(i === state.q));
        button.tabIndex = i === (state.q ?? 0) ? 0 : -1;
      });
      this.note.textContent = this.describe(position, top, diverging);
    }

    describe(position, top, diverging) {
      const { viewer } = this, { state, view, missing } = viewer;
      const target = position === null ? -1 : viewer.targetOfRow(position);
      const token = position === null ? "" : `${visible(view.tokens[position])} (${position})`;
      const what = position === null ? "where the targets' rows look, mean" :
        state.dir === "to" ? `who looks at ${token}` : `where ${token} looks${target >= 0 ? `, the row that predicts target ${target + 1}` : ""}`;
      const why = state.q !== null && !viewer.known(state.q) ? ` ${missing ?? ""}` : "";
      return `${what}, ${nameOfVisit(state.visit)}${state.q !== null && position === state.q ? ", locked" : ""}; full colour at ${diverging ? "\u00b1" : ""}${mass(top)}.${why}`;
    }

    positionOf(event) {
      const button = event.target.closest?.("[data-token]");
      return button ? Number(button.dataset.token) : null;
    }

    onClick(event) {
      const position = this.positionOf(event);
      if (position !== null) this.viewer.lock(this.viewer.state.q === position ? null : position);
    }

    onOver(event) {
      const { viewer } = this, position = this.positionOf(event);
      if (position === null || !viewer.rows) return;
      viewer.hoverOver(position);
      const value = viewer.state.q === null ? "" : `\n${viewer.valuesAt((i) => viewer.vector(i)[position])}`;
      viewer.showTip(event, viewer.describeToken(position) + value);
    }

    onLeave() {
      this.viewer.hoverOver(null);
      this.viewer.hideTip();
    }

    /** What the pointer does by passing over, the keyboard does by coming to a token. */
    onFocus(event) {
      const position = this.positionOf(event);
      if (position !== null && this.viewer.rows && event.target.matches(":focus-visible")) this.viewer.hoverOver(position);
    }

    /** From the token that has the focus to another. */
    move(key, from) {
      const last = this.buttons.length - 1;
      const to = { ArrowLeft: from - 1, ArrowUp: from - 1, ArrowRight: from + 1, ArrowDown: from + 1, Home: 0, End: last }[key];
      this.buttons[Math.min(Math.max(to, 0), last)].focus();
      return true;
    }

    /** To the locked token, or the first. */
    focus() {
      this.buttons[this.viewer.state.q ?? 0].focus();
    }

    scrollTo(position) {
      this.buttons[position]?.scrollIntoView({ block: "nearest" });
    }
  }

  /** Masses by region at each visit, as bars and in numbers, and the keys that have most. */
  class Masses {
    constructor(viewer) {
      this.viewer = viewer;
      this.bars = h("div", { class: "sv-bars" });
      this.table = h("table", { class: "sv-table" });
      this.element = h("section", { "aria-label": "Mass by region" }, h("h3", {}, "Mass by region"), this.bars, this.table);
      this.strongest = h("section", { class: "sv-strongest", "aria-label": "Strongest keys" });
    }

    render({ vectors, position }) {
      const { view, executions, before, state } = this.viewer, { head } = state;
      this.overall = position === null || state.dir === "to";
      this.masses = executions.map((e, i) => (this.overall ? view.mass[e.index][head] : view.byRegion(vectors[i])));
      this.before = this.overall && before ? executions.map((e) => before.mass[e.index][head]) : null;
      this.present = [...view.regions.keys()].filter((r) => view.region.includes(r) || this.masses.some((m) => m[r] > LOG_FLOOR));
      this.renderBars();
      this.renderTable(position);
      this.renderStrongest(vectors, state.dir === "to" ? "Queries" : "Keys");
    }

    renderBars() {
      const { view, executions } = this.viewer, { colours } = this.viewer.palette;
      const bar = (values, name, ghost = false) => {
        const said = (r) => `${readable(view.regions[r])} ${mass(values[r])}`;
        const parts = this.present.map((r) => {
          const part = h("i", { title: said(r) }, values[r] > 0.11 && !ghost ? mass(values[r]) : "");
          Object.assign(part.style, { flexGrow: values[r], background: colours[r], color: textOn(colours[r]) });
          return part;
        });
        return h("div", { class: `sv-bar${ghost ? " sv-ghost" : ""}` }, h("span", {}, name),
          h("div", { role: "img", "aria-label": `${name}: ${this.present.map(said).join(", ")}` }, parts));
      };
      this.bars.replaceChildren(...executions.flatMap((e, i) => [
        bar(this.masses[i], `visit ${e.visit}`), ...(this.before ? [bar(this.before[i], "before", true)] : []),
      ]));
    }

    renderTable(position) {
      const { view, executions, rows } = this.viewer, { colours } = this.viewer.palette, last = executions.length - 1;
      const line = (name, values, colour = null, old = null) => h("tr", {},
        h("th", { scope: "row" }, colour ? h("i", { style: `background:${colour}` }) : null, name),
        values.map((v, i) => h("td", {}, mass(v), old ? h("small", {}, ` ${signed(v - old[i])}`) : null)),
        last ? h("td", { class: "sv-change" }, signed(values[last] - values[0])) : null);
      const regions = this.present.map((r) => line(readable(view.regions[r]), this.masses.map((m) => m[r]), colours[r], this.before?.map((m) => m[r])));
      const onMark = (mark, i) => view.targets.reduce((sum, target, t) => target.marks[mark].reduce((s, key) => s + rows[i][t][key], sum), 0) / view.targets.length;
      const marks = this.overall ? Object.keys(view.targets[0].marks) : [];
      const heading = h("tr", {}, h("th", { scope: "col" }, "region"), executions.map((e) => h("th", { scope: "col" }, `visit ${e.visit}`)), last ? h("th", { scope: "col" }, "change") : null);
      this.caption = this.overall ? `Mean over targets${this.before ? "; small: minus the mass with nothing zeroed" : ""}` : `Row of token ${position}`;
      const overlapping = h("tr", {}, h("th", { colSpan: executions.length + 2, scope: "rowgroup" }, "marks, which overlap regions"));
      this.table.replaceChildren(h("caption", {}, this.caption), h("thead", {}, heading), h("tbody", {}, regions),
        ...(marks.length ? [h("tbody", { class: "sv-marks" }, overlapping, marks.map((mark) => line(readable(mark), executions.map((_, i) => onMark(mark, i)))))] : []));
    }

    renderStrongest(vectors, what) {
      const { view, executions } = this.viewer;
      const item = (vector, key) => h("li", {}, h("code", {}, visible(view.tokens[key])), h("span", {}, `${key} \u00b7 ${readable(view.regions[view.region[key]])}`), h("b", {}, mass(vector[key])));
      this.strongest.replaceChildren(...vectors.map((vector, i) => h("div", {},
        h("h3", {}, `${what}, visit ${executions[i].visit}`), h("ol", {}, strongestOf(vector, 8).map((key) => item(vector, key))))));
    }
  }

  /** Every query and key of the head chosen. */
  class FullMap {
    constructor(viewer) {
      this.viewer = viewer;
      this.title = h("h3");
      this.canvas = h("canvas", { class: "sv-map", tabIndex: 0, role: "img", onpointermove: (event) => this.onMove(event), onclick: () => this.lock() });
      this.keys = h("canvas", { "aria-hidden": "true" });
      this.queries = h("canvas", { "aria-hidden": "true" });
      this.cross = h("div", { class: "sv-cross", hidden: true }, h("i"), h("b"));
      this.box = h("div", { class: "sv-mapbox" }, h("span"), this.keys, this.queries, h("div", { class: "sv-maphold" }, this.canvas, this.cross));
      this.readout = h("p", { class: "sv-note sv-readout" });
      this.scale = h("p", { class: "sv-note" });
      this.element = h("section", { "aria-label": "Full map" }, this.title, this.scale, this.box, this.readout);
    }

    render() {
      const { viewer } = this, { state, patterns, view } = viewer, { later, earlier } = viewer.shown();
      this.title.textContent = `Full map, ${nameOfVisit(state.visit)}: queries down, keys across`;
      this.scale.textContent = "";
      this.box.hidden = !patterns;
      this.readout.textContent = patterns ? "" : viewer.missing ?? "Loading\u2026";
      if (!patterns) return;
      const size = Math.min(Math.max(viewer.widths.map - 12, 160), 620), palette = viewer.palette, masked = viewer.masked();
      const shown = [view.key, state.layer, state.head, state.visit, state.scale, masked, palette.theme].join();
      if (this.shown !== shown) {
        const pattern = earlier === null ? patterns[later] : patterns[later].minus(patterns[earlier]);
        const top = Math.max(...(earlier === null ? patterns : [pattern]).map((p) => p.largest(masked)));
        drawMap(this.canvas, pattern, { top, scale: state.scale, diverging: earlier !== null, colours: viewer.colours(earlier !== null), masked, hidden: palette.hidden });
        this.full = `full colour at ${earlier === null ? "" : "\u00b1"}${mass(top)}`;
        this.shown = shown;
      }
      this.scale.textContent = this.full;
      this.canvas.style.width = this.canvas.style.height = `${size}px`;
      this.canvas.setAttribute("aria-label", `Full map of layer ${state.layer}, head ${state.head}, ${nameOfVisit(state.visit)}: arrow keys move the cross, Enter locks its query`);
      drawBand(this.keys, view.region, palette, size, 6);
      drawBand(this.queries, view.region, palette, size, 6, true);
      this.renderCross();
    }

    renderCross() {
      const { view, patterns, valuesAt } = this.viewer;
      this.cross.hidden = !this.at || !patterns;
      if (this.cross.hidden) return;
      const [query, key] = (this.at = this.at.map((place) => Math.min(Math.max(place, 0), view.length - 1)));
      this.cross.style.setProperty("--x", `${(100 * (key + 0.5)) / view.length}%`);
      this.cross.style.setProperty("--y", `${(100 * (query + 0.5)) / view.length}%`);
      const masses = key > query ? "not seen" : valuesAt.call(this.viewer, (i) => patterns[i].at(query, key));
      this.readout.textContent = `query ${query} ${visible(view.tokens[query])}, key ${key} ${visible(view.tokens[key])}: ${masses}`;
    }

    onMove(event) {
      const box = this.canvas.getBoundingClientRect(), { length } = this.viewer.view;
      this.at = [Math.floor(((event.clientY - box.top) / box.height) * length), Math.floor(((event.clientX - box.left) / box.width) * length)];
      this.renderCross();
    }

    /** Follow an arrow key. */
    move(key) {
      const [query, across] = this.at ?? [this.viewer.view.length - 1, 0];
      const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -across], End: [0, query - across] }[key];
      this.at = [query + down, across + right];
      this.renderCross();
      this.viewer.announce(this.readout.textContent);
      return true;
    }

    lock() {
      if (this.at) this.viewer.lock(this.at[0]);
      return true;
    }
  }

  /* ---------------------------------------------------------------- the viewer */

  const KEYS = [
    ["\u2190 \u2191 \u2192 \u2193", "in the list of heads: choose a head; on the prompt: look from another token; on the full map: move the cross"],
    ["[  ]", "visit before, visit after; the last is the difference"],
    [",  .", "lock the token before, the token after"],
    ["Enter", "on a token: lock it; on the full map: lock the query"],
    ["Esc", "release the token: back to the mean over targets"],
    ["1 \u2026 9", "lock the row that predicts target 1 \u2026 9"],
    ["d", "direction: where the token looks, who looks at it"],
    ["s", "colour scale: linear, square root, logarithm"],
    ["b", "mask the column of the start token"],
    ["o", "order of heads"],
    ["h", "back to the Dyck head"],
    ["g", "go to the list of heads"],
    ["x", "go to the prompt's tokens"],
    ["z", "zero this head at all visits, or put it back"],
    ["Z", "zero all heads of looped layers at the visit shown, or put them back"],
    ["e", "the prompt's text, to change and run; Ctrl+Enter in it runs it"],
    ["l", "copy a link to this view"],
    ["t", "copy the numbers as TSV"],
    ["p  P", "save as PNG, as SVG"],
    ["?", "this list"],
  ];

  class Viewer {
    constructor(element, source) {
      Object.assign(this, { element, source, ...readState(), hover: null, generation: 0 });
      this.composer = new Composer(this);
      this.answer = new Answer(this);
      this.heads = new HeadList(this);
      this.zero = new ZeroControls(this);
      this.tools = new Tools(this);
      this.strips = new Strips(this);
      this.text = new PromptText(this);
      this.masses = new Masses(this);
      this.map = new FullMap(this);
      this.build();
      this.listen();
      this.work = this.guarded(() => this.start());
    }

    build() {
      const { composer, answer, heads, zero, tools, strips, text, masses, map } = this;
      const action = (label, title, onclick) => h("button", { type: "button", title, onclick }, label);
      this.runSelect = h("select", { "aria-label": "Run", onchange: () => this.choose({ run: Number(this.runSelect.value), ex: 0, prompt: null, zero: "", layer: null, head: null, visit: null, q: null }) });
      this.exampleSelect = h("select", { "aria-label": "Example", onchange: () => this.choose({ ex: Number(this.exampleSelect.value), prompt: null, zero: "", q: null }) });
      this.runLabel = labelled("Run", this.runSelect);
      this.title = h("h2", { class: "sv-title" });
      this.facts = h("p", { class: "sv-facts" });
      this.status = h("div", { class: "sv-status", role: "status", "aria-live": "polite" });
      this.alert = h("div", { class: "sv-alert", role: "alert" });
      this.tooltip = h("div", { class: "sv-tooltip", "aria-hidden": "true", hidden: true });
      this.help = h("dialog", { class: "sv-help", "aria-label": "Keys" },
        h("h2", {}, "Keys"),
        h("dl", {}, KEYS.map(([key, does]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, does)])),
        h("form", { method: "dialog" }, h("button", {}, "Close")));
      const top = h("header", { class: "sv-top" },
        this.runLabel, labelled("Example", this.exampleSelect), composer.button, h("span", { class: "sv-space" }),
        action("Copy link", "Copy a link to this view (l)", () => this.copyLink()),
        action("Copy TSV", "Copy the numbers shown as a table (t)", () => this.copyNumbers()),
        action("PNG", "Save as PNG (p)", () => this.savePicture("png")),
        action("SVG", "Save as SVG (P)", () => this.savePicture("svg")),
        action("?", "Keys (?)", () => this.help.showModal()));
      top.lastChild.setAttribute("aria-label", "Help: keys");
      this.main = h("div", { class: "sv-main" },
        h("div", { class: "sv-head" }, h("div", {}, this.title, this.facts), zero.element),
        tools.element, strips.element,
        h("div", { class: "sv-two" }, text.element, masses.element),
        h("div", { class: "sv-two" }, map.element, masses.strongest));
      this.body = h("div", { class: "sv-body", hidden: true }, heads.element, this.main);
      this.root = h("div", { class: "sv", role: "region", "aria-label": "Dyck attention viewer" },
        top, composer.element, this.alert, answer.element, this.body, this.status, this.tooltip, this.help);
      this.element.replaceChildren(this.root);
    }

    /* -------------------------------------------- loading */

    async start() {
      const { runs, live } = await this.source.list();
      Object.assign(this, { runs, live });
      this.runSelect.replaceChildren(...runs.map((run, i) => h("option", { value: i, disabled: Boolean(run.trouble) }, `${i}: ${run.name}${run.trouble ? ", cannot be read" : ""}`)));
      this.runLabel.hidden = runs.length < 2;
      this.composer.button.hidden = !live;
      if (!(this.state.run < runs.length) || this.state.run === null) {
        if (this.state.run !== null) this.unmet.push(`run ${this.state.run}`);
        const first = runs.findIndex((run) => run.examples.length);
        this.state.run = first >= 0 ? first : Math.max(0, runs.findIndex((run) => !run.trouble));
      }
      if (!runs.some((run) => run.examples.length) && !live) {
        throw new Failure("No run here holds prompts whose attention was kept; probe dyck makes such runs.");
      }
      await this.open();
    }

    /** Show what `state` names: a stored example or a prompt, and what is zeroed in it. */
    async open() {
      const generation = ++this.generation, { state, source } = this, { examples } = this.runs[state.run];
      const unmet = this.unmet; // what the address asks for and is not there
      this.unmet = [];
      if (state.prompt === null && state.ex >= examples.length) {
        if (examples.length) unmet.push(`example ${state.ex}`);
        state.ex = 0;
      }
      this.renderExamples(examples);
      if (this.runs[state.run].trouble) return this.showNothing(this.runs[state.run].trouble);
      if (state.prompt === null && !examples.length) {
        return this.showNothing(this.live ? "This run holds no examples; draw a prompt or type one under Prompt\u2026" : "This run holds no examples.");
      }
      this.root.setAttribute("aria-busy", "true");
      try {
        const zeroed = zeroedOf(state.zero), stored = state.prompt === null;
        const found = stored && !zeroed.length ? { view: await source.header(state.run, state.ex), before: null } :
          await source.live({ run: state.run, zeroed, ...(stored ? { example: state.ex } : { text: state.prompt }) });
        if (generation !== this.generation) return;
        this.opened = { run: state.run, ex: state.ex, prompt: state.prompt, zero: state.zero };
        Object.assign(this, { view: new View(found.view, source), before: found.before, rows: null });
        if (found.other_checkpoint) this.tell("The checkpoint that ran is not the one that the run was made with: these numbers are of another model.");
        if (!stored && this.composer.text.value === "") this.composer.text.value = state.prompt;
        this.body.hidden = this.answer.element.hidden = false;
        this.readStyle();
        unmet.push(...this.checkState());
        if (unmet.length) this.tell(`There is no ${unmet.join(", no ")} here; something else is shown instead.`);
        this.answer.render();
        this.heads.render();
        this.text.fill();
        await this.showHead();
      } catch (error) {
        if (error instanceof Failure && generation === this.generation) {
          if (state.prompt !== null && this.composer.text.value === "") this.composer.text.value = state.prompt; // to be put right
          if (this.opened) Object.assign(state, this.opened); // what was shown before still is
          else if (state.zero && this.runs[state.run].examples.length) { // a link to what cannot be zeroed
            Object.assign(state, { zero: "" });
            await this.open();
          } else this.showNothing("");
          this.renderExamples(this.runs[state.run].examples);
          this.saveState();
        }
        throw error;
      } finally {
        if (generation === this.generation) this.root.setAttribute("aria-busy", "false");
      }
    }

    /** Nothing of a prompt: neither what was there before nor its numbers. */
    showNothing(sentence) {
      Object.assign(this, { view: null, rows: null, patterns: null, opened: null });
      this.heads.observer?.disconnect();
      cancelAnimationFrame(this.frame);
      this.body.hidden = this.answer.element.hidden = true;
      delete this.root.dataset.shown;
      this.tell(sentence);
    }

    renderExamples(examples) {
      const { prompt, ex } = this.state;
      this.exampleSelect.replaceChildren(
        ...(prompt === null ? [] : [h("option", { value: "", selected: true }, "the prompt as typed")]),
        ...examples.map((e) => h("option", { value: e.example, selected: prompt === null && e.example === ex }, `${e.title} \u2014 ${e.answer}, ${e.right} of ${e.targets} right`)));
      this.runSelect.value = String(this.state.run);
    }

    /** Let the state name things that exist; choose the Dyck head where it names none. Gives what it named that is not there. */
    checkState() {
      const { state, view } = this, unmet = [];
      if (!view.layers.includes(state.layer)) {
        if (state.layer !== null) unmet.push(`layer ${state.layer}`);
        Object.assign(state, this.firstHead());
      }
      if (state.head === null || state.head >= view.headsOf(state.layer)) {
        if (state.head !== null) unmet.push(`head ${state.head}`);
        state.head = 0;
      }
      if (state.visit !== null && !this.visits().includes(state.visit)) {
        unmet.push(`visit ${state.visit}`);
        state.visit = null;
      }
      if (state.q !== null && state.q >= view.length) {
        unmet.push(`token ${state.q}`);
        state.q = null;
      }
      if (!this.sorts().includes(state.sort)) [state.sort] = this.sorts();
      return unmet;
    }

    /** The numbers of the head chosen: the targets' rows, then whole patterns. */
    async showHead() {
      const { view, state } = this, { layer, head } = state, executions = view.of(layer);
      const late = () => view !== this.view || layer !== state.layer || head !== state.head;
      if (!this.visits().includes(state.visit)) state.visit = String(executions.at(-1).visit);
      const rows = await Promise.all(executions.map((e) => view.rows(e.index, head)));
      if (late()) return;
      Object.assign(this, { executions, rows, patterns: null, missing: null });
      if (view.whole) {
        if (view.encoding === "u1") this.render(); // these come quickly, whole patterns of a long prompt do not
        try {
          const patterns = await Promise.all(executions.map((e) => view.pattern(e.index, head)));
          if (late()) return;
          this.patterns = patterns;
        } catch (error) {
          if (!(error instanceof Failure)) throw error;
          if (late()) return;
          this.missing = error.message;
        }
      } else this.missing = "The run holds the rows of the answer alone: its prompts were too long to keep whole patterns.";
      this.render();
      this.announce(this.describeHead(layer, head));
      this.saveState();
      if (view.encoding === "f4") for (const cell of this.heads.neighbours()) view.prefetch(Number(cell.dataset.layer), Number(cell.dataset.head));
    }

    /** Do something that may fail; the reader is told in a sentence. */
    async guarded(work) {
      try {
        await work();
      } catch (error) {
        if (error instanceof Gone) return this.guarded(() => this.open()); // run again what the server let go
        if (!(error instanceof Failure)) console.error(error);
        this.tell(error instanceof Failure ? error.message : "Something failed in this page; the browser's console says what.");
      }
    }

    tell(sentence) {
      this.alert.textContent = sentence;
    }

    announce(sentence) {
      this.status.textContent = sentence;
    }

    /* -------------------------------------------- what is shown */

    /** Change the state, and what depends on it. */
    choose(change) {
      const { state } = this, before = { ...state };
      Object.assign(state, change);
      const changed = (...names) => names.some((name) => state[name] !== before[name]);
      if (changed("run", "ex", "prompt", "zero")) {
        this.tell("");
        this.work = this.guarded(() => this.open());
      } else if (!this.view) return;
      else if (changed("layer", "head")) {
        this.tell("");
        this.work = this.guarded(() => this.showHead());
      } else {
        if (changed("sort", "mask")) this.heads.render();
        this.render();
      }
      this.saveState();
    }

    saveState() {
      clearTimeout(this.saving);
      this.saving = setTimeout(() => {
        try {
          history.replaceState(history.state, "", addressOf(this.state));
        } catch { /* a page opened from a file may not change its address */ }
      }, 120);
    }

    lock(position) {
      this.hover = null;
      this.choose({ q: position });
      this.announceToken();
    }

    hoverOver(position) {
      if (position === this.hover || !this.rows) return;
      this.hover = position;
      cancelAnimationFrame(this.frame);
      this.frame = requestAnimationFrame(() => this.renderFocus());
    }

    setZeroed(zeroed) {
      if (this.live) this.choose({ zero: [...new Set(zeroed.map((z) => textOfZeroed([z])))].join(",") });
    }

    toggleZeroed(one) {
      const text = textOfZeroed([one]), zeroed = zeroedOf(this.state.zero);
      const rest = zeroed.filter((z) => textOfZeroed([z]) !== text);
      this.setZeroed(rest.length < zeroed.length ? rest : [...zeroed, one]);
    }

    get ablation() {
      return this.runs[this.state.run].ablation;
    }

    looped() {
      return this.view.layers.some((layer) => this.view.of(layer).length > 1);
    }

    /** The orders of heads that this run has numbers for. */
    sorts() {
      return CHOICES.sort.filter((sort) => (sort !== "bos" || this.looped()) && (sort !== "ablation" || this.ablation));
    }

    /** Rise of perplexity when a head is ablated; null where it was not measured. */
    rise(layer, head, visits = "all") {
      const { ablation } = this, at = ablation?.layers.indexOf(layer) ?? -1;
      return at < 0 ? null : ablation.rise[ablation.visits.indexOf(visits)]?.[at]?.[head] ?? null;
    }

    isDyck(layer, head) {
      return this.ablation?.layer === layer && this.ablation.head === head;
    }

    /** The run's Dyck head; else the head whose mass on the start token changes most. */
    firstHead() {
      const { ablation, view } = this;
      const there = ablation && view.layers.includes(ablation.layer) && ablation.head < view.headsOf(ablation.layer);
      return there ? { layer: ablation.layer, head: ablation.head } : this.ranked("bos")[0];
    }

    /** All heads, those first that the order puts first: as with nothing zeroed, so that they stay where they are. */
    ranked(sort) {
      const { view, before } = this;
      const all = view.layers.flatMap((layer) => Array.from({ length: view.headsOf(layer) }, (_, head) => ({ layer, head })));
      const value = ({ layer, head }) => (sort === "ablation" ? this.rise(layer, head) : view.bosChange(layer, head, before?.mass));
      const rank = (place) => (value(place) === null ? -Infinity : sort === "bos" ? Math.abs(value(place)) : value(place));
      return all.sort((a, b) => (rank(a) === rank(b) ? 0 : rank(b) - rank(a)));
    }

    /** The visits to choose from: each, and each later one minus the first. */
    visits() {
      const visits = this.view.of(this.state.layer).map((e) => String(e.visit));
      return [...visits, ...visits.slice(1).map((visit) => `${visit}-${visits[0]}`)];
    }

    /** Places among `executions` of the visit shown, and of the one it is compared with, null for none. */
    shown() {
      const [later, earlier] = this.state.visit.split("-").map(Number), at = (visit) => this.executions.findIndex((e) => e.visit === visit);
      return { later: at(later), earlier: earlier === undefined ? null : at(earlier) };
    }

    targetOfRow(position) {
      return this.view.targets.findIndex((target) => target.position - 1 === position);
    }

    /** Whether the row or column of a token can be shown. */
    known(position) {
      return this.patterns !== null || (this.state.dir === "from" && this.targetOfRow(position) >= 0);
    }

    /** The token in question: the one locked, else the one under the pointer, else none, or the start token for `to`. */
    focus() {
      const { q, dir } = this.state, asked = q ?? this.hover;
      if (asked !== null && this.known(asked)) return asked;
      return dir === "to" && this.patterns ? 0 : null;
    }

    /** What the token in question has to do with every token, at the visit of this place; without one the mean over targets. */
    vector(i, position = this.focus()) {
      if (position === null) return mean(this.rows[i]);
      if (this.state.dir === "to") return this.patterns[i].column(position);
      const target = this.targetOfRow(position);
      return target >= 0 ? this.rows[i][target] : this.patterns[i].row(position);
    }

    /** The key whose colours are left out, -1 for none. */
    masked() {
      return this.state.mask && this.view.regions[this.view.region[0]] === "bos" ? 0 : -1;
    }

    /** Read what the style sheet says of this prompt's regions; once, for reading makes the browser lay the page out. */
    readStyle() {
      const style = getComputedStyle(this.root), { regions } = this.view;
      const variable = (name) => style.getPropertyValue(`--sv-${name.replaceAll("_", "-")}`).trim();
      const colours = regions.map((name) => variable(name) || variable("muted"));
      this.palette = { theme: variable("theme"), colours, separator: regions.indexOf("separator"), hidden: variable("hidden") };
    }

    colours(diverging) {
      return RAMPS[this.palette.theme][diverging ? "two" : "one"];
    }

    /* -------------------------------------------- rendering */

    render() {
      if (!this.rows) return;
      // What is read of the layout is read before anything is written: the browser lays out once.
      this.heads.mark();
      this.widths = { strips: this.strips.element.clientWidth, map: this.map.element.clientWidth };
      this.renderTitle();
      this.tools.render();
      this.zero.render();
      this.strips.render();
      this.renderFocus();
      this.map.render();
      this.root.dataset.shown = `${this.state.layer}.${this.state.head}`;
    }

    renderTitle() {
      const { view, state } = this, { layer, head } = state, rise = this.rise(layer, head);
      this.title.replaceChildren(`Layer ${layer}, head ${head}`, this.isDyck(layer, head) ? h("b", { class: "sv-badge" }, "Dyck head") : "");
      const atVisits = this.executions.map((e) => `, ${signed(this.rise(layer, head, String(e.visit)), significant)} at visit ${e.visit}`).join("");
      // The title of a prompt that was typed names pairs that are not the usual ones.
      this.facts.textContent = (state.prompt === null ? "" : `${view.title} \u00b7 `) + `BOS mass ${this.executions.map((e) => mass(view.massOn(e.index, head))).join(" \u2192 ")}, mean over targets` +
        (rise === null ? "" : ` \u00b7 perplexity ${signed(rise, significant)} under ${this.ablation.kind} ablation at all visits${atVisits}`);
    }

    /** What depends on the token in question alone: this runs at every move of the pointer. */
    renderFocus() {
      const position = this.focus(), vectors = this.executions.map((_, i) => this.vector(i)), { later, earlier } = this.shown();
      const diverging = earlier !== null, values = diverging ? difference(vectors[later], vectors[earlier]) : vectors[later];
      const masked = this.state.dir === "from" ? this.masked() : -1;
      const top = Math.max(...(diverging ? [values] : vectors).map((v) => Math.abs(largest(v, 0, v.length, masked))));
      this.text.render({ values, top, diverging, masked, position });
      this.masses.render({ vectors, position });
      this.values = values;
    }

    describeHead(layer, head) {
      const { view } = this, rise = this.rise(layer, head);
      const masses = view.of(layer).map((e) => `visit ${e.visit} ${mass(view.massOn(e.index, head))}`).join(", ");
      return `Layer ${layer}, head ${head}${this.isDyck(layer, head) ? ", the Dyck head" : ""}: BOS mass ${masses}` +
        (rise === null ? "" : `; perplexity ${signed(rise, significant)} when ablated`);
    }

    describeToken(position) {
      const { view } = this;
      return `${position}, ${visible(view.tokens[position])}, ${readable(view.regions[view.region[position]])}`;
    }

    /** `visit 1 .123, visit 2 .456, change +.333` of value(place of the visit). */
    valuesAt(value) {
      const values = this.executions.map((_, i) => value(i));
      const told = this.executions.map((e, i) => `visit ${e.visit} ${mass(values[i])}`);
      return [...told, ...(values.length > 1 ? [`change ${signed(values.at(-1) - values[0])}`] : [])].join(", ");
    }

    announceToken() {
      const { view, values } = this, position = this.focus();
      if (position === null || !values) return this.announce("Mean over targets.");
      this.announce(`Token ${this.describeToken(position)}: ` + strongestOf(values, 5).map((key) => `${visible(view.tokens[key])} at ${key} ${mass(values[key])}`).join(", "));
    }

    showTip(event, text) {
      const { tooltip } = this;
      tooltip.textContent = text;
      tooltip.hidden = false;
      const { width, height } = tooltip.getBoundingClientRect(), below = event.clientY + 18;
      tooltip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
      tooltip.style.top = `${below + height > innerHeight ? event.clientY - height - 10 : below}px`;
    }

    hideTip() {
      this.tooltip.hidden = true;
    }

    /* -------------------------------------------- taking away */

    async copy(text, said) {
      try {
        await navigator.clipboard.writeText(text);
      } catch { // no permission, or no secure context
        const area = h("textarea", { class: "sv-offscreen", value: text });
        this.root.append(area);
        area.select();
        document.execCommand("copy");
        area.remove();
      }
      this.announce(said);
      const note = h("div", { class: "sv-flash", "aria-hidden": "true" }, said);
      this.root.append(note);
      setTimeout(() => note.remove(), 1800);
    }

    copyLink() {
      return this.copy(addressOf(this.state), "Link copied.");
    }

    /** Wait for the numbers of what was chosen last, which may still be on their way; whether there are any. */
    async settled() {
      for (let work; work !== this.work; ) await (work = this.work);
      return Boolean(this.rows);
    }

    async copyNumbers() {
      if (await this.settled()) await this.copy(this.tsv(), `Numbers of ${this.view.length} tokens copied.`);
    }

    /** Masses of the token in question, or the mean over targets: a line for each token, a column for each visit. */
    tsv() {
      const { view, executions } = this, vectors = executions.map((_, i) => this.vector(i)), several = vectors.length > 1;
      const escaped = (text) => text.replace(/[\\\t\n\r]/g, (c) => ({ "\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r" })[c]);
      const head = ["position", "token", "region", ...executions.map((e) => `visit_${e.visit}`), ...(several ? ["change"] : [])];
      const lines = view.tokens.map((token, i) => {
        const values = vectors.map((vector) => vector[i]);
        return [i, escaped(token), view.regions[view.region[i]], ...[...values, ...(several ? [values.at(-1) - values[0]] : [])].map((v) => v.toPrecision(6))];
      });
      return [head, ...lines].map((line) => line.join("\t")).join("\n") + "\n";
    }

    async savePicture(kind) {
      if (!(await this.settled())) return;
      const { text, width, height } = pictureOf(this), name = `layer-${this.state.layer}-head-${this.state.head}.${kind}`;
      if (kind === "svg") return download(new Blob([text], { type: "image/svg+xml" }), name);
      const image = new Image();
      image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
      await image.decode();
      const canvas = h("canvas", { width: 2 * width, height: 2 * height });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => download(blob, name), "image/png");
    }

    /* -------------------------------------------- keys, themes, sizes */

    listen() {
      this.aborter = new AbortController();
      const { signal } = this.aborter;
      document.addEventListener("keydown", (event) => this.onKey(event), { signal });
      const restyle = () => {
        if (!this.view) return;
        this.readStyle();
        this.heads.render();
        this.render();
      };
      this.themes = new MutationObserver(restyle);
      this.themes.observe(document.documentElement, { attributes: true, attributeFilter: ["data-mantine-color-scheme"] });
      let width = 0;
      this.sizes = new ResizeObserver(() => {
        if (Math.abs(this.main.clientWidth - width) < 2) return;
        width = this.main.clientWidth;
        requestAnimationFrame(() => this.render());
      });
      this.sizes.observe(this.main);
    }

    onKey(event) {
      const { target, key } = event, inside = this.root.contains(target);
      if (this.help.open || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      if (/^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) || target.isContentEditable) {
        if (key === "Escape" && this.composer.element.contains(target)) this.composer.toggle(false);
        if (target.tagName !== "SELECT" || (key !== "?" && key !== "Escape")) return; // a menu takes letters for its choices
      }
      if (!inside && target !== document.body) return;
      if (key === "?") this.help.showModal();
      else if (key === "e" && this.live) event.preventDefault(), this.composer.toggle(); // also while numbers are on their way
      else if ((this.rows || (this.view && /^[ltpP]$/.test(key))) && this.act(key, target)) event.preventDefault();
    }

    /** Do what a key stands for; whether it stands for anything here. */
    act(key, target) {
      const { state, view } = this, onMap = target === this.map.canvas;
      const token = target.dataset?.token; // of the one that has the focus
      if (/^Arrow|^Home$|^End$/.test(key)) {
        if (token !== undefined) return this.text.move(key, Number(token));
        return onMap ? this.map.move(key) : this.heads.move(key);
      }
      if (key === "Enter") return onMap && this.map.lock();
      const asked = /^[1-9]$/.test(key) ? view.targets[Number(key) - 1] : undefined;
      if (asked) return this.lock(asked.position - 1), true;
      const next = (name, options, by = 1) => this.choose({ [name]: options[(options.indexOf(state[name]) + by + options.length) % options.length] });
      const step = (by) => {
        this.lock(Math.min(Math.max((state.q ?? (by > 0 ? -1 : view.length)) + by, 0), view.length - 1));
        this.text.scrollTo(state.q);
      };
      const actions = {
        "[": () => next("visit", this.visits(), -1),
        "]": () => next("visit", this.visits()),
        ",": () => step(-1),
        ".": () => step(1),
        Escape: () => this.lock(null),
        d: () => next("dir", CHOICES.dir),
        s: () => next("scale", CHOICES.scale),
        b: () => this.choose({ mask: !state.mask }),
        o: () => next("sort", this.sorts()),
        h: () => this.choose(this.firstHead()),
        g: () => this.heads.focus(),
        x: () => this.text.focus(),
        z: () => this.toggleZeroed({ layer: state.layer, head: state.head, visit: null }),
        Z: () => this.looped() && this.toggleZeroed({ layer: null, head: null, visit: this.executions[this.shown().later].visit }),
        l: () => this.copyLink(),
        t: () => this.copyNumbers(),
        p: () => this.savePicture("png"),
        P: () => this.savePicture("svg"),
      };
      if (!Object.hasOwn(actions, key)) return false;
      actions[key]();
      return true;
    }

    destroy() {
      this.view = this.rows = null;
      this.generation++;
      this.aborter.abort();
      this.themes.disconnect();
      this.sizes.disconnect();
      this.heads.observer?.disconnect();
      clearTimeout(this.saving);
      this.element.replaceChildren();
    }
  }

  /* ---------------------------------------------------------------- pictures */

  function download(blob, name) {
    const link = h("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  const escapeXml = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

  /** What is shown of a head as one SVG: strips, masses by region, the map. */
  function pictureOf(viewer) {
    const { view, state, masses, map } = viewer, width = 1080, left = 110, wide = width - left - 30;
    const style = getComputedStyle(viewer.root), ink = style.color, ground = style.backgroundColor, palette = viewer.palette;
    const parts = [];
    let y = 34;
    const text = (x, at, content, more = "") => parts.push(`<text x="${x}" y="${at}" ${more}>${escapeXml(content)}</text>`);
    const box = (x, at, w, tall, fill) => parts.push(`<rect x="${x.toFixed(2)}" y="${at}" width="${Math.max(w, 0).toFixed(2)}" height="${tall}" fill="${escapeXml(fill)}"/>`);
    const picture = (canvas, x, at, w, tall) => parts.push(`<image x="${x}" y="${at}" width="${w}" height="${tall}" preserveAspectRatio="none" style="image-rendering:pixelated" href="${canvas.toDataURL()}"/>`);
    text(24, y, `${viewer.title.textContent.replace("Dyck head", " (Dyck head)")} \u2014 ${viewer.runs[state.run].name}, ${view.title}`, 'font-size="17" font-weight="600"');
    text(24, (y += 22), viewer.facts.textContent, 'fill-opacity=".7"');
    text(24, (y += 18), `Attention of the targets' rows over all keys, ${state.scale} scale${state.mask ? ", BOS masked" : ""}` + (state.zero ? `; zeroed: ${zeroedOf(state.zero).map(nameOfZeroed).join("; ")}` : ""), 'fill-opacity=".7"');
    y += 20;
    let across = 24;
    for (const part of viewer.tools.legend.children) {
      if (part.tagName === "CANVAS") picture(part, across, y - 9, 96, 10);
      else text(across, y, part.textContent, 'font-size="11"');
      across += part.tagName === "CANVAS" ? 104 : 12 + 6.5 * part.textContent.length;
    }
    y += 28;
    for (const group of view.groups) if (((group.stop - group.start) / view.length) * wide > 6.5 * group.name.length) text(left + (wide * group.start) / view.length, y - 4, group.name, 'font-size="11" fill-opacity=".7"');
    view.region.forEach((number, i) => box(left + (wide * i) / view.length, y, wide / view.length + 0.3, 6, palette.colours[number]));
    y += 12;
    for (const { name, canvas } of viewer.strips.drawn) {
      const tall = canvas.height / RATIO;
      text(24, y + tall / 2 + 4, name);
      picture(canvas, left, y, wide, tall);
      view.targets.forEach((target, i) => text(left - 8, y + i * (ROW + GAP) + 13, visible(target.gold.trim() || target.gold), 'text-anchor="end" font-size="11" font-family="monospace"'));
      y += tall + 8;
    }
    y += 22;
    text(24, y, `Mass by region: ${masses.caption.split(";")[0].toLowerCase()}`, 'font-weight="600"');
    y += 10;
    viewer.executions.forEach((execution, i) => {
      text(24, y + 15, `visit ${execution.visit}`);
      let x = left;
      for (const region of masses.present) {
        const part = masses.masses[i][region] * wide;
        box(x, y, part, 22, palette.colours[region]);
        if (part > 40) text(x + part / 2, y + 15, mass(part / wide), `text-anchor="middle" fill="${textOn(palette.colours[region])}"`);
        x += part;
      }
      y += 28;
    });
    let x = left;
    for (const region of masses.present) {
      box(x, y + 2, 10, 10, palette.colours[region]);
      text(x + 15, y + 11, readable(view.regions[region]), 'font-size="11"');
      x += 34 + 6.4 * view.regions[region].length;
    }
    y += 40;
    if (viewer.patterns) {
      const size = 520;
      text(24, y, `${map.title.textContent}; ${map.full}`, 'font-weight="600"');
      picture(map.canvas, left, (y += 12), size, size);
      y += size;
    }
    const height = y + 24;
    const head = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="system-ui, sans-serif" font-size="13" fill="${escapeXml(ink)}">`;
    return { width, height, text: `${head}<rect width="100%" height="100%" fill="${escapeXml(ground)}"/>${parts.join("")}</svg>` };
  }

  window.smeltscopeViewer = {
    mount(element, source) {
      const viewer = new Viewer(element, source.kind === "inline" ? inlineSource(source) : serverSource(source));
      return { destroy: () => viewer.destroy() };
    },
  };
})();
