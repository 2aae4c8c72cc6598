"""Fine-tuning: train on the digits 0 to 4, then start from those weights for 5 to 9, with LoRA."""

import numpy as np
from sklearn.datasets import load_digits

import vitrail as vt

digits = load_digits()
pixels = (digits.images * 255 / 16).round().astype("uint8")


def save(name, chosen):
    """Write the digits of some classes as an .npz file, which `vt.train` reads as a data set."""
    keep = np.isin(digits.target, chosen)
    labels = digits.target[keep] - min(chosen)
    np.savez(name, x_train=pixels[keep], y_train=labels)


save("low.npz", range(5))
save("high.npz", range(5, 10))

first = vt.train("low.npz", out="runs/low", recipe="digits", epochs=10, report=False)
print(f"0 to 4 from scratch: validation accuracy {first.metrics[-1]['val_accuracy']:.1%}")

tuned = vt.train(
    "high.npz",
    out="runs/high",
    recipe="digits",
    from_="runs/low/best.safetensors",  # any weight file: timm's, transformers', ours
    tune="lora",
    epochs=5,
    report=False,
)
print(f"5 to 9 with LoRA:    validation accuracy {tuned.metrics[-1]['val_accuracy']:.1%}")
