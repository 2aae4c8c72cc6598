// Pictures with something known of each token: colours, arrays from the server, and the map itself.

export const $ = (id) => document.getElementById(id);
export const range = (count) => [...Array(count).keys()];
export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`;
export const capital = (text) => text[0].toUpperCase() + text.slice(1);
export const largest = (values) => values.reduce((best, value, i) => (value > values[best] ? i : best), 0);

/** What others wrote, on one line: marks that turn the direction of writing or hide text become visible. */
export function plain(text, most = 300) {
  const hidden = /[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/gu;
  const seen = text.slice(0, 2 * most).replace(hidden, (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return seen.length > most ? `${seen.slice(0, most)}…` : seen;
}

/** A new element; its text is only ever text, whoever wrote it. */
export function element(kind, parent, text = "", attributes = {}) {
  const made = parent.appendChild(document.createElement(kind));
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** An array of the server's: {shape, dtype, data}. */
export function unpack({ dtype, data }) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  return dtype === "float32" ? new Float32Array(bytes.buffer) : bytes;
}

// ---- colours -------------------------------------------------------------------------------------

export const HEAT = [[10, 10, 60], [120, 20, 110], [235, 90, 50], [255, 235, 120]];  // from nothing to much
export const SIGNED = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [244, 165, 130], [178, 24, 43]];
const LEAD = "#17171d";
const LARGEST = 22;  // rem, the longer side of a map

/** The colour at a place from 0 to 1 along some stops. */
export function colour(stops, place) {
  const at = Math.min(Math.max(place, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((part, i) => Math.round(part + (stops[low + 1][i] - part) * (at - low)));
}

/** A canvas of so many pixels, each coloured by a function of its number. */
export function dots(canvas, across, down, paint) {
  [canvas.width, canvas.height] = [across, down];
  const image = new ImageData(across, down);
  for (let i = 0; i < across * down; i++) image.data.set([...paint(i), 255], 4 * i);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Which colour is which number. */
export function paintLegend(legend, stops, least, most) {
  legend.replaceChildren();
  element("span", legend, least);
  dots(element("canvas", legend, "", { "aria-hidden": "true" }), 64, 1, (i) => colour(stops, i / 63));
  element("span", legend, most);
}

// ---- what the model saw ----------------------------------------------------------------------------

/** A picture of the server's, {width, height, png}, as it is and in grey. */
export async function openPicture({ width, height, png }) {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const [own, grey] = range(2).map(() => Object.assign(document.createElement("canvas"), { width, height }));
  own.getContext("2d").drawImage(image, 0, 0);
  const pen = grey.getContext("2d"), pixels = own.getContext("2d").getImageData(0, 0, width, height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    const [red, green, blue] = pixels.data.subarray(i, i + 3);
    pixels.data.fill((red + green + blue) / 3, i, i + 3);
  }
  pen.putImageData(pixels, 0, 0);
  return { own, grey };
}

// ---- the map -----------------------------------------------------------------------------------------

/**
 * Patches as panes on a canvas, the tokens before them as buttons above it. To point at one is to choose it.
 * The layout is the model's: {pixels: [H, W], patch: [P, Q], grid: [h, w], prefix: [names]}.
 */
export class TokenMap {
  constructor(place, label, layout, choose) {
    Object.assign(this, { place, layout, choose, token: 0 });
    place.replaceChildren();
    this.chips = element("div", place, "", { class: "chips", role: "group", "aria-label": "Tokens before the patches" });
    this.buttons = layout.prefix.map((name, token) => {
      const button = element("button", this.chips, "", { type: "button" });
      button.addEventListener("click", () => choose(token));
      return { button, swatch: element("i", button), name: element("span", button, `${name} `), share: element("span", button) };
    });
    this.canvas = element("canvas", place, "", {
      class: "patches", tabindex: 0, role: "application", "aria-label": `${label}. Arrow keys choose a patch.`,
    });
    this.legend = element("div", place, "", { class: "legend" });
    const [H, W] = layout.pixels;
    this.fine = 640 / Math.max(H, W);
    [this.canvas.width, this.canvas.height] = [Math.round(W * this.fine), Math.round(H * this.fine)];
    place.style.maxWidth = `${LARGEST * Math.min(1, Math.max(0.4, W / H))}rem`;
    this.chips.hidden = !layout.prefix.length;
    for (const event of ["pointermove", "pointerdown"]) this.canvas.addEventListener(event, (at) => this.point(at));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
  }

  point(at) {
    const { layout: { pixels: [H, W], patch: [P, Q], grid: [h, w], prefix } } = this;
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((at.clientY - box.top) / box.height * H / P);
    const column = Math.floor((at.clientX - box.left) / box.width * W / Q);
    if (row >= 0 && row < h && column >= 0 && column < w) this.choose(prefix.length + row * w + column);
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
    if (down >= 0 && down < h && across >= 0 && across < w) this.choose(n + down * w + across);
  }

  /** The corner and sides of a patch on the canvas. */
  pane(patch) {
    const { patch: [P, Q], grid: [, w] } = this.layout, [row, column] = [Math.floor(patch / w), patch % w];
    return [column * Q * this.fine, row * P * this.fine, Q * this.fine, P * this.fine];
  }

  /**
   * Colour by values of all tokens (or of the patches alone, after as many NaN), from `least` to `most`.
   * Without values, the picture itself; `open` from 0 to 1 is how far its patches have come apart.
   */
  paint(token, picture, values, { stops = HEAT, least = 0, most = 1, cover = 0.78, write = percent, open = 1 } = {}) {
    this.token = token;
    const n = this.layout.prefix.length;
    const hue = (value) => `rgb(${colour(stops, (value - least) / (most - least || 1))})`;
    this.paintPatches(picture, values && Array.from(values.slice(n), hue), cover, open);
    this.buttons.forEach(({ button, swatch, share }, i) => {
      const known = values && !Number.isNaN(values[i]);
      button.setAttribute("aria-pressed", i === token);
      swatch.hidden = !known;
      if (known) swatch.style.background = hue(values[i]);
      share.textContent = known ? write(values[i]) : "";
    });
    this.legend.hidden = !values;
    if (values) paintLegend(this.legend, stops, write(least), write(most));
    if (token >= n) this.frame(token - n);
  }

  paintPatches(picture, hues, cover, open) {
    const pen = this.canvas.getContext("2d"), { grid: [h, w], patch: [P, Q] } = this.layout;
    const gap = Math.max(1.5, Math.min(P, Q) * this.fine * (hues ? 0.04 : 0.1 * open));
    pen.imageSmoothingEnabled = this.fine < 2;
    pen.fillStyle = LEAD;
    pen.fillRect(0, 0, this.canvas.width, this.canvas.height);
    for (let patch = 0; patch < h * w; patch++) {
      const [x, y, wide, high] = this.pane(patch);
      const inside = [x + gap / 2, y + gap / 2, wide - gap, high - gap];
      const source = [patch % w * Q, Math.floor(patch / w) * P, Q, P];
      if (picture) pen.drawImage(hues ? picture.grey : picture.own, ...source, ...inside);
      if (!hues) continue;
      pen.globalAlpha = picture ? cover : 1;
      pen.fillStyle = hues[patch];
      pen.fillRect(...inside);
      pen.globalAlpha = 1;
    }
  }

  /** Round the chosen patch, seen on any colour. */
  frame(patch) {
    const pen = this.canvas.getContext("2d"), [x, y, wide, high] = this.pane(patch);
    for (const [ink, width] of [[LEAD, 9], ["white", 4]]) {
      Object.assign(pen, { strokeStyle: ink, lineWidth: Math.min(width, Math.max(width / 3, wide / 8)) });
      pen.strokeRect(x + 2, y + 2, wide - 4, high - 4);
    }
  }
}
