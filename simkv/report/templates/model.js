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
