// The run: columns from the page's JSON, unpacked for lookups.
"use strict";

const PAGE = JSON.parse(document.getElementById("data").textContent);

/** Unpack a column that may be stored as values and repeat counts. */
function unpacked(column) {
  if (Array.isArray(column)) return column;
  const { runs } = column;
  const values = [];
  for (let i = 0; i < runs.length; i += 2) for (let n = runs[i + 1]; n > 0; n--) values.push(runs[i]);
  return values;
}

/** Format seconds: "0.42 s", "12.3 s", "1,234 s". */
function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "none";
  const size = Math.abs(value);
  if (size > 0 && size < 0.1) return `${+(1000 * value).toPrecision(3)} ms`;
  return `${number(value)} s`;
}

/** Format a number with three significant digits and thousands separators. */
function number(value) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

/** One variant of the run. Places are positions in order of arrival; all times in seconds. */
class Variant {
  constructor(raw, tick) {
    Object.assign(this, raw);
    this.requests = {};
    for (const [name, column] of Object.entries(raw.requests)) {
      const factor = ["arrival", "ended", "first", "e2e"].includes(name) ? tick : 1;
      this.requests[name] = unpacked(column).map((value) => (value === null ? null : value * factor));
    }
    const { ids, held, others, total } = raw.owners;
    this.owners = { ids, total, held: held.map(unpacked), others: unpacked(others) };
    this.courses = Object.fromEntries(
      Object.entries(raw.courses).map(([name, series]) => [name, series.map(unpacked)]),
    );
    this.size = this.requests.id.length;
    this.arrows = raw.arrows.map(([at, victim, by, why, tokens]) => ({
      at: at * tick,
      victim,
      by,
      why,
      tokens,
    }));
    this.placeOf = new Map(this.requests.id.map((id, place) => [id, place]));
    this.unpackLanes(raw.lanes, tick);
  }

  /** Shown lanes: all requests, or a sample of them. */
  unpackLanes({ of, count, kinds, lasts }, tick) {
    this.drawn = of;
    this.laneOf = new Map(of.map((place, lane) => [place, lane]));
    this.begin = new Int32Array(of.length + 1);
    this.kind = new Uint8Array(kinds.length);
    this.start = new Float64Array(kinds.length);
    this.end = new Float64Array(kinds.length);
    let next = 0;
    of.forEach((place, lane) => {
      let reached = Math.round(this.requests.arrival[place] / tick);
      for (const stop = next + count[lane]; next < stop; next++) {
        this.kind[next] = kinds.charCodeAt(next) - 65;
        this.start[next] = reached * tick;
        reached += lasts[next];
        this.end[next] = reached * tick;
      }
      this.begin[lane + 1] = next;
    });
  }

  id(place) {
    return this.requests.id[place];
  }

  outcome(place) {
    return PAGE.outcomes[this.requests.outcome[place]];
  }

  /** Index of the interval of a lane at a time, or -1. */
  at(lane, time) {
    let low = this.begin[lane];
    let high = this.begin[lane + 1];
    if (low === high || time < this.start[low] || time > this.end[high - 1]) return -1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[middle] < time) low = middle + 1;
      else high = middle;
    }
    return Math.min(low, this.begin[lane + 1] - 1);
  }

  /** Seconds by kind of a lane's request, until the end of the request. */
  ledger(lane) {
    const sums = new Float64Array(PAGE.kinds.length);
    for (let i = this.begin[lane]; i < this.begin[lane + 1]; i++) {
      sums[this.kind[i]] += this.end[i] - this.start[i];
    }
    return sums;
  }
}

const VARIANTS = PAGE.variants.map((raw) => new Variant(raw, PAGE.tick));
const KINDS = PAGE.kinds; // {key, label, served, life}

/** Color of an interval: by activity, as in the plots, or by its kind in the ledger. */
const PAINTS = {
  did: {
    keys: ["waiting", "prefill", "recompute", "evicted", "decode", "held_up", "preempted", "starved", "timed_out",
      "failed", "gone", "wasted"],
    of(kind, vain) {
      const { key, served, life } = KINDS[kind];
      if (served || !life) return this.keys.indexOf(key);
      if (vain) return this.keys.indexOf(vain);
      return Math.max(this.keys.indexOf(key), 0);
    },
  },
  why: {
    keys: KINDS.map((kind) => kind.key),
    of: (kind) => kind,
  },
};

/**
 * Paint lanes `first` to `last` (exclusive) from `from` to `to` seconds into rows and columns.
 *
 * A row stands for one lane or for a group of them. If several paints share a cell, the shares that
 * are not painted are carried over to later cells with the same paint. Each paint is therefore
 * painted in proportion within a few cells. Returns rows of paint numbers; empty cells are null.
 */
