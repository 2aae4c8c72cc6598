"use strict";
// A Vision Transformer from pixels to logits, in plain JavaScript, beside the paper's Eq. 1 to 4.
//
// Values are stored as float32, as in the model; sums are accumulated in float64. A matrix is one
// Float32Array in row-major order. The letters are the paper's: N patches, T tokens (prefix tokens, then
// patches), D width, k heads, d head width, L blocks, K classes.

/** The error function by a series of positive terms, without cancellation; beyond 5 it is 1 to 12 digits. */
function erf(x) {
  if (Math.abs(x) >= 5) return Math.sign(x);
  let term = x, sum = x;
  for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum); n++) {
    term *= 2 * x * x / (2 * n + 1);
    sum += term;
  }
  return 2 / Math.sqrt(Math.PI) * Math.exp(-x * x) * sum;
}

const ACTIVATIONS = {
  "gelu": (x) => 0.5 * x * (1 + erf(x / Math.SQRT2)),
  "gelu-tanh": (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x))),
  "relu": (x) => Math.max(0, x),
};

/** x W^T + b: rows of x, (rows, in), times a weight (out, in). */
function linear(x, weight, bias, fanIn) {
  const rows = x.length / fanIn, fanOut = weight.length / fanIn;
  const y = new Float32Array(rows * fanOut);
  for (let row = 0; row < rows; row++) {
    for (let out = 0; out < fanOut; out++) {
      let sum = bias ? bias[out] : 0;
      for (let i = 0; i < fanIn; i++) sum += x[row * fanIn + i] * weight[out * fanIn + i];
      y[row * fanOut + out] = sum;
    }
  }
  return y;
}

/** LN: each row normalized to mean 0 and variance 1, then scaled and shifted. */
function layerNorm(x, weight, bias, eps) {
  const D = weight.length, y = new Float32Array(x.length);
  for (let start = 0; start < x.length; start += D) {
    let mean = 0, variance = 0;
    for (let i = 0; i < D; i++) mean += x[start + i] / D;
    for (let i = 0; i < D; i++) variance += (x[start + i] - mean) ** 2 / D;
    const scale = 1 / Math.sqrt(variance + eps);
    for (let i = 0; i < D; i++) y[start + i] = (x[start + i] - mean) * scale * weight[i] + bias[i];
  }
  return y;
}

/** Probabilities that sum to 1. */
function softmax(logits) {
  const max = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = Float64Array.from(logits, (logit) => Math.exp(logit - max));
  const sum = powers.reduce((a, b) => a + b, 0);
  return Float32Array.from(powers, (power) => power / sum);
}

/** z + branch, with the branch scaled by LayerScale if the model has it. */
function residual(z, branch, factors) {
  return z.map((value, i) => value + branch[i] * (factors ? factors[i % factors.length] : 1));
}

/** The experiments of the page: all off. `silenced` has "block.head" of each head whose output is set to 0. */
const NO_CHANGE = Object.freeze({ positions: true, scale: true, temperature: 1, silenced: new Set() });

class Vit {
  /** config: the JSON in the page; weights: a Float32Array with all tensors, one after the other. */
  constructor(config, weights) {
    Object.assign(this, config);
    [this.N, this.T] = [config.grid[0] * config.grid[1], config.prefix.length + config.grid[0] * config.grid[1]];
    this.tensors = {};
    let start = 0;
    for (const [name, length] of config.tensors) {
      this.tensors[name] = weights.subarray(start, start += length);
    }
  }

  /** Pixels 0 to 255, (H, W, C), to the model's input (C, H, W), with each step rounded to float32. */
  normalize(pixels) {
    const { scale, mean, std } = this.preprocess, C = mean.length, x = new Float32Array(pixels.length);
    for (let i = 0; i < pixels.length; i++) {
      const c = i % C, value = Math.fround(pixels[i] * scale);
      const centered = Math.fround(value - Math.fround(mean[c]));
      x[c * (pixels.length / C) + (i - c) / C] = centered / Math.fround(std[c]);
    }
    return x;
  }

  /** The patches x_p, row by row, each flattened: (N, C P P). */
  patchify(x) {
    const [H, W] = this.size, [P, Q] = this.patch, [h, w] = this.grid;
    const flat = new Float32Array(this.N * this.channels * P * Q);
    let at = 0;
    for (let row = 0; row < h; row++) for (let column = 0; column < w; column++)
      for (let c = 0; c < this.channels; c++)
        for (let i = 0; i < P; i++) for (let j = 0; j < Q; j++)
          flat[at++] = x[(c * H + row * P + i) * W + column * Q + j];
    return flat;
  }

