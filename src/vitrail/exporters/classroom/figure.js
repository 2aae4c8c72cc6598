// Figure 1 of the paper, drawn from this model: every box shows its numbers and opens below the drawing.

const GAP = 15;
const boxes = {};  // the buttons of the drawing by name, each with a canvas, words, and the panel it opens

/** A box of the drawing. `panel` is the section it opens, after `before`. */
function addBox(name, label, panel, { words = "", canvas = true, before = () => 0 } = {}) {
  const button = element("button", $("boxes"), "", { type: "button", class: `box ${name}`, "aria-label": label, title: label });
  const box = { button, panel, before, canvas: canvas ? element("canvas", button, "", { "aria-hidden": "true" }) : null };
  box.words = element("span", button);
  typeset(box.words, words);
  button.addEventListener("click", () => {
    box.before();
    if (panel) openPanel(panel);
    if (panel && onPhone.matches) button.scrollIntoView({ block: "start" });
  });
  return boxes[name] = box;
}

function fillFigure() {
  addBox("patches", "Patches become tokens, Eq. 1", "tokens", { words: "x_{p}" });
  addBox("filters", "The filters of E, Eq. 1", "filters", { words: "× E", canvas: false });
  if (n) addBox("prefix", "The learned tokens before the patches, Eq. 1", "tokens", { words: n === 1 && vit.prefix[0] === "class" ? "x_{class}" : "prefix", before: () => select(0) });
  if (vit.tensors.position) addBox("positions", "Position embeddings, Eq. 1", "positions", { words: "E_{pos}" });
  addBox("z0", "The tokens z_0, Eq. 1", "tokens", { words: "z_{0}" });
  for (const l of range(vit.depth)) {
    const box = addBox(`block${l}`, `Block ${l}`, "attention", { before: () => chooseBlock(l) });
    element("span", box.button, `block ${l}`);
  }
  for (const [name, label, panel, words, norm] of [
    ["norm1", "LayerNorm before attention, Eq. 2", "norm", "LN", "norm1"],
    ["attention", "Attention of this block, Eq. 2", "attention", "MSA"],
    ["norm2", "LayerNorm before the MLP, Eq. 3", "norm", "LN", "norm2"],
    ["mlp", "MLP of this block, Eq. 3", "mlp", "MLP"],
  ]) addBox(name, label, panel, { words, canvas: !norm, before: () => norm && chooseBlock(state.block, norm) });
  for (const name of ["sum1", "sum2"]) element("span", $("boxes"), "+", { class: `sum ${name}`, title: name === "sum1" ? "z′ = MSA(LN(z)) + z" : "z = MLP(LN(z′)) + z′" });
  element("span", $("boxes"), "", { class: "frame" });
  element("span", $("boxes"), "", { class: "title" });
  addBox("after", "The tokens after this block", "rollout", {});
  addBox("rollout", "Attention rollout: through all blocks", "rollout", { words: "rollout", canvas: false });
  addBox("head", "LayerNorm and head, Eq. 4: the prediction", "", { words: "head", canvas: false });
  boxes.head.button.addEventListener("click", () => goTo("answer"));
  for (const panel of $("opened").children) {
    const close = element("button", panel, "×", { type: "button", class: "close", "aria-label": "Close" });
    close.addEventListener("click", () => openPanel(""));
  }
  openPanel(onPhone.matches ? "" : "attention");
}

// ---- where everything is ----------------------------------------------------------------------------

/** The boxes along the model, each with its extents and its lane: 0 is the residual stream, 1 the branches. */
function sequence(wide) {
  const tokens = wide ? [62, 130] : [112, 60], collapsed = vit.depth > 4 ? [46, 76] : [68, 90];
  const opened = [
    ["norm1", 36, 32, 1], ["attention", 98, 116, 1], ["sum1", 26, 26, 0],
    ["norm2", 36, 32, 1], ["mlp", 98, 116, 1], ["sum2", 26, 26, 0],
  ];
  return [
    ["patches", 104, 122, 0], ["filters", 46, 34, 0], ["z0", ...tokens, 0],
    ...range(vit.depth).flatMap((l) => l === state.block ? [...opened, ["after", ...tokens, 0]] : [[`block${l}`, ...collapsed, 0]]),
    ["head", 54, 34, 0],
  ];
}

