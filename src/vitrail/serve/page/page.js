// The page: a picture in, an answer out; and what to do when something goes wrong.

import { check, listen, offerExamples, preview } from "./arrive.js";
import { drawGlass } from "./glass.js";
import { Inside } from "./inside.js";
import { $, element, percent, plain } from "./maps.js";
import { askJSON, token, Trouble } from "./server.js";
import { fillCard, fillFilters, fillPositions } from "./weights.js";

/** What the page holds now; `layers` has the server's answers for this picture, by layer. */
const state = { begun: null, model: null, inside: null, file: null, layers: new Map(), going: new AbortController() };

// ---- what goes wrong -----------------------------------------------------------------------------------

/** Do something that asks the server; show what goes wrong, and offer what can be done about it. */
async function attempt(task) {
  $("trouble").hidden = true;
  $("answer").setAttribute("aria-busy", "true");
  try {
    await task();
  } catch (trouble) {
    if (trouble.name === "AbortError") return;  // the user wanted something else meanwhile
    if (!(trouble instanceof Trouble)) throw trouble;
    if (trouble.kind === "token") askForToken(() => attempt(task));
    else showTrouble(trouble, () => attempt(task));
  } finally {
    $("answer").removeAttribute("aria-busy");
  }
}

function showTrouble(trouble, again) {
  $("trouble-words").textContent = trouble.message;
  $("again").hidden = trouble.kind !== "later";
  $("again").onclick = again;
  $("trouble").hidden = false;
}

function askForToken(again) {
  $("token-words").textContent = token.get() ? "The server did not take that token." : "";
  $("token-form").hidden = false;
  $("token").focus();
  $("token-form").onsubmit = (event) => {
    event.preventDefault();
    token.set($("token").value.trim());
    $("token").value = "";
    $("token-form").hidden = true;
    again();
  };
}

// ---- a picture, and its answer -------------------------------------------------------------------------

const say = (words) => { $("says-words").textContent = words; };

function take(file, name) {
  state.going.abort();
  const { signal } = state.going = new AbortController();
  attempt(async () => {
    await ready();
    signal.throwIfAborted();  // another picture came while we waited
    check(file, name, state.model.limits.bytes);
    state.file = file;
    state.layers.clear();
    preview(file, name);
    say("Asking …");
    document.body.classList.add("asking");
    try {
      await answer();
    } catch (trouble) {
      if (file === state.file) forget();  // what is shown belongs to another picture
      throw trouble;
    } finally {
      if (file === state.file) document.body.classList.remove("asking");
    }
  });
}

async function answer() {
  const start = performance.now(), { inside } = state;
  const found = inside ? await fetchLayer(inside.layer) : await send("v1/predict?top=5");
  paintAnswer(inside ? found.prediction : found.predictions[0], performance.now() - start);
  await inside?.show(found);
}

function forget() {
  headline("No answer", true);
  say("");
  $("score").textContent = $("took").textContent = "";
  $("bars").replaceChildren();
  if (state.inside) $("inside").hidden = true;
}

function headline(words, empty = false) {
  $("label").textContent = plain(words);
  $("label").className = words.length > 40 ? "long" : "";
  $("headline").classList.toggle("empty", empty);
}

const send = (path) => askJSON(path, { body: state.file, signal: state.going.signal, waiting: say });

async function fetchLayer(layer) {
  const { layers, file } = state;
  if (!layers.has(layer)) {
    const found = await send(`v1/explain?layer=${layer}&top=5`);
    if (file !== state.file) throw new DOMException("another picture came", "AbortError");
    layers.set(layer, found);
  }
  return layers.get(layer);
}

function paintAnswer({ label, score, unsure, top, error }, took) {
  $("answer").classList.toggle("unsure", unsure);
  headline(error ? "No answer" : unsure ? "Not sure" : label ?? "No classes", label === null);
  $("score").textContent = label === null ? "" : percent(score);
  say(error ?? (unsure ? `Its best guess has ${percent(score)}, which is less than it needs to be sure.`
    : label === null ? "This model has no head: it turns a picture into numbers and has no words for it." : ""));
  $("bars").replaceChildren();
  $("bars").classList.toggle("short", top.every(({ label: one }) => one.length < 4));
  top.forEach(({ label: one, score: part }, place) => {
    const row = element("li", $("bars"), "", place ? {} : { class: "first" });
    element("bdi", row, plain(one), { class: "label", title: plain(one) });
    const fill = element("span", element("span", row, "", { class: "track" }), "", { class: "fill" });
    element("span", row, percent(part), { class: "number" });
    requestAnimationFrame(() => { fill.style.width = `${100 * part}%`; });
  });
  $("took").textContent = `The answer came after ${Math.round(took)} ms.`;
}

// ---- the model -----------------------------------------------------------------------------------------

/** Begin, once; where that fails, again the next time. */
function ready() {
  state.begun ??= begin().catch((trouble) => {
    state.begun = null;
    throw trouble;
  });
  return state.begun;
}

/** Everything that is known before there is a picture. */
async function begin() {
  const model = await askJSON("v1/model");
  fillCard(model);
  $("no-inside").hidden = $("inside").hidden = model.explain.there;
  $("no-inside").textContent = model.explain.reason ?? "";
  for (const one of document.querySelectorAll("#depth-box, .figures")) one.hidden = !model.explain.there;
  state.model = model;
  const [positions, filters] = await Promise.all([askJSON("v1/positions"), askJSON("v1/filters"), offerExamples(take)]);
  fillFilters(filters);
  const paintPositions = fillPositions(positions, model, (patch) => {
    paintPositions(patch);
    if (state.inside?.found) state.inside.choose(state.inside.n + patch);
  });
  const [h, w] = model.grid;
  paintPositions(Math.floor(h / 2) * w + Math.floor(w / 2));
  if (model.explain.there) state.inside = new Inside(model, { fetchLayer, attempt, chosen: paintPositions });
}

drawGlass($("glass"));
addEventListener("resize", () => drawGlass($("glass")));
listen(take, (trouble) => showTrouble(trouble));
attempt(ready);
window.vitrail = state;  // for whoever opens the console