function raster(variant, paint, from, to, columns, rows, first, last) {
  const width = (to - from) / columns;
  const perRow = Math.max((last - first) / rows, 1);
  const paints = paint.keys.length;
  const result = [];
  for (let row = 0; row < rows; row++) {
    const begin = first + Math.floor(row * perRow);
    const end = Math.min(first + Math.floor((row + 1) * perRow), last);
    const shares = new Float32Array(columns * paints);
    for (let lane = begin; lane < end; lane++) {
      const vain = PAGE.vain[variant.requests.outcome[variant.drawn[lane]]];
      for (let i = variant.begin[lane]; i < variant.begin[lane + 1]; i++) {
        if (variant.end[i] <= from || variant.start[i] >= to) continue;
        const code = paint.of(variant.kind[i], vain);
        const left = Math.max((variant.start[i] - from) / width, 0);
        const right = Math.min((variant.end[i] - from) / width, columns);
        for (let column = Math.floor(left); column < right; column++) {
          shares[column * paints + code] +=
            Math.min(right, column + 1) - Math.max(left, column);
        }
      }
    }
    result.push(pick(shares, columns, paints, Math.max(end - begin, 1)));
  }
  return result;
}

function pick(shares, columns, paints, lanes) {
  const owed = new Float32Array(paints);
  const cells = new Array(columns).fill(null);
  for (let column = 0; column < columns; column++) {
    let sum = 0;
    for (let code = 0; code < paints; code++) sum += shares[column * paints + code];
    if (sum < 0.4 * Math.min(lanes, 1.25)) continue;
    let best = -1;
    for (let code = 0; code < paints; code++) {
      const share = shares[column * paints + code];
      owed[code] += share / sum;
      if (share > 0 && (best < 0 || owed[code] > owed[best])) best = code;
    }
    owed[best] -= 1;
    cells[column] = best;
  }
  return cells;
}

// Colors and fonts from the style sheet, which defines them once.
"use strict";

/** Current value of a custom property of the style sheet. */
function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Layout shared by all figures. */
function layoutOf(extra) {
  const ink = css("ink");
  return {
    paper_bgcolor: css("paper"),
    plot_bgcolor: css("paper"),
    font: { family: "system-ui, sans-serif", size: 13, color: ink },
    colorway: [css("blue"), css("red"), css("green"), css("orange")],
    margin: { l: 62, r: 14, t: 34, b: 46 },
    showlegend: false,
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 12 }, traceorder: "normal" },
    hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: ink } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    ...extra,
  };
}

function axis(title, extra) {
  return {
    title: { text: title, standoff: 8 },
    gridcolor: css("grid"),
    linecolor: css("line"),
    zeroline: false,
    ticks: "outside",
    tickcolor: css("line"),
    automargin: true,
    ...extra,
  };
}

/** Width of a figure: the width of the page, or a fixed width for files. */
const canvas = { width: null };

function widthNow() {
  const main = getComputedStyle(document.querySelector("main"));
  return canvas.width ?? parseFloat(main.width) - parseFloat(main.paddingLeft) - parseFloat(main.paddingRight);
}

/** Whether two panels do not fit side by side. */
function narrow() {
  return widthNow() < 700;
}

/** Axis domains and title position of panel `index` of `count`. */
function panel(index, count, rows = [1]) {
  const across = narrow() ? 1 : count;
  const down = Math.ceil(count / across);
  const column = index % across;
  const row = Math.floor(index / across);
  const gap = 0.09;
  const width = (1 - gap * (across - 1)) / across;
  const x = [column * (width + gap), column * (width + gap) + width];
  const between = down > 1 ? 0.14 : 0;
  const height = (1 - between * (down - 1)) / down;
  const top = 1 - row * (height + between);
  const total = rows.reduce((a, b) => a + b, 0);
  const inner = rows.length > 1 ? 0.1 * height : 0;
  let reached = top;
  const y = rows.map((share) => {
    const size = ((height - inner * (rows.length - 1)) * share) / total;
    const domain = [Math.max(reached - size, 0), Math.min(reached, 1)];
    reached -= size + inner;
    return domain;
  });
  return { x, y, top, across, down };
}

/** Heading of a panel, wrapped to several lines if necessary. */
function heading(text, place) {
  const width = (place.x[1] - place.x[0]) * (widthNow() - 76);
  return {
    text: wrapped(text, Math.max(Math.floor(width / 7.8), 12)).map((line) => `<b>${escaped(line)}</b>`).join("<br>"),
    x: place.x[0],
    y: place.top,
    xref: "paper",
    yref: "paper",
    xanchor: "left",
    yanchor: "bottom",
    showarrow: false,
    font: { size: 14 },
  };
}

function wrapped(text, most) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const line = lines[lines.length - 1];
    if (line && line.length + word.length >= most) lines.push(word);
    else lines[lines.length - 1] = line ? `${line} ${word}` : word;
  }
  return lines;
}