/** Place all boxes and draw the edges between them; from left to right, or downwards where there is no room. */
function layOut() {
  const parent = $("drawing"), wide = parent.clientWidth > 560, lanes = wide ? [112, 276] : [76, 222], at = {};
  let along = wide ? GAP : GAP / 2;
  for (const [name, w, h, lane] of sequence(wide)) {
    const long = wide ? w : h, start = along;
    if (name === "norm1") along += wide ? GAP : 3 * GAP;  // room for the branch and a title, within the frame
    at[name] = { along: along + long / 2, across: lanes[lane], w, h, start };
    along += long + GAP;
  }
  const beside = (name, of, w, h, shift = 0) => { at[name] = { along: at[of].along + shift, across: lanes[1], w, h }; };
  if (boxes.positions) beside("positions", "z0", ...(wide ? [62, 130] : [112, 60]));
  if (boxes.prefix) beside("prefix", "filters", 64, 36, wide ? 0 : -26);
  const [from, to] = [at.norm1.start - GAP / 4, at.sum2.along + GAP * 1.4];
  at.frame = { along: (from + to) / 2, across: wide ? 192 : 158, w: wide ? to - from : 304, h: wide ? 326 : to - from };
  at.title = { along: wide ? (from + to) / 2 : from + 14, across: wide ? 44 : lanes[1] - 10, w: wide ? to - from - 12 : 180, h: 20 };
  at.rollout = { along: wide ? (from + to) / 2 : to + 2 * GAP, across: wide ? 14 : lanes[1], w: 84, h: 28 };
  place(at, wide, along);
  drawEdges(at, wide, along, lanes);
}

function place(at, wide, length) {
  const parent = $("drawing"), size = wide ? [length, 368] : [320, length];
  for (const child of $("boxes").children) {
    const spot = at[child.classList[1] ?? child.classList[0]];
    child.hidden = !spot;
    if (!spot) continue;
    const [x, y] = wide ? [spot.along, spot.across] : [spot.across, spot.along];
    Object.assign(child.style, { left: `${x - spot.w / 2}px`, top: `${y - spot.h / 2}px`, width: `${spot.w}px`, height: `${spot.h}px` });
  }
  const zoom = wide ? Math.min(1.3, Math.max(0.62, parent.clientWidth / size[0])) : Math.min(1.2, parent.clientWidth / size[0]);
  for (const one of [$("boxes"), $("edges")]) Object.assign(one.style, { width: `${size[0]}px`, height: `${size[1]}px`, transform: `scale(${zoom})` });
  parent.style.height = `${size[1] * zoom}px`;
  $("edges").setAttribute("viewBox", `0 0 ${size[0]} ${size[1]}`);
}

function drawEdges(at, wide, length, [stream, branch]) {
  const point = (along, across) => wide ? `${along} ${across}` : `${across} ${along}`;
  const path = (kind, ...points) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("class", kind);
    line.setAttribute("d", `M${points.join(" L")}`);
    return line;
  };
  const edges = [path("stream", point(0, stream), point(length, stream))];
  for (const [norm, end] of [["norm1", "sum1"], ["norm2", "sum2"]]) {
    const start = at[norm].along - (wide ? at[norm].w : at[norm].h) / 2 - 8;
    edges.push(path("branch", point(start, stream), point(start, branch), point(at[end].along, branch), point(at[end].along, stream)));
  }
  for (const name of ["positions", "prefix"]) if (at[name]) {
    const to = name === "prefix" ? at.z0.along - (wide ? at.z0.w : at.z0.h) / 2 + 6 : at[name].along;
    edges.push(path("branch", point(at[name].along, branch), point(to, branch), point(to, stream)));
  }
  edges.push(...fan(at, wide, stream).map(([kind, ...points]) => path(kind, ...points.map((one) => point(...one)))));
  $("edges").replaceChildren(...edges);
}

/** A line from each patch to its row of z_0, that of the selected token marked. */
function fan(at, wide, stream) {
  const rows = (box, count, i) => stream + ((i + 0.5) / count - 0.5) * (wide ? box.h : box.w);
  const end = (box, sign) => box.along + sign * (wide ? box.w : box.h) / 2;
  const shown = range(vit.N).filter((i) => vit.N <= 64 || i % Math.ceil(vit.N / 64) === 0 || n + i === state.token);
  return shown.map((i) => {
    const from = wide ? rows(at.patches, h, Math.floor(i / w)) : rows(at.patches, w, i % w);
    const kind = n + i === state.token ? "thread now" : "thread";
    return [kind, [end(at.patches, 1), from], [end(at.z0, -1), rows(at.z0, vit.T, n + i)]];
  });
}

