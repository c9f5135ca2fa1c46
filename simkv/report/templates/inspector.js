// The inspector: one moment of the run, its step, queues and blocks, for both variants side by side.
"use strict";

/** Most rows of a list; the others are counted. */
const MOST_LISTED = 40;
const moment = { time: 0 };

/** Index of the last element at or before a value, or -1; `from` and `to` limit the search. */
function lastAt(sorted, value, from = 0, to = sorted.length) {
  let low = from;
  let high = to;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1 >= from ? low - 1 : -1;
}

/** Unpack the steps and the block counts of a variant when it is first inspected. */
function inspected(variant) {
  if (variant.moments) return variant.moments;
  const tick = PAGE.tick;
  const columns = {};
  for (const [name, column] of Object.entries(variant.steps.columns)) columns[name] = unpacked(column);
  const start = new Float64Array(columns.gap.length);
  const end = new Float64Array(columns.gap.length);
  let reached = 0;
  columns.gap.forEach((gap, i) => {
    start[i] = (reached + gap) * tick;
    reached += gap + columns.last[i];
    end[i] = reached * tick;
  });
  const { count, gaps, changes } = variant.holdings;
  const first = new Int32Array(count.length + 1);
  const since = new Float64Array(gaps.length);
  const blocks = new Int32Array(gaps.length);
  let next = 0;
  count.forEach((entries, lane) => {
    let time = 0;
    let held = 0;
    for (const stop = next + entries; next < stop; next++) {
      time += gaps[next];
      held += changes[next];
      since[next] = time * tick;
      blocks[next] = held;
    }
    first[lane + 1] = next;
  });
  variant.moments = { ...columns, start, end, first, since, blocks };
  return variant.moments;
}

/** Requests of the shown lanes at a time: running (computing or holding blocks) and waiting. */
function queuesAt(variant, time) {
  const { first, since, blocks } = inspected(variant);
  const running = [];
  const waiting = [];
  variant.drawn.forEach((place, lane) => {
    const i = variant.at(lane, time);
    if (i < 0) return;
    const { key, served, life } = KINDS[variant.kind[i]];
    const at = lastAt(since, time, first[lane], first[lane + 1]);
    const held = at < 0 ? 0 : blocks[at];
    if (!life && !held) return;
    let admitted = at;
    while (admitted > first[lane] && blocks[admitted - 1] > 0) admitted--;
    const row = { place, key, from: variant.start[i], held, admitted: held ? since[admitted] : variant.start[i] };
    (served || held ? running : waiting).push(row);
  });
  running.sort((a, b) => a.admitted - b.admitted || a.place - b.place);
  return { running, waiting };
}

/** A color of a request that differs from those of its neighbors. */
const colorOf = (id) => `hsl(${(id * 137.508) % 360} 62% 55%)`;

/** A count with its noun: "1 decode", "14 decodes". */
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

function stepAt(variant, time) {
  return lastAt(inspected(variant).start, time);
}

/** Sentences about the step at a time and its decision. */
function describeStep(variant, time) {
  const columns = inspected(variant);
  const i = stepAt(variant, time);
  if (i < 0) return ["No step has started."];
  const idle = time > columns.end[i] + PAGE.tick / 2;
  const of = variant.steps.every > 1 ? `; one of ${variant.steps.every} steps is stored` : "";
  const what = [];
  if (columns.prefill[i]) what.push(`prefill of ${number(columns.prefill[i])} tokens for ${counted(columns.prefills[i], "request")}`);
  if (columns.decodes[i]) what.push(counted(columns.decodes[i], "decode"));
  const lines = [
    `${idle ? "Idle after step" : "Step"} ${number(i + 1)} of ${number(columns.start.length)}${of}: ` +
      `${short(columns.start[i])} to ${short(columns.end[i])} s, ${what.join(" and ") || "no tokens"}.`,
    `${number(columns.running[i])} running, ${number(columns.waiting[i])} waiting, ` +
      `${number(columns.free[i])} of ${number(variant.owners.total)} blocks free.`,
  ];
  const upTo = i + 1 < columns.start.length ? columns.start[i + 1] : Infinity;
  const evicted = variant.arrows.filter(({ at }) => at >= columns.start[i] - PAGE.tick / 2 && at < upTo - PAGE.tick / 2);
  for (const { victim, by, why, tokens } of evicted.slice(0, 8)) {
    lines.push(`Request ${variant.id(victim)} is preempted${by < 0 ? "" : ` for request ${variant.id(by)}`}` +
      ` (${PAGE.causes[why] || why}); ${number(tokens)} tokens are lost.`);
  }
  if (evicted.length > 8) lines.push(`${evicted.length - 8} more requests are preempted.`);
  return lines;
}

