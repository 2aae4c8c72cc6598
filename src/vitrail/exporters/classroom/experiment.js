// Experiments: the model is computed again with a part of it switched off or changed.

/** The image with its patches in another order: place i shows patch order[i]. */
function shufflePatches(pixels, order) {
  const moved = pixels.slice(), [P, Q] = vit.patch, C = vit.channels;
  order.forEach((from, to) => {
    for (let y = 0; y < P; y++) for (let x = 0; x < Q; x++) for (let c = 0; c < C; c++) {
      const at = (place) => ((Math.floor(place / w) * P + y) * W + place % w * Q + x) * C + c;
      moved[at(to)] = pixels[at(from)];
    }
  });
  return moved;
}

/** A random order of the patches (Fisher and Yates). */
function randomOrder() {
  const order = range(vit.N);
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

const isPlain = ({ change, order }) =>
  change.positions && change.scale && change.temperature === 1 && !change.silenced.size && !order;

/** What is changed, as a list of phrases. */
function changes() {
  const { positions, scale, temperature, silenced } = state.change;
  const heads = [...silenced].map((one) => one.split(".")).map(([l, head]) => `head ${head} of block ${l}`);
  return [
    ...(positions ? [] : ["no position embeddings"]), ...(state.order ? ["patches shuffled"] : []),
    ...(scale ? [] : ["no scale"]), ...(temperature === 1 ? [] : [`temperature ${digits(temperature)}`]),
    ...(heads.length ? [heads.length > 3 ? `${heads.length} heads silenced` : `${heads.join(", ")} silenced`] : []),
  ];
}

/** What the experiment does to the prediction. */
function paintExperiment() {
  const list = changes(), [before, after] = [state.plain, state.result].map(({ logits }) => scoresOf(logits));
  const [was, is] = [largest(before), largest(after)];
  $("reset").hidden = $("changed").hidden = !list.length;
  $("changed-words").textContent = list.join(", ");
  $("experiment-words").textContent = !list.length ? "Nothing is changed: this is the model as it was trained."
    : `${capital(list.join(", "))}. The prediction was ${vit.labels[was]} (${percent(before[was])}) and `
    + (is === was ? `stays ${vit.labels[is]} (${percent(after[is])}).`
      : `is now ${vit.labels[is]} (${percent(after[is])}); ${vit.labels[was]} has ${percent(after[was])}.`);
  for (const button of document.querySelectorAll("#silence button"))
    button.setAttribute("aria-pressed", state.change.silenced.has(button.dataset.head));
  $("temperature-words").textContent = digits(state.change.temperature);
}

function experiment(change) {
  Object.assign(state.change, change);
  compute();
}

function fillExperiment() {
  for (const l of range(vit.depth)) {
    const line = element("div", $("silence"), "", { class: "heads", role: "group", "aria-label": `Block ${l}` });
    element("span", line, `block ${l}`);
    for (const head of range(vit.heads)) {
      const name = `${l}.${head}`, label = `Silence head ${head} of block ${l}`;
      const button = element("button", line, head, { type: "button", "data-head": name, "aria-label": label });
      button.addEventListener("click", () => {
        const { silenced } = state.change;
        if (!silenced.delete(name)) silenced.add(name);
        compute();
      });
    }
  }
  $("no-positions").addEventListener("change", () => experiment({ positions: !$("no-positions").checked }));
  $("no-scale").addEventListener("change", () => experiment({ scale: !$("no-scale").checked }));
  $("shuffle").addEventListener("change", () => {
    state.order = $("shuffle").checked ? randomOrder() : null;
    compute();
  });
  $("temperature").addEventListener("input", () => {
    experiment({ temperature: 10 ** Number($("temperature").value) });
  });
  for (const button of [$("reset"), $("changed-reset")]) button.addEventListener("click", resetExperiment);
}

function resetExperiment() {
  for (const id of ["no-positions", "no-scale", "shuffle"]) $(id).checked = false;
  [$("temperature").value, state.order] = [0, null];
  experiment({ ...NO_CHANGE, silenced: new Set() });
}
