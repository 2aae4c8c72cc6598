// The guided tour: each step shows a section, sets the page to something worth seeing, and says what it is.

const middle = () => n + Math.floor(h / 2) * w + Math.floor(w / 2);

const TOUR = [
  ["draw", "An image goes in", "This is what the model sees: numbers, one for each pixel and channel. Draw something, or go on with this one."],
  ["filters", "Patches and filters", "The image is cut into patches. Each of the filters here is multiplied with every patch: a column of E. "
    + "Point at a filter to see where in the image it responds.", () => select(middle())],
  ["tokens", "A patch becomes a token", "The answers of all filters are the patch's vector. Its position is added, because attention by itself does not "
    + "know where a patch lies. From here on the model has only these vectors."],
  ["norm", "LayerNorm", "Before each part of a block, every token is brought to mean 0 and variance 1 on its own, then scaled and shifted by learned "
    + "numbers. Look at the two histograms.", () => chooseBlock(0, "norm1")],
  ["attention", "Attention", "Each token asks a question (query), and every token has a key and a value. Here are the weights of one token: how much of each "
    + "other token it takes. Try the heads: each looks at something else.", () => { chooseBlock(0); chooseHead(0); }],
  ["weight", "One weight, all its numbers", "Query times key, summed; divided by √d; softmax over all tokens. The result says how much of the value is taken."],
  ["mlp", "The MLP", "Now each token is changed on its own: many hidden units, most of them closed by the activation, then back to the width of a token. "
    + "Both parts of a block add to the token; they never replace it."],
  ["answer", "The answer", "After the last block one vector is left, and the head turns it into scores. Move the slider to see what the head would say "
    + "after fewer blocks."],
  ["experiment", "Now break it", "Positions off, then patches shuffled: without positions the answer cannot change, since attention treats tokens as a set. "
    + "With positions it does. Silence heads to find the ones that matter.",
  () => { if (vit.tensors.position) { $("no-positions").checked = true; experiment({ positions: false }); } }],
  ["positions", "What the positions know", "Nobody told the model which patches are neighbors. Here is what its position embeddings say about it.",
    () => resetExperiment()],
].filter(([id]) => id !== "positions" || vit.tensors.position);

let stop = -1;  // the step of the tour, -1 if there is none

function showStep(number) {
  document.querySelector(".toured")?.classList.remove("toured");
  stop = number;
  $("tour").hidden = stop < 0;
  if (stop < 0) {
    if (!isPlain(state)) resetExperiment();
    return $("tour-start").focus();
  }
  const [id, title, words, act] = TOUR[stop];
  $("tour-title").textContent = `${stop + 1} of ${TOUR.length}: ${title}`;
  $("tour-words").textContent = words;
  $("tour-back").disabled = stop === 0;
  $("tour-next").textContent = stop === TOUR.length - 1 ? "Done" : "Next";
  act?.();
  $(id).classList.add("toured");
  goTo(id);
}

$("tour-start").addEventListener("click", () => { showStep(0); $("tour-next").focus(); });
$("tour-back").addEventListener("click", () => showStep(stop - 1));
$("tour-next").addEventListener("click", () => showStep(stop === TOUR.length - 1 ? -1 : stop + 1));
$("tour-close").addEventListener("click", () => showStep(-1));
$("tour").addEventListener("keydown", (event) => {
  if (event.key === "Escape") showStep(-1);
});
