// Draw the figures, synchronize them, and handle mouse, touch and keyboard input.
"use strict";

const whole = (pair) => [0, Math.max(...pair.map((index) => VARIANTS[index].until))];
const view = { pair: PAGE.pair, x: whole(PAGE.pair), y: PAGE.pair.map(() => null), paint: "did" };
const charts = new Map();
const CONFIG = { displayModeBar: false, responsive: false, scrollZoom: false, doubleClick: false, showTips: false };

const pairNow = () => view.pair.map((index) => VARIANTS[index]);
const $ = (selector, root = document) => root.querySelector(selector);

function draw(figure) {
  const box = charts.get(figure.id);
  if (!box) return;
  const { data, layout } = sized(figure);
  box.previousElementSibling.innerHTML = legendHtml(data);
  Plotly.react(box, data, layout, CONFIG);
  if (figure === LANES) markLanes();
}

/** A figure with its current size and margins for the headings of its panels. */
function sized(figure) {
  const pair = pairNow();
  const { data, layout } = figure.make(pair, view);
  const lines = Math.max(0, ...(layout.annotations || []).filter(({ yref, y }) => yref === "paper" && y === 1)
    .map(({ text }) => text.split("<br>").length));
  layout.margin.t = 6 + 20 * lines;
  layout.width = widthNow();
  layout.height = figure.height(pair) + layout.margin.t;
  layout.legend.y = 1 + (layout.margin.t + 4) / (layout.height - layout.margin.t - layout.margin.b);
  return { data, layout };
}

/** The legend as a list outside the figure, because it wraps better. */
function legendHtml(data) {
  const seen = new Set();
  const entries = data.filter(({ name, showlegend, legendgroup }) => {
    const key = legendgroup ?? name;
    if (!name || showlegend === false || seen.has(key)) return false;
    return seen.add(key);
  });
  if (entries.length < 2) return "";
  return entries.map(({ name, mode, marker, line }) => {
    const sign = { x: "✕", cross: "✚", diamond: "◆", "triangle-right": "▶", arrow: "➝" }[marker?.symbol];
    const swatch = sign ? `<i class="sign" style="color:${marker.color}">${sign}</i>`
      : mode === "lines" ? `<i class="rule" style="border-top:3px ${line.dash === "dot" ? "dotted" : "solid"} ${line.color}"></i>`
      : `<i class="chip" style="background:${marker.color}"></i>`;
    return `<li>${swatch}${escaped(name)}</li>`;
  }).join("");
}

function drawAll() {
  FIGURES.forEach(draw);
}

function drawTimed() {
  FIGURES.filter((figure) => figure.timed).forEach(draw);
}

/** Draw one figure at a time, so that the page stays responsive. */
function drawSoon(figures) {
  const [next, ...rest] = figures;
  if (!next) {
    document.documentElement.dataset.ready = "yes";
    return;
  }
  setTimeout(() => {
    draw(next);
    listen(next);
    drawSoon(rest);
  });
}

/** Apply a zoom to all figures that share the axis. */
function listen(figure) {
  const box = charts.get(figure.id);
  if (!box) return;
  box.on("plotly_relayout", (event) => {
    if (!figure.timed) return;
    let moved = false;
    for (const [key, value] of Object.entries(event)) {
      const found = key.match(/^([xy])axis(\d*)\.range\[0\]$/);
      if (!found) continue;
      moved = true;
      const other = event[key.replace("[0]", "[1]")];
      const range = [Math.min(value, other), Math.max(value, other)];
      if (found[1] === "x") view.x = [Math.max(range[0], 0), Math.min(range[1], whole(view.pair)[1])];
      else if (figure === LANES) view.y[found[2] ? found[2] - 1 : 0] = range;
    }
    if (moved) drawTimed();
  });
  box.on("plotly_doubleclick", reset);
  if (figure === LANES) listenToLanes(box);
  else listenToTaps(box);
}

function reset() {
  view.x = whole(view.pair);
  view.y = view.pair.map(() => null);
  drawTimed();
}

// The lanes: a tip under the pointer, a pinned request below.

