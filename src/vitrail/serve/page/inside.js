// Inside the model: patches, attention and attention rollout, layer by layer.

import { $, element, largest, openImage, percent, plain, range, TokenMap, unpack } from "./maps.js";

const CUTTING = 900;  // milliseconds of the patch animation
const PAUSE = 60;     // milliseconds after the last slider movement before a layer is fetched
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const LABELS = { cut: "The image in patches", attention: "Attention", rollout: "Attention rollout" };

/** Tokens, layers and heads count from 0 here; a head of -1 is the mean over all heads. */
export class Inside {
  /**
   * @param fetchLayer returns the explanation of the image with the attention of a layer
   * @param attempt runs a task and shows its error
   * @param onSelect called with the index of each selected patch
   */
  constructor(model, { fetchLayer, attempt, onSelect }) {
    Object.assign(this, { model, fetchLayer, attempt, onSelect });
    Object.assign(this, { result: null, image: null, maps: null, token: 0, layer: model.depth - 1, head: -1, open: 1 });
    $("depth").max = model.depth;
    $("depth-box").hidden = model.depth < 2;
    $("depth").addEventListener("input", () => this.goTo(Number($("depth").value) - 1));
  }

  /** Show the explanation of an image. */
  async show(result) {
    this.image = await openImage(result.image);
    if (!this.maps) this.build(result);
    this.result = result;
    this.weights = result.attention.reason ? null : unpack(result.attention);
    this.relevance = unpack(result.rollout);
    $("inside").hidden = false;
    this.listPredictions(result.lens);
    this.animatePatches();
    this.paint();
    if (result.layer !== this.layer) await this.loadAttention();  // the slider was moved meanwhile
  }

  build({ prefix, grid: [h, w], attention }) {
    const layout = { pixels: this.model.size, patch: this.model.patch, grid: this.model.grid, prefix };
    this.maps = Object.fromEntries(Object.entries(LABELS).map(([name, label]) =>
      [name, new TokenMap($(`${name}-map`), label, layout, (token) => this.select(token))]));
    this.n = prefix.length;
    this.token = prefix.includes("class") ? 0 : this.n + Math.floor(h / 2) * w + Math.floor(w / 2);
    this.addHeadChoices(attention.reason ? 0 : attention.shape[0]);
  }

  addHeadChoices(count) {
    $("heads").hidden = count < 2;
    const row = element("div", $("heads"));
    for (const head of [-1, ...range(count)]) {
      const label = element("label", row, "", { class: "choice" });
      const input = element("input", label, "", { type: "radio", name: "head", value: head });
      element("span", label, head < 0 ? "mean" : head + 1);
      input.checked = head === this.head;
      input.addEventListener("change", () => { this.head = head; this.paintAttention(); });
    }
  }

  listPredictions(lens) {
    $("lens").replaceChildren();
    $("no-lens").hidden = !lens.reason;
    $("no-lens").textContent = lens.reason ?? "";
    for (const [layer, { label, score }] of lens.reason ? [] : lens.entries()) {
      const button = element("button", element("li", $("lens")), "", { type: "button" });
      element("span", button, `layer ${layer + 1}`);
      element("bdi", button, plain(label));
      element("span", button, percent(score));
      button.addEventListener("click", () => this.goTo(layer));
    }
  }

  // ---- interaction ----------------------------------------------------------------------------

  select(token) {
    if (token === this.token) return;
    this.token = token;
    this.paint();
    if (token >= this.n) this.onSelect(token - this.n);
  }

