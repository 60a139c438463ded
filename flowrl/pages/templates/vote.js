"use strict";
// The page of votes. The server knows everything: a reload, a second tab and a restart show the same pair.
const at = (id) => document.getElementById(id);
const images = { left: at("image-left"), right: at("image-right") };
const SMALL = 192; // pixels of a side below which an image is shown with hard edges
let state = null; // the server's last answer
let since = 0; // when the pair became visible, by a clock that does not jump
let busy = false;

const trouble = (text) => { at("trouble").textContent = text; at("trouble").hidden = !text; };
const pause = (seconds) => new Promise((go) => setTimeout(go, 1000 * seconds));

// Ask until there is an answer: a vote that arrives twice counts once, so it can be sent again.
async function ask(path, body) {
  for (let tries = 0; ; tries++) {
    let answer = null;
    try {
      const sent = body && { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
      answer = await fetch(path, { credentials: "same-origin", cache: "no-store", ...sent });
    } catch {
      trouble("The server does not answer. Your vote is kept here and sent again.");
    }
    if (answer && answer.status === 401) { location.reload(); return null; }
    if (answer && (answer.ok || answer.status === 409)) {
      trouble("");
      return answer.ok ? answer.json() : ask("/now"); // another tab was faster
    }
    if (answer) trouble((await answer.json().catch(() => ({}))).detail || "The server has a problem. Trying again.");
    await pause(Math.min(5, 0.3 * 2 ** tries));
  }
}

// Both sides appear together, once both are there.
async function preload(open) {
  for (let tries = 0; ; tries++) {
    const loaded = { left: new Image(), right: new Image() };
    for (const side of ["left", "right"]) loaded[side].src = open[side];
    try {
      await Promise.all([loaded.left.decode(), loaded.right.decode()]);
      return loaded;
    } catch {
      if (tries === 2) return null;
      await pause(0.5);
    }
  }
}

async function show(next) {
  if (!next) return;
  const open = next.open;
  if (open) {
    const loaded = await preload(open);
    if (!loaded) { // the pair has changed in another tab, or the server is gone
      trouble("The images did not load. Trying again.");
      await pause(1);
      return show(await ask("/now"));
    }
    trouble("");
    for (const side of ["left", "right"]) {
      images[side].src = loaded[side].src;
      images[side].classList.toggle("small", Math.max(loaded[side].naturalWidth, loaded[side].naturalHeight) <= SMALL);
    }
    at("prompt").textContent = open.prompt;
    at("prompt").scrollTop = 0;
  }
  state = next;
  at("pair").hidden = at("prompt").hidden = !open;
  at("left").textContent = open ? `${next.done + 1} of ${next.total}` : `${next.total} of ${next.total}`;
  at("end").hidden = Boolean(open);
  document.body.classList.toggle("finished", !open);
  at("undo").disabled = !next.last;
  for (const button of document.querySelectorAll("[data-verdict]")) button.disabled = !open;
  const lines = next.found || (open ? [] : [`Your votes are in. What was found is shown once ${next.others} more ${next.others === 1 ? "rater is" : "raters are"} done.`]);
  at("found").replaceChildren(...lines.map((line) => Object.assign(document.createElement("li"), { textContent: line })));
  since = performance.now();
}

async function act(path, body) {
  if (busy || !body.id) return;
  busy = true;
  document.body.classList.add("waiting");
  try {
    await show(await ask(path, body));
  } finally {
    busy = false;
    document.body.classList.remove("waiting");
  }
}

const vote = (verdict) => state && state.open && act("/vote", { id: state.open.id, verdict, seconds: Math.min(86400, (performance.now() - since) / 1000) });
const undo = () => state && act("/undo", { id: state.last });

function zoom() {
  const on = document.body.classList.toggle("zoomed");
  at("zoom").setAttribute("aria-pressed", String(on));
}

for (const button of document.querySelectorAll("[data-verdict]")) button.addEventListener("click", () => vote(button.dataset.verdict));
for (const button of document.querySelectorAll(".look")) {
  button.addEventListener("click", () => (document.body.classList.contains("zoomed") ? zoom() : vote(button.dataset.side)));
  button.addEventListener("scroll", () => { // both sides show the same place
    for (const other of document.querySelectorAll(".look")) {
      if (other !== button) { other.scrollLeft = button.scrollLeft; other.scrollTop = button.scrollTop; }
    }
  });
}
at("undo").addEventListener("click", undo);
at("zoom").addEventListener("click", zoom);
const KEYS = {
  ArrowLeft: () => vote("left"), ArrowRight: () => vote("right"), ArrowDown: () => vote("equal"),
  b: () => vote("both_bad"), s: () => vote("skip"), u: undo, Backspace: undo, z: zoom,
};
document.addEventListener("keydown", (event) => {
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (!(key in KEYS) || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  KEYS[key]();
});
// A page that was open on another pair catches up when it is looked at again.
document.addEventListener("visibilitychange", async () => {
  if (!document.hidden && !busy) {
    const next = await ask("/now");
    if (next && !busy && (next.open || {}).id !== ((state || {}).open || {}).id) await show(next);
  }
});
ask("/now").then(show);
