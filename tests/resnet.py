# ResNet-18 as it is written for CIFAR images, with as many channels as one likes.
from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with BatchNorm and the way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        result: Tensor = self.relu(out)
        return result


class ResNet18(nn.Module):
    """Four stages of two blocks, (N, 3, 32, 32) → (N, classes)."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        stages = [
            nn.Sequential(Block(before, after, stride), Block(after, after, 1))
            for before, after, stride in zip(widths, widths[1:], (1, 2, 2, 2), strict=False)
        ]
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(self.pool(x).flatten(1))
        return out
