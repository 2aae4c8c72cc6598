// All of A: the attention of every token to every token, and the weight that is opened below it, played slowly.

/** The weights of one block (T, T): of the selected head, or the mean over all. */
function attentionOf(l) {
  const { T, heads: k } = vit, weights = state.result.attention[l], mean = new Float32Array(T * T);
  for (const head of state.head < 0 ? range(k) : [state.head])
    for (let i = 0; i < T * T; i++) mean[i] += weights[head * T * T + i] / (state.head < 0 ? k : 1);
  return mean;
}

/** The selected token's row of A in a block. */
const attentionRow = (l = state.block) => row(attentionOf(l), state.token, vit.T);

function paintMatrix() {
  const { T } = vit, canvas = $("matrix"), A = attentionOf(state.block), most = maxAbs(A) || 1;
  const fine = Math.max(1, Math.round(400 / T)), small = document.createElement("canvas");
  dots(small, T, T, (i) => color(HEAT, Math.sqrt(A[i] / most)));  // the square root, so that small weights show
  [canvas.width, canvas.height] = [T * fine, T * fine];
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 0, 0, T * fine, T * fine);
  for (const [ink, wide] of [["black", 3], ["white", 1]]) {
    [pen.strokeStyle, pen.lineWidth] = [ink, wide];
    pen.strokeRect(0, state.token * fine, T * fine, fine);
    pen.strokeRect(state.key * fine, state.token * fine, fine, fine);
  }
  $("matrix-shape").textContent = `${T} × ${T}`;
  $("matrix-words").textContent = `A row for each query, a column for each key; the selected row sums to 100%. The marked weight, `
    + `${state.head < 0 ? "averaged over the heads" : `in head ${state.head}`}, is `;
  const same = state.head < 0 ? {} : { "data-same": "weight" };
  element("strong", $("matrix-words"), percent(A[state.token * T + state.key]), same);
  $("matrix-words").append(". Colors show the square root, so that small weights can be seen.");
}

for (const kind of ["pointermove", "pointerdown"]) $("matrix").addEventListener(kind, (event) => {
  const box = $("matrix").getBoundingClientRect(), at = (offset, side) => Math.floor(offset / side * vit.T);
  const [token, key] = [at(event.clientY - box.top, box.height), at(event.clientX - box.left, box.width)];
  if (Math.min(token, key) < 0 || Math.max(token, key) >= vit.T || (kind === "pointermove" && !event.buttons)) return;
  state.key = key;
  select(token);
  paintBlock();
});
$("matrix").addEventListener("keydown", (event) => {
  const [field, step] = { ArrowUp: ["token", -1], ArrowDown: ["token", 1], ArrowLeft: ["key", -1], ArrowRight: ["key", 1] }[event.key] ?? [];
  if (!field) return;
  event.preventDefault();
  const next = state[field] + step;
  if (next >= 0 && next < vit.T) select(next, field);
});

/** A number that appears in several places is marked in all of them. */
for (const [kind, on] of [["pointerover", true], ["pointerout", false]]) document.addEventListener(kind, (event) => {
  const name = event.target.closest?.("[data-same]")?.dataset.same;
  if (name) for (const one of document.querySelectorAll(`[data-same="${name}"]`)) one.classList.toggle("same", on);
});

// ---- one weight, slowly -------------------------------------------------------------------------------

let played = 0;  // which run of the animation is the last: an older one stops

/** Play q·k number by number, then the softmax: the scores become powers of e, and those the weights. */
function playWeight(seconds = 6) {
  const { block, token, key, change } = state, head = Math.max(state.head, 0), run = ++played;
  const found = weightNumbers(state.result, { block, head, token, key, change });
  const powers = found.scores.map((score) => Math.exp(score - found.most)), weights = powers.map((one) => one / found.total);
  const mix = (a, b, t) => a.map((value, i) => value + (b[i] - value) * t);
  const start = performance.now(), calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const frame = (now) => {
    const t = calm ? 1 : Math.min(1, (now - start) / (1000 * seconds));
    if (run !== played) return;
    const done = Math.min(found.products.length, Math.floor(t * 2 * found.products.length));
    paintNumbers("weight-products", found.products.map((one, i) => i < done ? one : 0), maxAbs(found.products));
    $("weight-dot").textContent = digits(sum(Array.from(found.products.slice(0, done))));
    const soft = Math.min(1, Math.max(0, 4 * t - 2)), parts = Math.min(1, Math.max(0, 4 * t - 3));
    const [text, bars] = parts > 0 ? ["Divided by their sum, they are the weights:", mix(powers, weights, parts)]
      : soft > 0 ? ["Each score becomes a power of e:", mix(found.scores, powers, soft)] : ["The scores of all tokens:", found.scores];
    $("weight-bars-words").textContent = text;
    paintScores(bars, key);
    if (t < 1) requestAnimationFrame(frame);
    else setTimeout(() => { if (run === played) paintWeight(); }, calm ? 0 : 2500);
  };
  frame(start);
}

$("play").addEventListener("click", () => playWeight());
