// Token maps: colors, arrays from the server, and an image with one value per token.

export const $ = (id) => document.getElementById(id);
export const range = (count) => [...Array(count).keys()];
export const percent = (fraction) => `${(100 * fraction).toFixed(fraction < 0.0995 ? 1 : 0)}%`;
export const capital = (text) => text[0].toUpperCase() + text.slice(1);
export const largest = (values) => values.reduce((best, value, i) => (value > values[best] ? i : best), 0);

/** Untrusted text on one line: control characters and bidirectional marks become visible. */
export function plain(text, limit = 300) {
  const hidden = /[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/gu;
  const visible = text.slice(0, 2 * limit).replace(hidden, (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return visible.length > limit ? `${visible.slice(0, limit)}…` : visible;
}

/** Append a new element; its text is never parsed as HTML. */
export function element(kind, parent, text = "", attributes = {}) {
  const child = parent.appendChild(document.createElement(kind));
  child.textContent = text;
  for (const [name, value] of Object.entries(attributes)) child.setAttribute(name, value);
  return child;
}

/** Decode an array from the server: {shape, dtype, data}. */
export function unpack({ dtype, data }) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  return dtype === "float32" ? new Float32Array(bytes.buffer) : bytes;
}

// ---- colors -------------------------------------------------------------------------------------

export const HEAT = [[10, 10, 60], [120, 20, 110], [235, 90, 50], [255, 235, 120]];  // from low to high
export const SIGNED = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [244, 165, 130], [178, 24, 43]];
const LEAD = "#17171d";
const LARGEST = 22;  // rem, the longer side of a map

/** Interpolate between color stops; `t` goes from 0 to 1. */
export function color(stops, t) {
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((part, i) => Math.round(part + (stops[low + 1][i] - part) * (at - low)));
}

/** Fill a canvas of across x down pixels; `paint` maps a pixel's index to its color. */
export function dots(canvas, across, down, paint) {
  [canvas.width, canvas.height] = [across, down];
  const image = new ImageData(across, down);
  for (let i = 0; i < across * down; i++) image.data.set([...paint(i), 255], 4 * i);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** The color scale with its bounds. */
export function paintLegend(legend, stops, min, max) {
  legend.replaceChildren();
  element("span", legend, min);
  dots(element("canvas", legend, "", { "aria-hidden": "true" }), 64, 1, (i) => color(stops, i / 63));
  element("span", legend, max);
}

// ---- the model's input ----------------------------------------------------------------------------

/** An image from the server, {width, height, png}, in color and in gray. */
export async function openImage({ width, height, png }) {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const [own, gray] = range(2).map(() => Object.assign(document.createElement("canvas"), { width, height }));
  own.getContext("2d").drawImage(image, 0, 0);
  const pen = gray.getContext("2d"), pixels = own.getContext("2d").getImageData(0, 0, width, height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    const [red, green, blue] = pixels.data.subarray(i, i + 3);
    pixels.data.fill((red + green + blue) / 3, i, i + 3);
  }
  pen.putImageData(pixels, 0, 0);
  return { own, gray };
}

// ---- the map -----------------------------------------------------------------------------------------

/**
 * Patches on a canvas, with the prefix tokens as buttons above it. Pointing at a token selects it.
 * The layout is the model's: {pixels: [H, W], patch: [P, Q], grid: [h, w], prefix: [names]}.
 */
export class TokenMap {
  constructor(parent, label, layout, select) {
    Object.assign(this, { parent, layout, select, token: 0 });
    parent.replaceChildren();
    this.chips = element("div", parent, "", { class: "chips", role: "group", "aria-label": "Prefix tokens" });
    this.buttons = layout.prefix.map((name, token) => {
      const button = element("button", this.chips, "", { type: "button" });
      button.addEventListener("click", () => select(token));
      return { button, swatch: element("i", button), name: element("span", button, `${name} `), number: element("span", button) };
    });
    this.canvas = element("canvas", parent, "", {
      class: "patches", tabindex: 0, role: "application", "aria-label": `${label}. Arrow keys select a patch.`,
    });
    this.legend = element("div", parent, "", { class: "legend" });
    const [H, W] = layout.pixels;
    this.fine = 640 / Math.max(H, W);
    [this.canvas.width, this.canvas.height] = [Math.round(W * this.fine), Math.round(H * this.fine)];
    parent.style.maxWidth = `${LARGEST * Math.min(1, Math.max(0.4, W / H))}rem`;
    this.chips.hidden = !layout.prefix.length;
    for (const event of ["pointermove", "pointerdown"]) this.canvas.addEventListener(event, (at) => this.point(at));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
  }

  point(at) {
    const { layout: { pixels: [H, W], patch: [P, Q], grid: [h, w], prefix } } = this;
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((at.clientY - box.top) / box.height * H / P);
    const column = Math.floor((at.clientX - box.left) / box.width * W / Q);
    if (row >= 0 && row < h && column >= 0 && column < w) this.select(prefix.length + row * w + column);
  }

  step(event) {
    const { grid: [h, w], prefix: { length: n } } = this.layout;
    const [row, column] = [Math.floor((this.token - n) / w), (this.token - n) % w];
    const there = {
      ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
      Home: [row, 0], End: [row, w - 1],
    }[event.key];
    if (!there) return;
    event.preventDefault();
    const [down, across] = this.token < n ? [0, 0] : there;
    if (down >= 0 && down < h && across >= 0 && across < w) this.select(n + down * w + across);
  }

  /** The corner and sides of a patch on the canvas. */
  pane(patch) {
    const { patch: [P, Q], grid: [, w] } = this.layout, [row, column] = [Math.floor(patch / w), patch % w];
    return [column * Q * this.fine, row * P * this.fine, Q * this.fine, P * this.fine];
  }

  /**
   * Color all tokens by their values, from `min` to `max`; NaN means that a prefix token has none.
   * Without values, show the image itself; `open` from 0 to 1 widens the gaps between patches.
   */
  paint(token, image, values, { stops = HEAT, min = 0, max = 1, cover = 0.78, format = percent, open = 1 } = {}) {
    this.token = token;
    const n = this.layout.prefix.length;
    const hue = (value) => `rgb(${color(stops, (value - min) / (max - min || 1))})`;
    this.paintPatches(image, values && Array.from(values.slice(n), hue), cover, open);
    this.buttons.forEach(({ button, swatch, number }, i) => {
      const hasValue = values && !Number.isNaN(values[i]);
      button.setAttribute("aria-pressed", i === token);
      swatch.hidden = !hasValue;
      if (hasValue) swatch.style.background = hue(values[i]);
      number.textContent = hasValue ? format(values[i]) : "";
    });
    this.legend.hidden = !values;
    if (values) paintLegend(this.legend, stops, format(min), format(max));
    if (token >= n) this.frame(token - n);
  }

  paintPatches(image, hues, cover, open) {
    const pen = this.canvas.getContext("2d"), { grid: [h, w], patch: [P, Q] } = this.layout;
    const gap = Math.max(1.5, Math.min(P, Q) * this.fine * (hues ? 0.04 : 0.1 * open));
    pen.imageSmoothingEnabled = this.fine < 2;
    pen.fillStyle = LEAD;
    pen.fillRect(0, 0, this.canvas.width, this.canvas.height);
    for (let patch = 0; patch < h * w; patch++) {
      const [x, y, wide, high] = this.pane(patch);
      const inside = [x + gap / 2, y + gap / 2, wide - gap, high - gap];
      const source = [patch % w * Q, Math.floor(patch / w) * P, Q, P];
      if (image) pen.drawImage(hues ? image.gray : image.own, ...source, ...inside);
      if (!hues) continue;
      pen.globalAlpha = image ? cover : 1;
      pen.fillStyle = hues[patch];
      pen.fillRect(...inside);
      pen.globalAlpha = 1;
    }
  }

  /** A frame around the selected patch, visible on any color. */
  frame(patch) {
    const pen = this.canvas.getContext("2d"), [x, y, wide, high] = this.pane(patch);
    for (const [ink, width] of [[LEAD, 9], ["white", 4]]) {
      Object.assign(pen, { strokeStyle: ink, lineWidth: Math.min(width, Math.max(width / 3, wide / 8)) });
      pen.strokeRect(x + 2, y + 2, wide - 4, high - 4);
    }
  }
}
