"""How a model is executed: `prepare` returns a checked executable beside it, for training or inference."""
