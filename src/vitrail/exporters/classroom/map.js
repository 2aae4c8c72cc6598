// The model in the page, the state of the page, and maps with one value per token.

// ---- model and state -------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);

function bytes(text) {
  const binary = atob(text.trim()), array = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) array[i] = binary.charCodeAt(i);
  return array;
}

/** The float32 value of each of the 65,536 float16 numbers. */
const HALVES = Float32Array.from({ length: 65536 }, (_, bits) => {
  const exponent = (bits >> 10) & 31, fraction = (bits & 1023) / 1024;
  return (bits >> 15 ? -1 : 1) * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
});

/** All tensors as float32, one after the other: matrices may be stored as float16 ("f2"), the rest is float32. */
function readWeights(tensors, data) {
  const weights = new Float32Array(tensors.reduce((sum, [, length]) => sum + length, 0));
  let [at, start] = [0, 0];
  for (const [, length, kind] of tensors) {
    const part = data.buffer.slice(start, start += length * (kind === "f2" ? 2 : 4));
    const half = () => Float32Array.from(new Uint16Array(part), (bits) => HALVES[bits]);
    weights.set(kind === "f2" ? half() : new Float32Array(part), at);
    at += length;
  }
  return weights;
}

const config = JSON.parse($("model").textContent);
const vit = new Vit(config, readWeights(config.tensors, bytes($("weights").textContent)));
const [H, W] = vit.size, [h, w] = vit.grid, n = vit.prefix.length, gray = vit.channels === 1;
const PAPER = gray ? "black" : "white";
const FINE = Math.max(1, Math.round(336 / Math.max(H, W)));  // canvas pixels per pixel of the model

/** What is shown now. Everything counts from 0; a head of -1 is the mean over all heads. `plain` is the result
 *  without the experiment in `change`, and `order` says which patch is shown at each place, if they are shuffled. */
const state = {
  pixels: new Uint8Array(H * W * vit.channels), shown: null, result: null, plain: null, drawn: false,
  token: vit.prefix.includes("class") ? 0 : n + Math.floor(h / 2) * w + Math.floor(w / 2),
  key: n + Math.floor(h / 2) * w + Math.floor(w / 2),
  block: vit.depth - 1, head: -1, depth: vit.depth, channel: 0, filter: 0, norm: "norm1",
  change: { ...NO_CHANGE, silenced: new Set() }, order: null, open: "",
};

const percent = (fraction) => `${(100 * fraction).toFixed(fraction < 0.0995 ? 1 : 0)}%`;
const largest = (values) => values.reduce((best, value, i) => value > values[best] ? i : best, 0);
const range = (count) => [...Array(count).keys()];

function named(token) {
  const [row, column] = [Math.floor((token - n) / w), (token - n) % w];
  if (token >= n) return `the patch in row ${row}, column ${column}`;
  return vit.prefix[token].startsWith("register") ? vit.prefix[token] : `the ${vit.prefix[token]} token`;
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

function element(kind, parent, text = "", attributes = {}) {
  const child = parent.appendChild(document.createElement(kind));
  child.textContent = text;
  for (const [name, value] of Object.entries(attributes)) child.setAttribute(name, value);
  return child;
}

/** A text in which z_{1} has an index and e^{2} an exponent. */
function typeset(place, text) {
  const parts = text.split(/([_^])\{([^}]*)\}/);  // text, sign, what is set lower or higher, text, ...
  place.replaceChildren();
  for (let i = 0; i < parts.length; i += 3) {
    place.append(parts[i]);
    if (i + 1 < parts.length) element(parts[i + 1] === "_" ? "sub" : "sup", place, parts[i + 2]);
  }
}

// ---- colors -------------------------------------------------------------------------------------

const HEAT = [[10, 10, 60], [120, 20, 110], [235, 90, 50], [255, 235, 120]];  // from low to high
const SIGNED = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [244, 165, 130], [178, 24, 43]];

/** Interpolate between color stops; `t` goes from 0 to 1. */
function color(stops, t) {
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((part, i) => part + (stops[low + 1][i] - part) * (at - low));
}

