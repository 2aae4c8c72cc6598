"use strict";
// A Vision Transformer from pixels to logits, in plain JavaScript, beside the paper's Eq. 1 to 4.
//
// Numbers are kept as float32, as the model has them; every sum is taken in float64. A table of so many
// rows lies in one Float32Array, row after row. The letters are the paper's: N patches, T tokens (those
// before the patches, then the patches), D width, k heads, d the width of one, L blocks, K classes.

/** The error function: a series of positive terms, so nothing cancels; from 5 on it is 1 to 12 digits. */
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
function linear(x, weight, bias, inside) {
  const rows = x.length / inside, outside = weight.length / inside;
  const y = new Float32Array(rows * outside);
  for (let row = 0; row < rows; row++) {
    for (let out = 0; out < outside; out++) {
      let sum = bias ? bias[out] : 0;
      for (let i = 0; i < inside; i++) sum += x[row * inside + i] * weight[out * inside + i];
      y[row * outside + out] = sum;
    }
  }
  return y;
}

/** LN: every row to mean 0 and variance 1, then stretched and shifted. */
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

/** Numbers to shares that sum to 1. */
function softmax(numbers) {
  const most = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = Float64Array.from(numbers, (number) => Math.exp(number - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return Float32Array.from(powers, (power) => power / sum);
}

/** z + branch, the branch times LayerScale's factors where there are any. */
function added(z, branch, factors) {
  return z.map((value, i) => value + branch[i] * (factors ? factors[i % factors.length] : 1));
}

class Vit {
  /** facts: what the page was made with; numbers: a Float32Array of all tensors, one after the other. */
  constructor(facts, numbers) {
    Object.assign(this, facts);
    [this.N, this.T] = [facts.grid[0] * facts.grid[1], facts.prefix.length + facts.grid[0] * facts.grid[1]];
    this.tensors = {};
    let start = 0;
    for (const [name, length] of facts.tensors) {
      this.tensors[name] = numbers.subarray(start, start += length);
    }
  }

  /** Levels 0 to 255, (H, W, C), as the model takes them, (C, H, W): each step rounded to float32. */
  normalise(levels) {
    const { scale, mean, std } = this.preprocess, C = mean.length, x = new Float32Array(levels.length);
    for (let i = 0; i < levels.length; i++) {
      const c = i % C, level = Math.fround(levels[i] * scale);
      const centred = Math.fround(level - Math.fround(mean[c]));
      x[c * (levels.length / C) + (i - c) / C] = centred / Math.fround(std[c]);
    }
    return x;
  }

  /** Cut into patches x_p, row by row, each flattened: (N, C P P). */
  cut(x) {
    const [H, W] = this.size, [P, Q] = this.patch, [h, w] = this.grid;
    const flat = new Float32Array(this.N * this.channels * P * Q);
    let at = 0;
    for (let row = 0; row < h; row++) for (let column = 0; column < w; column++)
      for (let c = 0; c < this.channels; c++)
        for (let i = 0; i < P; i++) for (let j = 0; j < Q; j++)
          flat[at++] = x[(c * H + row * P + i) * W + column * Q + j];
    return flat;
  }

  /** From levels to logits, with all that is worth a look on the way. */
  forward(levels) {
    const flat = this.cut(this.normalise(levels));
    const embedded = this.linear(flat, "embed", flat.length / this.N);  // x_p E: (N, D)
    const tokens = new Float32Array(this.T * this.width);
    tokens.set(this.tensors.prefix ?? []);  // x_class, and others before the patches
    tokens.set(embedded, tokens.length - embedded.length);
    const z = [this.tensors.position ? added(tokens, this.tensors.position) : tokens];  // Eq. 1
    const attention = [];
    for (let l = 0; l < this.depth; l++) {
      const looked = this.attend(this.norm(z[l], `blocks.${l}.norm1`), l);
      const between = added(z[l], looked.out, this.tensors[`blocks.${l}.scale1`]);  // Eq. 2: z'
      const thought = this.think(this.norm(between, `blocks.${l}.norm2`), l);
      z.push(added(between, thought, this.tensors[`blocks.${l}.scale2`]));  // Eq. 3
      attention.push(looked.weights);
    }
    const lens = z.map((tokens) => this.answer(tokens));  // the logits after 0, 1, ... L blocks
    return { embedded, z, attention, lens, logits: lens[this.depth] };
  }

  /** MSA: who looks at whom, (k, T, T), and what that brings, (T, D). */
  attend(z, l) {
    const { T, heads: k, d } = this, inner = k * d;
    const qkv = this.linear(z, `blocks.${l}.qkv`, this.width);  // (T, 3 k d): q, k and v of all heads
    const weights = new Float32Array(k * T * T), mixed = new Float32Array(T * inner);
    for (let head = 0; head < k; head++) for (let from = 0; from < T; from++) {
      const q = from * 3 * inner + head * d, scores = new Float64Array(T);
      for (let to = 0; to < T; to++) {
        const key = to * 3 * inner + inner + head * d;
        for (let i = 0; i < d; i++) scores[to] += this.scale * qkv[q + i] * qkv[key + i];
      }
      const shares = softmax(scores);
      weights.set(shares, (head * T + from) * T);
      for (let i = 0; i < d; i++) {
        let sum = 0;
        for (let to = 0; to < T; to++) sum += shares[to] * qkv[to * 3 * inner + 2 * inner + head * d + i];
        mixed[from * inner + head * d + i] = sum;
      }
    }
    return { weights, out: this.linear(mixed, `blocks.${l}.out`, inner) };
  }

  /** The MLP, on each token by itself. */
  think(z, l) {
    const hidden = this.linear(z, `blocks.${l}.fc1`, this.width).map(ACTIVATIONS[this.activation]);
    return this.linear(hidden, `blocks.${l}.fc2`, this.mlp);
  }

  /** Eq. 4 and the head: logits, as if the encoder ended with these tokens. */
  answer(z) {
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

  /** What reached the answer through the first `depth` blocks (Abnar and Zuidema 2020): (T,).
   *  In every block a token keeps itself and mixes in what it looks at, half and half. */
  rollout(attention, depth) {
    const { T, heads: k } = this;
    let reached = Float64Array.from(this.tensors.pool);
    for (let l = depth - 1; l >= 0; l--) {
      const before = reached.map((share) => share / 2);
      for (let from = 0; from < T; from++) for (let head = 0; head < k; head++)
        for (let to = 0; to < T; to++)
          before[to] += reached[from] / 2 * attention[l][(head * T + from) * T + to] / k;
      reached = before;
    }
    return reached;
  }

  /** The cosine of one token's position with that of every token: (T,); 0 where either is zero. */
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

  linear(x, name, inside) {
    return linear(x, this.tensors[`${name}.weight`], this.tensors[`${name}.bias`], inside);
  }

  norm(x, name) {
    return layerNorm(x, this.tensors[`${name}.weight`], this.tensors[`${name}.bias`], this.eps);
  }
}
