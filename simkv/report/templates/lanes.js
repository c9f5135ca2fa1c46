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
