"use strict";
// The chosen block, head and token of a walk: shows their stages and draws the attention of the token.

const data = JSON.parse(document.getElementById("data").textContent);
const weights = new Uint16Array(Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0)).buffer);
const { grid: [h, w], prefix, heads, tokens: T } = data;
const pick = (name) => document.getElementById(`choose-${name}`);
const pixels = document.getElementById("pixels");
const SCALE = [[10, 10, 60], [120, 20, 110], [235, 90, 50], [255, 235, 120]];  // from low to high

const chosen = () => Object.fromEntries(["block", "head", "token"].map((name) => [name, Number(pick(name).value)]));
const named = (token) => pick("token").options[token].text.replace(/^\d+: /, "");
const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;

/** The attention weights of one token; each is stored as a part of the largest weight of the row. */
function attention({ block, head, token }) {
  const row = (block * heads + head) * T + token;
  return Array.from(weights.subarray(row * T, (row + 1) * T), (code) => code / 65535 * data.most[row]);
}

function heat(t) {
  const at = Math.min(Math.max(t, 0), 1) * (SCALE.length - 1), low = Math.min(Math.floor(at), SCALE.length - 2);
  return SCALE[low].map((part, i) => Math.round(part + (SCALE[low + 1][i] - part) * (at - low)));
}

/** The image in the upper layer of the canvas, or the weights, with a frame around the chosen patch. */
function draw(id, token, row) {
  const canvas = document.getElementById(id), pen = canvas.getContext("2d"), side = 448;
  canvas.width = side;
  canvas.height = Math.round(side * pixels.naturalHeight / pixels.naturalWidth);
  const [down, across] = [canvas.height / h, canvas.width / w];
  pen.imageSmoothingEnabled = false;
  if (!row) pen.drawImage(pixels, 0, 0, canvas.width, canvas.height);
  const most = Math.max(...(row ?? [1]).slice(prefix));
  for (let patch = 0; row && patch < h * w; patch++) {
    pen.fillStyle = `rgb(${heat(row[prefix + patch] / (most || 1))})`;
    pen.fillRect(patch % w * across, Math.floor(patch / w) * down, Math.ceil(across), Math.ceil(down));
  }
  if (token < prefix) return;
  const [top, left] = [Math.floor((token - prefix) / w) * down, (token - prefix) % w * across];
  for (const [ink, wide] of [["black", 6], ["white", 2.5]]) {
    [pen.strokeStyle, pen.lineWidth] = [ink, wide];
    pen.strokeRect(left + 2, top + 2, across - 4, down - 4);
  }
}

/** The stages of the chosen block and head, and the numbers of the chosen token in them. */
function showStages({ block, head, token }) {
  for (const article of document.querySelectorAll("article[data-block]")) {
    const other = article.dataset.head !== undefined && Number(article.dataset.head) !== head;
    article.hidden = Number(article.dataset.block) !== block || other;
    if (article.hidden || !article.dataset.of) continue;
    const words = article.querySelector(".meaning");
    words.dataset.first ??= words.textContent;
    const same = token === data.token;
    words.textContent = same ? words.dataset.first : `The same for ${named(token)} (t = ${token}).`;
    const [mean, variance, meanAfter, varianceAfter] = data.statistics[block][token];
    const numbers = article.querySelector(".numbers span");
    numbers.dataset.first ??= numbers.textContent;
    const found = {
      "norm1.before": `mean ${mean}, variance ${variance}`, "norm1.after": `mean ${meanAfter}, variance ${varianceAfter}`,
      "norm1.standard": "mean 0, variance 1", "attention.row": "see the map above",
    }[article.dataset.of];
    numbers.textContent = same ? numbers.dataset.first : data.is_plain || article.dataset.of === "attention.row" ? found
      : `choose ${named(data.token)}, or run the walk with --token ${token}`;
    const image = article.querySelector("figure");
    if (image) image.hidden = !same;
  }
  for (const part of document.querySelectorAll(".chosen-block")) part.textContent = block;
}

/** The weight of each token before the patches by its name, and that of all patches. */
function parts(row, token) {
  const total = (from, to) => percent(row.slice(from, to).reduce((a, b) => a + b, 0));
  const before = prefix <= 5 ? [...Array(prefix).keys()].map((at) => `${at === token ? "itself" : named(at)} with ${total(at, at + 1)}`)
    : [`the ${prefix} tokens before the patches with ${total(0, prefix)}`];
  return [...before, `all patches with ${total(prefix)}`].join(", ").replace(/, (?=all patches)/, " and to ");
}

function show() {
  const choice = chosen(), row = attention(choice), { block, head, token } = choice;
  draw("map-image", token);
  draw("map-attention", token, row);
  document.getElementById("words").textContent = `Block ${block}, head ${head}: ${named(token)} attends to ${parts(row, token)}. `
    + "The patches with the largest weights:";
  const patches = [...row.keys()].slice(prefix).sort((a, b) => row[b] - row[a]).slice(0, 5), list = document.getElementById("top");
  list.replaceChildren(...patches.map((to) => {
    const item = document.createElement("li");
    item.textContent = `${to === token ? "itself" : named(to)}: ${percent(row[to])}`;
    return item;
  }));
  showStages(choice);
}

for (const name of ["block", "head", "token"]) pick(name).addEventListener("change", show);
for (const id of ["map-image", "map-attention"]) {
  document.getElementById(id).addEventListener("click", (event) => {
    const box = event.target.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / box.height * h);
    const column = Math.floor((event.clientX - box.left) / box.width * w);
    if (row < 0 || row >= h || column < 0 || column >= w) return;
    pick("token").value = prefix + row * w + column;
    show();
  });
}
document.getElementById("choose").hidden = false;
if (pixels.complete) show(); else pixels.addEventListener("load", show);
window.walk = { attention, show };
