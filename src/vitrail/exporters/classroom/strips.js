// Rows of numbers as strips of color, and small plots.

/** Three significant digits, with a true minus sign. */
function digits(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
  return text.replace("-", "−");
}

const maxAbs = (...rows) => rows.reduce((most, row) => row.reduce((a, x) => Math.max(a, Math.abs(x)), most), 0);
const row = (table, index, width) => table.subarray(index * width, (index + 1) * width);
const sum = (values) => values.reduce((a, b) => a + b, 0);

/** Numbers as colors, blue for negative and red for positive; the strongest color is `max`. */
function paintStrip(id, values, max = maxAbs(values)) {
  dots($(id), values.length, 1, (i) => color(SIGNED, 0.5 + values[i] / (2 * max || 1)));
  $(id).title = `${values.length} numbers, from ${digits(Math.min(...values))} to ${digits(Math.max(...values))}`;
}

/** A canvas with sharp lines on any screen: returns its pen, and width and height in CSS pixels. */
function plot(id, tall) {
  const canvas = $(id), wide = Math.max(canvas.clientWidth, 120), fine = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(wide * fine), Math.round(tall * fine)];
  canvas.style.height = `${tall}px`;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  pen.scale(fine, fine);
  pen.font = "12px system-ui, sans-serif";
  const ink = (name) => style.getPropertyValue(`--${name}`).trim();
  return { pen, wide, tall, ink };
}

/** A strip with its numbers written into it, where there is room for them. */
function paintNumbers(id, values, max = maxAbs(values)) {
  const { pen, wide, tall, ink } = plot(id, 26), cell = wide / values.length;
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "center";
  values.forEach((value, i) => {
    const shade = color(SIGNED, 0.5 + value / (2 * max || 1));
    pen.fillStyle = `rgb(${shade.map(Math.round)})`;
    pen.fillRect(i * cell, 0, Math.ceil(cell), tall);
    pen.fillStyle = shade[0] + shade[1] + shade[2] > 380 ? "#1d1d22" : "#ffffff";
    if (cell >= 30) pen.fillText(digits(Number(value.toFixed(2))), (i + 0.5) * cell, tall / 2 + 4);
  });
  $(id).title = `${values.length} numbers, from ${digits(Math.min(...values))} to ${digits(Math.max(...values))}`;
  pen.strokeStyle = ink("line");
  pen.strokeRect(0, 0, wide, tall);
}

/** How many numbers lie in each of `bins` intervals from -limit to limit. */
function histogram(values, limit, bins) {
  const counts = new Array(bins).fill(0);
  for (const value of values) {
    const at = Math.floor((value / limit + 1) / 2 * bins);
    counts[Math.min(Math.max(at, 0), bins - 1)]++;
  }
  return counts;
}

/** Bars of counts along the bottom, with 0 marked and the limits written. */
function paintHistogram(id, values, limit, name) {
  const { pen, wide, tall, ink } = plot(id, 74), bins = 41, counts = histogram(values, limit, bins);
  const floor = tall - 16, most = Math.max(...counts);
  pen.fillStyle = ink(name);
  counts.forEach((count, i) => {
    const high = count / most * (floor - 4);
    pen.fillRect(i * wide / bins + 0.5, floor - high, wide / bins - 1, high);
  });
  pen.fillStyle = pen.strokeStyle = ink("dim");
  pen.beginPath();
  pen.moveTo(0, floor + 0.5);
  pen.lineTo(wide, floor + 0.5);
  pen.moveTo(wide / 2, 0);
  pen.lineTo(wide / 2, floor);
  pen.globalAlpha = 0.5;
  pen.stroke();
  pen.globalAlpha = 1;
  pen.fillText(digits(-limit), 1, tall - 3);
  pen.fillText("0", wide / 2 - 3, tall - 3);
  const high = digits(limit);
  pen.fillText(high, wide - pen.measureText(high).width - 1, tall - 3);
}
