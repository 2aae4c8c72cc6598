// The page: send an image, show the prediction, handle errors.

import { check, listen, showExamples, preview } from "./arrive.js";
import { drawGlass } from "./glass.js";
import { Inside } from "./inside.js";
import { $, element, percent, plain } from "./maps.js";
import { fetchJSON, token, ServerError } from "./server.js";
import { fillCard, fillFilters, fillPositions } from "./weights.js";

/** The state of the page; `layers` caches the explanations of this image by layer. */
const state = { started: null, model: null, inside: null, file: null, layers: new Map(), request: new AbortController() };

// ---- errors -----------------------------------------------------------------------------------

/** Run a task that uses the server; show its error and offer a retry or the token form. */
async function attempt(task) {
  $("trouble").hidden = true;
  $("answer").setAttribute("aria-busy", "true");
  try {
    await task();
  } catch (error) {
    if (error.name === "AbortError") return;  // the user did something else meanwhile
    if (!(error instanceof ServerError)) throw error;
    if (error.kind === "token") askForToken(() => attempt(task));
    else showError(error, () => attempt(task));
  } finally {
    $("answer").removeAttribute("aria-busy");
  }
}

function showError(error, retry) {
  $("trouble-words").textContent = error.message;
  $("again").hidden = error.kind !== "later";
  $("again").onclick = retry;
  $("trouble").hidden = false;
}

function askForToken(retry) {
  $("token-words").textContent = token.get() ? "The server rejected that token." : "";
  $("token-form").hidden = false;
  $("token").focus();
  $("token-form").onsubmit = (event) => {
    event.preventDefault();
    token.set($("token").value.trim());
    $("token").value = "";
    $("token-form").hidden = true;
    retry();
  };
}

// ---- image and prediction -------------------------------------------------------------------------

const showStatus = (text) => { $("says-words").textContent = text; };

function submit(file, name) {
  state.request.abort();
  const { signal } = state.request = new AbortController();
  attempt(async () => {
    await start();
    signal.throwIfAborted();  // another image was chosen meanwhile
    check(file, name, state.model.limits.bytes);
    state.file = file;
    state.layers.clear();
    preview(file, name);
    showStatus("Waiting for the server …");
    document.body.classList.add("waiting");
    try {
      await predict();
    } catch (error) {
      if (file === state.file) clearPrediction();  // what is shown belongs to another image
      throw error;
    } finally {
      if (file === state.file) document.body.classList.remove("waiting");
    }
  });
}

async function predict() {
  const start = performance.now(), { inside, model } = state;
  const result = inside && await fetchLayer(inside.layer);
  const prediction = inside && !model.words ? result.prediction : await fetchPrediction();
  if (prediction) paintPrediction(prediction, performance.now() - start);
  else clearPrediction("No classes yet", "Name two or more, and press Predict.");
  await inside?.show(result);
}

/** The prediction alone; of a model whose classes are words, for those in the form, or null without any. */
async function fetchPrediction() {
  const words = $("words").value.trim();
  if (state.model.words && !words) return null;
  const labels = state.model.words ? `&labels=${encodeURIComponent(words)}` : "";
  return (await send(`v1/predict?top=5${labels}`)).predictions[0];
}

function clearPrediction(title = "No prediction", status = "") {
  headline(title, true);
  showStatus(status);
  $("score").textContent = $("took").textContent = "";
  $("ood").hidden = true;
  $("bars").replaceChildren();
  if (state.inside) $("inside").hidden = true;
}

function headline(text, empty = false) {
  $("label").textContent = plain(text);
  $("label").className = text.length > 40 ? "long" : "";
  $("headline").classList.toggle("empty", empty);
}

const send = (path) => fetchJSON(path, { body: state.file, signal: state.request.signal, onWait: showStatus });

async function fetchLayer(layer) {
  const { layers, file } = state;
  if (!layers.has(layer)) {
    const explanation = await send(`v1/explain?layer=${layer}&top=5`);
    if (file !== state.file) throw new DOMException("another image was chosen", "AbortError");
    layers.set(layer, explanation);
  }
  return layers.get(layer);
}

function paintPrediction({ label, score, unsure, ood, labels, top, error }, took) {
  const none = state.model.multilabel && !error && !labels.length;
  $("answer").classList.toggle("unsure", unsure);
  headline(error ? "No prediction" : unsure ? "Not sure" : none ? "None of the classes"
    : labels.map((one) => one.label).join(", ") || "No classes", label === null);
  $("score").textContent = label === null || labels.length > 1 ? "" : percent(score);
  showStatus(error ?? (unsure ? `The highest score is ${percent(score)}, below the threshold for a label.`
    : none ? "No score is above the threshold of its class."
    : label === null ? "This model has no head: it computes embeddings, not classes." : ""));
  $("ood").hidden = !ood;
  $("bars").replaceChildren();
  $("bars").classList.toggle("short", top.every(({ label: one }) => one.length < 4));
  const predicted = new Set(labels.map((one) => one.label));
  top.forEach(({ label: one, score: part }, rank) => {
    const first = state.model.multilabel ? predicted.has(one) : rank === 0;
    const row = element("li", $("bars"), "", first ? { class: "first" } : {});
    element("bdi", row, plain(one), { class: "label", title: plain(one) });
    const fill = element("span", element("span", row, "", { class: "track" }), "", { class: "fill" });
    element("span", row, percent(part), { class: "number" });
    requestAnimationFrame(() => { fill.style.width = `${100 * part}%`; });
  });
  $("took").textContent = `Response time: ${Math.round(took)} ms.`;
}

// ---- the model -----------------------------------------------------------------------------------------

/** Load the model's data once; after an error, the next call tries again. */
function start() {
  state.started ??= loadModel().catch((error) => {
    state.started = null;
    throw error;
  });
  return state.started;
}

/** Fill in everything that does not depend on an image. */
async function loadModel() {
  const model = await fetchJSON("v1/model");
  fillCard(model);
  $("no-inside").hidden = $("inside").hidden = model.explain.available;
  $("no-inside").textContent = model.explain.reason ?? "";
  for (const part of document.querySelectorAll("#depth-box, .figures")) part.hidden = !model.explain.available;
  state.model = model;
  $("words-form").hidden = !model.words;
  const [positions, filters] = await Promise.all([fetchJSON("v1/positions"), fetchJSON("v1/filters"), showExamples(submit)]);
  fillFilters(filters);
  const paintPositions = fillPositions(positions, model, (patch) => {
    paintPositions(patch);
    if (state.inside?.result) state.inside.select(state.inside.n + patch);
  });
  const [h, w] = model.grid;
  paintPositions(Math.floor(h / 2) * w + Math.floor(w / 2));
  if (model.explain.available) state.inside = new Inside(model, { fetchLayer, attempt, onSelect: paintPositions });
}

drawGlass($("glass"));
addEventListener("resize", () => drawGlass($("glass")));
$("words-form").onsubmit = (event) => {
  event.preventDefault();
  if (state.file) attempt(predict);
};
listen(submit, (error) => showError(error));
attempt(start);
window.vitrail = state;  // for the browser console
