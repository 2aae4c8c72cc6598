"""Export models: ONNX, torch.export, and a page that runs one in a browser."""
