"""Trains two small networks on handwritten digits, all weights on offload, and compares with the same training without it.

A convolutional network and a transformer learn scikit-learn's 1,797 images of 8 x 8 pixels; a quarter is held out for testing.
What offload asks of a training program is one call: `.to("offload")`, in `main`. Each network is trained a second time on the
plain device, and the loss of every step and all weights at the end must be the same to the last bit.

    python examples/digits.py            both networks, less than a minute on two cores
    python examples/digits.py --quick    a few steps of each, to see that it runs

The exit status is 1 if the results differ, or if the convolutional network stays below 97 % on the images held out.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import torch_offload

COMPUTE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WANTED = 0.97


def conv_net() -> nn.Module:
    """(batch, 1, 8, 8) to the scores of ten digits, (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Transformer(nn.Module):
    """The same task; the eight rows of an image are eight tokens."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embedding(images.squeeze(1)) + self.position
        return self.head(self.encoder(tokens).mean(dim=1))


@dataclass
class Digits:
    """Images (count, 1, 8, 8) with values from -1 to 1 and their digits (count,), on the compute device."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def digits() -> Digits:
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    train_images, test_images = (
        torch.tensor(part / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8) for part in parts[:2]
    )
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return Digits(
        (train_images.to(COMPUTE), train_labels.to(COMPUTE)), (test_images.to(COMPUTE), test_labels.to(COMPUTE))
    )


@dataclass
class Outcome:
    """The loss of every step, the share of test images that are told right, and the weights and statistics at the end."""

    losses: list[float]
    accuracy: float
    state: dict[str, Tensor]


def train(name: str, model: nn.Module, optimizer: Any, data: Digits, epochs: int) -> Outcome:
    """A training loop as any other: nothing in it knows of offload."""
    images, labels = data.train
    shuffle = torch.Generator().manual_seed(0)
    losses: list[float] = []
    accuracy = 0.0
    for epoch in range(1, epochs + 1):
        model.train()
        order = torch.randperm(len(images), generator=shuffle).to(images.device)
        for batch in order.split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            right = model(data.test[0]).argmax(dim=1) == data.test[1]
        accuracy = right.float().mean().item()
        print(f"{name}  epoch {epoch:2d}/{epochs}  loss {losses[-1]:.4f}  accuracy {accuracy:.1%}", flush=True)
    return Outcome(losses, accuracy, {key: value.cpu().clone() for key, value in model.state_dict().items()})


class OptimizerOnHost:
    """AdamW on copies in host memory of parameters that live elsewhere: what offload's optimizer steps are compared with."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.copies = [parameter.detach().cpu().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.copies)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = parameter.grad.cpu()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, copy in zip(self.parameters, self.copies, strict=True):
                parameter.copy_(copy)


def differences(one: Outcome, other: Outcome) -> list[str]:
    """What two outcomes don't have in common, bit for bit."""
    steps = [step for step, pair in enumerate(zip(one.losses, other.losses, strict=True)) if pair[0] != pair[1]]
    weights = [name for name, value in one.state.items() if not torch.equal(value, other.state[name])]
    return ([f"the loss of {len(steps)} steps, the first at {steps[0]}"] if steps else []) + weights


def report(name: str, offload: Outcome, plain: Outcome, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Prints what came of training on offload; `before` and `after` are `torch_offload.memory_stats()` around it."""

    def mib(count: int) -> str:
        return f"{count / 2**20:.2f} MiB"

    down, up = (mib(after[key] - before[key]) for key in ("link.bytes_to_device", "link.bytes_to_host"))
    now, peak = (mib(after[f"device.slot_bytes.{key}"]) for key in ("current", "peak"))
    different = differences(offload, plain)
    answer = f"NO: {', '.join(different[:5])}" if different else "yes: every loss and every weight, bit for bit"
    print(f"\n{name}, all weights on offload")
    print(f"  accuracy on images held out  {offload.accuracy:.1%}")
    print(f"  {f'same as on {COMPUTE}':<27}  {answer}")
    print(f"  streamed                     {down} to the GPU, {up} back")
    print(f"  host memory held             {mib(after['host.allocated_bytes.current'])}")
    print(f"  GPU memory of the cache      {now}, at most {peak}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one epoch each, whatever the accuracy")
    quick = parser.parse_args().quick
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's condition for deterministic results
    torch.use_deterministic_algorithms(True)

    data = digits()
    networks: list[tuple[str, Callable[[], nn.Module], int, float]] = [
        ("conv net", conv_net, 12, WANTED),
        ("transformer", Transformer, 20, 0.0),
    ]
    print(
        f"computing on {COMPUTE}; {len(data.train[0])} images to learn from, {len(data.test[0])} held out", flush=True
    )
    failed = False
    for name, build, epochs, wanted in networks:
        epochs = 1 if quick else epochs
        before = torch_offload.memory_stats()

        torch.manual_seed(0)
        model = build().to("offload")  # the one line
        optimizer = torch.optim.AdamW(model.parameters())
        offload = train(f"{name}, offload", model, optimizer, data, epochs)

        after = torch_offload.memory_stats()
        torch.manual_seed(0)
        model = build().to(COMPUTE)
        optimizer = (OptimizerOnHost if COMPUTE.type == "cuda" else torch.optim.AdamW)(model.parameters())
        plain = train(f"{name}, {COMPUTE}", model, optimizer, data, epochs)

        report(name, offload, plain, before, after)
        failed = failed or bool(differences(offload, plain)) or (not quick and offload.accuracy < wanted)
    if COMPUTE.type == "cpu":
        print("Without a GPU the CPU computes on the host bytes in place, and nothing has to be streamed.")
    if failed:
        raise SystemExit("The results differ, or the conv net learned too little.")


if __name__ == "__main__":
    main()
