// Draws panels (speq/dashboard/panel.py) with plotly.js, on any page that has page.css and the
// bundle. What a page has of these elements is filled, by their ids: title, theme (a button),
// facts (a dl), contents (a ul), panels, notes. A page as JSON in a script element with the id
// `page` is opened at once.
//
//   speqPage.open({title, facts, panels, notes})    a whole page
//   speqPage.show(panels)    draws new panels, and those of a name that is there anew in its place
//   speqPage.facts([[what, value], ...]), speqPage.notes([sentence, ...])
//
// `open` and `show` return a promise that is kept when all is drawn.
"use strict";
window.speqPage = (() => {
  const NARROW_PX = 640;
  // Of one letter in a chart, about, and of one row of its legend.
  const LETTER_PX = 7;
  const LEGEND_ROW_PX = 21;
  const ROWS_AT_ONCE = 500;
  const STEP_MS = 400;
  const CALM_STEP_MS = 1200;
  // What holds data or words, in which "@" is only a letter.
  const WORDS = new Set([
    ...["x", "y", "z", "text", "hovertext", "customdata", "ticktext", "tickvals", "name", "ids"],
    ...["hovertemplate", "texttemplate"],
  ]);

  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const isObject = (value) =>
    value !== null && typeof value === "object" && !Array.isArray(value) && !ArrayBuffer.isView(value);

  // `over` laid on `base`, objects key by key, anything else as it is.
  function merged(base, over) {
    const result = { ...base };
    for (const [key, value] of Object.entries(over ?? {})) {
      result[key] = isObject(value) && isObject(base[key]) ? merged(base[key], value) : value;
    }
    return result;
  }

  // --- Themes ---

  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const probe = make("span", { hidden: "" });
  const colours = new Map();

  const isDark = () => (root.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";

  function colour(name) {
    if (!colours.has(name)) {
      if (!getComputedStyle(root).getPropertyValue(`--c-${name}`)) {
        throw new Error(`a figure names the colour @${name}, which the page does not have`);
      }
      if (!probe.isConnected) document.body.append(probe);
      probe.style.color = `var(--c-${name})`;
      colours.set(name, getComputedStyle(probe).color);
    }
    return colours.get(name);
  }

  // A figure with this theme's colours in place of "@name".
  function painted(value) {
    if (typeof value === "string") return value.startsWith("@") ? colour(value.slice(1)) : value;
    if (Array.isArray(value)) return value.map(painted);
    if (!isObject(value)) return value;
    const keys = Object.entries(value);
    return Object.fromEntries(keys.map(([key, each]) => [key, WORDS.has(key) ? each : painted(each)]));
  }

  function themed() {
    colours.clear();
    const button = byId("theme");
    if (button) button.textContent = isDark() ? "Light theme" : "Dark theme";
    return redraw(sections.values());
  }

  // --- Charts ---

  const titled = (title) => (typeof title === "string" ? { text: title } : title);

  // Lines of words, none longer than there is room for.
  function wrapped(text, room_px) {
    const letters = Math.max(12, Math.floor(room_px / LETTER_PX));
    const lines = [];
    for (const word of text.split(" ")) {
      const last = lines.length - 1;
      if (last >= 0 && lines[last].length + 1 + word.length <= letters) lines[last] += ` ${word}`;
      else lines.push(word);
    }
    return lines.join("<br>");
  }

  function axisOf(axis, room_px) {
    const span = axis.domain ? axis.domain[1] - axis.domain[0] : 1;
    const base = {
      ...{ automargin: true, gridcolor: "@grid", zerolinecolor: "@grid", linecolor: "@grid" },
      title: { standoff: 8 },
    };
    const full = merged(base, { ...axis, title: titled(axis.title) ?? {} });
    if (full.title.text) full.title.text = wrapped(full.title.text, span * room_px);
    return full;
  }

  function legendRows(data, width_px) {
    const named = data.filter((trace) => trace.name && trace.showlegend !== false);
    if (named.length < 2 && !named.some((trace) => trace.showlegend)) return 0;
    const longest = Math.max(...named.map((trace) => String(trace.name).length));
    const columns = Math.max(1, Math.floor((width_px - 20) / (longest * LETTER_PX + 50)));
    return Math.ceil(named.length / columns);
  }

  function barOf(bar, narrow) {
    const base = { thickness: narrow ? 8 : 14, outlinewidth: 0, title: { side: "right" } };
    return merged(base, { ...bar, title: titled(bar?.title) ?? {} });
  }

  const RAMP = [[0, "@low"], [0.5, "@middle"], [1, "@high"]];

  function traceOf(trace, narrow) {
    if (trace.type === "heatmap" && !trace.coloraxis) {
      return { colorscale: RAMP, hoverongaps: false, ...trace, colorbar: barOf(trace.colorbar, narrow) };
    }
    // A pattern lies on the bar's colour, rather than on the background.
    const pattern = trace.marker?.pattern;
    return pattern ? merged({ marker: { pattern: { fillmode: "overlay" } } }, trace) : trace;
  }

  function figureOf(data, layout, width, height_px) {
    const narrow = width < NARROW_PX;
    const axes = new Set(["xaxis", "yaxis"]);
    for (const key of Object.keys(layout)) if (/^[xy]axis\d*$/.test(key)) axes.add(key);
    for (const { xaxis, yaxis } of data) {
      for (const key of [xaxis, yaxis]) if (key) axes.add(`${key[0]}axis${key.slice(1)}`);
    }
    const rows = layout.showlegend === false ? 0 : legendRows(data, width);
    const height = height_px + rows * LEGEND_ROW_PX;
    const base = {
      ...{ width, height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" },
      margin: { l: 8, r: 12, t: narrow ? 12 : 32, b: 8 },
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 12 : 13, color: "@text" },
      colorway: [1, 2, 3, 4, 5, 6, 7, 8].map((number) => `@${number}`),
      // A finger that scrolls the page shall not move the chart.
      dragmode: narrow ? false : "zoom",
      hoverlabel: { align: "left" },
      legend: {
        ...{ orientation: "h", traceorder: "normal", x: 0, xanchor: "left" },
        ...{ yref: "container", y: 0, yanchor: "bottom" },
      },
    };
    const full = merged(base, layout);
    for (const key of axes) {
      const room_px = key.startsWith("x") ? width - 80 : height_px - 70;
      full[key] = axisOf(layout[key] ?? {}, room_px);
    }
    if (layout.coloraxis) {
      full.coloraxis = { colorscale: RAMP, ...layout.coloraxis };
      full.coloraxis.colorbar = barOf(layout.coloraxis.colorbar, narrow);
    }
    const traces = data.map((trace) => traceOf(trace, narrow));
    return { data: painted(traces), layout: painted(full) };
  }

  const CONFIG = {
    ...{ displaylogo: false, responsive: false },
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
  };

  // Of charts, as they were drawn last.
  const widths = new WeakMap();

  async function plot(element, data, layout, height_px) {
    const width = Math.floor(element.clientWidth);
    widths.set(element, width);
    if (width === 0) return;
    const figure = figureOf(data, layout, width, height_px);
    const config = { ...CONFIG, displayModeBar: width < NARROW_PX ? false : "hover" };
    await Plotly.react(element, figure.data, figure.layout, config);
  }

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const section = sections.get(target.closest(".panel")?.dataset.name);
      const drawn_px = widths.get(target);
      if (drawn_px !== undefined && drawn_px !== Math.floor(target.clientWidth)) redraw([section]);
    }
  });

  function chart() {
    const element = make("div", { class: "chart", role: "img" });
    resized.observe(element);
    return element;
  }

  // --- Tables ---

  const NONE = "–";

  function written(value) {
    if (value === null) return NONE;
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number") return value;
    const size = Math.abs(value);
    if (Number.isInteger(value)) return value.toLocaleString("en");
    if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    if (size < 1e-4) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: 4 });
  }

  function csvOf({ columns, rows }) {
    const cell = (value) => {
      const text = value === null ? "" : String(value);
      return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    return [columns, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
  }

  function save(text, name) {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  // Numbers behind a summary: rows are made when they are looked at.
  class Numbers {
    constructor(summary, name) {
      this.body = make("div");
      this.element = make("details", {}, make("summary", {}, summary), this.body);
      this.element.addEventListener("toggle", () => this.fill());
      this.name = name;
      this.title = summary;
      this.limit = ROWS_AT_ONCE;
    }

    update(table) {
      this.table = table;
      this.element.hidden = table.columns.length === 0;
      this.fill();
    }

    fill() {
      if (!this.element.open) return this.body.replaceChildren();
      const { columns, rows } = this.table;
      const isNumber = columns.map((_, at) =>
        rows.every((row) => row[at] === null || typeof row[at] === "number"),
      );
      const kind = (at) => (isNumber[at] ? { class: "number" } : {});
      const head = columns.map((title, at) => make("th", { scope: "col", ...kind(at) }, title));
      const body = rows.slice(0, this.limit).map((row) =>
        make("tr", {}, ...row.map((value, at) => {
          const exact = typeof value === "number" ? { title: String(value) } : {};
          return make("td", { ...kind(at), ...exact }, written(value));
        })),
      );
      const box = make(
        "div",
        { class: "box", tabindex: "0", role: "region", "aria-label": `${this.title}: ${this.name}` },
        make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)),
      );
      const acts = make("div", { class: "acts" });
      if (rows.length > this.limit) {
        const all = make("button", { type: "button" }, `Show all ${written(rows.length)} rows`);
        all.addEventListener("click", () => { this.limit = Infinity; this.fill(); });
        acts.append(all);
      }
      const csv = make("button", { type: "button" }, "Save as CSV");
      csv.addEventListener("click", () => save(csvOf(this.table), `${this.name}.csv`));
      acts.append(csv);
      const scrolled = this.body.querySelector(".box")?.scrollTop ?? 0;
      this.body.replaceChildren(box, acts);
      box.scrollTop = scrolled;
    }
  }

  // --- What panels show ---

  // Traces and a layout, as they were given.
  class Figure {
    constructor() {
      this.chart = chart();
      this.element = make("div", {}, this.chart);
    }

    update(panel) {
      this.panel = panel;
      this.chart.setAttribute("aria-label", `${panel.title}. ${panel.aid}`);
    }

    draw() {
      return plot(this.chart, this.panel.data, this.panel.layout, this.panel.height_px);
    }
  }

  const AWAY = 0;
  const HOST = 1;
  const HELD = 2;
  const ASKED = 3;
  const MISSED = 4;
  const STATE_COLOURS = ["away", "host", "held", "asked", "missed"];

  function bitsOf(text, count) {
    const bytes = atob(text);
    const bits = new Uint8Array(count);
    for (let at = 0; at < count; at++) bits[at] = (bytes.charCodeAt(at >> 3) >> (at & 7)) & 1;
    return bits;
  }

  // A heat map of layers and experts for each step, one of their use so far, and a slider.
  class Experts {
    constructor() {
      this.states = chart();
      this.uses = chart();
      this.key = make("ul", { class: "key" });
      this.slider = make("input", { type: "range", min: "0", step: "1", value: "0", "aria-label": "Step" });
      this.play = make("button", { type: "button" }, "Play");
      this.label = make("output", { "aria-live": "polite" });
      this.playing = null;
      this.table = new Numbers("Numbers of this step", "experts-of-the-step");
      this.element = make(
        "div",
        { class: "experts" },
        make("div", { class: "steps" }, this.play, this.slider, this.label),
        make(
          "div",
          { class: "pair" },
          make("div", {}, make("h3", {}, "When this step ended"), this.states, this.key),
          make("div", {}, make("h3", {}, "Asked for, up to this step"), this.uses),
        ),
        this.table.element,
      );
      this.slider.addEventListener("input", () => { this.stop(); this.moved(); });
      this.play.addEventListener("click", () => (this.playing === null ? this.start() : this.stop()));
    }

    get at() {
      return Number(this.slider.value);
    }

    update(panel) {
      const before = this.frames;
      const label = before?.labels[this.at];
      const followed = before !== undefined && this.at === before.labels.length - 1;
      this.panel = panel;
      this.frames = panel.frames;
      const { labels } = panel.frames;
      this.slider.max = String(Math.max(0, labels.length - 1));
      this.slider.disabled = this.play.disabled = labels.length < 2;
      // Whoever looks at the last step goes on with the run; on another one he stays.
      const same = before === undefined || followed ? -1 : labels.indexOf(label);
      this.slider.value = same >= 0 ? String(same) : this.slider.max;
      this.count = panel.frames.layers * panel.frames.experts;
      this.host = panel.frames.host === null ? null : bitsOf(panel.frames.host, this.count);
    }

    async start() {
      const playing = (this.playing = {});
      this.play.textContent = "Pause";
      this.label.setAttribute("aria-live", "off");
      if (this.at === Number(this.slider.max)) this.slider.value = "0";
      await this.moved();
      const step_ms = calm.matches ? CALM_STEP_MS : STEP_MS;
      while (this.playing === playing && this.at < Number(this.slider.max)) {
        await new Promise((resolve) => setTimeout(resolve, step_ms));
        if (this.playing !== playing) return;
        this.slider.value = String(this.at + 1);
        await this.moved();
      }
      if (this.playing === playing) this.stop();
    }

    stop() {
      this.playing = null;
      this.play.textContent = "Play";
      this.label.setAttribute("aria-live", "polite");
    }

    moved() {
      return redraw([sections.get(this.panel.name)]);
    }

    words(state) {
      const away = this.host === null ? "not in a slot" : "on disk only";
      return [
        away,
        "in host memory",
        "in a slot",
        "in a slot, and asked for in this step",
        "asked for in this step, in no slot when it ended",
      ][state];
    }

    decoded(at) {
      const { slots, used } = this.frames;
      const held = bitsOf(slots[at], this.count);
      const asked = bitsOf(used[at], this.count);
      const uses = new Uint32Array(this.count);
      for (let step = 0; step <= at; step++) {
        const bits = bitsOf(used[step], this.count);
        for (let cell = 0; cell < this.count; cell++) uses[cell] += bits[cell];
      }
      const states = Array.from(held, (in_slot, cell) => {
        if (in_slot) return asked[cell] ? ASKED : HELD;
        if (asked[cell]) return MISSED;
        return this.host !== null && this.host[cell] ? HOST : AWAY;
      });
      return { states, uses, held, asked };
    }

    byLayer(values) {
      const { layers, experts } = this.frames;
      return Array.from({ length: layers }, (_, layer) =>
        Array.from(values.slice(layer * experts, (layer + 1) * experts)),
      );
    }

    async draw() {
      const { labels, layers, experts } = this.frames;
      const at = this.at;
      if (labels.length === 0) return;
      const { states, uses, held, asked } = this.decoded(at);
      this.label.textContent = labels[at];
      this.slider.setAttribute("aria-valuetext", labels[at]);
      this.states.setAttribute("aria-label", `${this.panel.title}, ${labels[at]}. ${this.panel.aid}`);
      this.uses.setAttribute("aria-label", `How often each expert was asked for up to ${labels[at]}`);
      this.showKey(states);
      this.table.update(this.numbers(held, asked, uses));
      const shown = (state, cell) => {
        if (this.host === null || state === AWAY || state === HOST) return this.words(state);
        return `${this.words(state)};<br>${this.host[cell] ? "host memory has it too" : "otherwise on disk only"}`;
      };
      const each = { type: "heatmap", xgap: this.gap(), ygap: this.gap() };
      const map = {
        ...{ ...each, z: this.byLayer(states), text: this.byLayer(states.map(shown)), showscale: false },
        ...{ zmin: 0, zmax: MISSED, colorscale: STATE_COLOURS.map((name, state) => [state / MISSED, `@${name}`]) },
        hovertemplate: "layer %{y}, expert %{x}<br>%{text}<extra></extra>",
      };
      const missed = [...states.keys()].filter((cell) => states[cell] === MISSED);
      const crosses = {
        ...{ type: "scatter", mode: "markers", hoverinfo: "skip", showlegend: false },
        x: missed.map((cell) => cell % experts),
        y: missed.map((cell) => Math.floor(cell / experts)),
        marker: { symbol: "x", size: this.crossPx(), color: "@cross", line: { width: 0 } },
      };
      const most = uses.reduce((most, use) => Math.max(most, use), 1);
      const total = {
        ...{ ...each, z: this.byLayer(uses), zmin: 0, zmax: most, colorbar: { title: "steps", ...(most < 9 ? { dtick: 1 } : {}) } },
        hovertemplate: "layer %{y}, expert %{x}<br>asked for in %{z} steps<extra></extra>",
      };
      const ticks = { showgrid: false, zeroline: false, tickformat: "d" };
      const layout = {
        xaxis: { ...ticks, title: "expert", range: [-0.5, experts - 0.5], ...(experts < 9 ? { dtick: 1 } : {}) },
        yaxis: { ...ticks, title: "MoE layer", range: [layers - 0.5, -0.5], ...(layers < 9 ? { dtick: 1 } : {}) },
      };
      await plot(this.states, [map, crosses], layout, this.panel.height_px);
      await plot(this.uses, [total], layout, this.panel.height_px);
      this.element.dataset.drawn = String(at);
    }

    cellPx() {
      const { layers, experts } = this.frames;
      return Math.min((this.states.clientWidth - 60) / experts, (this.panel.height_px - 80) / layers);
    }

    gap() {
      return this.cellPx() > 7 ? 1 : 0;
    }

    crossPx() {
      return Math.min(10, Math.max(3, 0.7 * this.cellPx()));
    }

    showKey(states) {
      const found = [AWAY, ...(this.host === null ? [] : [HOST]), HELD, ASKED, MISSED];
      this.key.replaceChildren(...found.map((state) => {
        const style = `background: var(--c-${STATE_COLOURS[state]})`;
        const swatch = make("span", { class: "swatch", style }, state === MISSED ? "×" : "");
        const count = states.filter((each) => each === state).length;
        return make("li", {}, swatch, make("span", {}, `${this.words(state)}: `, make("b", {}, written(count))));
      }));
    }

    numbers(held, asked, uses) {
      const [slots, wanted, total] = [held, asked, uses].map((each) => this.byLayer(each));
      const sum = (values) => values.reduce((one, other) => one + other, 0);
      return {
        columns: ["MoE layer", "in slots", "asked for", "of these in no slot", "asked for so far"],
        rows: slots.map((row, layer) => [
          ...[layer, sum(row), sum(wanted[layer])],
          ...[sum(wanted[layer].map((bit, expert) => bit && !row[expert] ? 1 : 0)), sum(total[layer])],
        ]),
      };
    }
  }

  // --- Panels ---

  const sections = new Map();

  class Section {
    constructor(panel) {
      this.heading = make("h2", { id: `title-${panel.name}` });
      this.aid = make("p", { class: "aid" });
      this.absent = make("p", { class: "absent", hidden: "" });
      this.place = make("div");
      this.numbers = new Numbers("Numbers", panel.name);
      this.element = make(
        "section",
        { class: "panel", id: `panel-${panel.name}`, "data-name": panel.name, "aria-labelledby": this.heading.id },
        ...[this.heading, this.aid, this.absent, this.place, this.numbers.element],
      );
      this.link = make("a", { href: `#panel-${panel.name}` });
      this.view = null;
    }

    update(panel) {
      this.panel = panel;
      this.heading.textContent = this.link.textContent = panel.title;
      this.aid.textContent = panel.aid;
      this.tell(panel.absent);
      const Kind = panel.frames ? Experts : Figure;
      if (panel.absent === "" && !(this.view instanceof Kind)) {
        this.view = new Kind();
        this.place.replaceChildren(this.view.element);
      }
      if (panel.absent === "") this.view.update(panel);
      this.numbers.update(panel.table);
    }

    // A sentence in place of the picture; none: the picture.
    tell(sentence) {
      this.absent.textContent = sentence;
      this.absent.hidden = sentence === "";
      this.place.hidden = sentence !== "";
      this.aid.hidden = sentence !== "";
    }

    async draw() {
      if (this.panel.absent !== "") return;
      try {
        await this.view.draw();
      } catch (error) {
        this.tell(`This picture could not be drawn: ${error.message}.`);
        console.error(error);
      }
    }
  }

  const waiting = new Set();
  let drawing = null;

  // One after another: whatever asks again while others are drawn is drawn once, after them.
  function redraw(these) {
    for (const section of these) waiting.add(section);
    if (waiting.size > 0) drawing ??= drawAll();
    return drawing ?? Promise.resolve();
  }

  async function drawAll() {
    while (waiting.size > 0) {
      const [section] = waiting;
      waiting.delete(section);
      await section.draw();
    }
    drawing = null;
  }

  // --- The page ---

  function show(panels) {
    for (const panel of panels) {
      if (!sections.has(panel.name)) {
        const section = new Section(panel);
        sections.set(panel.name, section);
        (byId("panels") ?? document.body).append(section.element);
        byId("contents")?.append(make("li", {}, section.link));
      }
      sections.get(panel.name).update(panel);
    }
    return redraw(panels.map((panel) => sections.get(panel.name)));
  }

  function facts(pairs) {
    byId("facts")?.replaceChildren(
      ...pairs.map(([what, value]) => make("div", {}, make("dt", {}, what), make("dd", {}, value))),
    );
  }

  function notes(sentences) {
    const list = make("ul", {}, ...sentences.map((sentence) => make("li", {}, sentence)));
    byId("notes")?.replaceChildren(...(sentences.length ? [make("h2", {}, "Notes"), list] : []));
  }

  function open(page) {
    document.title = page.title;
    if (byId("title")) byId("title").textContent = page.title;
    facts(page.facts);
    notes(page.notes);
    return show(page.panels);
  }

  byId("theme")?.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    themed();
  });
  systemDark.addEventListener("change", themed);
  themed();

  const given = byId("page");
  const opened = given ? open(JSON.parse(given.textContent)) : Promise.resolve();
  return { open, show, facts, notes, colour, opened };
})();