function listenToLanes(box) {
  const tip = $("#tip");
  let pressed = null;
  const show = (event) => {
    const spot = event.buttons && event.pointerType === "mouse" ? null : spotAt(box, event);
    tip.innerHTML = spot ? LANES.about(pairNow(), spot.index, spot.time, spot.y, view) : "";
    tip.hidden = !tip.innerHTML;
    place(tip, event);
  };
  box.addEventListener("pointermove", show);
  box.addEventListener("pointerleave", ({ pointerType }) => { tip.hidden ||= pointerType === "mouse"; });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  box.addEventListener("pointerdown", (event) => { pressed = event; }, true);
  addEventListener("pointercancel", () => { pressed = null; }, true);
  addEventListener("pointerup", (event) => {
    const still = pressed && Math.hypot(event.clientX - pressed.clientX, event.clientY - pressed.clientY) < 5;
    pressed = null;
    const spot = still ? spotAt(box, event) : null;
    if (!spot) return;
    show(event);
    const { drawn } = pairNow()[spot.index];
    const lane = Math.round(spot.y);
    if (lane >= 0 && lane < drawn.length) inspect(spot.index, drawn[lane]);
    moveTo(spot.time);
  }, true);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (!step) return;
    event.preventDefault();
    const variant = pairNow()[pinned.index];
    const lane = variant.laneOf.get(pinned.place) ?? 0;
    const next = Math.min(Math.max(lane + step, 0), variant.drawn.length - 1);
    inspect(pinned.index, variant.drawn[next]);
  });
}

/** Panel under the pointer and the coordinates in it; null outside the panels. */
function spotAt(box, { clientX, clientY }) {
  const { left, top } = box.getBoundingClientRect();
  for (const [index, id] of Object.keys(box._fullLayout._plots).entries()) {
    const { xaxis, yaxis } = box._fullLayout._plots[id];
    const [x, y] = [clientX - left - xaxis._offset, clientY - top - yaxis._offset];
    if (x >= 0 && x <= xaxis._length && y >= 0 && y <= yaxis._length) {
      return { index, id, x, time: xaxis.p2d(x), y: yaxis.p2d(y), down: y };
    }
  }
  return null;
}

/** On a touch screen, dragging scrolls the page and a tap shows what hovering shows. */
function listenToTaps(box) {
  box.addEventListener("click", (event) => {
    const spot = matchMedia("(pointer: coarse)").matches ? spotAt(box, event) : null;
    if (spot) Plotly.Fx.hover(box, { xpx: spot.x, ypx: spot.down }, spot.id);
  });
}

function place(tip, event) {
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 14;
  const top = event.clientY + 14 + height > innerHeight ? event.clientY - height - 14 : event.clientY + 14;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(top, 4)}px`;
}

const pinned = { index: 0, place: 0 };

/** Show the details of one request below the lanes. */
function inspect(index, placeOf) {
  const variant = pairNow()[index];
  pinned.index = index;
  pinned.place = placeOf;
  $("#inspect-variant").value = String(index);
  $("#inspect-id").value = variant.id(placeOf);
  const box = charts.get(LANES.id);
  if (box._fullLayout) Plotly.relayout(box, { shapes: LANES.shapes(pairNow()) });
  const { arrival, prompt, output, tokens, first, e2e, ended, preemptions, recomputed } = variant.requests;
  const outcome = variant.outcome(placeOf);
  const facts = [
    ["outcome", `${outcome.label}, at ${number(ended[placeOf])} s`],
    ["arrival", `${number(arrival[placeOf])} s`],
    ["tokens", `${number(prompt[placeOf])} in the prompt; ${number(tokens[placeOf])} of ${number(output[placeOf])} received`],
    ["first token after", seconds(first[placeOf])],
    ["answer after", seconds(e2e[placeOf])],
    ["preemptions", `${number(preemptions[placeOf])}, ${number(recomputed[placeOf])} tokens recomputed`],
  ];
  const behind = behindWhom(variant, placeOf);
  if (behind) facts.push(["main blockers", behind.replace("main blockers: ", "")]);
  const lane = variant.laneOf.get(placeOf);
  let bar = "";
  if (lane !== undefined) {
    const sums = [...variant.ledger(lane)].map((sum, code) => ({ sum, ...KINDS[code] })).filter(({ sum, life }) => sum > 0 && life);
    const all = sums.reduce((total, { sum }) => total + sum, 0) || 1;
    bar = `<div class="strip" aria-hidden="true">${sums.map(({ key, sum }) =>
      `<span style="flex:${sum / all};background:var(--kind-${key})"></span>`).join("")}</div>
      <ul class="ledger">${sums.sort((a, b) => b.sum - a.sum).map(({ key, sum }) =>
        `<li><i class="chip" style="background:var(--kind-${key})"></i>${escaped(PAGE.words[key])} <b>${seconds(sum)}</b> (${number((100 * sum) / all)} %)</li>`).join("")}</ul>`;
  } else {
    bar = "<p>This page contains a sample of the lanes, without this request.</p>";
  }
  $("#inspected").innerHTML = `<h3>Request ${variant.id(placeOf)} of ${escaped(variant.name)}</h3>
    <dl>${facts.map(([term, text]) => `<div><dt>${term}</dt><dd>${escaped(text)}</dd></div>`).join("")}</dl>${bar}`;
}

// Files of a figure.

function save(figure, format) {
  const name = `${PAGE.name}-${figure.id}`;
  if (format === "csv") {
    const text = figure.csv(pairNow(), view).map((row) => row.map(quoted).join(",")).join("\n") + "\n";
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = `${name}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    return Promise.resolve(text);
  }
  const { data, layout } = forFile(figure);
  const { width, height } = layout;
  return Plotly.downloadImage({ data, layout }, { format, width, height, scale: 2, filename: name });
}

