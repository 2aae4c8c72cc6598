// The whole model as a row of parts, from the image to the answer: each leads to its section.

const flow = { blocks: [] };

function goTo(id) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  $(id).scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "start" });
}

/** A part of the flow: a small image, its name, and where it leads. */
function addStep(parent, name, label, id, before = () => 0) {
  const button = element("button", parent, "", { type: "button", class: "step", "aria-label": label, title: label });
  const canvas = element("canvas", button, "", { "aria-hidden": "true" });
  const words = element("span", button, name);
  button.addEventListener("click", () => { before(); goTo(id); });
  return { button, canvas, words };
}

function fillFlow() {
  const parent = $("flow-steps");
  flow.image = addStep(parent, "image", "The image", "draw");
  flow.patches = addStep(parent, "", "Patches become tokens, Eq. 1", "tokens");
  typeset(flow.patches.words, vit.tensors.position ? "patches + E_{pos}" : "patches");
  for (const l of range(vit.depth)) {
    const box = element("div", parent, "", { class: "block", role: "group", "aria-label": `Block ${l}` });
    const title = element("span", box, "", { class: "title" });
    const line = element("div", box, "", { class: "line" });
    const choose = (norm) => () => chooseBlock(l, norm);
    addStep(line, "LN", `LayerNorm before the attention of block ${l}`, "norm", choose("norm1")).canvas.remove();
    const attention = addStep(line, "MSA +", `Attention of block ${l}, Eq. 2`, "attention", choose(state.norm));
    addStep(line, "LN", `LayerNorm before the MLP of block ${l}`, "norm", choose("norm2")).canvas.remove();
    const mlp = addStep(line, "MLP +", `MLP of block ${l}, Eq. 3`, "mlp", choose(state.norm));
    flow.blocks.push({ box, title, attention, mlp });
  }
  flow.head = addStep(parent, "", "LayerNorm and head, Eq. 4: the prediction", "answer");
}

/** The attention of the selected token in each block, its MLP's hidden units, and the prediction so far. */
function paintFlow() {
  const { T, mlp: F } = vit, { token, result } = state;
  dots(flow.image.canvas, W, H, (i) => rgb(state.pixels, i));
  dots(flow.patches.canvas, w * 3 - 1, h * 3 - 1, (i) => {
    const [y, x] = [Math.floor(i / (w * 3 - 1)), i % (w * 3 - 1)];
    if (y % 3 === 2 || x % 3 === 2) return [150, 150, 160];
    return rgb(state.shown, Math.floor((y / 3 + 0.2) * vit.patch[0]) * W + Math.floor((x / 3 + 0.2) * vit.patch[1]));
  });
  result.blocks.forEach((block, l) => {
    const parts = flow.blocks[l], mean = new Float32Array(vit.N);
    for (const head of range(vit.heads)) for (let to = 0; to < vit.N; to++)
      mean[to] += block.weights[(head * T + token) * T + n + to] / vit.heads;
    const most = maxAbs(mean);
    dots(parts.attention.canvas, w, h, (i) => color(HEAT, mean[i] / (most || 1)));
    const hidden = row(block.hidden, token, F), across = Math.ceil(Math.sqrt(F)), top = maxAbs(hidden);
    dots(parts.mlp.canvas, across, Math.ceil(F / across), (i) => color(SIGNED, 0.5 + (hidden[i] ?? 0) / (2 * top || 1)));
    const scores = scoresOf(result.lens[l + 1]), best = largest(scores);
    parts.title.textContent = `block ${l} → ${vit.labels[best]} ${percent(scores[best])}`;
    parts.box.classList.toggle("now", l === state.block);
  });
  const scores = scoresOf(result.logits), best = largest(scores);
  dots(flow.head.canvas, scores.length > 10 ? 10 : scores.length, 1, (i) => color(HEAT, scores[i]));
  flow.head.words.textContent = `${vit.labels[best]} ${percent(scores[best])}`;
}

/** Show another block, and one of its norms, in every section. */
function chooseBlock(l, norm = state.norm) {
  [state.block, state.norm] = [l, norm];
  syncChoices();
  paintBlock();
  revealBlock(l);
}

/** Scroll the flow sideways to a block that is out of sight. */
function revealBlock(l) {
  const parent = $("flow-steps"), { box } = flow.blocks[l], left = box.offsetLeft - parent.offsetLeft;
  const hidden = left < parent.scrollLeft || left + box.offsetWidth > parent.scrollLeft + parent.clientWidth;
  if (hidden) parent.scrollLeft = left - (parent.clientWidth - box.offsetWidth) / 2;
}