function listOf(variant, title, rows, cells, order) {
  const shown = rows.slice(0, MOST_LISTED);
  const more = rows.length - shown.length;
  return `<h4>${title}: ${number(rows.length)} <span class="muted">(${order})</span></h4><ol class="moment">${shown.map((row) =>
    `<li><i class="chip" style="background:${row.held ? colorOf(variant.id(row.place)) : "transparent"}"></i><button type="button" data-place="${row.place}">${variant.id(row.place)}</button> ${cells(row)}</li>`).join("")}</ol>${more > 0 ? `<p class="muted">and ${number(more)} more</p>` : ""}`;
}

/** Draw the blocks by owner: one run of cells per request, in order of admission, then shared and free ones. */
function drawBlocks(canvas, variant, running, free) {
  const total = variant.owners.total;
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.fillStyle = css("grid");
  context.fillRect(0, 0, width, height);
  const rows = 8;
  const perCell = total / (rows * width);
  const held = running.reduce((sum, row) => sum + row.held, 0);
  const used = total - free;
  const scale = held > used && held ? used / held : 1; // shared blocks are in several tables
  let reached = 0;
  const paint = (blocks, color) => {
    context.fillStyle = color;
    let from = reached / perCell;
    reached += blocks;
    const to = reached / perCell;
    while (from < to) {
      const row = Math.floor(from / width + 1e-9);
      const stop = Math.min(to, (row + 1) * width);
      context.fillRect(from - row * width, (row * height) / rows, stop - from, height / rows - 1);
      from = stop;
    }
  };
  for (const { place, held: blocks } of running) paint(blocks * scale, colorOf(variant.id(place)));
  if (used > reached) paint(used - reached, css("muted"));
}

function showMoment() {
  const box = $("#moments");
  const pair = pairNow();
  box.innerHTML = pair.map((variant, index) => {
    const { running, waiting } = queuesAt(variant, moment.time);
    variant.queues = { running, waiting };
    const [step, state, ...decided] = describeStep(variant, moment.time);
    const words = (key) => escaped(PAGE.words[key] || key);
    return `<section data-index="${index}" aria-label="${escaped(variant.name)}"><h3>${escaped(variant.name)}</h3>
      <p>${escaped(step)}</p>${state ? `<p>${escaped(state)}</p>` : ""}${decided.map((line) => `<p class="decided">${escaped(line)}</p>`).join("")}
      <canvas width="560" height="72" role="img"></canvas>
      ${listOf(variant, "Running", running, ({ key, held }) => `${words(key)}, ${number(held)} blocks`, "by admission")}
      ${listOf(variant, "Waiting", waiting, ({ key, from }) => `${words(key)} for ${seconds(moment.time - from)}`, "by arrival")}</section>`;
  }).join("");
  for (const section of box.children) {
    const variant = pair[section.dataset.index];
    const { running } = variant.queues;
    const i = stepAt(variant, moment.time);
    const free = i < 0 ? variant.owners.total : inspected(variant).free[i];
    const canvas = $("canvas", section);
    drawBlocks(canvas, variant, running, free);
    canvas.setAttribute("aria-label", `Blocks by owner: ${running.slice(0, 12).map((row) =>
      `request ${variant.id(row.place)} ${row.held}`).join(", ")}; ${free} free of ${variant.owners.total}`);
  }
}