/** A figure for export: fixed width, with title and legend. */
function forFile(figure) {
  canvas.width = 1200;
  const { data, layout } = sized(figure);
  canvas.width = null;
  layout.showlegend = legendHtml(data) !== "";
  layout.title = { text: `<b>${escaped(PAGE.title)}</b>`, x: 0, xref: "paper", y: 0.985, yanchor: "top", font: { size: 15 } };
  layout.margin.t += layout.showlegend ? 84 : 34;
  layout.height += layout.showlegend ? 84 : 34;
  return { data, layout };
}

function quoted(value) {
  const text = String(value);
  return /[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

// The table of requests: sorting, filtering and paging.

const table = { sort: "ended", down: true, page: 0, size: 15, filter: "all", index: 0 };
const COLUMNS = [
  ["id", "request", (v, p) => v.id(p)],
  ["arrival", "arrival (s)", (v, p) => v.requests.arrival[p]],
  ["outcome", "outcome", (v, p) => v.outcome(p).word],
  ["first", "first token after (s)", (v, p) => v.requests.first[p]],
  ["e2e", "answer after (s)", (v, p) => v.requests.e2e[p]],
  ["ended", "time in system (s)", (v, p) => v.requests.ended[p] - v.requests.arrival[p]],
  ["preemptions", "preemptions", (v, p) => v.requests.preemptions[p]],
  ["recomputed", "recomputed tokens", (v, p) => v.requests.recomputed[p]],
];

function fillTable() {
  const variant = pairNow()[table.index];
  const [, , value] = COLUMNS.find(([key]) => key === table.sort);
  const failed = (p) => !variant.outcome(p).served;
  const places = [...Array(variant.size).keys()].filter((p) => table.filter === "all" || failed(p));
  const key = (p) => value(variant, p);
  const sign = table.down ? -1 : 1;
  places.sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return sign * (x < y ? -1 : x > y ? 1 : 0) || a - b;
  });
  const pages = Math.max(Math.ceil(places.length / table.size), 1);
  table.page = Math.min(Math.max(table.page, 0), pages - 1);
  const shown = places.slice(table.page * table.size, (table.page + 1) * table.size);
  $("#rows thead").innerHTML = `<tr>${COLUMNS.map(([name, title]) => {
    const on = name === table.sort;
    return `<th scope="col" aria-sort="${on ? (table.down ? "descending" : "ascending") : "none"}">
      <button type="button" data-sort="${name}">${title}${on ? (table.down ? " ▼" : " ▲") : ""}</button></th>`;
  }).join("")}</tr>`;
  $("#rows tbody").innerHTML = shown.map((p) => `<tr>${COLUMNS.map(([name, , of]) => {
    const cell = of(variant, p);
    if (name === "id") return `<th scope="row"><button type="button" data-place="${p}">${cell}</button></th>`;
    return `<td class="${typeof cell === "string" ? "" : "number"}">${typeof cell === "string" ? escaped(cell) : cell === null ? "none" : number(cell)}</td>`;
  }).join("")}</tr>`).join("");
  $("#pager").textContent = `${places.length ? table.page * table.size + 1 : 0} to ${table.page * table.size + shown.length} of ${places.length}`;
}

