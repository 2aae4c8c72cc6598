// What happened inside: the picture in patches, who looks where, what reached the answer, layer by layer.

import { $, element, largest, openPicture, percent, plain, range, TokenMap, unpack } from "./maps.js";

const CUTTING = 900;  // milliseconds for a picture to come apart
const PAUSE = 60;     // milliseconds that the slider must rest before a layer is fetched
const still = matchMedia("(prefers-reduced-motion: reduce)");
const LABELS = { cut: "The picture in patches", attention: "Attention", rollout: "What reached the answer" };

/** Tokens, layers and heads count from 0 here; a head of -1 is the mean over all. */
export class Inside {
  /**
   * @param fetchLayer what the server says of the picture with the attention of a layer
   * @param attempt runs a task and shows what goes wrong
   * @param chosen told of each patch that is chosen, by its number
   */
  constructor(model, { fetchLayer, attempt, chosen }) {
    Object.assign(this, { model, fetchLayer, attempt, chosen });
    Object.assign(this, { found: null, picture: null, maps: null, token: 0, layer: model.depth - 1, head: -1, open: 1 });
    $("depth").max = model.depth;
    $("depth-box").hidden = model.depth < 2;
    $("depth").addEventListener("input", () => this.goTo(Number($("depth").value) - 1));
  }

  /** A picture's answer has come. */
  async show(found) {
    this.picture = await openPicture(found.picture);
    if (!this.maps) this.build(found);
    this.found = found;
    this.weights = found.attention.reason ? null : unpack(found.attention);
    this.shares = unpack(found.rollout);
    $("inside").hidden = false;
    this.listAnswers(found.lens);
    this.cutApart();
    this.paint();
    if (found.layer !== this.layer) await this.look();  // the slider was moved meanwhile
  }

  build({ prefix, grid: [h, w], attention }) {
    const layout = { pixels: this.model.size, patch: this.model.patch, grid: this.model.grid, prefix };
    this.maps = Object.fromEntries(Object.entries(LABELS).map(([name, label]) =>
      [name, new TokenMap($(`${name}-map`), label, layout, (token) => this.choose(token))]));
    this.n = prefix.length;
    this.token = prefix.includes("class") ? 0 : this.n + Math.floor(h / 2) * w + Math.floor(w / 2);
    this.offerHeads(attention.reason ? 0 : attention.shape[0]);
  }

  offerHeads(count) {
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

  listAnswers(lens) {
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

  // ---- what the hand does ----------------------------------------------------------------------------

  choose(token) {
    if (token === this.token) return;
    this.token = token;
    this.paint();
    if (token >= this.n) this.chosen(token - this.n);
  }

  /** Look in after another layer: rollout and answers are here already, its attention is fetched. */
  goTo(layer) {
    if (layer === this.layer) return;
    this.layer = layer;
    this.paintDepth();
    $("attention-map").classList.add("waiting");
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.attempt(() => this.look()), PAUSE);
  }

  /** Fetch and show the attention of the layer we are at. */
  async look() {
    const { layer } = this, found = await this.fetchLayer(layer);
    if (layer !== this.layer) return;
    this.found = found;
    this.weights = found.attention.reason ? null : unpack(found.attention);
    this.paintAttention();
  }

  /** The picture comes apart along its patches, unless the user wants pages that keep still. */
  cutApart() {
    if (still.matches) return;
    const start = performance.now(), picture = this.picture;
    this.open = 0;
    const frame = (now) => {
      if (picture !== this.picture) return;
      const part = Math.min(Math.max((now - start) / CUTTING, 0), 1);
      this.open = 1 - (1 - part) ** 3;
      this.paintCut();
      if (part < 1) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  // ---- what the eye sees -----------------------------------------------------------------------------

  paint() {
    this.paintCut();
    this.paintDepth();
    this.paintAttention();
  }

  paintCut() {
    const { grid: [h, w], patch: [P, Q] } = this.model;
    this.maps.cut.paint(this.token, this.picture, null, { open: this.open });
    $("cut-words").textContent = `What the model sees: ${h} × ${w} patches of ${P} × ${Q} pixels. Point at one, or `
      + "move with the arrow keys: the pictures beside it then speak of it.";
  }

  paintDepth() {
    const { found: { lens }, layer, model: { depth } } = this, said = lens.reason ? null : lens[layer];
    const words = `layer ${layer + 1} of ${depth}`;
    $("depth").value = layer + 1;
    $("depth").setAttribute("aria-valuetext", said ? `${words}: ${plain(said.label, 60)}, ${percent(said.score)}` : words);
    $("depth-words").textContent = words;
    [...$("lens").children].forEach((item, i) => item.firstChild.setAttribute("aria-pressed", i === layer));
    this.paintRollout();
  }

  paintRollout() {
    const { grid: [h, w], depth } = this.model, N = h * w;
    const shares = this.shares.subarray(this.layer * N, (this.layer + 1) * N), best = largest(shares);
    this.maps.rollout.paint(this.token, this.picture, [...Array(this.n).fill(NaN), ...shares], { most: shares[best] });
    $("rollout-words").textContent = shares[best] === 0 ? "Nothing of the patches has reached the answer."
      : `Through ${this.layer + 1} of ${depth} layers the most came from ${this.named(this.n + best)}: `
      + `${percent(shares[best])}, where an even share would be ${percent(1 / N)}.`;
  }

  /** The chosen token's row of attention: of one head, or the mean over heads. */
  row() {
    const { found: { attention: { shape: [k, T], most } }, token, head } = this;
    const row = new Float32Array(T), heads = head < 0 ? range(k) : [head];
    for (const one of heads) {
      const share = most[one][token] / 255 / heads.length, start = (one * T + token) * T;
      for (let to = 0; to < T; to++) row[to] += this.weights[start + to] * share;
    }
    return row;
  }

  paintAttention() {
    const { attention, layer } = this.found, n = this.n;
    if (layer === this.layer) $("attention-map").classList.remove("waiting");
    $("attention-map").hidden = !this.weights;
    $("attention-note").hidden = !attention.note;
    $("attention-note").textContent = attention.note ?? "";
    if (!this.weights) {
      $("attention-words").textContent = attention.reason;
      return;
    }
    const row = this.row(), best = n + largest(row.subarray(n));
    this.maps.attention.paint(this.token, this.picture, row, { most: row[best] });
    const before = row.slice(0, n).reduce((a, b) => a + b, 0);
    const how = this.head < 0 ? "in the mean over its heads" : `in head ${this.head + 1}`;
    $("attention-words").textContent = `In layer ${layer + 1}, ${how}, ${this.named(this.token)} looks most at `
      + `${best === this.token ? "itself among the patches" : this.named(best)} (${percent(row[best])})`
      + (n && this.token >= n ? `; ${percent(before)} goes to ${n > 1 ? "the tokens before the patches" : this.named(0)}.` : ".");
  }

  named(token) {
    const { prefix, grid: [, w] } = this.found, n = this.n;
    if (token >= n) return `the patch in row ${Math.floor((token - n) / w) + 1}, column ${(token - n) % w + 1}`;
    return prefix[token].startsWith("register") ? prefix[token] : `the ${prefix[token]} token`;
  }
}
