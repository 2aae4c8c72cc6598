// The parts of the page: words, bars, strips and maps of what the model found.

// ---- the parts of the page -------------------------------------------------------------------------

const rows = range(Math.min(10, vit.labels.length)).map(() => {
  const row = element("li", $("bars"));
  const part = (name, within = row) => element("span", within, "", { class: name });
  const [label, fill, number] = [part("label"), part("fill", part("track")), part("number")];
  return { row, label, fill, number };
});
const steps = range(vit.depth + 1).map(() => element("li", $("depths")));

function paintAnswer() {
  const scores = softmax(state.found.lens[state.depth]), best = largest(scores);
  const order = range(scores.length);
  if (order.length > rows.length) order.sort((a, b) => scores[b] - scores[a]);  // else each keeps its place
  rows.forEach(({ row, label, fill, number }, i) => {
    row.className = order[i] === best ? "first" : "";
    label.textContent = label.title = vit.labels[order[i]];
    fill.style.width = `${100 * scores[order[i]]}%`;
    number.textContent = percent(scores[order[i]]);
  });
  const blank = state.drawn && state.levels.every((level) => level === (grey ? 0 : 255));
  $("says").textContent = blank ? "The sheet is empty, and it answers all the same."
    : `It says ${vit.labels[best]}, with ${percent(scores[best])}.`;
  $("depth-words").textContent = `${state.depth} of ${vit.depth} blocks`;
  state.found.lens.forEach((logits, l) => {
    const shares = softmax(logits), top = largest(shares);
    steps[l].textContent = `${l === 0 ? "no block" : `block ${l}`}: ${vit.labels[top]}, ${percent(shares[top])}`;
    steps[l].className = l === state.depth ? "now" : "";
  });
}

function paintTokens() {
  maps.tokens.paint(null);
  const { width: D } = vit, { token } = state;
  const cut = (table, row) => table.subarray(row * D, (row + 1) * D);
  const strips = {
    made: token < n ? cut(vit.tensors.prefix, token) : cut(state.found.embedded, token - n),
    ...(vit.tensors.position && { place: cut(vit.tensors.position, token) }),
    sum: cut(state.found.z[0], token),
  };
  const most = Math.max(...Object.values(strips).flatMap((strip) => Array.from(strip, Math.abs)));
  for (const [name, strip] of Object.entries(strips)) {
    dots($(`strip-${name}`), D, 1, (i) => colour(SIGNED, 0.5 + strip[i] / (2 * most || 1)));
  }
  $("token-words").textContent = `${capital(named(token))}:`;
  $("strip-words-made").textContent = token < n ? "a row that was learned" : "its pixels times E";
  $("strip-most").textContent = most.toFixed(2);
}

/** The row of A of the chosen token: of one head, or the mean over heads. */
function lookedAt() {
  const { T, heads: k } = vit, weights = state.found.attention[state.block], row = new Float32Array(T);
  const seen = state.head < 0 ? range(k) : [state.head];
  for (const head of seen) for (let to = 0; to < T; to++)
    row[to] += weights[(head * T + state.token) * T + to] / seen.length;
  return row;
}

function paintAttention() {
  const row = lookedAt(), patches = row.subarray(n), best = n + largest(patches);
  maps.attention.paint(row, { most: row[best] });
  const before = row.slice(0, n).reduce((a, b) => a + b, 0);
  const how = state.head < 0 ? "in the mean over its heads" : `in head ${state.head + 1}`;
  $("attention-words").textContent = `In block ${state.block + 1}, ${how}, ${named(state.token)} looks most at `
    + `${best === state.token ? "itself among the patches" : named(best)} (${percent(row[best])}). `
    + `${percent(row[state.token])} of its attention stays on itself`
    + (n > 1 ? `, ${percent(before)} goes to the tokens before the patches.`
      : n === 1 && state.token > 0 ? `, ${percent(before)} goes to ${named(0)}.` : ".");
}

function paintRollout() {
  const reached = vit.rollout(state.found.attention, state.depth), patches = reached.subarray(n);
  const best = n + largest(patches), all = patches.reduce((a, b) => a + b, 0);
  maps.rollout.paint(reached, { most: reached[best] });
  $("rollout-words").textContent = all < 1e-9 ? `Without a block, ${vit.reads} has seen nothing of the picture.`
    : `Through ${state.depth} of ${vit.depth} blocks, ${percent(all)} of ${vit.reads} came from the patches, `
    + `the most from ${named(best).replace(/^the patch/, "the one")} (${percent(reached[best])}).`;
}

function paintPositions() {
  if (!vit.tensors.position) return;
  const alike = vit.similarity(state.token), others = alike.slice(n);
  if (state.token >= n) others[state.token - n] = -Infinity;
  const best = n + largest(others), write = (cosine) => cosine.toFixed(2);
  maps.positions.paint(alike, { stops: SIGNED, least: -1, most: 1, under: 0, write });
  const chosen = named(state.token), other = named(best).replace(/^the patch/, "the one");
  $("positions-words").textContent = alike[state.token] === 0 ? `${capital(chosen)} has no position.`
    : `Most like ${chosen} is ${other} (${write(alike[best])}).`;
}

function paintChosen() {
  paintTokens();
  paintAttention();
  paintRollout();
  paintPositions();
}

let took = 0;  // milliseconds, the last time

function compute() {
  const start = performance.now();
  state.found = vit.forward(state.levels);
  took = performance.now() - start;
  paintAnswer();
  paintChosen();
}

// ---- words and choices that depend on the model ------------------------------------------------------

/** Buttons of which one is chosen. */
function offer(name, words, chosen, then) {
  const row = element("div", $(name));
  words.forEach(([value, word]) => {
    const label = element("label", row, "", { class: "choice" });
    const input = element("input", label, "", { type: "radio", name, value });
    input.checked = value === chosen;
    element("span", label, word);
    input.addEventListener("change", () => then(value));
  });
}

/** Eq. 4 as this model has it: which token or mean of tokens, and where the norm stands. */
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
  $("draw-title").textContent = grey ? "Draw" : "Show it a picture";
  $("how").textContent = grey ? "Draw with mouse, pen or finger, or take an example."
    : "Pick a picture, or drop one on the sheet; draw on it with mouse, pen or finger.";
  $("reads").textContent = vit.reads;
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
    ? "learned like every other weight. Nobody said which patches are neighbours."
    : "here made of fixed sines and cosines of its place.";
  const rules = { ".only-grey": grey, ".only-colour": !grey, ".only-placed": vit.tensors.position };
  for (const [those, shown] of Object.entries(rules))
    for (const one of document.querySelectorAll(those)) one.hidden = !shown;
  const blocks = range(vit.depth).map((l) => [l, l + 1]);
  offer("blocks", blocks, state.block, (l) => { state.block = l; paintAttention(); });
  const heads = [[-1, "mean"], ...range(vit.heads).map((i) => [i, i + 1])];
  offer("heads", heads, state.head, (i) => { state.head = i; paintAttention(); });
  $("depth").max = $("depth").value = vit.depth;
  $("depth").addEventListener("input", () => {
    state.depth = Number($("depth").value);
    paintAnswer();
    paintRollout();
  });
  for (const { name, levels: text } of vit.examples) {
    const levels = bytes(text);
    const button = element("button", $("examples"), "", { type: "button", "aria-label": name, title: name });
    dots(element("canvas", button), W, H, (i) => pixel(levels, i));
    button.addEventListener("click", () => show(levels));
  }
}
