// The sections of the page: bars, strips, maps and the sentences beside them.

// ---- sections -------------------------------------------------------------------------

const rows = range(Math.min(10, vit.labels.length)).map(() => {
  const row = element("li", $("bars"));
  const part = (name, within = row) => element("span", within, "", { class: name });
  const [label, track, number] = [part("label"), part("track"), part("number")];
  return { row, label, fill: part("fill", track), was: part("was", track), number };
});
const steps = range(vit.depth + 1).map(() => element("li", $("depths")));

/** Scores by softmax or by sigmoid, as the model was trained. */
const scoresOf = (logits) => vit.scores === "sigmoid" ? logits.map((logit) => 1 / (1 + Math.exp(-logit))) : softmax(logits);

/** The prediction in words; a multi-label model predicts every class above its threshold. */
function verdict(scores, best) {
  if (!vit.thresholds) return `Prediction: ${vit.labels[best]} (${percent(scores[best])}).`;
  const above = range(scores.length).filter((k) => scores[k] > vit.thresholds[k]).sort((a, b) => scores[b] - scores[a]);
  return above.length ? `Prediction: ${above.map((k) => `${vit.labels[k]} (${percent(scores[k])})`).join(", ")}.`
    : "Prediction: none of the classes.";
}

function paintAnswer() {
  const scores = scoresOf(state.result.lens[state.depth]), best = largest(scores);
  const plain = scoresOf(state.plain.lens[state.depth]), order = range(scores.length);
  if (order.length > rows.length) order.sort((a, b) => scores[b] - scores[a]);  // otherwise in their own order
  rows.forEach(({ row, label, fill, was, number }, i) => {
    was.style.left = `${100 * plain[order[i]]}%`;
    was.hidden = isPlain(state);
    row.className = order[i] === best ? "first" : "";
    label.textContent = label.title = vit.labels[order[i]];
    fill.style.width = `${100 * scores[order[i]]}%`;
    number.textContent = percent(scores[order[i]]);
  });
  const blank = state.drawn && state.pixels.every((value) => value === (gray ? 0 : 255));
  $("says").textContent = blank ? "The canvas is empty, and the model still predicts something."
    : verdict(scores, best);
  $("depth-words").textContent = `${state.depth} of ${vit.depth} blocks`;
  state.result.lens.forEach((logits, l) => {
    const probabilities = scoresOf(logits), top = largest(probabilities);
    const after = l === 0 ? "no block" : `${l} block${l > 1 ? "s" : ""}`;
    steps[l].textContent = `${after}: ${vit.labels[top]}, ${percent(probabilities[top])}`;
    steps[l].className = l === state.depth ? "now" : "";
  });
}

/** Remove the answer of the previous image, while the next one is being read or if it cannot be. */
function clearAnswer() {
  for (const { row, label, fill, number } of rows) {
    [row.className, label.textContent, label.title, number.textContent] = ["", "", "", ""];
    fill.style.width = "0";
  }
  for (const step of steps) [step.textContent, step.className] = ["", ""];
  $("says").textContent = "";
}

function paintTokens() {
  maps.tokens.paint(null);
  const { width: D } = vit, { token } = state;
  const cut = (table, row) => table.subarray(row * D, (row + 1) * D);
  const strips = {
    embedding: token < n ? cut(vit.tensors.prefix, token) : cut(state.result.embedded, token - n),
    ...(vit.tensors.position && { position: cut(vit.tensors.position, token) }),
    sum: cut(state.result.z[0], token),
  };
  const max = Math.max(...Object.values(strips).flatMap((strip) => Array.from(strip, Math.abs)));
  for (const [name, strip] of Object.entries(strips)) {
    dots($(`strip-${name}`), D, 1, (i) => color(SIGNED, 0.5 + strip[i] / (2 * max || 1)));
  }
  $("token-words").textContent = `${capital(named(token))}:`;
  $("strip-words-embedding").textContent = token < n ? "a learned vector" : "its pixels times E";
  $("strip-max").textContent = max.toFixed(2);
}

function paintAttention() {
  const row = attentionRow(), patches = row.subarray(n), best = n + largest(patches);
  maps.attention.paint(row, { max: row[best] });
  const before = row.slice(0, n).reduce((a, b) => a + b, 0);
  const how = state.head < 0 ? "averaged over the heads" : `in head ${state.head}`;
  $("attention-words").textContent = `In block ${state.block}, ${how}, ${named(state.token)} attends most to `
    + `${best === state.token ? "itself (among the patches)" : named(best)} (${percent(row[best])}). `
    + `${percent(row[state.token])} of its attention goes to itself`
    + (n > 1 ? `, ${percent(before)} goes to the prefix tokens.`
      : n === 1 && state.token > 0 ? `, ${percent(before)} goes to ${named(0)}.` : ".");
}

function paintRollout() {
  const relevance = vit.rollout(state.result.attention, state.depth), patches = relevance.subarray(n);
  const best = n + largest(patches), all = patches.reduce((a, b) => a + b, 0);
  maps.rollout.paint(relevance, { max: relevance[best] });
  $("rollout-words").textContent = all < 1e-9 ? `Before the first block, ${vit.reads} contains nothing of the image.`
    : `Through ${state.depth} of ${vit.depth} blocks, ${percent(all)} of ${vit.reads} comes from the patches, `
    + `the most from ${named(best).replace(/^the patch/, "the one")} (${percent(relevance[best])}).`;
}