function escaped(text) {
  return String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

// One lane per request. Lanes are merged to the resolution of the screen; zooming in separates them.
"use strict";

const LANES = {
  id: "lanes",
  timed: true,
  arrowsAtMost: 300,
  marksAtMost: 1200,

  height(pair) {
    const most = Math.max(...pair.map((variant) => variant.drawn.length));
    return Math.min(Math.max(140 + 9 * most, 260), narrow() ? 420 : 560) * panel(0, pair.length).down;
  },

  make(pair, view) {
    const data = [];
    const layout = layoutOf({ annotations: [], shapes: [], hovermode: "closest" });
    const paint = PAINTS[view.paint];
    const [from, to] = view.x;
    const seen = new Set();
    pair.forEach((variant, index) => {
      const place = panel(index, pair.length);
      const name = index ? index + 1 : "";
      const { first, last } = rangeOf(variant, view.y[index]);
      const rows = Math.min(last - first, place.down > 1 ? 240 : 380);
      const columns = Math.round(1100 / place.across);
      const z = raster(variant, paint, from, to, columns, rows, first, last);
      for (const row of z) for (const code of row) if (code !== null) seen.add(code);
      const step = (to - from) / columns;
      const per = (last - first) / rows;
      data.push({
        type: "heatmap",
        z,
        x0: from + step / 2,
        dx: step,
        y0: first + per / 2 - 0.5,
        dy: per,
        zmin: -0.5,
        zmax: paint.keys.length - 0.5,
        colorscale: scaleOf(paint),
        showscale: false,
        hoverinfo: "skip",
        hoverongaps: false,
        ygap: per === 1 && this.height(pair) / rows > 7 ? 1 : 0,
        xaxis: `x${name}`,
        yaxis: `y${name}`,
      });
      data.push(...this.marks(variant, view, first, last, name), ...this.arrows(variant, view, first, last, name));
      layout[`xaxis${name}`] = axis("time (s)", { domain: place.x, range: [from, to], anchor: `y${name}` });
      layout[`yaxis${name}`] = axis(index % place.across ? "" : "request", {
        domain: place.y[0],
        range: [last - 0.5, first - 0.5],
        anchor: `x${name}`,
        showgrid: false,
        ...idTicks(variant, first, last),
      });
      layout.annotations.push(heading(`${variant.name}: ${variant.served}`, place));
      if (variant.standstill) {
        const { kind, since } = variant.standstill;
        layout.annotations.push({
          text: `<b>${escaped(kind)} at ${escaped(seconds(since))}</b>`, x: since, y: 0.5,
          xref: `x${name}`, yref: `y${name} domain`, showarrow: false, bgcolor: css("card"),
          bordercolor: css("ink"), borderpad: 3, xanchor: since > (from + to) / 2 ? "right" : "left",
        });
      }
    });
    data.push(...legendOf(paint, seen));
    layout.shapes = this.shapes(pair);
    return { data, layout };
  },

  /** A frame around the pinned request, and a line where an engine halted. */
  shapes(pair) {
    const shapes = [];
    pair.forEach((variant, index) => {
      const name = index ? index + 1 : "";
      const line = { color: css("ink"), width: 2 };
      if (variant.standstill) {
        const { since } = variant.standstill;
        shapes.push({
          type: "line", x0: since, x1: since, y0: 0, y1: 1,
          xref: `x${name}`, yref: `y${name} domain`, line: { ...line, dash: "dash" },
        });
      }
      const lane = variant.laneOf.get(pinned.place);
      if (!canvas.width && index === pinned.index && lane !== undefined) {
        shapes.push({
          type: "rect", x0: 0, x1: 1, y0: lane - 0.5, y1: lane + 0.5,
          xref: `x${name} domain`, yref: `y${name}`, line,
        });
      }
    });
    return shapes;
  },

  /** Where requests without an answer ended. */
  marks(variant, view, first, last, name) {
    const points = new Map();
    let count = 0;
    for (let lane = first; lane < last && count <= this.marksAtMost; lane++) {
      const outcome = variant.outcome(variant.drawn[lane]);
      if (outcome.served) continue;
      count++;
      if (!points.has(outcome)) points.set(outcome, { x: [], y: [] });
      points.get(outcome).x.push(variant.requests.ended[variant.drawn[lane]]);
      points.get(outcome).y.push(lane);
    }
    if (count > this.marksAtMost) return [];
    return [...points].map(([outcome, { x, y }]) => ({
      type: "scatter", mode: "markers", x, y, name: outcome.label, legendgroup: outcome.key,
      hoverinfo: "skip",
      marker: {
        symbol: outcome.symbol, color: css(outcome.colour), size: last - first > 80 ? 5 : 8,
        line: { color: css("paper"), width: 1 },
      },
      xaxis: `x${name}`, yaxis: `y${name}`, cliponaxis: false,
    }));
  },

  /** Preemptions in view, from the request that gained blocks to the request that lost its KV. */
  arrows(variant, view, first, last, name) {
    if (last - first > 200) return [];
    const [from, to] = view.x;
    const x = [], y = [], size = [];
    let count = 0;
    for (const { at, victim, by } of variant.arrows) {
      if (at < from || at > to) continue;
      const target = variant.laneOf.get(victim);
      const source = variant.laneOf.get(by);
      if (target === undefined || target < first || target >= last) continue;
      if (++count > this.arrowsAtMost) return [];
      if (source === undefined) {
        x.push(at, at, null); y.push(target - 0.5, target, null); size.push(0, 8, 0);
      } else {
        x.push(at, at, null); y.push(source, target, null); size.push(0, 9, 0);
      }
    }
    if (!count) return [];
    return [{
      type: "scatter", mode: "lines+markers", x, y, name: "preemption", legendgroup: "arrow",
      showlegend: name === "", hoverinfo: "skip", line: { color: css("ink"), width: 1 },
      marker: { symbol: "arrow", angleref: "previous", size, color: css("ink") },
      xaxis: `x${name}`, yaxis: `y${name}`,
    }];
  },

  /** Description of a point of the figure, as HTML. */
  about(pair, index, x, y, view) {
    const variant = pair[index];
    const { first, last } = rangeOf(variant, view.y[index]);
    const rows = Math.min(last - first, 380);
    const per = (last - first) / rows;
    if (per <= 1) return aboutMoment(variant, Math.round(y), x);
    const begin = first + Math.floor(Math.floor((y + 0.5 - first) / per) * per);
    return aboutGroup(variant, begin, Math.min(Math.ceil(begin + per), last), x);
  },

  csv(pair) {
    const rows = [["variant", "request", "kind", "start_s", "end_s"]];
    for (const variant of pair) {
      variant.drawn.forEach((place, lane) => {
        for (let i = variant.begin[lane]; i < variant.begin[lane + 1]; i++) {
          rows.push([variant.name, variant.id(place), KINDS[variant.kind[i]].key,
            short(variant.start[i]), short(variant.end[i])]);
        }
      });
    }
    return rows;
  },
};

function short(value) {
  return value === null ? "" : +value.toPrecision(9);
}

function rangeOf(variant, range) {
  const count = Math.max(variant.drawn.length, 1);
  if (!range) return { first: 0, last: count };
  const first = Math.min(Math.max(Math.floor(range[0] + 0.5), 0), count - 1);
  return { first, last: Math.min(Math.max(Math.ceil(range[1] + 0.5), first + 1), count) };
}

/** Ticks of the y axis, labeled with request ids. */
function idTicks(variant, first, last) {
  const count = last - first;
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000]
    .find((size) => count / size <= 9) || 200000;
  const tickvals = [];
  for (let lane = Math.ceil(first / step) * step; lane < last; lane += step) tickvals.push(lane);
  return { tickvals, ticktext: tickvals.map((lane) => String(variant.id(variant.drawn[lane]))) };
}

