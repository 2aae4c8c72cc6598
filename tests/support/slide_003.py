"""Note 003 of the lecture notes, "Decoder": inputs, targets and the printed list of pairs."""

import torch

XB = torch.tensor(
    [
        [24, 43, 58, 5, 57, 1, 46, 43],
        [44, 53, 56, 1, 58, 46, 39, 58],
        [52, 58, 1, 58, 46, 39, 58, 1],
        [25, 17, 27, 10, 0, 21, 1, 54],
    ]
)
YB = torch.tensor(
    [
        [43, 58, 5, 57, 1, 46, 43, 39],
        [53, 56, 1, 58, 46, 39, 58, 1],
        [58, 1, 58, 46, 39, 58, 1, 46],
        [17, 27, 10, 0, 21, 1, 54, 39],
    ]
)
WHEN = """
when input is [24] the target: 43
when input is [24, 43] the target: 58
when input is [24, 43, 58] the target: 5
when input is [24, 43, 58, 5] the target: 57
when input is [24, 43, 58, 5, 57] the target: 1
when input is [24, 43, 58, 5, 57, 1] the target: 46
when input is [24, 43, 58, 5, 57, 1, 46] the target: 43
when input is [24, 43, 58, 5, 57, 1, 46, 43] the target: 39
when input is [44] the target: 53
when input is [44, 53] the target: 56
when input is [44, 53, 56] the target: 1
when input is [44, 53, 56, 1] the target: 58
when input is [44, 53, 56, 1, 58] the target: 46
when input is [44, 53, 56, 1, 58, 46] the target: 39
"""
