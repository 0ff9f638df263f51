"""Sweeps one scenario: the n-th call of the Link fails, for n = 1, 2, ... until the scenario passes. See test_faults.py.

After each failure the user has one sentence, nothing is half written, and the same again gives the undisturbed bits.
"""

import copy
import gc
import io
import sys
import warnings
from typing import Any

import torch
from helpers import COMPUTE, OFFLOAD, assert_same, at, bits

import torch_offload
from torch_offload import _C

MOST = 2000  # calls of a scenario


class World:
    """A small model after one step of training, and one scenario's data."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 24), torch.nn.LayerNorm(24), torch.nn.GELU(), torch.nn.Linear(24, 4)
        ).to(OFFLOAD)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.125, weight_decay=0)
        self.x = at(COMPUTE, 8, 16, seed=1)
        self.train()
        self.saved = self.now()

    def now(self) -> dict[str, Any]:
        def on_cpu(value: Any) -> Any:
            return {k: on_cpu(v) for k, v in value.items()} if isinstance(value, dict) else copy.deepcopy(to_cpu(value))

        def to_cpu(value: Any) -> Any:
            return value.detach().cpu() if isinstance(value, torch.Tensor) else value

        return {
            "net": on_cpu(dict(self.net.state_dict())),
            "grads": on_cpu({name: p.grad for name, p in self.net.named_parameters()}),
            "optimizer": on_cpu(self.optimizer.state_dict()["state"]),
        }

    def restore(self) -> None:
        self.net.load_state_dict(self.saved["net"])
        for name, parameter in self.net.named_parameters():
            grad = self.saved["grads"][name]
            parameter.grad = None if grad is None else grad.to(OFFLOAD)
        state = self.optimizer.state_dict()
        state["state"] = copy.deepcopy(self.saved["optimizer"])
        self.optimizer.load_state_dict(state)

    # What is swept; each returns what it computed.

    def train(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.net(self.x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        return loss.detach()

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.net(self.x)

    def accumulate(self) -> torch.Tensor:
        """Another gradient on top of the ones that there are."""
        loss = self.net(self.x).square().mean()
        loss.backward()
        return loss.detach()

    def retained(self) -> list[torch.Tensor]:
        """A backward, and again through the same graph whether the first one failed or not."""
        self.optimizer.zero_grad()
        loss = self.net(self.x).square().mean()
        failure = None
        try:
            loss.backward(retain_graph=True)
        except RuntimeError as error:
            failure = error
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.cpu() for p in self.net.parameters()]
        assert_same(gradients, self.wanted) if hasattr(self, "wanted") else setattr(self, "wanted", gradients)
        if failure is not None:
            raise failure
        return gradients

    def results(self) -> list[torch.Tensor]:
        """A model that is fed with offload inputs: results are the newest on the device."""
        with torch.no_grad():
            y = self.net(self.x.to(OFFLOAD))
            z = y @ y.T
            z.add_(1)
            z[1:3] = 5
            return [y.cpu(), z.cpu(), z.sum().item(), z.clone().to(COMPUTE)]

    def before_step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.x).square().mean().backward()

    def step(self) -> None:
        """Gradients are newer on the device, and copies of the weights are under way."""
        self.optimizer.step()

    def save(self) -> dict[str, torch.Tensor]:
        """Gradients are newer on the device than on the host when they are written."""
        self.optimizer.zero_grad()
        self.net(self.x).square().mean().backward()
        file = io.BytesIO()
        torch.save({"net": self.net, "grads": [p.grad for p in self.net.parameters()]}, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        return {"net": dict(read["net"].state_dict()), "grads": read["grads"]}

    before_load = before_step

    def load(self) -> None:
        file = io.BytesIO()
        torch.save(self.saved["net"], file)
        file.seek(0)
        self.net.load_state_dict(torch.load(file, map_location="offload"))

    def before_move(self) -> None:
        self.net(self.x).square().mean().backward()

    def move(self) -> list[torch.Tensor]:
        net = torch.nn.Linear(16, 4).to(COMPUTE)
        with torch.no_grad():
            net.weight.copy_(self.saved["net"]["3.weight"][:, :16])
            net.bias.zero_()
        net.to(OFFLOAD)
        with torch.no_grad():
            for mine, theirs in zip(self.net[3].parameters(), net.parameters(), strict=True):
                mine.flatten()[: theirs.numel() // 2].copy_(theirs.to(COMPUTE).flatten()[: theirs.numel() // 2])
        return [p.detach() for p in net.parameters()]


WHOLE = {"train", "step", "load"}  # scenarios that write parameters


def check_sentence(error: RuntimeError) -> None:
    text = str(error)
    if text.startswith("Error(s) in loading state_dict"):  # PyTorch's own, around ours
        assert "offload: the device was made to" in text
        return
    assert text.startswith("offload: "), text
    assert text.endswith("."), text
    assert "\n" not in text, text
    assert isinstance(error, torch.OutOfMemoryError) == ("refuse" in text), f"{type(error)}: {text}"


def check_nothing_half_written(world: World, name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Every parameter and every gradient is what it was before, or what it is afterwards."""
    now = world.now()
    for what in ("net", "grads"):
        for key, value in now[what].items():
            of = [state[what][key] for state in (before, after)]
            if what == "grads":
                of += [None, world.raw[key]]  # zeroed; and not clipped yet
            same = any(
                v is value or (v is not None and value is not None and torch.equal(bits(value), bits(v))) for v in of
            )
            assert same, f"{name}: {what} {key} is neither old nor new: {value}"


