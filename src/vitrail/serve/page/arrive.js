// Image input: file picker, drop, paste and examples.

import { $, element, plain } from "./maps.js";
import { fetchJSON, request, ServerError } from "./server.js";

const SMALL = 64;  // pixels: images up to this size are enlarged without smoothing

/** Call `submit(file, name)` for each image, and `fail` for anything else. */
export function listen(submit, fail) {
  $("pick").addEventListener("change", () => {
    if ($("pick").files.length) submit($("pick").files[0], $("pick").files[0].name);
    $("pick").value = "";  // so that the same file can be chosen again
  });
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("over");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("over");
    receive(event.dataTransfer, "What you dropped is not a file. Save the image first, then drop the file.", submit, fail);
  });
  document.addEventListener("paste", (event) => {
    if (event.target.matches("input[type=password]")) return;
    receive(event.clipboardData, "The clipboard contains no image. Copy the image itself, not its address.", submit, fail);
  });
}

function receive(transfer, message, submit, fail) {
  const file = transfer?.files[0];
  if (file) submit(file, file.name);
  else fail(new ServerError("refused", message));
}

/** Refuse files that the server would refuse. */
export function check(file, fileName, limit) {
  const name = plain(fileName, 80);
  const mebibytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;
  if (file.size === 0) throw new ServerError("refused", `“${name}” is empty. Choose another file.`);
  if (limit && file.size > limit) {
    const message = `The limit is ${mebibytes(limit)}, and “${name}” has ${mebibytes(file.size)}; choose a smaller image.`;
    throw new ServerError("refused", message);
  }
}

/** Show the image file; browsers cannot display every format that the server reads. */
export function preview(file, name) {
  const image = $("preview");
  URL.revokeObjectURL(image.src);
  image.hidden = true;
  image.onload = () => {
    image.className = Math.max(image.naturalWidth, image.naturalHeight) <= SMALL ? "tiny" : "";
    image.hidden = false;
    $("drop-words").hidden = true;
  };
  image.onerror = () => { $("drop-words").hidden = false; };
  image.src = URL.createObjectURL(file);
  image.alt = $("image-name").textContent = plain(name);
}

/** Show the examples; they are fetched because an <img> would not send the token. */
export async function showExamples(submit) {
  const examples = await fetchJSON("v1/examples");
  $("examples").replaceChildren();
  const slots = examples.map(({ name }) => {
    const labels = { "aria-label": plain(name), title: plain(name) };
    const button = element("button", $("examples"), "", { type: "button", disabled: "", ...labels });
    return { button, image: element("img", button, "", { alt: "" }) };
  });
  $("examples-words").hidden = !examples.length;
  await Promise.all(examples.map(async ({ name, url }, i) => {
    const { button, image } = slots[i], file = await (await request(url.replace(/^\//, ""))).blob();
    image.src = URL.createObjectURL(file);
    image.onload = () => { if (image.naturalWidth <= SMALL) image.className = "tiny"; };
    button.disabled = false;
    button.addEventListener("click", () => submit(file, name));
  }));
}