function scaleOf(paint) {
  const count = paint.keys.length;
  return paint.keys.flatMap((key, index) => {
    const colour = css(`kind-${key}`);
    return [[index / count, colour], [(index + 1) / count, colour]];
  });
}

/** One legend square per color that occurs, because a heatmap has no legend. */
function legendOf(paint, seen) {
  return paint.keys.map((key, index) => ({ key, index })).filter(({ index }) => seen.has(index))
    .map(({ key }) => ({
      type: "scatter", mode: "markers", x: [null], y: [null], name: PAGE.words[key], hoverinfo: "skip",
      marker: { symbol: "square", size: 11, color: css(`kind-${key}`), line: { color: css("line"), width: 1 } },
    }));
}

/** One request at one moment. */
function aboutMoment(variant, lane, time) {
  if (lane < 0 || lane >= variant.drawn.length) return "";
  const place = variant.drawn[lane];
  const { prompt, output, tokens, preemptions } = variant.requests;
  const i = variant.at(lane, time);
  const lines = [`<b>request ${variant.id(place)}</b>: ${escaped(variant.outcome(place).label)}`];
  if (i >= 0) {
    const key = KINDS[variant.kind[i]].key;
    lines.push(`<i class="chip" style="background:var(--kind-${key})"></i>${escaped(PAGE.words[key])},
      ${number(variant.start[i])} to ${number(variant.end[i])} s (${seconds(variant.end[i] - variant.start[i])})`);
    if (key === "preempted" || key === "recompute" || key === "evicted") {
      const arrow = variant.arrows.filter((a) => a.victim === place && a.at <= variant.end[i]).pop();
      if (arrow) lines.push(aboutArrow(variant, arrow));
    }
  }
  const behind = behindWhom(variant, place);
  if (behind) lines.push(behind);
  lines.push(`${number(prompt[place])} + ${number(output[place])} tokens, ${number(tokens[place])} received,
    ${number(preemptions[place])} preemption${preemptions[place] === 1 ? "" : "s"}`);
  return lines.join("<br>");
}

function aboutArrow(variant, { at, by, why, tokens }) {
  const gained = by < 0 ? "" : ` in favor of request ${variant.id(by)}`;
  return `preempted at ${number(at)} s${gained} ${escaped(PAGE.causes[why] || why)}, ${number(tokens)} tokens of KV lost`;
}

function behindWhom(variant, place) {
  const who = variant.blocked[variant.id(place)];
  if (!who || !who.length) return "";
  return `main blockers: ${who.map(([id, time]) => `request ${id} (${seconds(time)})`).join(", ")}`;
}

/** Lanes `begin` to `end` at one moment: number of requests by activity. */
function aboutGroup(variant, begin, end, time) {
  const count = new Map();
  for (let lane = begin; lane < end; lane++) {
    const i = variant.at(lane, time);
    if (i >= 0) count.set(variant.kind[i], (count.get(variant.kind[i]) || 0) + 1);
  }
  const ids = `${variant.id(variant.drawn[begin])} to ${variant.id(variant.drawn[end - 1])}`;
  const lines = [...count].sort((a, b) => b[1] - a[1]).map(([kind, many]) =>
    `<i class="chip" style="background:var(--kind-${KINDS[kind].key})"></i>${many} ${escaped(PAGE.words[KINDS[kind].key])}`);
  return [`<b>requests ${ids}</b> at ${number(time)} s`, ...lines, "zoom in for single requests"].join("<br>");
}

