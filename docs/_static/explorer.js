// The explorer: choose the precision of each product, and see the errors of five tensors. The page
// contains the numbers (docs/build/explorer.py computes them), its address contains the state.
"use strict";

(() => {
  const root = document.getElementById("ex");
  if (!root) return;
  const data = JSON.parse(document.getElementById("ex-data").textContent);
  const sites = Object.keys(data.products);
  const outputs = Object.keys(data.outputs);
  const lowest = -4, highest = 1; // decades of the error axis

  const LEVEL_NAMES = { int8: "INT8", fp8_e4m3: "FP8", input16: "16 bit" };
  const SMOOTHING = [["none", "nothing"], ["k", "K"], ["q", "Q"], ["qk", "Q and K"]];
  const SCALES = [["tile", "per tile and block"], ["factored", "factored"]];
  const DELTA = [["o", "O, as in the paper"], ["p", "P and dP"]];
  const ALL_16 = Object.fromEntries(sites.map((site) => [site, "input16"]));
  const START = { input: "capture" in data.inputs ? "capture" : Object.keys(data.inputs)[0] };

  function preset(scales, changes = {}) {
    const p = data.presets[scales];
    return { levels: { ...p.levels, ...changes }, scales, smoothing: p.smoothing, delta: p.delta };
  }
  const PRESETS = [
    ["SageBwd", preset("tile")],
    ["all seven INT8", preset("tile", { dp: "int8" })],
    ["factored", preset("factored")],
    ["factored, PV in 16 bit", { ...preset("factored", { pv: "input16" }), delta: "o" }],
    ["16 bit", { ...preset("tile", ALL_16), smoothing: "none" }],
  ];

  // --- the numbers --------------------------------------------------------------------------

  function errorsOf(state) {
    const lists = data.errors[[state.input, state.scales, state.smoothing, state.delta, state.against].join(".")];
    const found = {};
    for (const t of outputs) {
      let index = 0;
      for (const site of data.reads[state.delta][t]) {
        index = index * data.levels.length + data.levels.indexOf(state.levels[site]);
      }
      found[t] = lists[t][index] ?? Infinity;
    }
    return found;
  }

  // The two products of Q and K make the same error, and most of it cancels in P. The error of one
  // alone does not cancel, so both change together.
  const together = (site) => (site.startsWith("qk") ? sites.filter((s) => s.startsWith("qk")) : [site]);

  function in16(state, site) {
    const levels = { ...state.levels };
    for (const s of together(site)) levels[s] = "input16";
    return errorsOf({ ...state, levels });
  }

  function label(state) {
    const base = data.presets[state.scales];
    const words = [state.scales === "tile" ? "sagebwd" : "factored"];
    for (const site of sites) {
      if (state.levels[site] !== base.levels[site]) words.push(`${site}=${state.levels[site]}`);
    }
    if (state.smoothing !== base.smoothing) words.push(`smooth=${state.smoothing}`);
    if (state.delta !== base.delta) words.push(`delta=${state.delta}`);
    return words.join(" ");
  }

  const shown = (x) => (Number.isFinite(x) ? x.toPrecision(3) : "overflow");

  // --- the state and the address ------------------------------------------------------------

  let state = { ...START, against: "exact", ...preset("tile") };

  function write() {
    const words = new URLSearchParams({ input: state.input, ...state.levels });
    for (const key of ["scales", "smoothing", "delta", "against"]) words.set(key, state[key]);
    history.replaceState(null, "", "#" + words);
  }

  function read() {
    const words = new URLSearchParams(location.hash.slice(1));
    const pick = (key, known, otherwise) => (known.includes(words.get(key)) ? words.get(key) : otherwise);
    const scales = pick("scales", SCALES.map(([w]) => w), "tile");
    const start = preset(scales);
    const levels = {};
    for (const site of sites) levels[site] = pick(site, data.levels, start.levels[site]);
    return {
      input: pick("input", Object.keys(data.inputs), START.input),
      levels,
      scales,
      smoothing: pick("smoothing", SMOOTHING.map(([w]) => w), start.smoothing),
      delta: pick("delta", DELTA.map(([w]) => w), start.delta),
      against: pick("against", Object.keys(data.references), "exact"),
    };
  }

  // --- building the page --------------------------------------------------------------------

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  // Radio buttons work with the keyboard: Tab reaches the group, arrow keys choose.
  function choice(name, title, options, hidden = false) {
    const legend = make("legend", hidden ? { class: "ex-hidden" } : {}, title);
    const row = make("div", { class: "ex-segments" });
    for (const [value, text] of options) {
      const input = make("input", { type: "radio", name: `ex-${name}`, value });
      row.append(make("label", { class: `ex-${value}` }, input, make("span", {}, text)));
    }
    return make("fieldset", { "data-switch": name }, legend, row);
  }

  const presetButtons = PRESETS.map(([name, p]) => {
    const button = make("button", { type: "button" }, name);
    button.addEventListener("click", () => set({ input: state.input, against: state.against, ...p, levels: { ...p.levels } }));
    return button;
  });

  const bars = {};
  const results = make("div", { class: "ex-results" });
  for (const t of outputs) {
    const bar = make("div", { class: "ex-bar" });
    const marks = ["tile", "factored"].map((scales) => make("i", { class: `ex-mark ex-mark-${scales}` }));
    const value = make("output", { id: `ex-value-${t}`, class: "ex-value", "aria-label": `error of ${data.outputs[t]}` });
    bars[t] = { bar, marks, value };
    results.append(
      make("span", { class: "ex-name" }, data.outputs[t]),
      make("div", { class: "ex-track", "aria-hidden": "true" }, bar, ...marks),
      value,
    );
  }
  const axis = make("div", { class: "ex-axis", "aria-hidden": "true" });
  for (let decade = lowest; decade <= highest; decade++) {
    const tick = make("span", {}, String(10 ** decade));
    tick.style.left = `${(100 * (decade - lowest)) / (highest - lowest)}%`;
    axis.append(tick);
  }
  results.append(make("span"), axis, make("span"));
  const key = make("p", { class: "ex-key" },
    make("i", { class: "ex-mark ex-mark-tile" }), " SageBwd  ",
    make("i", { class: "ex-mark ex-mark-factored" }), " factored (both on the same input)");

  const cells = {};
  const head = make("tr", {}, make("th", { scope: "col" }, "product"), make("th", { scope: "col" }, "computed in"));
  for (const t of outputs) head.append(make("th", { scope: "col", class: "ex-effect" }, data.outputs[t]));
  const body = make("tbody");
  let pass = "";
  for (const site of sites) {
    const [formula, itsPass] = data.products[site];
    if (itsPass !== pass) {
      pass = itsPass;
      body.append(make("tr", { class: "ex-pass" }, make("th", { colspan: 2 + outputs.length, scope: "rowgroup" }, pass)));
    }
    const levels = data.levels.map((level) => [level, LEVEL_NAMES[level] ?? level]);
    const row = make("tr", {},
      make("th", { scope: "row" }, formula, make("code", {}, site)),
      make("td", {}, choice(site, formula, levels, true)));
    cells[site] = {};
    for (const t of outputs) {
      cells[site][t] = make("td", { class: "ex-effect", "data-label": data.outputs[t] });
      row.append(cells[site][t]);
    }
    body.append(row);
  }
  const caption = make("caption", {}, make("b", {}, "The seven products."),
    " The columns on the right show how each error would change if only this product were computed in 16 bit" +
    " (for S: both products).");
  const products = make("table", { class: "ex-products" }, caption, make("thead", {}, head), body);

  const best = make("p", { class: "ex-best", role: "status" });
  const spec = make("code", { id: "ex-label" });
  const command = make("code", { id: "ex-command" });

  root.replaceChildren(
    make("div", { class: "ex-presets", role: "group", "aria-label": "presets" }, make("span", {}, "Start from"), ...presetButtons),
    choice("input", "Inputs (σ: standard deviation of Gaussian Q and K)", Object.entries(data.inputs)),
    choice("against", "Errors against", Object.entries(data.references)),
    make("section", { class: "ex-panel", "aria-label": "errors" },
      make("h3", {}, "Relative error of each output"), results, key, best),
    products,
    make("div", { class: "ex-more" },
      choice("scales", "Scales", SCALES),
      choice("smoothing", "Smoothing: mean subtracted from", SMOOTHING),
      choice("delta", "delta computed from", DELTA)),
    make("p", { class: "ex-spec" }, "This spec: ", spec),
    make("p", { class: "ex-spec" }, "On all layers of the shipped capture: ", command),
  );

  // --- showing a state ----------------------------------------------------------------------

  const place = (x) => {
    const decade = Math.min(Math.max(Math.log10(x), lowest), highest);
    return `${(100 * (decade - lowest)) / (highest - lowest)}%`;
  };

  function change(now, then) {
    if (!Number.isFinite(now) || !Number.isFinite(then) || now === 0) return Number.isFinite(then) ? -1 : 0;
    return then / now - 1;
  }

  function percent(x) {
    const rounded = Math.round(100 * x);
    if (rounded === 0) return "·";
    if (rounded > 999) return "≫";
    return (rounded > 0 ? "+" : "−") + Math.abs(rounded) + "\u00a0%";
  }

  function show() {
    for (const input of root.querySelectorAll("input[type=radio]")) {
      const name = input.name.slice(3);
      const chosen = name in state.levels ? state.levels[name] : state[name];
      input.checked = input.value === chosen;
    }
    PRESETS.forEach(([, p], i) => {
      const same = sites.every((s) => p.levels[s] === state.levels[s]) &&
        ["scales", "smoothing", "delta"].every((key) => p[key] === state[key]);
      presetButtons[i].setAttribute("aria-pressed", String(same));
    });
    const now = errorsOf(state);
    const others = ["tile", "factored"].map((s) => errorsOf({ input: state.input, against: state.against, ...preset(s) }));
    for (const t of outputs) {
      bars[t].bar.style.width = place(now[t]);
      bars[t].value.textContent = shown(now[t]);
      others.forEach((other, i) => { bars[t].marks[i].style.left = place(other[t]); });
    }
    const gains = {};
    for (const site of sites) {
      const then = in16(state, site);
      const is16 = together(site).every((s) => state.levels[s] === "input16");
      for (const t of outputs) {
        const x = is16 ? 0 : change(now[t], then[t]);
        const cell = cells[site][t];
        cell.textContent = percent(x);
        cell.style.setProperty("--ex-strength", Math.min(Math.abs(x), 1).toFixed(2));
        cell.classList.toggle("ex-worse", x > 0.005);
        cell.classList.toggle("ex-better", x < -0.005);
        if (!gains[t] || x < gains[t].x) gains[t] = { x, site };
      }
    }
    const { x, site } = gains.ds;
    const which = site.startsWith("qk") ? "S, in both passes," : data.products[site][0];
    best.textContent = x < -0.005
      ? `The dS error is ${shown(now.ds)}. The largest gain from one product: ${which} in 16 bit would change it by ${percent(x)}.`
      : `The dS error is ${shown(now.ds)}. No single product in 16 bit would reduce it.`;
    spec.textContent = label(state);
    command.textContent = `sagesim attribute llama --spec "${label(state)}"`;
  }

  function set(next) {
    state = next;
    write();
    show();
  }

  root.addEventListener("change", (event) => {
    const name = event.target.name.slice(3), value = event.target.value;
    if (name in state.levels) set({ ...state, levels: { ...state.levels, [name]: value } });
    else set({ ...state, [name]: value });
  });
  window.addEventListener("hashchange", () => { state = read(); show(); });
  state = read();
  show();
})();
