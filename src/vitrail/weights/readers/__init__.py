"""Safe reading of weight files: their tensors and settings, whoever wrote them."""