// All figures except the lanes. Each defines its height, its traces and its table.
"use strict";

const centres = () => PAGE.edges.slice(0, -1).map((edge, i) => (edge + PAGE.edges[i + 1]) / 2);

/** Ledger of all variants: mean seconds of a request by kind, one bar per variant. */
const LEDGER = {
  id: "ledger",
  height: () => 150 + 30 * VARIANTS.length + (narrow() ? 90 : 0),
  make() {
    const shown = KINDS.map((kind, code) => ({ ...kind, code })).filter(({ code, life }) =>
      life && VARIANTS.some((variant) => variant.totals[code] > 0));
    const names = VARIANTS.map((variant) => variant.name);
    const data = shown.map(({ key, code }) => ({
      type: "bar", orientation: "h", y: names, name: PAGE.words[key],
      x: VARIANTS.map((variant) => variant.totals[code] / Math.max(variant.size, 1)),
      marker: { color: css(`kind-${key}`), line: { color: css("paper"), width: 1 } },
      hovertemplate: `%{y}: ${escaped(PAGE.words[key])} %{x:.3~s} s per request<extra></extra>`,
    }));
    const layout = layoutOf({ barmode: "stack", hovermode: "closest" });
    layout.xaxis = axis("mean seconds per request", {});
    layout.yaxis = axis("", { autorange: "reversed", type: "category" });
    return { data, layout };
  },
  csv() {
    const rows = [["variant", "kind", "seconds_in_all", "seconds_per_request"]];
    for (const variant of VARIANTS) {
      KINDS.forEach(({ key, life }, code) => {
        const sum = variant.totals[code];
        if (life && sum > 0) rows.push([variant.name, key, short(sum), short(sum / variant.size)]);
      });
    }
    return rows;
  },
};

/** Ledger by request: seconds of each kind, requests in order of arrival, in groups if many. */
const REQUESTS = {
  id: "requests",
  groups: 120,
  height: (pair) => 330 * panel(0, pair.length).down,
  make(pair) {
    const data = [];
    const layout = layoutOf({ barmode: "stack", bargap: 0.05, annotations: [], hovermode: "closest" });
    const legend = new Set();
    pair.forEach((variant, index) => {
      const place = panel(index, pair.length);
      const name = index ? index + 1 : "";
      const groups = this.grouped(variant);
      KINDS.forEach(({ key, life }, code) => {
        if (!life || !groups.some(({ means }) => means[code] > 0)) return;
        data.push({
          type: "bar", x: groups.map(({ lane }) => lane), y: groups.map(({ means }) => means[code]),
          width: groups.map(({ width }) => width * 0.95),
          name: PAGE.words[key], legendgroup: key, showlegend: !legend.has(key),
          customdata: groups.map(({ title }) => title),
          marker: { color: css(`kind-${key}`), line: { width: 0 } },
          hovertemplate: `%{customdata}: ${escaped(PAGE.words[key])} %{y:.4~s} s<extra></extra>`,
          xaxis: `x${name}`, yaxis: `y${name}`,
        });
        legend.add(key);
      });
      const count = Math.max(variant.drawn.length, 1);
      layout[`xaxis${name}`] = axis("request, by arrival", {
        domain: place.x, anchor: `y${name}`, range: [-0.6, count - 0.4], ...idTicks(variant, 0, variant.drawn.length),
      });
      layout[`yaxis${name}`] = axis(index % place.across ? "" : "seconds", {
        domain: place.y[0], anchor: `x${name}`, ...(index ? { matches: "y" } : {}),
      });
      layout.annotations.push(heading(variant.name, place));
    });
    return { data, layout };
  },
  grouped(variant) {
    const count = variant.drawn.length;
    const size = Math.max(Math.ceil(count / this.groups), 1);
    const groups = [];
    for (let begin = 0; begin < count; begin += size) {
      const end = Math.min(begin + size, count);
      const means = new Float64Array(KINDS.length);
      for (let lane = begin; lane < end; lane++) {
        variant.ledger(lane).forEach((sum, code) => { means[code] += sum / (end - begin); });
      }
      const ids = [variant.id(variant.drawn[begin]), variant.id(variant.drawn[end - 1])];
      groups.push({
        lane: (begin + end - 1) / 2, width: end - begin, means,
        title: end - begin > 1 ? `requests ${ids[0]} to ${ids[1]}, mean` : `request ${ids[0]}`,
      });
    }
    return groups;
  },
  csv(pair) {
    const rows = [["variant", "request", "kind", "seconds"]];
    for (const variant of pair) {
      variant.drawn.forEach((place, lane) => {
        variant.ledger(lane).forEach((sum, code) => {
          if (sum > 0 && KINDS[code].life) rows.push([variant.name, variant.id(place), KINDS[code].key, short(sum)]);
        });
      });
    }
    return rows;
  },
};

