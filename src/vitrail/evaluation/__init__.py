"""How good a model is, and how far its scores can be believed."""