  /** Go to another layer: rollout and predictions are loaded already, its attention is fetched. */
  goTo(layer) {
    if (layer === this.layer) return;
    this.layer = layer;
    this.paintDepth();
    $("attention-map").classList.add("waiting");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.attempt(() => this.loadAttention()), PAUSE);
  }

  /** Fetch and show the attention of the current layer. */
  async loadAttention() {
    const { layer } = this, result = await this.fetchLayer(layer);
    if (layer !== this.layer) return;
    this.result = result;
    this.weights = result.attention.reason ? null : unpack(result.attention);
    this.paintAttention();
  }

  /** Animate the split into patches, unless the user prefers reduced motion. */
  animatePatches() {
    if (reducedMotion.matches) return;
    const start = performance.now(), image = this.image;
    this.open = 0;
    const frame = (now) => {
      if (image !== this.image) return;
      const part = Math.min(Math.max((now - start) / CUTTING, 0), 1);
      this.open = 1 - (1 - part) ** 3;
      this.paintCut();
      if (part < 1) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  // ---- drawing -----------------------------------------------------------------------------

  paint() {
    this.paintCut();
    this.paintDepth();
    this.paintAttention();
  }

  paintCut() {
    const { grid: [h, w], patch: [P, Q] } = this.model;
    this.maps.cut.paint(this.token, this.image, null, { open: this.open });
    $("cut-words").textContent = `The model's input: ${h} × ${w} patches of ${P} × ${Q} pixels. Point at a patch, or use `
      + "the arrow keys: the maps beside it then show that token.";
  }

  paintDepth() {
    const { result: { lens }, layer, model: { depth } } = this, prediction = lens.reason ? null : lens[layer];
    const position = `layer ${layer + 1} of ${depth}`;
    $("depth").value = layer + 1;
    $("depth").setAttribute("aria-valuetext", prediction ? `${position}: ${plain(prediction.label, 60)}, ${percent(prediction.score)}` : position);
    $("depth-words").textContent = position;
    [...$("lens").children].forEach((item, i) => item.firstChild.setAttribute("aria-pressed", i === layer));
    this.paintRollout();
  }

  paintRollout() {
    const { grid: [h, w], depth } = this.model, N = h * w;
    const values = this.relevance.subarray(this.layer * N, (this.layer + 1) * N), best = largest(values);
    this.maps.rollout.paint(this.token, this.image, [...Array(this.n).fill(NaN), ...values], { max: values[best] });
    $("rollout-words").textContent = values[best] === 0 ? "No patch has reached the pooled vector."
      : `Through ${this.layer + 1} of ${depth} layers, ${this.named(this.n + best)} contributes most: `
      + `${percent(values[best])} (uniform would be ${percent(1 / N)}).`;
  }

  /** The selected token's row of attention: of one head, or the mean over heads. */
  row() {
    const { result: { attention: { shape: [k, T], row_max: rowMax } }, token, head } = this;
    const row = new Float32Array(T), heads = head < 0 ? range(k) : [head];
    for (const one of heads) {
      const scale = rowMax[one][token] / 255 / heads.length, start = (one * T + token) * T;
      for (let to = 0; to < T; to++) row[to] += this.weights[start + to] * scale;
    }
    return row;
  }

  paintAttention() {
    const { attention, layer } = this.result, n = this.n;
    if (layer === this.layer) $("attention-map").classList.remove("waiting");
    $("attention-map").hidden = !this.weights;
    $("attention-note").hidden = !attention.note;
    $("attention-note").textContent = attention.note ?? "";
    if (!this.weights) {
      $("attention-words").textContent = attention.reason;
      return;
    }
    const row = this.row(), best = n + largest(row.subarray(n));
    this.maps.attention.paint(this.token, this.image, row, { max: row[best] });
    const before = row.slice(0, n).reduce((a, b) => a + b, 0);
    const how = this.head < 0 ? "averaged over the heads" : `in head ${this.head + 1}`;
    $("attention-words").textContent = `In layer ${layer + 1}, ${how}, ${this.named(this.token)} attends most to `
      + `${best === this.token ? "itself (among the patches)" : this.named(best)} (${percent(row[best])})`
      + (n && this.token >= n ? `; ${percent(before)} goes to ${n > 1 ? "the prefix tokens" : this.named(0)}.` : ".");
  }

  named(token) {
    const { prefix, grid: [, w] } = this.result, n = this.n;
    if (token >= n) return `the patch in row ${Math.floor((token - n) / w) + 1}, column ${(token - n) % w + 1}`;
    return prefix[token].startsWith("register") ? prefix[token] : `the ${prefix[token]} token`;
  }
}