  /** From pixels to logits, with the activations that the page shows. `change` is an experiment (NO_CHANGE). */
  forward(pixels, change = NO_CHANGE) {
    const flat = this.patchify(this.normalize(pixels));
    const embedded = this.linear(flat, "tokens.proj", flat.length / this.N);  // x_p E: (N, D)
    const tokens = new Float32Array(this.T * this.width);
    tokens.set(this.tensors.prefix ?? []);  // x_class and the other prefix tokens
    tokens.set(embedded, tokens.length - embedded.length);
    const positions = change.positions && this.tensors.position;
    const z = [positions ? residual(tokens, positions) : tokens];  // Eq. 1
    const blocks = [];
    for (let l = 0; l < this.depth; l++) {
      const norm1 = this.norm(z[l], `blocks.${l}.norm1`), msa = this.attend(norm1, l, change);
      const middle = residual(z[l], msa.out, this.tensors[`blocks.${l}.scale1.weight`]);  // Eq. 2: z'
      const norm2 = this.norm(middle, `blocks.${l}.norm2`), mlp = this.feedForward(norm2, l);
      z.push(residual(middle, mlp.out, this.tensors[`blocks.${l}.scale2.weight`]));  // Eq. 3
      blocks.push({ norm1, ...msa, middle, norm2, before: mlp.before, hidden: mlp.hidden, mlp: mlp.out });
    }
    const lens = z.map((tokens) => this.classify(tokens));  // the logits after 0, 1, ... L blocks
    const attention = blocks.map((block) => block.weights);
    return { embedded, z, blocks, attention, lens, logits: lens[this.depth] };
  }

  /** The factor of q k^T in an experiment. */
  factor(change) {
    return (change.scale ? this.scale : 1) / change.temperature;
  }

  /** MSA: q, k and v (T, 3 k d), the attention weights (k, T, T), the heads (T, k d) and the output (T, D). */
  attend(z, l, change) {
    const { T, heads: k, d } = this, inner = k * d, factor = this.factor(change);
    const qkv = this.linear(z, `blocks.${l}.attention.qkv`, this.width);
    const weights = new Float32Array(k * T * T), mixed = new Float32Array(T * inner);
    for (let head = 0; head < k; head++) for (let from = 0; from < T; from++) {
      const q = from * 3 * inner + head * d, scores = new Float64Array(T);
      for (let to = 0; to < T; to++) {
        const key = to * 3 * inner + inner + head * d;
        for (let i = 0; i < d; i++) scores[to] += factor * qkv[q + i] * qkv[key + i];
      }
      const row = softmax(scores);
      weights.set(row, (head * T + from) * T);
      if (change.silenced.has(`${l}.${head}`)) continue;  // its output stays 0
      for (let i = 0; i < d; i++) {
        let sum = 0;
        for (let to = 0; to < T; to++) sum += row[to] * qkv[to * 3 * inner + 2 * inner + head * d + i];
        mixed[from * inner + head * d + i] = sum;
      }
    }
    return { qkv, weights, mixed, out: this.linear(mixed, `blocks.${l}.attention.out`, inner) };
  }

  /** q, k or v of one head and token: a row of d numbers. */
  part(qkv, letter, head, token) {
    const inner = this.heads * this.d, start = (token * 3 + "qkv".indexOf(letter)) * inner + head * this.d;
    return qkv.subarray(start, start + this.d);
  }

  /** The MLP, applied to each token, with its hidden units before and after the activation. */
  feedForward(z, l) {
    const before = this.linear(z, `blocks.${l}.mlp.fc1`, this.width);
    const hidden = before.map(ACTIVATIONS[this.activation]);
    return { before, hidden, out: this.linear(hidden, `blocks.${l}.mlp.fc2`, this.mlp) };
  }

  /** Eq. 4 and the head: the logits if the encoder ended with these tokens. */
  classify(z) {
    const tokens = this.last_norm === "before" ? this.norm(z, "norm") : z, D = this.width;
    let y = new Float32Array(D);
    for (let i = 0; i < D; i++) {
      let sum = 0;
      for (let token = 0; token < this.T; token++) sum += this.tensors.pool[token] * tokens[token * D + i];
      y[i] = sum;
    }
    if (this.last_norm === "after") y = this.norm(y, "norm");
    return this.linear(y, "head", D);
  }

  /** Attention rollout through the first `depth` blocks (Abnar and Zuidema 2020): (T,).
   *  Each block averages the identity (the residual) and the mean attention over heads. */
  rollout(attention, depth) {
    const { T, heads: k } = this;
    let relevance = Float64Array.from(this.tensors.pool);
    for (let l = depth - 1; l >= 0; l--) {
      const before = relevance.map((value) => value / 2);
      for (let from = 0; from < T; from++) for (let head = 0; head < k; head++)
        for (let to = 0; to < T; to++)
          before[to] += relevance[from] / 2 * attention[l][(head * T + from) * T + to] / k;
      relevance = before;
    }
    return relevance;
  }

  /** Cosine similarity of one token's position embedding with every token's, (T,); 0 if either is zero. */
  similarity(token) {
    const { T, width: D } = this, E = this.tensors.position;
    const dot = (a, b) => {
      let sum = 0;
      for (let i = 0; i < D; i++) sum += E[a * D + i] * E[b * D + i];
      return sum;
    };
    return Float64Array.from({ length: T }, (_, other) =>
      dot(token, other) / (Math.sqrt(dot(token, token) * dot(other, other)) || 1));
  }

  linear(x, name, fanIn) {
    return linear(x, this.tensors[`${name}.weight`], this.tensors[`${name}.bias`], fanIn);
  }

  norm(x, name) {
    return layerNorm(x, this.tensors[`${name}.weight`], this.tensors[`${name}.bias`], this.eps);
  }
}
