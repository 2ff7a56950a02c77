"use strict";
// Shows the values under the pointer. The charts themselves need no script.
const charts = JSON.parse(document.getElementById("series").textContent);
const SVG = "http://www.w3.org/2000/svg";

function drawn(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

const place = ([low, high, start, end], value) => start + ((value - low) / (high - low)) * (end - start);

function written(value) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  const text = value !== 0 && (size < 1e-3 || size >= 1e5)
    ? value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e")
    : String(Number(value.toPrecision(4)));
  return text.replace(/-/g, "\u2212");
}

// The place in a sorted list that is nearest to a value.
function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return value - sorted[low] <= sorted[high] - value ? low : high;
}

for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = charts[svg.dataset.chart];
  const steps = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const cursor = drawn("g", { class: "cursor", visibility: "hidden" });
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  svg.append(cursor);
  svg.after(tip);
  let current = -1;

  function show(index) {
    current = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[current], x = place(chart.x, step);
    const rule = drawn("line", { x1: x, x2: x, y1: chart.y[3], y2: chart.y[2] });
    const title = document.createElement("b");
    title.textContent = `step ${step}`;
    const dots = [], rows = [title];
    for (const line of chart.lines) {
      const at = nearest(line.x, step);
      if (line.x[at] !== step) continue;
      const value = line.y[at], row = document.createElement("div"), name = document.createElement("span");
      const figure = document.createElement("span");
      name.className = `key ${line.style}`;
      name.textContent = line.label;
      figure.textContent = written(value);
      row.append(name, figure);
      rows.push(row);
      if (value !== null) dots.push(drawn("circle", { cx: x, cy: place(chart.y, value), r: 3, class: line.style }));
    }
    cursor.replaceChildren(rule, ...dots);
    cursor.setAttribute("visibility", "visible");
    tip.replaceChildren(...rows);
    tip.hidden = false;
    const share = x / svg.viewBox.baseVal.width;
    tip.style.left = share < 0.5 ? `calc(${100 * share}% + 10px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${100 * (1 - share)}% + 10px)`;
  }

  function hide() {
    cursor.setAttribute("visibility", "hidden");
    tip.hidden = true;
    current = -1;
  }

  function follow(event) {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const [low, high, start, end] = chart.x;
    show(nearest(steps, low + ((x - start) / (end - start)) * (high - low)));
  }

  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: steps.length - 1 };
    if (event.key === "Escape") hide();
    else if (event.key in moves) {
      event.preventDefault();
      show(moves[event.key]);
    }
  });
}