/** KV blocks by owner over time, the largest holders separately. */
const BLOCKS = {
  id: "blocks",
  timed: true,
  height: (pair) => 340 * panel(0, pair.length).down,
  make(pair, view) {
    const data = [];
    const layout = layoutOf({ annotations: [], shapes: [], hovermode: "x unified", showlegend: false });
    const x = centres();
    pair.forEach((variant, index) => {
      const place = panel(index, pair.length);
      const name = index ? index + 1 : "";
      const { ids, held, others, total } = variant.owners;
      const bands = [...ids.map((id, i) => [`request ${id}`, held[i], css(`owner-${i + 1}`), String(id)]),
        ["all others", others, css("kind-behind"), "others"]];
      const below = new Array(x.length).fill(0);
      for (const [label, y, colour, text] of bands) {
        if (!y.length || !y.some((value) => value > 0)) continue;
        data.push({
          type: "scatter", mode: "lines", x, y, stackgroup: `s${index}`, name: label, showlegend: false,
          line: { width: 0.6, color: css("paper"), shape: "hvh" }, fillcolor: colour,
          hovertemplate: "%{y:.3~s}", xaxis: `x${name}`, yaxis: `y${name}`,
        });
        const note = bandLabel(x, y, below, text, view, name, total);
        if (note) layout.annotations.push(note);
        y.forEach((value, i) => { below[i] += value; });
      }
      layout.shapes.push({
        type: "line", x0: 0, x1: 1, xref: `x${name} domain`, y0: total, y1: total, yref: `y${name}`,
        line: { color: css("ink"), width: 1.5, dash: "dash" },
      });
      layout[`xaxis${name}`] = axis("time (s)", { domain: place.x, range: view.x, anchor: `y${name}`, hoverformat: ".4~s", ticksuffix: "", unifiedhovertitle: { text: "%{x:.4~s} s" } });
      layout[`yaxis${name}`] = axis(index % place.across ? "" : "KV blocks", {
        domain: place.y[0], anchor: `x${name}`, range: [0, total * 1.04],
      });
      layout.annotations.push(heading(`${variant.name}: ${number(total)} blocks`, place));
    });
    return { data, layout };
  },
  csv(pair) {
    const rows = [["variant", "start_s", "end_s", "owner", "mean_blocks"]];
    for (const variant of pair) {
      const { ids, held, others } = variant.owners;
      PAGE.edges.slice(0, -1).forEach((edge, i) => {
        const cell = (owner, value) => rows.push([variant.name, short(edge), short(PAGE.edges[i + 1]), owner, value]);
        ids.forEach((id, owner) => { if (held[owner][i] > 0) cell(`request ${id}`, held[owner][i]); });
        if (others[i] > 0) cell("all others", others[i]);
      });
    }
    return rows;
  },
};

/** The label of a band at its thickest point, if it is thick enough. */
function bandLabel(x, y, below, text, view, name, total) {
  let best = -1;
  x.forEach((time, i) => {
    if (time >= view.x[0] && time <= view.x[1] && (best < 0 || y[i] > y[best])) best = i;
  });
  if (best < 0 || y[best] < 0.055 * total) return null;
  return {
    text, x: x[best], y: below[best] + y[best] / 2, xref: `x${name}`, yref: `y${name}`,
    showarrow: false, font: { size: 11, color: "#111" }, bgcolor: "rgba(255,255,255,0.72)", borderpad: 1,
  };
}

/** Queues and batches over time: mean and range in each bin. */
const QUEUES = {
  id: "queues",
  timed: true,
  height: (pair) => 480 * panel(0, pair.length).down,
  rows: [
    ["requests", [["waiting", "waiting", "red"], ["running", "running", "blue"]]],
    ["decodes per step", [["decodes", "decodes per step", "sky"]]],
    ["prefill tokens", [["prefill", "prefill tokens per step", "purple"]]],
  ],
  make(pair, view) {
    const data = [];
    const layout = layoutOf({ annotations: [], hovermode: "x unified" });
    const x = centres();
    pair.forEach((variant, index) => {
      const place = panel(index, pair.length, [2, 1, 1]);
      this.rows.forEach(([title, series], row) => {
        const axisNumber = index * this.rows.length + row + 1;
        const name = axisNumber === 1 ? "" : axisNumber;
        for (const [column, label, colour] of series) {
          const [least, mean, most] = variant.courses[column];
          const shared = { type: "scatter", mode: "lines", x, xaxis: `x${name}`, yaxis: `y${name}`, legendgroup: column, connectgaps: false };
          const tint = css(colour);
          data.push(
            { ...shared, y: most, line: { width: 0, shape: "hvh" }, showlegend: false, hoverinfo: "skip" },
            { ...shared, y: least, line: { width: 0, shape: "hvh" }, fill: "tonexty", fillcolor: faded(tint), showlegend: false, hoverinfo: "skip" },
            { ...shared, y: mean, line: { width: 1.8, color: tint, shape: "hvh" }, name: label, showlegend: index === 0, hovertemplate: "%{y:.3~s}" },
          );
        }
        const bottom = row === this.rows.length - 1;
        layout[`xaxis${name}`] = axis(bottom ? "time (s)" : "", {
          domain: place.x, anchor: `y${name}`, range: view.x, showticklabels: bottom, hoverformat: ".4~s", unifiedhovertitle: { text: "%{x:.4~s} s" },
        });
        layout.annotations.push({
          text: title, x: 0, y: 1, xref: `x${name} domain`, yref: `y${name} domain`, showarrow: false,
          xanchor: "left", yanchor: "top", bgcolor: css("paper"), opacity: 0.85, borderpad: 1, font: { size: 12, color: css("muted") },
        });
        layout[`yaxis${name}`] = axis("", {
          domain: place.y[row], anchor: `x${name}`, rangemode: "tozero", nticks: row ? 3 : 6,
          ...(index ? { matches: row ? `y${row + 1}` : "y" } : {}),
        });
      });
      layout.annotations.push(heading(variant.name, place));
    });
    return { data, layout };
  },
  csv(pair) {
    const columns = this.rows.flatMap(([, series]) => series.map(([column]) => column));
    const rows = [["variant", "start_s", "end_s", ...columns.flatMap((c) => [`${c}_least`, `${c}_mean`, `${c}_most`])]];
    for (const variant of pair) {
      PAGE.edges.slice(0, -1).forEach((edge, i) => {
        const values = columns.flatMap((column) => variant.courses[column].map((series) => series[i] ?? ""));
        rows.push([variant.name, short(edge), short(PAGE.edges[i + 1]), ...values]);
      });
    }
    return rows;
  },
};