/** Fill a canvas of across x down pixels; `paint` maps a pixel's index to its color. */
function dots(canvas, across, down, paint) {
  [canvas.width, canvas.height] = [across, down];
  const image = new ImageData(across, down);
  for (let i = 0; i < across * down; i++) {
    const shade = paint(i);
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = shade[c];
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Red, green and blue of pixel i. */
function rgb(pixels, i) {
  const at = i * vit.channels;
  return gray ? [pixels[at], pixels[at], pixels[at]] : [pixels[at], pixels[at + 1], pixels[at + 2]];
}

// ---- token maps ---------------------------------------------------

/** Patches on a canvas, with the prefix tokens as buttons above it. Pointing at a token selects it. */
class TokenMap {
  /** `field` is the field of the state that holds the selected token. */
  constructor(id, field = "token") {
    const parent = $(id);
    this.field = field;
    const choose = (token) => select(token, field);
    const attributes = { class: "chips", role: "group", "aria-label": "Prefix tokens" };
    this.chips = element("div", parent, "", attributes);
    this.buttons = vit.prefix.map((name, token) => {
      const button = element("button", this.chips, "", { type: "button" });
      button.addEventListener("click", () => choose(token));
      const swatch = element("i", button);
      element("span", button, `${name} `);
      return { button, swatch, number: element("span", button) };
    });
    this.chips.hidden = !n;
    this.canvas = element("canvas", parent, "", {
      class: "patches", tabindex: 0, role: "application",
      "aria-label": `${parent.dataset.label}. Arrow keys select a patch.`,
    });
    this.legend = element("div", parent, "", { class: "legend" });
    [this.low, this.ramp, this.high] = ["span", "canvas", "span"].map((kind) => element(kind, this.legend));
    for (const event of ["pointermove", "pointerdown"]) {
      this.canvas.addEventListener(event, (at) => {
        const box = this.canvas.getBoundingClientRect();
        const row = Math.floor((at.clientY - box.top) / box.height * H / vit.patch[0]);
        const column = Math.floor((at.clientX - box.left) / box.width * W / vit.patch[1]);
        if (row >= 0 && row < h && column >= 0 && column < w) choose(n + row * w + column);
      });
    }
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: -w, ArrowDown: w, ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const patch = state[field] < n ? 0 : state[field] - n + step;
      if (patch >= 0 && patch < vit.N) choose(n + patch);
    });
  }

  /** Color all tokens by their values, from `min` to `max`; without values, show the image itself. */
  paint(values, { stops = HEAT, min = 0, max = 1, imageWeight = 0.3, format = percent } = {}) {
    const scaled = (value) => (value - min) / (max - min || 1);
    const hues = values && Array.from(values, (value) => color(stops, scaled(value)));
    this.paintPatches(hues, imageWeight);
    this.paintSelection();
    this.buttons.forEach(({ button, swatch, number }, token) => {
      button.setAttribute("aria-pressed", token === state[this.field]);
      swatch.hidden = !values;
      if (values) swatch.style.background = `rgb(${hues[token].map(Math.round)})`;
      number.textContent = values ? format(values[token]) : "";
    });
    this.legend.hidden = !values;
    if (values) {
      dots(this.ramp, 64, 1, (i) => color(stops, i / 63));
      [this.low.textContent, this.high.textContent] = [format(min), format(max)];
    }
  }

  /** Each patch in its color, blended with the image's brightness by `imageWeight`. */
  paintPatches(hues, imageWeight) {
    const small = document.createElement("canvas");
    dots(small, W, H, (i) => {
      const row = Math.floor(Math.floor(i / W) / vit.patch[0]), column = Math.floor((i % W) / vit.patch[1]);
      const own = rgb(state.shown, i);
      if (!hues || row >= h || column >= w) return own;
      const [red, green, blue] = hues[n + row * w + column], hueWeight = 1 - imageWeight;
      const light = imageWeight * (own[0] + own[1] + own[2]) / 3;
      return [hueWeight * red + light, hueWeight * green + light, hueWeight * blue + light];
    });
    [this.canvas.width, this.canvas.height] = [W * FINE, H * FINE];
    const pen = this.canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, 0, 0, W * FINE, H * FINE);
  }

  /** The lines between patches, and a frame around the selected one. */
  paintSelection() {
    const pen = this.canvas.getContext("2d"), [P, Q] = vit.patch.map((side) => side * FINE);
    pen.strokeStyle = "rgba(150, 150, 160, .55)";
    for (let row = 0; row < h; row++)
      for (let column = 0; column < w; column++) pen.strokeRect(column * Q, row * P, Q, P);
    const token = state[this.field];
    if (token < n) return;
    const [top, left] = [Math.floor((token - n) / w) * P, (token - n) % w * Q];
    for (const [ink, wide] of [["black", 6], ["white", 2.5]]) {  // visible on any color
      [pen.strokeStyle, pen.lineWidth] = [ink, wide];
      pen.strokeRect(left + 2, top + 2, Q - 4, P - 4);
    }
  }
}

const NAMES = ["tokens", "filters", "attention", "rollout", "positions"];
const maps = Object.fromEntries(NAMES.map((name) => [name, new TokenMap(`${name}-map`)]));
maps.weight = new TokenMap("weight-map", "key");
maps.filters.chips.hidden = true;  // a filter sees pixels, and prefix tokens have none

function select(token, field = "token") {
  if (token === state[field]) return;
  state[field] = token;
  if (field === "token") paintSelected();
  else paintBlock();
}
