// LayerNorm and the MLP of one block, for the selected token.

/** The statistics of one LayerNorm, and the token before, between and after. */
function normNumbers(result, { block, token, norm }) {
  const D = vit.width, name = `blocks.${block}.${norm}`, after = result.blocks[block][norm];
  const before = row(norm === "norm1" ? result.z[block] : result.blocks[block].middle, token, D);
  const mean = sum(before) / D, variance = sum(before.map((x) => (x - mean) ** 2)) / D;
  const standard = before.map((x) => (x - mean) / Math.sqrt(variance + vit.eps));
  return {
    before, standard, after: row(after, token, D), mean, variance,
    weight: vit.tensors[`${name}.weight`], bias: vit.tensors[`${name}.bias`],
  };
}

function paintNorm() {
  const found = normNumbers(state.result, state), c = Math.min(state.channel, vit.width - 1);
  const input = state.norm === "norm1" ? `z_{${state.block}}` : `z′_{${state.block + 1}}`;
  typeset($("norm-where"), `${capital(named(state.token))} in block ${state.block}, before its `
    + `${state.norm === "norm1" ? "attention" : "MLP"}: a row of ${input}, ${vit.width} numbers. `
    + "Point at a number to see its arithmetic.");
  for (const name of ["before", "standard", "after"]) paintStrip(`norm-${name}`, found[name]);
  $("norm-statistics").textContent = `mean μ = ${digits(found.mean)}, variance σ² = ${digits(found.variance)}`;
  const limit = maxAbs(found.before, found.standard);
  paintHistogram("norm-histogram-before", found.before, limit, "bar");
  paintHistogram("norm-histogram-standard", found.standard, limit, "mark");
  $("norm-arithmetic").textContent = `Number ${c}: (${digits(found.before[c])} − ${digits(found.mean)}) / `
    + `√(${digits(found.variance)} + ${vit.eps}) = ${digits(found.standard[c])}, then × ${digits(found.weight[c])} `
    + `+ ${digits(found.bias[c])} = ${digits(found.after[c])}.`;
}

function paintMlp() {
  const { block, token } = state, one = state.result.blocks[block], [D, F] = [vit.width, vit.mlp];
  const [before, hidden] = [row(one.before, token, F), row(one.hidden, token, F)];
  const out = row(one.mlp, token, D), z = row(state.result.z[block + 1], token, D);
  paintStrip("mlp-input", row(one.norm2, token, D));
  const most = maxAbs(before);
  paintStrip("mlp-before", before, most);
  paintStrip("mlp-hidden", hidden, most);
  paintStrip("mlp-out", out, maxAbs(out, z));
  paintStrip("mlp-sum", z, maxAbs(out, z));
  const best = largest(hidden), open = hidden.reduce((count, x) => count + (x > 0.1), 0);
  $("mlp-words").textContent = `In block ${block}, ${open} of ${F} hidden units of ${named(token)} are above 0.1. `
    + `The most active is unit ${best}: ${digits(before[best])} before the activation, ${digits(hidden[best])} after it.`;
  $("mlp-hidden-words").textContent = `after ${ACTIVATION_NAMES[vit.activation]}: negative numbers become `
    + (vit.activation === "relu" ? "0" : "small");
  paintActivation(before);
}

const ACTIVATION_NAMES = { "gelu": "GELU", "gelu-tanh": "GELU (tanh)", "relu": "ReLU" };

/** The curve of the activation, with a dot for each hidden unit. */
function paintActivation(before) {
  const { pen, wide, tall, ink } = plot("mlp-curve", 150), act = ACTIVATIONS[vit.activation];
  const limit = Math.max(3, maxAbs(before)), top = limit, bottom = -0.4 * limit;
  const x = (value) => (value + limit) / (2 * limit) * wide;
  const y = (value) => (top - value) / (top - bottom) * tall;
  [pen.strokeStyle, pen.fillStyle] = [ink("line"), ink("dim")];
  pen.strokeRect(-1, y(0), wide + 2, 0.01);
  pen.strokeRect(x(0), -1, 0.01, tall + 2);
  pen.fillText(digits(-limit), 2, y(0) + 14);
  const high = digits(limit);
  pen.fillText(high, wide - pen.measureText(high).width - 2, y(0) + 14);
  [pen.strokeStyle, pen.lineWidth] = [ink("mark"), 1.5];
  pen.beginPath();
  for (let i = 0; i <= 100; i++) pen.lineTo(x((i / 50 - 1) * limit), y(act((i / 50 - 1) * limit)));
  pen.stroke();
  [pen.fillStyle, pen.globalAlpha] = [ink("ink"), 0.55];
  for (const value of before) {
    pen.beginPath();
    pen.arc(x(value), y(act(value)), 2.2, 0, 7);
    pen.fill();
  }
}

for (const name of ["before", "standard", "after"]) {
  $(`norm-${name}`).addEventListener("pointermove", (event) => {
    const box = $(`norm-${name}`).getBoundingClientRect();
    const at = Math.floor((event.clientX - box.left) / box.width * vit.width);
    state.channel = Math.min(Math.max(at, 0), vit.width - 1);
    paintNorm();
  });
}
