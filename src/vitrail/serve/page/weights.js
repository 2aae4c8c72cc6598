// What does not depend on an image: the model card, the positions and the filters.

import { $, capital, color, dots, element, paintLegend, percent, plain, range, SIGNED, TokenMap, unpack } from "./maps.js";

const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : word.endsWith("s") ? "es" : "s"}`;
const LISTED = 12;  // classes on the card
const by = (sides) => sides.join(" × ");

// ---- the card ----------------------------------------------------------------------------------------

export function fillCard(model) {
  for (const id of ["positions", "filters", "card"]) $(id).hidden = false;
  const { labels, limits } = model, [H, W] = model.size;
  document.title = `${plain(model.name, 80)}: vitrail`;
  $("model-name").textContent = plain(model.name);
  $("model-words").textContent = `predicts ${model.words ? "classes that you name" : labels.count ? count(labels.count, "class") : "no classes"}. `
    + (model.native ? `Images keep their shape, with at most ${model.grid[0] * model.grid[1]} patches; ` : `Input: ${H} × ${W} pixels in ${by(model.grid)} patches; `)
    + `${count(model.depth, "layer")} with ${count(model.heads, "head")} each.`;
  $("limit-words").textContent = `At most ${(limits.bytes / 2 ** 20).toFixed(0)} MiB and ${Math.floor(limits.pixels / 1e6)} megapixels.`;
  const metrics = Object.entries(model.card.metrics).map(([name, value]) => `${plain(name, 60)}: ${Number(value.toPrecision(4))}`);
  const some = labels.first.slice(0, LISTED).map((label) => plain(label, 40)), more = labels.count - some.length;
  const facts = {
    "License": [plain(model.card.license)],
    "Metrics": metrics.length ? metrics : ["none in the file"],
    "Classes": some.length ? [...some, ...(more > 0 ? [`and ${more.toLocaleString("en")} more`] : [])] : [model.words ? "by words" : "none"],
    "Patches": [`${by(model.grid)} of ${by(model.patch)} pixels`],
    "Scores": [model.multilabel ? "sigmoid, any number of classes per image" : model.scores],
    "Size": [...(model.parameters ? [count(model.parameters, "parameter")] : []), count(model.depth, "layer"),
      count(model.heads, "head"), `tokens of ${count(model.width, "number")}`],
    "Preprocessing": model.preprocess,
    "Limits": [`${limits.bytes.toLocaleString("en")} bytes`, `${limits.pixels.toLocaleString("en")} pixels`,
      `${count(limits.files, "image")} in one request`, `${limits.queue} at once`, `deadline ${limits.deadline} s`],
  };
  $("facts").replaceChildren();
  for (const [name, lines] of Object.entries(facts)) {
    const group = element("div", $("facts"));
    element("dt", group, name);
    const list = element("dd", group, "", name === "Classes" ? { class: "inline" } : {});
    for (const line of lines) element("bdi", list, line);
  }
}

// ---- the figures of the weights ------------------------------------------------------------------------

/** Whether a figure is available; if not, show the reason. */
export function isAvailable(name, figure) {
  const reason = figure?.reason;
  $(`no-${name}`).hidden = !reason;
  $(`no-${name}`).textContent = reason ?? "";
  return !reason;
}

export function fillFilters(figure) {
  if (!isAvailable("filters", figure)) return;
  const { tiles, patch: [P, Q], variance } = figure, values = unpack(tiles), C = tiles.shape[3];
  $("tiles").replaceChildren();
  variance.forEach((fraction, tile) => {
    const item = element("li", $("tiles"));
    dots(element("canvas", item, "", { role: "img", "aria-label": `filter ${tile + 1}` }), Q, P, (i) => {
      const at = (tile * P * Q + i) * C;
      return C === 3 ? values.subarray(at, at + 3) : color(SIGNED, values[at] / 255);
    });
    element("span", item, percent(fraction));
  });
  $("tiles-legend").hidden = C === 3;
  if (C !== 3) paintLegend($("tiles-legend"), SIGNED, tiles.min.toFixed(2), tiles.max.toFixed(2));
  $("filters-caption").textContent = figure.caption;
  $("filters-box").hidden = false;
}

/** Returns a function that paints the map for a patch, given its index. */
export function fillPositions(figure, model, select) {
  if (!isAvailable("positions", figure)) return () => {};
  const { similarity: { min, max }, grid: [h, w] } = figure, quantized = unpack(figure.similarity), N = h * w;
  const layout = { pixels: model.size, patch: model.patch, grid: figure.grid, prefix: [] };
  const map = new TokenMap($("positions-map"), "Similarity of positions", layout, select);
  const format = (value) => value.toFixed(2), value = (byte) => min + byte / 255 * (max - min);
  $("positions-how").textContent = `Attention alone has no notion of position. This model uses position="${figure.kind}"; `
    + `the colors show the ${figure.measure} of the framed patch with every other patch.`;
  $("positions-caption").textContent = figure.caption;
  $("positions-box").hidden = false;
  return (patch) => {
    const row = Array.from(quantized.subarray(patch * N, (patch + 1) * N), value);
    map.paint(patch, null, row, { stops: SIGNED, min, max, format });
    const others = range(N).filter((other) => other !== patch);
    if (!others.length) return;
    const best = others.reduce((a, b) => (row[b] > row[a] ? b : a));
    const named = (index) => `row ${Math.floor(index / w) + 1}, column ${index % w + 1}`;
    $("positions-words").textContent = `${capital(named(patch))} is most similar to ${named(best)} (${format(row[best])}).`;
  };
}