function paintPositions() {
  if (!vit.tensors.position) return;
  const cosines = vit.similarity(state.token), others = cosines.slice(n);
  if (state.token >= n) others[state.token - n] = -Infinity;
  const best = n + largest(others), format = (cosine) => cosine.toFixed(2);
  maps.positions.paint(cosines, { stops: SIGNED, min: -1, max: 1, imageWeight: 0, format });
  const selected = named(state.token), other = named(best).replace(/^the patch/, "the one");
  $("positions-words").textContent = cosines[state.token] === 0 ? `${capital(selected)} has no position embedding.`
    : `The position most similar to ${selected} is ${other} (${format(cosines[best])}).`;
}

/** What depends on the block, the head and the selected token. */
function paintBlock() {
  if (state.open === "attention") {
    paintAttention();
    paintMatrix();
    paintWeight();
  }
  if (state.open === "norm") paintNorm();
  if (state.open === "mlp") paintMlp();
  paintFigure();
}

function paintSelected() {
  if (state.open === "tokens") paintTokens();
  if (state.open === "filters") paintFilters();
  if (state.open === "rollout") paintRollout();
  if (state.open === "positions") paintPositions();
  paintBlock();
}

let took = 0;  // milliseconds of the last forward pass

function compute() {
  state.shown = state.order ? shufflePatches(state.pixels, state.order) : state.pixels;
  const start = performance.now();
  state.result = vit.forward(state.shown, state.change);
  took = performance.now() - start;
  state.plain = isPlain(state) ? state.result : vit.forward(state.pixels);
  paintAnswer();
  paintExperiment();
  paintSelected();
}

// ---- text and controls that depend on the model ------------------------------------------------------

const choices = [];  // all radio buttons, with the field of the state that they set

/** Radio buttons in each element of a class; all of them show the same choice. */
function addChoices(name, values, field, onChange) {
  for (const parent of document.querySelectorAll(`.choose-${name}`)) {
    const row = element("div", parent), group = `${name}-${choices.length}`;
    for (const [value, text] of values) {
      if (value < 0 && parent.dataset.mean === "no") continue;
      const label = element("label", row, "", { class: "choice" });
      const input = element("input", label, "", { type: "radio", name: group, value });
      element("span", label, text);
      input.addEventListener("change", () => onChange(value));
      choices.push({ input, value, field, alone: parent.dataset.mean === "no" });
    }
  }
}

/** Check the radio buttons that the state says; where there is no mean over the heads, head 0 stands for it. */
function syncChoices() {
  for (const { input, value, field, alone } of choices)
    input.checked = value === (alone ? Math.max(state[field], 0) : state[field]);
}

function chooseHead(head) {
  state.head = head;
  syncChoices();
  paintBlock();
}

/** Eq. 4 for this model: which token or mean of tokens is read, and where the norm is. */
function fillFormula(y) {
  const ofClass = vit.tensors.pool[0] === 1, inside = vit.last_norm === "before";
  const normed = (write) => { y.append("LN("); write(); y.append(")"); };
  const z = () => { y.append("z"); element("sub", y, "L"); if (ofClass) element("sup", y, "0"); };
  const read = () => {
    if (!ofClass) y.append(`${vit.reads} of `);
    return inside ? normed(z) : z();
  };
  return vit.last_norm === "after" ? normed(read) : read();
}

function fill() {
  const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
  $("name").textContent = vit.name;
  $("shape").textContent = `with ${count(vit.parameters, "parameter")}, ${count(vit.depth, "block")} of `
    + `${count(vit.heads, "head")} and tokens of ${vit.width} numbers`;
  $("accuracy").textContent = vit.accuracy;
  $("filters-look").textContent = vit.filters;
  $("filters-count").textContent = FILTERS.order.length < vit.width ? `the ${FILTERS.order.length} largest of ${vit.width}` : `all ${vit.width}`;
  $("draw-title").textContent = gray ? "Draw" : "Show it an image";
  $("how").textContent = gray ? "Draw with mouse, pen or finger, or choose an example."
    : "Choose an image or drop one on the canvas; draw on it with mouse, pen or finger.";
  fillFormula($("y-formula"));
  const [P, Q] = vit.patch;
  $("cut").textContent = `${h} × ${w} patches of ${P} × ${Q} pixels`;
  $("width").textContent = vit.width;
  const before = $("prefix-formula");
  for (const name of vit.prefix) {
    before.append("x");
    element("sub", before, name);
    before.append("; ");
  }
  $("positions-kind").textContent = vit.position.startsWith("learned")
    ? "learned like every other weight. The model was never told which patches are neighbors."
    : "here fixed sines and cosines of its position.";
  const rules = { ".only-gray": gray, ".only-color": !gray, ".only-position": vit.tensors.position };
  for (const [selector, shown] of Object.entries(rules))
    for (const part of document.querySelectorAll(selector)) part.hidden = !shown;
  addChoices("block", range(vit.depth).map((l) => [l, l]), "block", (l) => chooseBlock(l));
  addChoices("head", [[-1, "mean"], ...range(vit.heads).map((i) => [i, i])], "head", chooseHead);
  addChoices("norm", [["norm1", "before attention"], ["norm2", "before the MLP"]], "norm",
    (norm) => chooseBlock(state.block, norm));
  syncChoices();
  fillFigure();
  fillExperiment();
  paintSheetOfFilters();
  $("depth").max = $("depth").value = vit.depth;
  $("depth").addEventListener("input", () => {
    state.depth = Number($("depth").value);
    paintAnswer();
    if (state.open === "rollout") paintRollout();
  });
  for (const { name, pixels: text } of vit.examples) {
    const pixels = bytes(text);
    const button = element("button", $("examples"), "", { type: "button", "aria-label": name, title: name });
    dots(element("canvas", button), W, H, (i) => rgb(pixels, i));
    button.addEventListener("click", () => show(pixels));
  }
}
