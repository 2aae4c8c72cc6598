// The ways in which a picture arrives: chosen, dropped, pasted, or taken from the examples.

import { $, element, plain } from "./maps.js";
import { ask, askJSON, Trouble } from "./server.js";

const SMALL = 64;  // pixels: pictures up to this size are shown as squares, not smoothed

/** Hand over each picture as (file, name); what cannot be one goes to `fail`. */
export function listen(take, fail) {
  $("pick").addEventListener("change", () => {
    if ($("pick").files.length) take($("pick").files[0], $("pick").files[0].name);
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
    receive(event.dataTransfer, "What you dropped is not a picture file. Save the picture first, and drop the file.", take, fail);
  });
  document.addEventListener("paste", (event) => {
    if (event.target.matches("input[type=password]")) return;
    receive(event.clipboardData, "There is no picture in what you pasted. Copy a picture, not its address.", take, fail);
  });
}

function receive(transfer, otherwise, take, fail) {
  const file = transfer?.files[0];
  if (file) take(file, file.name);
  else fail(new Trouble("refused", otherwise));
}

/** Refuse here what the server would refuse. */
export function check(file, given, most) {
  const name = plain(given, 80);
  const mebibytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;
  if (file.size === 0) throw new Trouble("refused", `“${name}” is empty. Choose another file.`);
  if (most && file.size > most) {
    const words = `A picture may have at most ${mebibytes(most)} here, and “${name}” has ${mebibytes(file.size)}.`;
    throw new Trouble("refused", `${words} Make it smaller, or choose another.`);
  }
}

/** Show the picture as it was given; some formats that the server reads are not shown by browsers. */
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
  image.alt = $("picture-name").textContent = plain(name);
}

/** Fetched like all else, since an <img> would not send a token. */
export async function offerExamples(take) {
  const found = await askJSON("v1/examples");
  $("examples").replaceChildren();
  const places = found.map(({ name }) => {
    const words = { "aria-label": plain(name), title: plain(name) };
    const button = element("button", $("examples"), "", { type: "button", disabled: "", ...words });
    return { button, image: element("img", button, "", { alt: "" }) };
  });
  $("examples-words").hidden = !found.length;
  await Promise.all(found.map(async ({ name, url }, i) => {
    const { button, image } = places[i], file = await (await ask(url.replace(/^\//, ""))).blob();
    image.src = URL.createObjectURL(file);
    image.onload = () => { if (image.naturalWidth <= SMALL) image.className = "tiny"; };
    button.disabled = false;
    button.addEventListener("click", () => take(file, name));
  }));
}
