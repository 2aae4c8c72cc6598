"""Our own format: one file with weights, config, preprocessing, labels and card."""