// ---- what the boxes show ----------------------------------------------------------------------------

/** A matrix of tokens as colors: a row for each token, or a column where the drawing goes downwards. */
function paintTokensOf(canvas, z) {
  const { T, width: D } = vit, down = $("drawing").clientWidth <= 560, most = maxAbs(z) || 1;
  const value = down ? (i) => z[(i % T) * D + Math.floor(i / T)] : (i) => z[i];
  dots(canvas, down ? T : D, down ? D : T, (i) => color(SIGNED, 0.5 + value(i) / (2 * most) * 2));
}

/** The mean attention of the selected token over the heads of a block, or that of the selected head. */
function paintLook(canvas, l) {
  const values = attentionRow(l).subarray(n), most = maxAbs(values) || 1;
  dots(canvas, w, h, (i) => color(HEAT, values[i] / most));
}

function paintFigure() {
  const { result, block, token } = state, { mlp: F, depth } = vit;
  dots(boxes.patches.canvas, w * 5 - 1, h * 5 - 1, (i) => {
    const [y, x] = [Math.floor(i / (w * 5 - 1)), i % (w * 5 - 1)];
    if (y % 5 === 4 || x % 5 === 4) return [150, 150, 160];
    const inside = (at, side) => Math.floor((Math.floor(at / 5) + (at % 5 + 0.5) / 4) * side);
    return rgb(state.shown, inside(y, vit.patch[0]) * W + inside(x, vit.patch[1]));
  });
  paintTokensOf(boxes.z0.canvas, result.z[0]);
  paintTokensOf(boxes.after.canvas, result.z[block + 1]);
  typeset(boxes.after.words, `z_{${block + 1}}`);
  if (boxes.positions) paintTokensOf(boxes.positions.canvas, vit.tensors.position);
  if (boxes.prefix) dots(boxes.prefix.canvas, vit.width, n, (i) => color(SIGNED, 0.5 + vit.tensors.prefix[i] / (2 * maxAbs(vit.tensors.prefix) || 1)));
  for (const l of range(depth)) paintLook(boxes[`block${l}`].canvas, l);
  paintLook(boxes.attention.canvas, block);
  const hidden = row(result.blocks[block].hidden, token, F), across = Math.ceil(Math.sqrt(F)), top = maxAbs(hidden) || 1;
  dots(boxes.mlp.canvas, across, Math.ceil(F / across), (i) => color(SIGNED, 0.5 + (hidden[i] ?? 0) / (2 * top)));
  const scores = scoresOf(result.lens[block + 1]), best = largest(scores);
  document.querySelector("#boxes > .title").textContent = `block ${block} of 0 to ${depth - 1} → ${vit.labels[best]} ${percent(scores[best])}`;
  for (const box of Object.values(boxes)) box.button.setAttribute("aria-expanded", box.panel === state.open && isOf(box));
  boxes.positions?.button.classList.toggle("gone", !state.change.positions);
  layOut();
}

/** Whether an open panel shows this box: of the two norms one is open. */
const isOf = ({ button: { classList } }) => !classList[1].startsWith("block") && (!classList[1].startsWith("norm") || classList[1] === state.norm);

const onPhone = matchMedia("(max-width: 34rem)");  // there a panel covers the lower part of the screen

/** Open the panel of a part below the drawing, and close the others; "" closes all. */
function openPanel(id) {
  state.open = id;
  for (const panel of $("opened").children) panel.hidden = panel.id !== id;
  if (state.result) paintSelected();
  const { top } = $("opened").getBoundingClientRect();
  if (id && !onPhone.matches && (top > innerHeight * 0.6 || top < 0)) goTo(id);
}

/** Scroll to a part of the page; what is within a panel is opened. */
function goTo(id) {
  const panel = $(id).closest("#opened > section");
  if (panel && panel.hidden) openPanel(panel.id);
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  $(id).scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "nearest" });
}

/** Show another block, and one of its norms, in the drawing and in every panel. */
function chooseBlock(l, norm = state.norm) {
  [state.block, state.norm] = [l, norm];
  syncChoices();
  paintBlock();
}