function listenToTable() {
  $("#rows").addEventListener("click", ({ target }) => {
    const { sort, place: p } = target.dataset;
    if (sort) {
      table.down = table.sort === sort ? !table.down : true;
      table.sort = sort;
      fillTable();
      $(`#rows [data-sort="${sort}"]`).focus();
    } else if (p !== undefined) {
      inspect(table.index, Number(p));
      $("#inspected").scrollIntoView({ block: "center" });
    }
  });
  $("#previous").addEventListener("click", () => { table.page--; fillTable(); });
  $("#next").addEventListener("click", () => { table.page++; fillTable(); });
  $("#filter").addEventListener("change", ({ target }) => { table.filter = target.value; table.page = 0; fillTable(); });
  $("#rows-variant").addEventListener("change", ({ target }) => { table.index = Number(target.value); table.page = 0; fillTable(); });
}

// Controls.

function nameThePair() {
  for (const select of [$("#inspect-variant"), $("#rows-variant")]) {
    select.innerHTML = pairNow().map((variant, index) => `<option value="${index}">${escaped(variant.name)}</option>`).join("");
    select.closest("label").hidden = view.pair.length < 2;
  }
  table.index = 0;
}

function choosePair() {
  view.pair = [...document.querySelectorAll("[data-side]")].map((select) => Number(select.value));
  view.x = whole(view.pair);
  view.y = view.pair.map(() => null);
  nameThePair();
  fillTable();
  inspect(0, worstOf(pairNow()[0]));
  $("#moment-slider").max = String(whole(view.pair)[1]);
  moveTo(moment.time);
  drawAll();
}

/** The request to show first: the slowest unserved request, or the slowest request. */
function worstOf(variant) {
  const { arrival, ended } = variant.requests;
  let worst = 0;
  const rank = (p) => (variant.outcome(p).served ? 0 : 1e12) + ended[p] - arrival[p];
  for (let p = 1; p < variant.size; p++) if (rank(p) > rank(worst)) worst = p;
  return worst;
}

function listenToControls() {
  for (const select of document.querySelectorAll("[data-side]")) select.addEventListener("change", choosePair);
  for (const button of document.querySelectorAll("[data-save]")) {
    const figure = FIGURES.find(({ id }) => id === button.closest("figure").dataset.figure);
    button.addEventListener("click", () => save(figure, button.dataset.save));
  }
  for (const button of document.querySelectorAll("[data-reset]")) button.addEventListener("click", reset);
  $("#paint").addEventListener("change", ({ target }) => { view.paint = target.value; [LANES, SESSIONS].forEach(draw); });
  $("#inspect").addEventListener("submit", (event) => {
    event.preventDefault();
    const index = Number($("#inspect-variant").value || 0);
    const found = pairNow()[index].placeOf.get(Number($("#inspect-id").value));
    if (found === undefined) $("#inspected").textContent = "This variant has no such request.";
    else inspect(index, found);
  });
}

/** Print with light colors and the width of A4 or Letter paper without margins. */
function forPaper(printing) {
  document.documentElement.classList.toggle("print", printing);
  canvas.width = printing ? 700 : null;
  drawAll();
}

function start() {
  if (!VARIANTS.some((variant) => variant.size)) return;
  for (const element of document.querySelectorAll("figure[data-figure]")) {
    charts.set(element.dataset.figure, $(".chart", element));
  }
  nameThePair();
  listenToControls();
  listenToTable();
  fillTable();
  inspect(0, worstOf(pairNow()[0]));
  startInspector();
  drawSoon(FIGURES.filter(({ id }) => charts.has(id)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(start.timer);
    start.timer = setTimeout(drawAll, 120);
  });
  addEventListener("beforeprint", () => forPaper(true));
  addEventListener("afterprint", () => forPaper(false));
}

/** Load the plotting library, which is embedded as base64 gzip unless it is a separate file. */
async function unpackLibrary() {
  const packed = $("#library");
  if (!packed) return;
  const bytes = Uint8Array.from(atob(packed.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(stream).text();
  document.head.append(library);
}

unpackLibrary().then(start);
