"""A plain PyTorch training loop around a Vitrail model: torch's DataLoader, your own optimizer."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import vitrail as vt

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 * 2 - 1  # (N, 1, 8, 8)
labels = torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)

model = vt.ViT(vt.ViTConfig(width=64, depth=4, heads=4, patch=2, size=8, channels=1, classes=10))
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=50, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
epochs = 10
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=epochs * len(loader))

for epoch in range(epochs):
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"epoch {epoch + 1:2}  loss {loss.item():.3f}  test accuracy {accuracy:.1%}")

# The trained model as one file with preprocessing and labels, which every vitrail command reads.
spec = vt.Preprocess(size=8, resize="squash", scale=1 / 255, mean=(0.5,), std=(0.5,))
bundle = vt.Bundle(model=model, preprocess=spec, labels=[str(n) for n in range(10)])
bundle.save("digits.safetensors")
print("saved digits.safetensors")
