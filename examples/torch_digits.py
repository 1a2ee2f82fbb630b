"""A PyTorch program for one machine: handwritten digits, a small network. It does not know mpiddl.

    python examples/torch_digits.py --epochs 20
    mpiexec -n 2 mpiddl run examples/torch_digits.py --epochs 20

Expect an accuracy of about 93 %, and the same to rounding on any number of ranks.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
torch.manual_seed(options.seed)

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=64, shuffle=True)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(options.epochs):
    for x, y in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

with torch.no_grad():
    right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
print(f"accuracy: {100 * right:.2f} %")
torch.save(model.state_dict(), "digits.pt")
