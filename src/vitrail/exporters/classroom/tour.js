// The article below the drawing, and the same steps as a guided tour: each opens a part and says what it shows.

const middle = () => n + Math.floor(h / 2) * w + Math.floor(w / 2);

const TOUR = [
  ["draw", "An image goes in", "The model sees numbers, one for each pixel and channel. Draw something, or take this one."],
  ["filters", "Patches and filters", "The image is cut into patches, and each patch is multiplied with every filter: the columns of E. "
    + "Point at a filter to see where in the image it responds.", () => select(middle())],
  ["tokens", "A patch becomes a token", "The responses of all filters are the vector of the patch. Its position embedding is added, because "
    + "attention by itself does not know where a patch lies. From here on the model has only these vectors: the residual stream, the thick line of the drawing."],
  ["norm", "LayerNorm", "Before each branch of a block, every token is brought to mean 0 and variance 1, then scaled and shifted by learned "
    + "numbers. Compare the two histograms.", () => chooseBlock(0, "norm1")],
  ["attention", "Attention", "Each token has a query, a key and a value. A row of A says how much of each other token's value it takes. "
    + "Try the heads: each attends to something else.", () => { chooseBlock(0); chooseHead(0); }],
  ["weight", "One weight, all its numbers", "Query times key, summed; divided by √d; softmax over all tokens. Play it slowly, and follow one number."],
  ["mlp", "The MLP", "Now each token is changed on its own: many hidden units, most of them set near zero by the activation, then back to the width "
    + "of a token. Attention and MLP add to the stream; they never replace it."],
  ["answer", "The prediction", "After the last block the head turns one vector into a score for each class. Move the slider to apply the head "
    + "after fewer blocks (the logit lens). It was trained on the last block only, so a poor early prediction does not mean that the information is missing."],
  ["experiment", "Now break it", "Without position embeddings, shuffling the patches cannot change the prediction: attention treats tokens as a set. "
    + "With them it does. Silence heads to find those that matter.",
  () => { if (vit.tensors.position) { $("no-positions").checked = true; experiment({ positions: false }); } }],
  ["positions", "What the positions know", "Nobody told the model which patches are neighbors. This is what its position embeddings say about it.",
    () => resetExperiment()],
  ["rollout", "Through all blocks", "Tokens mix in every block, so the pooled vector combines many patches. Rollout multiplies the attention of all "
    + "blocks to trace it back to the image."],
].filter(([id]) => id !== "positions" || vit.tensors.position);

/** The steps as paragraphs to scroll through, each with a button that opens its part. */
function fillArticle() {
  for (const [id, title, words, act] of TOUR) {
    const part = element("div", $("article"));
    element("h3", part, title);
    element("p", part, words);
    const button = element("button", part, "Show it", { type: "button", "aria-label": `Show it: ${title}` });
    button.addEventListener("click", () => { act?.(); goTo(id); });
  }
}
fillArticle();

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
