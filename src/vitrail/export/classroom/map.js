// The model in the page, what is shown of it now, and pictures with something known of each token.

// ---- what the page holds -------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);

function bytes(text) {
  const found = atob(text.trim()), array = new Uint8Array(found.length);
  for (let i = 0; i < found.length; i++) array[i] = found.charCodeAt(i);
  return array;
}

const numbers = new Float32Array(bytes($("weights").textContent).buffer);
const vit = new Vit(JSON.parse($("facts").textContent), numbers);
const [H, W] = vit.size, [h, w] = vit.grid, n = vit.prefix.length, grey = vit.channels === 1;
const PAPER = grey ? "black" : "white";
const FINE = Math.max(1, Math.round(336 / Math.max(H, W)));  // pixels of the sheet for one of the model's

/** What is shown now. Of tokens, blocks and heads the number, from 0; a head of -1 is the mean over all. */
const state = {
  levels: new Uint8Array(H * W * vit.channels), found: null, drawn: false,
  token: vit.prefix.includes("class") ? 0 : n + Math.floor(h / 2) * w + Math.floor(w / 2),
  block: vit.depth - 1, head: -1, depth: vit.depth,
};

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`;
const largest = (values) => values.reduce((best, value, i) => value > values[best] ? i : best, 0);
const range = (count) => [...Array(count).keys()];

function named(token) {
  const [row, column] = [Math.floor((token - n) / w) + 1, (token - n) % w + 1];
  if (token >= n) return `the patch in row ${row}, column ${column}`;
  return vit.prefix[token].startsWith("register") ? vit.prefix[token] : `the ${vit.prefix[token]} token`;
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

function element(kind, parent, text = "", attributes = {}) {
  const made = parent.appendChild(document.createElement(kind));
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// ---- colours -------------------------------------------------------------------------------------

const HEAT = [[10, 10, 60], [120, 20, 110], [235, 90, 50], [255, 235, 120]];  // from nothing to much
const SIGNED = [[33, 102, 172], [146, 197, 222], [247, 247, 247], [244, 165, 130], [178, 24, 43]];

/** The colour at a place from 0 to 1 along some stops. */
function colour(stops, place) {
  const at = Math.min(Math.max(place, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((part, i) => part + (stops[low + 1][i] - part) * (at - low));
}

/** A canvas of so many pixels, each coloured by a function of its number. */
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

/** Red, green and blue of the model's pixel i. */
function pixel(levels, i) {
  const at = i * vit.channels;
  return grey ? [levels[at], levels[at], levels[at]] : [levels[at], levels[at + 1], levels[at + 2]];
}

// ---- a picture with something known of each token ---------------------------------------------------

/** Patches on a canvas, the tokens before them as buttons above it. To point at one is to choose it. */
class TokenMap {
  constructor(id) {
    const place = $(id);
    const words = { class: "chips", role: "group", "aria-label": "Tokens before the patches" };
    this.chips = element("div", place, "", words);
    this.buttons = vit.prefix.map((name, token) => {
      const button = element("button", this.chips, "", { type: "button" });
      button.addEventListener("click", () => choose(token));
      const swatch = element("i", button);
      element("span", button, `${name} `);
      return { button, swatch, share: element("span", button) };
    });
    this.chips.hidden = !n;
    this.canvas = element("canvas", place, "", {
      class: "patches", tabindex: 0, role: "application",
      "aria-label": `${place.dataset.label}. Arrow keys choose a patch.`,
    });
    this.legend = element("div", place, "", { class: "legend" });
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
      const patch = state.token < n ? 0 : state.token - n + step;
      if (patch >= 0 && patch < vit.N) choose(n + patch);
    });
  }

  /** Colour by values of all tokens, from `least` to `most`; without values, the picture as it is. */
  paint(values, { stops = HEAT, least = 0, most = 1, under = 0.3, write = percent } = {}) {
    const place = (value) => (value - least) / (most - least || 1);
    const hues = values && Array.from(values, (value) => colour(stops, place(value)));
    this.paintPatches(hues, under);
    this.paintChoice();
    this.buttons.forEach(({ button, swatch, share }, token) => {
      button.setAttribute("aria-pressed", token === state.token);
      swatch.hidden = !values;
      if (values) swatch.style.background = `rgb(${hues[token].map(Math.round)})`;
      share.textContent = values ? write(values[token]) : "";
    });
    this.legend.hidden = !values;
    if (values) {
      dots(this.ramp, 64, 1, (i) => colour(stops, i / 63));
      [this.low.textContent, this.high.textContent] = [write(least), write(most)];
    }
  }

  /** Each patch in its hue, with so much of the picture's light as `under` says. */
  paintPatches(hues, under) {
    const small = document.createElement("canvas");
    dots(small, W, H, (i) => {
      const row = Math.floor(Math.floor(i / W) / vit.patch[0]), column = Math.floor((i % W) / vit.patch[1]);
      const levels = pixel(state.levels, i);
      if (!hues || row >= h || column >= w) return levels;
      const [red, green, blue] = hues[n + row * w + column], own = 1 - under;
      const light = under * (levels[0] + levels[1] + levels[2]) / 3;
      return [own * red + light, own * green + light, own * blue + light];
    });
    [this.canvas.width, this.canvas.height] = [W * FINE, H * FINE];
    const pen = this.canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, 0, 0, W * FINE, H * FINE);
  }

  /** The lines between patches, and a frame round the chosen one. */
  paintChoice() {
    const pen = this.canvas.getContext("2d"), [P, Q] = vit.patch.map((side) => side * FINE);
    pen.strokeStyle = "rgba(150, 150, 160, .55)";
    for (let row = 0; row < h; row++)
      for (let column = 0; column < w; column++) pen.strokeRect(column * Q, row * P, Q, P);
    if (state.token < n) return;
    const [top, left] = [Math.floor((state.token - n) / w) * P, (state.token - n) % w * Q];
    for (const [ink, wide] of [["black", 6], ["white", 2.5]]) {  // seen on any colour
      [pen.strokeStyle, pen.lineWidth] = [ink, wide];
      pen.strokeRect(left + 2, top + 2, Q - 4, P - 4);
    }
  }
}

const NAMES = ["tokens", "attention", "rollout", "positions"];
const maps = Object.fromEntries(NAMES.map((name) => [name, new TokenMap(`${name}-map`)]));

function choose(token) {
  if (token === state.token) return;
  state.token = token;
  paintChosen();
}