/** Turns of the slowest sessions, with tool calls and think times as gaps between them. */
const SESSIONS = {
  id: "sessions",
  timed: true,
  height(pair) {
    const most = Math.max(1, ...pair.map((variant) => this.rowsOf(variant)));
    return Math.min(Math.max(120 + 14 * most, 220), 640) * panel(0, pair.length).down;
  },
  rowsOf: (variant) => variant.sessions.reduce((sum, { rows }) => sum + rows, 0),
  /** Bars of a variant: {key, start, end, row, place}. */
  bars(variant, paint) {
    const bars = [];
    let top = 0;
    for (const { rows, turns } of variant.sessions) {
      for (const [place, row, since, tools, arrived] of turns) {
        const add = (key, start, end) => {
          const last = bars[bars.length - 1];
          if (last && last.place === place && last.key === key && last.end === start) last.end = end;
          else if (end > start) bars.push({ key, start, end, row: top + row, place });
        };
        const [begin, called, came] = [since * PAGE.tick, (since + tools) * PAGE.tick, arrived * PAGE.tick];
        add("tools", begin, called);
        add("think", called, came);
        add("waiting", came, variant.requests.arrival[place]);
        const lane = variant.laneOf.get(place);
        if (lane === undefined) continue;
        const vain = PAGE.vain[variant.requests.outcome[place]];
        for (let i = variant.begin[lane]; i < variant.begin[lane + 1]; i++) {
          add(paint.keys[paint.of(variant.kind[i], vain)], variant.start[i], variant.end[i]);
        }
      }
      top += rows;
    }
    return bars;
  },
  make(pair, view) {
    const data = [];
    const layout = layoutOf({ annotations: [], barmode: "overlay", bargap: 0.15, hovermode: "closest" });
    const legend = new Set();
    pair.forEach((variant, index) => {
      const place = panel(index, pair.length);
      const name = index ? index + 1 : "";
      const byKey = new Map();
      for (const bar of this.bars(variant, PAINTS[view.paint])) {
        if (!byKey.has(bar.key)) byKey.set(bar.key, []);
        byKey.get(bar.key).push(bar);
      }
      for (const [key, bars] of byKey) {
        data.push({
          type: "bar", orientation: "h", name: PAGE.words[key], legendgroup: key, showlegend: !legend.has(key),
          base: bars.map(({ start }) => start), x: bars.map(({ start, end }) => end - start), y: bars.map(({ row }) => row),
          customdata: bars.map((bar) => `request ${variant.id(bar.place)}: ${escaped(PAGE.words[key])}, ${number(bar.start)} to ${number(bar.end)} s`),
          marker: { color: css(`kind-${key}`), line: { width: 0 } },
          hovertemplate: "%{customdata}<extra></extra>", xaxis: `x${name}`, yaxis: `y${name}`,
        });
        legend.add(key);
      }
      const tickvals = [], ticktext = [];
      let top = 0;
      for (const { number: session, rows } of variant.sessions) {
        tickvals.push(top);
        ticktext.push(String(session));
        top += rows;
      }
      const every = Math.ceil(tickvals.length / 20);
      layout[`xaxis${name}`] = axis("time (s)", { domain: place.x, range: view.x, anchor: `y${name}` });
      layout[`yaxis${name}`] = axis(index % place.across ? "" : "session", {
        domain: place.y[0], anchor: `x${name}`, range: [Math.max(top, 1) - 0.5, -0.5], showgrid: false,
        tickvals: tickvals.filter((_, i) => i % every === 0), ticktext: ticktext.filter((_, i) => i % every === 0),
      });
      layout.annotations.push(heading(top ? variant.name : `${variant.name}: no sessions`, place));
    });
    return { data, layout };
  },
  csv(pair, view) {
    const rows = [["variant", "session", "request", "kind", "start_s", "end_s"]];
    for (const variant of pair) {
      const of = new Map(variant.sessions.flatMap(({ number: session, turns }) => turns.map(([place]) => [place, session])));
      for (const { key, start, end, place } of this.bars(variant, PAINTS[view.paint])) {
        rows.push([variant.name, of.get(place), variant.id(place), key, short(start), short(end)]);
      }
    }
    return rows;
  },
};

