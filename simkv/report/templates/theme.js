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
