// What can be said of the model before it has seen a picture: its card, its positions, its filters.

import { $, capital, colour, dots, element, paintLegend, percent, plain, range, SIGNED, TokenMap, unpack } from "./maps.js";

const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : word.endsWith("s") ? "es" : "s"}`;
const SOME = 12;  // classes that the card lists
const by = (sides) => sides.join(" × ");

// ---- the card ----------------------------------------------------------------------------------------

export function fillCard(model) {
  for (const id of ["positions", "filters", "card"]) $(id).hidden = false;
  const { labels, limits } = model, [H, W] = model.size;
  document.title = `${plain(model.name, 80)}: vitrail`;
  $("model-name").textContent = plain(model.name);
  $("model-words").textContent = `${labels.count ? `knows ${count(labels.count, "class")}` : "knows no classes"}. It cuts `
    + `${H} × ${W} pixels into ${by(model.grid)} patches, and ${count(model.depth, "layer")} of `
    + `${count(model.heads, "head")} let them look at each other.`;
  $("limit-words").textContent = `At most ${(limits.bytes / 2 ** 20).toFixed(0)} MiB and ${Math.floor(limits.pixels / 1e6)} megapixels.`;
  const metrics = Object.entries(model.card.metrics).map(([name, value]) => `${plain(name, 60)}: ${Number(value.toPrecision(4))}`);
  const some = labels.first.slice(0, SOME).map((label) => plain(label, 40)), more = labels.count - some.length;
  const facts = {
    "Licence": [plain(model.card.licence)],
    "Measured": metrics.length ? metrics : ["nothing is noted in its file"],
    "Classes": some.length ? [...some, ...(more > 0 ? [`and ${more.toLocaleString("en")} more`] : [])] : ["none"],
    "Patches": [`${by(model.grid)} of ${by(model.patch)} pixels`],
    "Size": [...(model.parameters ? [count(model.parameters, "parameter")] : []), count(model.depth, "layer"),
      count(model.heads, "head"), `tokens of ${count(model.width, "number")}`],
    "A picture becomes": model.preprocess,
    "Limits": [`${limits.bytes.toLocaleString("en")} bytes`, `${limits.pixels.toLocaleString("en")} pixels`,
      `${count(limits.files, "picture")} in one request`, `${limits.queue} waiting`, `an answer within ${limits.deadline} s`],
  };
  $("facts").replaceChildren();
  for (const [name, lines] of Object.entries(facts)) {
    const group = element("div", $("facts"));
    element("dt", group, name);
    const place = element("dd", group, "", name === "Classes" ? { class: "inline" } : {});
    for (const line of lines) element("bdi", place, line);
  }
}

// ---- the figures of the weights ------------------------------------------------------------------------

/** Say the reason where there is nothing to see; else whether there is. */
export function there(name, found) {
  const reason = found?.reason;
  $(`no-${name}`).hidden = !reason;
  $(`no-${name}`).textContent = reason ?? "";
  return !reason;
}

export function fillFilters(found) {
  if (!there("filters", found)) return;
  const { tiles, patch: [P, Q], share } = found, levels = unpack(tiles), C = tiles.shape[3];
  $("tiles").replaceChildren();
  share.forEach((part, tile) => {
    const item = element("li", $("tiles"));
    dots(element("canvas", item, "", { role: "img", "aria-label": `filter ${tile + 1}` }), Q, P, (i) => {
      const at = (tile * P * Q + i) * C;
      return C === 3 ? levels.subarray(at, at + 3) : colour(SIGNED, levels[at] / 255);
    });
    element("span", item, percent(part));
  });
  $("tiles-legend").hidden = C === 3;
  if (C !== 3) paintLegend($("tiles-legend"), SIGNED, tiles.least.toFixed(2), tiles.most.toFixed(2));
  $("filters-caption").textContent = found.caption;
  $("filters-box").hidden = false;
}

/** Returns a function that paints the map for a patch, by its number from 0. */
export function fillPositions(found, model, choose) {
  if (!there("positions", found)) return () => {};
  const { similarity: { least, most }, grid: [h, w] } = found, levels = unpack(found.similarity), N = h * w;
  const layout = { pixels: model.size, patch: model.patch, grid: found.grid, prefix: [] };
  const map = new TokenMap($("positions-map"), "Similarity of positions", layout, choose);
  const write = (value) => value.toFixed(2), value = (level) => least + level / 255 * (most - least);
  $("positions-how").textContent = `Attention alone does not know where a patch was. This model has ${found.kind} positions; `
    + `the colours are the ${found.measure} of the framed patch with every other.`;
  $("positions-caption").textContent = found.caption;
  $("positions-box").hidden = false;
  return (patch) => {
    const row = Array.from(levels.subarray(patch * N, (patch + 1) * N), value);
    map.paint(patch, null, row, { stops: SIGNED, least, most, write });
    const others = range(N).filter((other) => other !== patch);
    if (!others.length) return;
    const best = others.reduce((a, b) => (row[b] > row[a] ? b : a));
    const named = (place) => `row ${Math.floor(place / w) + 1}, column ${place % w + 1}`;
    $("positions-words").textContent = `${capital(named(patch))} is most like ${named(best)} (${write(row[best])}).`;
  };
}
