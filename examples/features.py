"""Features without training a head: embed images, then classify by nearest neighbors."""

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import vitrail as vt

run = vt.train("digits", out="runs/features", recipe="digits", epochs=3, report=False)
model = run.bundle.model

digits = load_digits()
pixels = (digits.images * 255 / 16).round().astype("uint8")[..., None]  # (N, 8, 8, 1)
inputs = run.bundle.preprocess.batch(list(pixels))

model.eval()
with torch.no_grad():
    encoded = model.encode(inputs, layers=[1])
print("patch tokens ", tuple(encoded.patches.shape))  # (N, h, w, D)
print("pooled       ", tuple(encoded.pooled.shape))  # (N, D)
print("after block 1", tuple(encoded.layers[1].pooled.shape))

train, test = slice(0, 1500), slice(1500, None)
for name, features in [("pooled", encoded.pooled), ("after block 1", encoded.layers[1].pooled)]:
    knn = KNeighborsClassifier(5).fit(features[train].numpy(), digits.target[train])
    print(f"{name:14} 5-NN accuracy {knn.score(features[test].numpy(), digits.target[test]):.1%}")
