"use strict";
document.documentElement.classList.add("js");

// Numbers as the page writes them: three significant digits.
function short(x) {
  if (Number.isInteger(x)) return x.toLocaleString("en");
  const size = Math.abs(x);
  const text = size >= 1e6 || size < 1e-3 ? x.toExponential(2) : x.toPrecision(3);
  return text.replace("-", "\u2212");
}

// The slider: the base beside the evaluation that it shows, or all of them.
for (const slider of document.querySelectorAll(".slider")) {
  const range = slider.querySelector("input[type=range]");
  const shown = slider.querySelector("output");
  const names = [...slider.querySelectorAll("option")].map((option) => option.textContent);
  const every = slider.querySelector("input[type=checkbox]");
  const motion = slider.querySelector(".motion");
  const show = () => {
    const place = range.value;
    shown.textContent = names[place];
    range.setAttribute("aria-valuetext", names[place]);
    slider.classList.toggle("two", !every.checked);
    slider.classList.toggle("every", every.checked);
    for (const figure of slider.querySelectorAll(".strip figure")) {
      figure.classList.toggle("first", figure.dataset.place === "0");
      figure.classList.toggle("now", figure.dataset.place === place);
    }
  };
  range.addEventListener("input", show);
  every.addEventListener("change", show);
  show();
  if (motion) {
    const root = document.documentElement;
    let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    const set = () => {
      root.classList.toggle("moving", playing);
      root.classList.toggle("paused", !playing);
      motion.textContent = playing ? "Pause videos" : "Play videos";
    };
    motion.addEventListener("click", () => { playing = !playing; set(); });
    set();
  }
}

// Charts: the values at the iteration under the pointer, or the one chosen by the arrow keys.
for (const figure of document.querySelectorAll(".chart")) {
  const { range, box, lines } = JSON.parse(figure.dataset.chart);
  const svg = figure.querySelector("svg");
  const output = figure.querySelector("output");
  const cursor = figure.querySelector(".cursor");
  const before = output.textContent;
  const xs = [...new Set(lines.flatMap((line) => line.points.map((p) => p[0])))].sort((a, b) => a - b);
  let at = xs.length - 1;
  const show = (place) => {
    at = Math.max(0, Math.min(xs.length - 1, place));
    const x = xs[at];
    const [left, right] = box;
    const pixel = left + ((right - left) * (x - range[0])) / (range[1] - range[0]);
    cursor.setAttribute("x1", pixel);
    cursor.setAttribute("x2", pixel);
    const values = lines
      .map((line) => [line.name, line.points.find((p) => p[0] === x)])
      .filter((pair) => pair[1])
      .map(([name, p]) => (lines.length > 1 ? `${name} ${short(p[1])}` : short(p[1])));
    output.textContent = `${x}: ${values.join(", ")}`;
  };
  const hide = () => {
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    output.textContent = before;
  };
  svg.addEventListener("pointermove", (event) => {
    const bounds = svg.getBoundingClientRect();
    const pixel = ((event.clientX - bounds.left) / bounds.width) * box[2];
    const x = range[0] + ((pixel - box[0]) / (box[1] - box[0])) * (range[1] - range[0]);
    let nearest = 0;
    xs.forEach((each, i) => {
      if (Math.abs(each - x) < Math.abs(xs[nearest] - x)) nearest = i;
    });
    show(nearest);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("focus", () => show(at));
  svg.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -xs.length, End: xs.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    show(at + steps[event.key]);
  });
}

// Trees: the node under the pointer, or the one chosen by the arrow keys.
for (const tree of document.querySelectorAll(".tree:has(svg)")) {
  const svg = tree.querySelector("svg");
  const output = tree.querySelector("output");
  const nodes = [...svg.querySelectorAll("[data-tip]")];
  let at = -1;
  const show = (node) => {
    nodes.forEach((each) => each.classList.toggle("chosen", each === node));
    output.textContent = node ? node.dataset.tip : "";
  };
  nodes.forEach((node) => node.addEventListener("pointerenter", () => show(node)));
  svg.addEventListener("pointerleave", () => show(null));
  svg.addEventListener("blur", () => show(null));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step || !nodes.length) return;
    event.preventDefault();
    at = Math.max(0, Math.min(nodes.length - 1, at + step));
    nodes[at].scrollIntoView({ block: "nearest", inline: "nearest" });
    show(nodes[at]);
  });
}

// The section in view is marked in the header.
const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    for (const [anchor, link] of links) {
      if (anchor === entry.target.id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
      link.classList.toggle("here", anchor === entry.target.id);
    }
  }
}, { rootMargin: "-25% 0px -70% 0px" });
for (const section of document.querySelectorAll("section[id]")) seen.observe(section);