/** Show a time (s) in the inspector, the address and the marks on the lanes. */
function moveTo(time) {
  moment.time = Math.min(Math.max(time, 0), whole(view.pair)[1]);
  $("#moment-time").value = +moment.time.toPrecision(9);
  $("#moment-slider").value = String(moment.time);
  showMoment();
  markLanes();
  clearTimeout(moveTo.timer);
  moveTo.timer = setTimeout(() => history.replaceState(null, "", momentLink()), 200);
}

/** The part of the address that opens this moment: `#t=12.34&request=82`. */
function momentLink() {
  const { index, place } = pinned;
  return `#t=${+moment.time.toPrecision(9)}&request=${pairNow()[index].id(place)}`;
}

/** A line at the moment in each panel of the lanes. */
function markLanes() {
  const box = charts.get(LANES.id);
  if (!box || !box._fullLayout) return;
  const plots = Object.values(box._fullLayout._plots);
  while (box.marks?.length > plots.length) box.marks.pop().remove();
  box.marks ??= [];
  plots.forEach(({ xaxis, yaxis }, i) => {
    const mark = (box.marks[i] ??= box.appendChild(Object.assign(document.createElement("i"), { className: "cursor" })));
    const x = xaxis.d2p(moment.time);
    mark.hidden = x < 0 || x > xaxis._length;
    mark.style.cssText = `left:${xaxis._offset + x}px;top:${yaxis._offset}px;height:${yaxis._length}px`;
  });
}

/** Move by steps of the first variant. */
function moveBySteps(steps) {
  const { start } = inspected(pairNow()[0]);
  const i = stepAt(pairNow()[0], moment.time + PAGE.tick / 2) + steps;
  moveTo(i < 0 ? 0 : start[Math.min(i, start.length - 1)]);
}

/** Open the moment and the request of an address; return whether it has a moment. */
function openAddress(hash = location.hash) {
  const asked = new URLSearchParams(hash.slice(1));
  const id = Number(asked.get("request") ?? NaN);
  const index = pairNow().findIndex((variant) => variant.placeOf.has(id));
  if (index >= 0) inspect(index, pairNow()[index].placeOf.get(id));
  const time = Number(asked.get("t") ?? NaN);
  if (Number.isNaN(time)) return false;
  moveTo(time);
  return true;
}

function startInspector() {
  const slider = $("#moment-slider");
  slider.max = String(whole(view.pair)[1]);
  slider.addEventListener("input", () => moveTo(Number(slider.value)));
  $("#moment-time").addEventListener("change", ({ target }) => moveTo(Number(target.value)));
  $("#moment-back").addEventListener("click", () => moveBySteps(-1));
  $("#moment-on").addEventListener("click", () => moveBySteps(1));
  $("#moment").addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 100, PageUp: -100 }[event.key];
    if (!steps || event.target.matches("input")) return;
    event.preventDefault();
    moveBySteps(event.shiftKey ? 10 * steps : steps);
  });
  $("#moments").addEventListener("click", ({ target }) => {
    if (target.dataset.place === undefined) return;
    inspect(Number(target.closest("section").dataset.index), Number(target.dataset.place));
    $("#inspected").scrollIntoView({ block: "center" });
  });
  addEventListener("hashchange", ({ newURL }) => openAddress(new URL(newURL).hash));
  const variant = pairNow()[pinned.index];
  const lane = variant.laneOf.get(pinned.place) ?? 0;
  if (openAddress()) $("#moment").scrollIntoView();
  else moveTo(variant.begin[lane] < variant.begin[lane + 1] ? variant.start[variant.begin[lane]] : 0);
}
