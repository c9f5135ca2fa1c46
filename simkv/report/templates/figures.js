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
