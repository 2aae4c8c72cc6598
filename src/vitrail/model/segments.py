"""Several sequences packed into one: attention within each of them only."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)  # what the flash kernel takes


class Segments:
    """The lengths of the sequences in a pack. As the mask of an attention, it is block-diagonal.

    No token of one image ever meets a token of another, so neighbors cannot change an answer, and no
    computation is spent on padding.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._offsets: dict[torch.device, Tensor] = {}

    def offsets(self, device: torch.device) -> Tensor:
        """Where each sequence starts, and where the last one ends: (n + 1,) int32.

        Copied to the device once for all blocks: every copy would wait for it.
        """
        if device not in self._offsets:
            starts = [0, *accumulate(self.lengths)]
            self._offsets[device] = torch.tensor(starts, dtype=torch.int32).to(device)
        return self._offsets[device]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
        """softmax(scale q k^T) v within each sequence; q, k, v and the result are (1, k, T, d)."""
        if q.is_cuda and q.dtype in _HALF and not dropout and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
            return self.attend_flash(q, k, v, scale=scale)
        if q.is_cuda:
            return self.attend_nested(q, k, v, scale=scale, dropout=dropout)
        return self.attend_by_length(q, k, v, scale=scale, dropout=dropout)

    def attend_by_length(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0
    ) -> Tensor:
        """Neighboring sequences of the same length as one batch: the least work on a CPU."""
        outputs, at = [], 0
        for length, group in groupby(self.lengths):
            count = len(list(group))
            parts = (x[0, :, at : at + count * length].unflatten(1, (count, length)) for x in (q, k, v))
            one, two, three = (part.transpose(0, 1) for part in parts)  # each (count, k, length, d)
            heads = F.scaled_dot_product_attention(one, two, three, scale=scale, dropout_p=dropout)
            outputs.append(heads.transpose(0, 1).flatten(1, 2))  # (k, count length, d)
            at += count * length
        return torch.cat(outputs, dim=1)[None]

    def attend_flash(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """All sequences in one flash kernel, which takes them as they are: packed, with their offsets."""
        from torch.nn.attention.varlen import varlen_attn

        usual = q.shape[-1] ** -0.5  # the kernel's own factor
        q = q if math.isclose(scale, usual) else q * (scale / usual)
        parts = [x[0].transpose(0, 1) for x in (q, k, v)]  # each (T, k, d)
        offsets, most = self.offsets(q.device), max(self.lengths)
        one, two, three = parts
        heads: Any = varlen_attn(one, two, three, offsets, offsets, most, most)
        return heads.transpose(0, 1)[None]

    def attend_nested(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
        """All sequences in one kernel for sequences of different lengths, by nested tensors."""
        offsets = self.offsets(q.device).long()
        limits: Any = {"min_seqlen": min(self.lengths), "max_seqlen": max(self.lengths)}
        nested = [
            torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1).contiguous(), offsets, **limits)
            for x in (q, k, v)  # each (images, tokens of each, k, d)
        ]
        one, two, three = (x.transpose(1, 2) for x in nested)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
            heads = F.scaled_dot_product_attention(one, two, three, scale=scale, dropout_p=dropout)
        return heads.transpose(1, 2).values().transpose(0, 1)[None]

    def spread(self, values: Tensor) -> Tensor:
        """One value for each sequence, (n, 1, 1), as one for each of its tokens, (1, T, 1)."""
        lengths = torch.tensor(self.lengths, device=values.device)
        return values.repeat_interleave(lengths, output_size=sum(self.lengths)).view(1, -1, 1)

    def dense(self, device: torch.device) -> Tensor:
        """The same as a boolean mask (T, T), for attention computed step by step."""
        lengths = torch.tensor(self.lengths, device=device)
        owner = torch.arange(len(self.lengths), device=device).repeat_interleave(lengths)
        return owner[:, None] == owner
