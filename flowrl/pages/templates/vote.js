"use strict";
// The page of votes. The server knows everything: a reload, a second tab and a restart show the same pair.
const at = (id) => document.getElementById(id);
const SIDES = ["left", "right"];
const of = (kind) => ({ left: at(`${kind}-left`), right: at(`${kind}-right`) });
const images = of("image"), canvases = of("video"), texts = of("text");
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

async function image(address) {
  const loaded = new Image();
  loaded.src = address;
  await loaded.decode();
  return loaded;
}

// Both sides appear together, once all of both is there: an image, all frames of a video, or a text.
async function preload(open) {
  const all = (side) => (open.kind === "video"
    ? Promise.all(Array.from({ length: open.video[side].frames }, (_, k) => image(`${open[side]}/${k}`)))
    : open.kind === "image" ? image(open[side]) : open[side]);
  for (let tries = 0; ; tries++) {
    try {
      const [left, right, source] = await Promise.all([all("left"), all("right"), open.source && image(open.source)]);
      return { left, right, source };
    } catch {
      if (tries === 2) return null;
      await pause(0.5);
    }
  }
}

const small = (element, width, height) => element.classList.toggle("small", Math.max(width, height) <= SMALL);

function place(open, loaded) {
  const pictures = open.kind === "image", moving = open.kind === "video";
  for (const side of SIDES) {
    images[side].hidden = !pictures;
    canvases[side].hidden = !moving;
    images[side].parentElement.hidden = open.kind === "text";
    texts[side].hidden = open.kind !== "text";
    if (pictures) {
      images[side].src = loaded[side].src;
      small(images[side], loaded[side].naturalWidth, loaded[side].naturalHeight);
    } else if (!moving) {
      texts[side].textContent = loaded[side];
      texts[side].scrollTop = 0;
    }
  }
  at("source").hidden = !loaded.source;
  at("pair").classList.toggle("edits", Boolean(loaded.source));
  if (loaded.source) {
    at("image-source").src = loaded.source.src;
    small(at("image-source"), loaded.source.naturalWidth, loaded.source.naturalHeight);
  }
  at("zoom").disabled = open.kind === "text";
  play(moving ? open.video : null, loaded);
  hear(null);
  at("listen").hidden = !moving || !SIDES.some((side) => open.video[side].sound);
}

// Both videos follow one clock: they start together, and begin again together when the longer one has ended.
let playing = 0; // the number of the present pair of videos
let began = 0;
function play(video, loaded) {
  const own = ++playing;
  if (!video) return;
  const period = Math.max(...SIDES.map((side) => video[side].seconds)) || 1;
  for (const side of SIDES) {
    const first = loaded[side][0];
    Object.assign(canvases[side], { width: first.naturalWidth, height: first.naturalHeight });
    small(canvases[side], first.naturalWidth, first.naturalHeight);
  }
  const shown = {};
  began = performance.now();
  const draw = (now) => {
    if (own !== playing) return;
    const time = (Math.max(0, now - began) / 1000) % period;
    for (const side of SIDES) {
      const { frames, seconds } = video[side];
      const frame = Math.min(frames - 1, seconds ? Math.floor((time / seconds) * frames) : 0);
      if (frame !== shown[side]) canvases[side].getContext("2d").drawImage(loaded[side][frame], 0, 0);
      shown[side] = frame;
    }
    requestAnimationFrame(draw);
  };
  draw(began);
}

// Videos are mute until somebody asks for one side's sound.
let heard = null;
function hear(side) {
  heard = side;
  const sound = at("sound");
  sound.pause();
  at("heard").textContent = { left: "Sound: left", right: "Sound: right" }[side] || "Sound off";
  if (!side) return;
  sound.src = `${state.open[side]}/sound`;
  sound.addEventListener("loadedmetadata", () => { sound.currentTime = ((performance.now() - began) / 1000) % (sound.duration || 1); }, { once: true });
  sound.play().catch(() => trouble("The browser does not play this sound."));
}
function listen() {
  if (!state || !state.open || !state.open.video) return;
  const sounding = SIDES.filter((side) => state.open.video[side].sound);
  hear(sounding[sounding.indexOf(heard) + 1] || null);
}

async function show(next) {
  if (!next) return;
  const open = next.open;
  if (open) {
    const loaded = await preload(open);
    if (!loaded) { // the pair has changed in another tab, or the server is gone
      trouble("The samples did not load. Trying again.");
      await pause(1);
      return show(await ask("/now"));
    }
    trouble("");
    place(open, loaded);
    at("prompt").textContent = open.prompt;
    at("prompt").scrollTop = 0;
  } else {
    play(null);
    hear(null);
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
  if (next.waiting) setTimeout(catchUp, 1500); // of a run that goes on
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
for (const button of document.querySelectorAll("button.look")) {
  button.addEventListener("click", () => (document.body.classList.contains("zoomed") ? zoom() : vote(button.dataset.side)));
  button.addEventListener("scroll", () => { // both sides show the same place
    for (const other of document.querySelectorAll("button.look")) {
      if (other !== button) { other.scrollLeft = button.scrollLeft; other.scrollTop = button.scrollTop; }
    }
  });
}
at("undo").addEventListener("click", undo);
at("zoom").addEventListener("click", zoom);
at("listen").addEventListener("click", listen);
const KEYS = {
  ArrowLeft: () => vote("left"), ArrowRight: () => vote("right"), ArrowDown: () => vote("equal"),
  b: () => vote("both_bad"), s: () => vote("skip"), u: undo, Backspace: undo, z: zoom, m: listen,
};
document.addEventListener("keydown", (event) => {
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (!(key in KEYS) || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  KEYS[key]();
});
// A page that was open on another pair catches up when it is looked at again.
async function catchUp() {
  if (busy) return;
  const next = await ask("/now");
  if (!next || busy) return;
  if ((next.open || {}).id !== ((state || {}).open || {}).id) await show(next);
  else if (next.waiting) setTimeout(catchUp, 1500);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) catchUp(); });
ask("/now").then(show);
