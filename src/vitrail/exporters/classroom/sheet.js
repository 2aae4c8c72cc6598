// The canvas to draw on: a drawing, an example or an image file becomes pixels for the model.

// ---- canvas -------------------------------------------------------------------------------------

const sheet = $("sheet"), pen = sheet.getContext("2d", { willReadFrequently: true });
[sheet.width, sheet.height] = [W * FINE, H * FINE];

function blank() {
  [pen.fillStyle, pen.shadowBlur] = [PAPER, 0];
  pen.fillRect(0, 0, sheet.width, sheet.height);
}

/** The model's pixels: the mean of each FINE x FINE square of the canvas. */
function read(canvas) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, sheet.width, sheet.height), C = vit.channels;
  const sums = new Float64Array(H * W * C);
  for (let y = 0; y < H * FINE; y++) for (let x = 0; x < W * FINE; x++) for (let c = 0; c < C; c++)
    sums[(Math.floor(y / FINE) * W + Math.floor(x / FINE)) * C + c] += data[4 * (y * W * FINE + x) + c];
  return Uint8Array.from(sums, (sum) => Math.round(sum / (FINE * FINE)));
}

/** The drawing as in MNIST: the longer side is 20/28 of the image, the center of mass is in the middle. */
function centered() {
  const { data } = pen.getImageData(0, 0, sheet.width, sheet.height);
  let [top, left, bottom, right, mass, down, across] = [Infinity, Infinity, -1, -1, 0, 0, 0];
  for (let y = 0; y < sheet.height; y++) for (let x = 0; x < sheet.width; x++) {
    const ink = data[4 * (y * sheet.width + x)];
    if (ink < 64) continue;
    [top, left] = [Math.min(top, y), Math.min(left, x)];
    [bottom, right] = [Math.max(bottom, y), Math.max(right, x)];
    [mass, down, across] = [mass + ink, down + ink * y, across + ink * x];
  }
  if (!mass) return sheet;
  const long = Math.max(bottom - top, right - left) + 1;
  const zoom = Math.min(2, 20 / 28 * Math.min(sheet.width, sheet.height) / long);  // a dot stays a dot
  const moved = document.createElement("canvas"), ink = moved.getContext("2d");
  [moved.width, moved.height] = [sheet.width, sheet.height];
  ink.fillStyle = PAPER;
  ink.fillRect(0, 0, moved.width, moved.height);
  ink.translate(moved.width / 2 - zoom * across / mass, moved.height / 2 - zoom * down / mass);
  ink.scale(zoom, zoom);
  ink.imageSmoothingQuality = "high";
  ink.drawImage(sheet, 0, 0);
  return moved;
}

function readSheet() {
  state.pixels = read(gray && state.drawn && $("center").checked ? centered() : sheet);
  compute();
}

let waiting = false;

/** Run the model at most once per frame; a slow model waits for the end of the stroke. */
function schedule() {
  if (waiting || (stroke && took > 150)) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; readSheet(); });
}

let stroke = null;

function position(event) {
  const box = sheet.getBoundingClientRect();
  const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  return [x * sheet.width, y * sheet.height];
}

function draw(event) {
  const [x, y] = position(event), side = Math.max(sheet.width, sheet.height);
  pen.strokeStyle = pen.shadowColor = gray ? "white" : $("color").value;
  [pen.lineCap, pen.lineJoin, pen.lineWidth, pen.shadowBlur] = ["round", "round", 0.085 * side, 0.02 * side];
  pen.beginPath();
  pen.moveTo(...stroke);
  pen.lineTo(x, y);
  pen.stroke();
  stroke = [x, y];
  schedule();
}

sheet.addEventListener("pointerdown", (event) => {
  event.preventDefault();
  sheet.setPointerCapture(event.pointerId);
  if (gray && !state.drawn) blank();  // a digit starts on an empty canvas
  state.drawn = true;
  stroke = position(event);
  draw(event);
});
sheet.addEventListener("pointermove", (event) => {
  if (stroke) (event.getCoalescedEvents?.() ?? [event]).forEach(draw);
});
for (const end of ["pointerup", "pointercancel"]) sheet.addEventListener(end, () => { stroke = null; schedule(); });

$("clear").addEventListener("click", () => {
  blank();
  $("message").textContent = $("file").value = "";
  state.drawn = true;
  readSheet();
});
$("center").addEventListener("change", readSheet);

/** Show an image of the model's size, given as pixels. */
function show(pixels) {
  const small = document.createElement("canvas");
  dots(small, W, H, (i) => rgb(pixels, i));
  blank();
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 0, 0, sheet.width, sheet.height);
  pen.imageSmoothingEnabled = true;
  [state.pixels, state.drawn] = [pixels, false];
  $("message").textContent = $("file").value = "";  // they belong to the previous image
  compute();
}

/** Show an image file, resized and cropped as in the model's preprocessing. */
async function openImage(file) {
  $("message").textContent = "";
  blank();
  clearAnswer();
  let image;
  try {
    image = await createImageBitmap(file);
  } catch {
    $("message").textContent = "Your browser cannot read this file as an image.";
    return;
  }
  const { resized: [tall, wide], shortest } = vit.preprocess;
  const zoom = tall / Math.min(image.width, image.height);
  const target = shortest ? [image.width * zoom, image.height * zoom] : [wide, tall];
  const [across, down] = target.map((side) => side * FINE);
  blank();
  pen.imageSmoothingQuality = "high";
  pen.drawImage(image, (sheet.width - across) / 2, (sheet.height - down) / 2, across, down);
  state.drawn = false;
  readSheet();
}

$("file").addEventListener("change", () => { if ($("file").files[0]) openImage($("file").files[0]); });
if (!gray) {
  for (const event of ["dragover", "dragleave", "drop"]) sheet.addEventListener(event, (at) => {
    at.preventDefault();
    sheet.classList.toggle("over", event === "dragover");
    if (event === "drop" && at.dataTransfer.files[0]) openImage(at.dataTransfer.files[0]);
  });
}

// ---- start -----------------------------------------------------------------------------------------

fill();
blank();
if (vit.examples.length) show(bytes(vit.examples[Math.min(3, vit.examples.length - 1)].pixels));
else readSheet();

window.addEventListener("resize", paintSelected);  // plots and the drawing have the width of the page
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => paintBlock());

window.vitrail = { vit, state, forward: (pixels, change) => vit.forward(pixels, change), show, shufflePatches };