function faded(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${r},${g},${b},0.22)`;
}

/** Share of all requests with a first token, and with an answer, by time. */
const LATENCY = {
  id: "latency",
  height: () => 360,
  make(pair) {
    const data = [];
    pair.forEach((variant, index) => {
      const colour = css(index ? "blue" : "red");
      for (const [key, label, dash] of [["ttft", "first token", "dot"], ["e2e", "answer", "solid"]]) {
        const curve = variant.curves[key];
        data.push({
          type: "scatter", mode: "lines", name: `${variant.name}: ${label}`,
          x: [0, ...curve.map((point) => point[0]), PAGE.end], y: [0, ...curve.map((point) => point[1]), curve.length ? curve[curve.length - 1][1] : 0],
          line: { shape: "hv", color: colour, width: dash === "dot" ? 1.6 : 2.6, dash },
          hovertemplate: "%{y:.1f} % within %{x:.4~s} s",
        });
      }
    });
    const layout = layoutOf({ hovermode: "closest" });
    layout.xaxis = axis("seconds after arrival", { rangemode: "tozero", range: [0, PAGE.slowest * 1.03] });
    layout.yaxis = axis("% of all requests", { range: [0, 103] });
    return { data, layout };
  },
  csv(pair) {
    const rows = [["variant", "request", "arrival_s", "outcome", "ttft_s", "e2e_s"]];
    for (const variant of pair) {
      const { id, arrival, first, e2e } = variant.requests;
      id.forEach((number_, place) => rows.push([variant.name, number_, short(arrival[place]), variant.outcome(place).key, short(first[place]), short(e2e[place])]));
    }
    return rows;
  },
};

/** Requests that held the resources that others waited for. */
const BLOCKERS = {
  id: "blockers",
  height: (pair) => 330 * panel(0, pair.length).down,
  make(pair) {
    const data = [];
    const layout = layoutOf({ annotations: [], showlegend: false, hovermode: "closest" });
    pair.forEach((variant, index) => {
      const place = panel(index, pair.length);
      const name = index ? index + 1 : "";
      const top = variant.blockers.slice(0, 10);
      data.push({
        type: "bar", orientation: "h", x: top.map((b) => b[1]), y: top.map((b) => `request ${b[0]}`),
        customdata: top.map((b) => b[2]), marker: { color: css(index ? "blue" : "red") },
        hovertemplate: "%{y}: %{x:.4~s} s of waiting caused, %{customdata:.4~s} block-seconds<extra></extra>",
        xaxis: `x${name}`, yaxis: `y${name}`,
      });
      layout[`xaxis${name}`] = axis("waiting time caused (s)", { domain: place.x, anchor: `y${name}`, rangemode: "tozero", ...(index ? { matches: "x" } : {}) });
      layout[`yaxis${name}`] = axis("", { domain: place.y[0], anchor: `x${name}`, autorange: "reversed", type: "category" });
      layout.annotations.push(heading(top.length ? variant.name : `${variant.name}: no blockers`, place));
    });
    return { data, layout };
  },
  csv(pair) {
    const rows = [["variant", "request", "seconds_of_others_waiting", "block_seconds"]];
    for (const variant of pair) for (const row of variant.blockers) rows.push([variant.name, ...row]);
    return rows;
  },
};

/** Error of simulated figures compared with published ones, with the error of the profile. */
const PUBLISHED = {
  id: "published",
  height: () => 130 + 22 * PAGE.published.length,
  make() {
    const rows = PAGE.published;
    const labels = rows.map(({ variant, figure }) => `${variant}: ${figure}`);
    const layout = layoutOf({ hovermode: "closest", showlegend: false, margin: { l: 20, r: 20, t: 20, b: 46 } });
    layout.xaxis = axis("error of the simulated figure (%)", { zeroline: true, zerolinecolor: css("ink"), zerolinewidth: 2 });
    layout.yaxis = axis("", { autorange: "reversed", type: "category" });
    return {
      data: [{
        type: "scatter", mode: "markers", x: rows.map((row) => row.error), y: labels,
        error_x: { type: "data", array: rows.map((row) => row.bar), color: css("blue"), thickness: 1.4, width: 4 },
        marker: { color: css("blue"), size: 8 },
        customdata: rows.map((row) => [row.published, row.simulated]),
        hovertemplate: "%{y}<br>published %{customdata[0]:.6~g}, simulated %{customdata[1]:.6~g}: %{x:+.2f} %<extra></extra>",
      }],
      layout,
    };
  },
  csv() {
    return [["variant", "figure", "published", "simulated", "error_percent", "profile_rms_percent"],
      ...PAGE.published.map((row) => [row.variant, row.figure, row.published, row.simulated, row.error, row.bar ?? ""])];
  },
};

const FIGURES = [LANES, SESSIONS, BLOCKS, QUEUES, LEDGER, REQUESTS, BLOCKERS, LATENCY, PUBLISHED];

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
