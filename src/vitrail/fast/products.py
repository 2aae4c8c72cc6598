"""A linear layer of the fused forward pass: several ways to compute it, of which the fastest is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from vitrail.fast.choices import Choices

_TRIALS, _REPEATS = 3, 10  # of a measurement: the fastest trial of so many runs each
_FEW_ROWS = 4096  # below this, small tiles are tried instead of large ones
_VERY_FEW_ROWS = 128  # below this, nothing is measured: all ways take about as long

Way = Callable[[Tensor, Tensor], Tensor]
"""Computes the layer for x (M, K) into out (M, N)."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """f(x W^T + bias), or the sum of it and what the output holds.

    In fp8, x and W hold the numbers times a factor, which `scales` divides out again.
    """

    weight: Tensor
    """(N, K), in bf16 or fp8; in fp32 only in tests."""
    bias: Tensor | None = None
    """(N,) in fp32."""
    scales: Tensor | None = None
    """(N,) in fp32, for fp8."""
    gelu: bool = False
    add: bool = False
    factor: float | None = None
    """The output is quantized to fp8 after multiplying by it."""

    @property
    def output_dtype(self) -> torch.dtype:
        if self.factor is not None:
            return torch.float8_e4m3fn
        return torch.bfloat16 if self.weight.dtype == torch.float8_e4m3fn else self.weight.dtype

    def rows(self, first: int, last: int | None = None) -> Product:
        """The product for some rows of W: the same memory."""

        def cut(one: Tensor | None) -> Any:
            return None if one is None else one[first:last]

        return replace(self, weight=cut(self.weight), bias=cut(self.bias), scales=cut(self.scales))

    @property
    def kind(self) -> str:
        """A key for the choice of the fastest way, without the number of rows."""
        flags = [name for name in ("gelu", "add") if getattr(self, name)]
        flags += ["bias"] * (self.bias is not None) + ["to fp8"] * (self.factor is not None)
        return f"{str(self.weight.dtype).removeprefix('torch.')} {tuple(self.weight.shape)} {' '.join(flags)}"

    def ways(self, rows: int) -> dict[str, Way]:
        """All ways to compute it by name; the first is the plain one."""
        found: dict[str, Way] = {}
        if self.weight.dtype == torch.bfloat16 and self.factor is None:
            found["cuBLAS"] = self._cublas
        elif self.output_dtype == torch.bfloat16 and not self.gelu and not self.add:
            found["torch._scaled_mm"] = self._scaled_mm
        if rows >= _VERY_FEW_ROWS:
            return found | self._triton_ways(rows)
        found = found if "cuBLAS" in found else self._triton_ways(rows) | found
        return dict(list(found.items())[:1])

    def _triton_ways(self, rows: int) -> dict[str, Way]:
        if torch.cuda.get_device_capability(self.weight.device) < (9, 0):
            return {}  # no tensor memory accelerator
        from vitrail.fast.kernels.product import LARGE_TILES, SMALL_TILES, product

        N, K = self.weight.shape
        if K * self.weight.element_size() % 16:
            return {}
        large, small = (
            [one for one in tiles if N % one.columns == 0] for tiles in (LARGE_TILES, SMALL_TILES)
        )
        fits = (large or small) if rows >= _FEW_ROWS else small  # a width of 192 has no large tiles
        return {one.name: partial(product, self, tiles=one) for one in fits}

    def _cublas(self, x: Tensor, out: Tensor) -> Tensor:
        w = self.weight.T
        if self.add:
            assert self.bias is None
            assert not self.gelu
            return out.addmm_(x, w)
        if self.gelu:
            from vitrail.fast.kernels.gelu import bias_gelu

            torch.mm(x, w, out=out)
            assert self.bias is not None
            return bias_gelu(out, self.bias)
        if self.bias is None:
            return torch.mm(x, w, out=out)
        assert self._rounded_bias is not None
        return torch.addmm(self._rounded_bias, x, w, out=out)

    def _scaled_mm(self, x: Tensor, out: Tensor) -> Tensor:
        assert self.scales is not None
        ones = torch.ones(len(x), 1, device=x.device)
        return torch._scaled_mm(
            *(x, self.weight.T, ones, self.scales[None], self._rounded_bias),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            out=out,
        )

    @cached_property
    def _rounded_bias(self) -> Tensor | None:
        """In the dtype of the output, as the libraries want it."""
        return None if self.bias is None else self.bias.to(self.output_dtype)


def choose(product: Product, rows: int, choices: Choices) -> Way:
    """The fastest way for so many rows, measured once and remembered."""
    ways = product.ways(rows)
    if len(ways) == 1:
        return next(iter(ways.values()))

    def measure(name: str) -> float:
        x = torch.randn(rows, product.weight.shape[1], device=product.weight.device).to(product.weight.dtype)
        out = torch.zeros(rows, len(product.weight), device=x.device, dtype=product.output_dtype)
        return seconds_on_gpu(lambda: ways[name](x, out))

    return ways[choices.fastest(f"product, {rows} rows, {product.kind}", list(ways), measure)]


def processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; elsewhere, kernels are only interpreted."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def seconds_on_gpu(run: Callable[[], object]) -> float:
    """Seconds on the GPU, by its own clock.

    The runs are in a CUDA graph, as they will be: to launch a small kernel takes longer than the kernel.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # not by torch.cuda.graph, which collects garbage every time
        for _ in range(3):
            run()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(_REPEATS):
                run()
        finally:
            graph.capture_end()
        return min(_replay_seconds(graph) for _ in range(1 + _TRIALS)) / _REPEATS


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000
