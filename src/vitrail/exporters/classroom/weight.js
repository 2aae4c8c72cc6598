// One attention weight, step by step: q k, the scale, softmax, and what it does with v.

/** The numbers of one weight: from the selected token to the key token, in one head of one block. */
function weightNumbers(result, { block, head, token, key, change }) {
  const { qkv, weights } = result.blocks[block], { T, d } = vit;
  const [q, k, v] = [[token, "q"], [key, "k"], [key, "v"]].map(([of, letter]) => vit.part(qkv, letter, head, of));
  const products = Float32Array.from(q, (value, i) => value * k[i]);
  const scores = Float64Array.from(range(T), (to) => {
    const other = vit.part(qkv, "k", head, to);
    return vit.factor(change) * sum(Array.from(q, (value, i) => value * other[i]));
  });
  const most = Math.max(...scores), total = sum(scores.map((score) => Math.exp(score - most)));
  const row = weights.subarray((head * T + token) * T, (head * T + token + 1) * T);
  const output = new Float32Array(d);  // the weighted mean of the values, as if the head were not silenced
  for (let to = 0; to < T; to++) vit.part(qkv, "v", head, to).forEach((x, i) => { output[i] += row[to] * x; });
  return {
    q, k, v, products, dot: sum(Array.from(products)), scores, score: scores[key], most, total, row,
    weight: row[key], added: v.map((x) => x * row[key]), output,
  };
}

function paintWeight() {
  const head = Math.max(state.head, 0), { change, token, key, block } = state;
  const found = weightNumbers(state.result, { block, head, token, key, change });
  maps.weight.paint(found.row, { max: found.row[n + largest(found.row.subarray(n))] });
  played++;  // what is still being played stops
  $("weight-bars-words").textContent = "The scores of all tokens:";
  $("weight-where").textContent = `Block ${block}, head ${head}: from ${named(token)} to `
    + `${key === token ? "itself" : named(key)}.`;
  for (const name of ["q", "k"]) paintNumbers(`weight-${name}`, found[name], maxAbs(found.q, found.k));
  paintNumbers("weight-products", found.products);
  for (const name of ["v", "added", "output"]) paintNumbers(`weight-${name}`, found[name], maxAbs(found.v));
  $("weight-dot").textContent = digits(found.dot);
  const scale = change.scale ? 1 / vit.scale : 1, root = Math.sqrt(vit.d);
  const divided = Math.abs(scale - root) < 1e-6 ? `√${vit.d} = ${digits(root)}` : digits(scale);
  $("weight-scale").textContent = (change.scale ? `divided by ${divided}` : "without the scale")
    + (change.temperature === 1 ? "" : `, divided by the temperature ${digits(change.temperature)}`);
  $("weight-score").textContent = digits(found.score);
  const less = found.most > 20 ? found.most : 0;  // e^score would be too large to read
  typeset($("weight-softmax"), `e^{${digits(found.score)}} divided by the sum of e^{score} over ${vit.T} tokens: `
    + `${digits(Math.exp(found.score - less))} / ${digits(found.total * Math.exp(found.most - less))}`
    + (less ? ` (both divided by e^{${digits(less)}})` : ""));
  $("weight-weight").textContent = percent(found.weight);
  paintScores(found.scores, key);
  const fraction = Math.sqrt(sum(found.added.map((x) => x * x)) / (sum(found.output.map((x) => x * x)) || 1));
  $("weight-added-words").replaceChildren();
  element("span", $("weight-added-words"), percent(found.weight), { "data-same": "weight" });
  $("weight-added-words").append(` of v. Its length is ${percent(fraction)} of that of the sum below.`);
  const silenced = change.silenced.has(`${block}.${head}`);
  $("weight-output-words").textContent = silenced ? "This head is silenced in the experiment above: 0 is used instead."
    : `All ${vit.T} values, each times its weight: what head ${head} gives to ${named(token)}.`;
}

/** The scores of all tokens as bars, that of the key in the mark's color; `full` is the value of the tallest bar. */
function paintScores(scores, key, full = Math.max(0, ...scores)) {
  const { pen, wide, tall, ink } = plot("weight-scores", 70);
  const low = Math.min(0, ...scores), high = full, step = wide / scores.length;
  const place = (value) => (high - value) / (high - low || 1) * (tall - 2) + 1;
  scores.forEach((score, i) => {
    pen.fillStyle = ink(i === key ? "mark" : "bar");
    const [top, bottom] = [place(Math.max(score, 0)), place(Math.min(score, 0))];
    pen.fillRect(i * step, top, Math.max(step - 0.5, 1), Math.max(bottom - top, 1));
  });
}