def settled() -> dict[str, Any]:
    gc.collect()
    torch_offload.synchronize()
    stats = torch_offload.memory_stats()
    assert stats["device.pinned_slot_bytes.current"] == 0, stats
    return {k: stats[k] for k in ("host.allocated_bytes.current", "host.allocations.current")}


def computes_on_device() -> bool:
    w = at(OFFLOAD, 8, 8)
    fetches = torch_offload.memory_stats()["cache.fetches"]
    w @ w
    return torch_offload.memory_stats()["cache.fetches"] > fetches


def sweep(name: str) -> int:
    world = World()
    scenario, prepare = getattr(world, name), getattr(world, f"before_{name}", lambda: None)
    # Unclipped gradients, for what fails between backward and clipping.
    world.optimizer.zero_grad()
    world.net(world.x).square().mean().backward()
    world.raw = {k: p.grad.cpu().clone() for k, p in world.net.named_parameters()}
    world.restore()
    prepare()
    before = world.now()
    truth = scenario()
    truth = copy.deepcopy(truth)
    after = world.now()
    world.restore()
    for _ in range(2):
        prepare()
        scenario()
        world.restore()
    usual = settled()
    gc.freeze()  # what is imported is no garbage
    for n in range(1, MOST):
        prepare()
        _C.fail_call(n)
        kept = None
        try:
            scenario()
        except RuntimeError as error:
            kept = error
        failed = _C.failed_calls()
        _C.fail_call(0)
        if kept is not None:
            check_sentence(kept)
            assert failed == 1
            assert computes_on_device(), "a scope is left"
            if name in WHOLE:
                check_nothing_half_written(world, f"{name}, call {n}", before, after)
            kept = None
        world.restore()
        assert_same(world.now()["net"], before["net"], f"{name}, call {n}, restored")
        prepare()
        assert_same(scenario(), truth, f"{name}, call {n}, once more")
        assert_same(world.now(), after, f"{name}, call {n}, afterwards")
        world.restore()
        if failed == 0:
            break
        now = settled()
        assert now == usual, f"{name}, call {n}: {now} and not {usual}"
    else:
        raise AssertionError(f"more than {MOST} calls")
    gc.unfreeze()
    del world, scenario, prepare, truth
    settled()
    for _ in range(3):
        torch_offload.empty_cache()
        torch_offload.synchronize()
    stats = torch_offload.memory_stats()
    assert stats["device.slot_bytes.current"] == 0, stats
    assert stats["host.reserved_bytes.current"] == 0, stats
    assert _C.link_use()["buffers"] == 0, _C.link_use()
    return n


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for scenario_name in sys.argv[1:]:
        print(scenario_name, sweep(scenario_name), flush=True)
