// The decorative window at the top of the page: panes of colored glass, the same each time.

const COLORS = ["#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#7a2f6d", "#f0c419", "#1d4e9e"];
const HIGH = 3;  // rows of panes

/** A seeded random number generator, so that the window is always the same. */
function random(seed) {
  return () => (seed = (seed * 16807) % 2147483647) / 2147483647;
}

export function drawGlass(canvas) {
  const fine = window.devicePixelRatio || 1, next = random(7);
  [canvas.width, canvas.height] = [canvas.clientWidth * fine, canvas.clientHeight * fine];
  const side = canvas.height / HIGH, across = Math.ceil(canvas.width / (1.5 * side)) + 1;
  const corner = (row, column) => [
    (column - 0.5 + (column % 1 ? 0 : 0.55 * (next() - 0.5))) * 1.5 * side,
    row === 0 || row === HIGH ? row * side : (row + 0.55 * (next() - 0.5)) * side,
  ];
  const corners = Array.from({ length: HIGH + 1 }, (_, row) =>
    Array.from({ length: across + 1 }, (_, column) => corner(row, column)));
  const pen = canvas.getContext("2d");
  Object.assign(pen, { strokeStyle: "#17171d", lineWidth: 2.2 * fine, lineJoin: "round" });
  let last = 0;
  for (let row = 0; row < HIGH; row++) {
    for (let column = 0; column < across; column++) {
      const [a, b, c, d] = [corners[row][column], corners[row][column + 1], corners[row + 1][column + 1], corners[row + 1][column]];
      const halves = next() < 0.4 ? [[a, b, c], [a, c, d]] : [[a, b, c, d]];
      for (const pane of halves) {
        last = (last + 1 + Math.floor(next() * (COLORS.length - 1))) % COLORS.length;  // never the same color twice in a row
        drawPane(pen, pane, COLORS[last], 0.82 + 0.18 * next());
      }
    }
  }
}

function drawPane(pen, points, color, light) {
  pen.beginPath();
  points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.closePath();
  pen.fillStyle = "white";
  pen.fill();
  pen.globalAlpha = light;
  pen.fillStyle = color;
  pen.fill();
  pen.globalAlpha = 1;
  pen.stroke();
}
