// E's filters as images: each of the D numbers of a token is the patch times one filter.

const FILTERS = (() => {
  const size = vit.channels * vit.patch[0] * vit.patch[1], E = vit.tensors["tokens.proj.weight"];
  const norm = (i) => Math.sqrt(sum(row(E, i, size).map((x) => x * x)));
  const norms = range(vit.width).map(norm);
  const order = range(vit.width).sort((a, b) => norms[b] - norms[a]).slice(0, 96);  // the strongest first
  const across = Math.min(order.length, 16);
  return { size, E, norms, order, across, down: Math.ceil(order.length / across) };
})();

/** The color of one pixel of a filter: signed for one channel; RGB with mid gray as 0 for three. */
function filterColor(filter, pixel, max) {
  const area = vit.patch[0] * vit.patch[1];
  if (gray) return color(SIGNED, 0.5 + filter[pixel] / (2 * max));
  return [0, 1, 2].map((c) => 127.5 + 127.5 * filter[c * area + pixel] / max);
}

function paintSheetOfFilters() {
  const { size, E, order, across, down } = FILTERS, [P, Q] = vit.patch, canvas = $("filters-sheet");
  const fine = Math.max(1, Math.round(640 / (across * (Q + 1)))), [tileH, tileW] = [P * fine + 3, Q * fine + 3];
  [canvas.width, canvas.height] = [across * tileW, down * tileH];
  const pen = canvas.getContext("2d");
  order.forEach((number, place) => {
    const filter = row(E, number, size), max = maxAbs(filter) || 1, tile = document.createElement("canvas");
    dots(tile, Q, P, (i) => filterColor(filter, i, max));
    const [left, top] = [place % across * tileW, Math.floor(place / across) * tileH];
    pen.imageSmoothingEnabled = false;
    pen.drawImage(tile, left + 1, top + 1, Q * fine, P * fine);
    if (place !== state.filter) return;
    for (const [ink, wide] of [["black", 4], ["white", 2]]) {
      [pen.strokeStyle, pen.lineWidth] = [ink, wide];
      pen.strokeRect(left + 1.5, top + 1.5, Q * fine - 1, P * fine - 1);
    }
  });
}

/** What the chosen filter gives on every patch of the image. */
function paintFilters() {
  const { order, norms } = FILTERS, number = order[state.filter], D = vit.width;
  const values = new Float32Array(vit.T);
  for (let patch = 0; patch < vit.N; patch++) values[n + patch] = state.result.embedded[patch * D + number];
  const max = maxAbs(values) || 1, best = n + largest(values.subarray(n));
  maps.filters.paint(values, { stops: SIGNED, min: -max, max, imageWeight: 0.15, format: digits });
  $("filters-words").textContent = `Filter ${number} of ${D} (length ${digits(norms[number])}) responds most to `
    + `${named(best)} (${digits(values[best])})`
    + (state.token >= n ? `; for ${named(state.token)} it gives ${digits(values[state.token])}.` : ".");
}

function chooseFilter(place) {
  if (place < 0 || place >= FILTERS.order.length || place === state.filter) return;
  state.filter = place;
  paintSheetOfFilters();
  paintFilters();
}

for (const kind of ["pointermove", "pointerdown"]) $("filters-sheet").addEventListener(kind, (event) => {
  const box = $("filters-sheet").getBoundingClientRect(), { across, down } = FILTERS;
  const column = Math.floor((event.clientX - box.left) / box.width * across);
  const line = Math.floor((event.clientY - box.top) / box.height * down);
  if (column >= 0 && column < across) chooseFilter(line * across + column);
});
$("filters-sheet").addEventListener("keydown", (event) => {
  const step = { ArrowUp: -FILTERS.across, ArrowDown: FILTERS.across, ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  chooseFilter(state.filter + step);
});
