"""Optimizer steps on offload parameters: on the host, with the CPU's bits."""

import copy

import pytest
import torch
from helpers import COMPUTE, CPU, GPU, OFFLOAD, assert_same, same
from torch import nn

OPTIMIZERS = {
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.1, **k),
    "SGD momentum": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, **k),
    "Adam": lambda p, **k: torch.optim.Adam(p, lr=0.01, **k),
    "Adam amsgrad": lambda p, **k: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.01, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, **k),
    "Adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.01, **k),
    "Adadelta": lambda p, **k: torch.optim.Adadelta(p, **k),
    "NAdam": lambda p, **k: torch.optim.NAdam(p, **k),
    "RAdam": lambda p, **k: torch.optim.RAdam(p, **k),
    "Adamax": lambda p, **k: torch.optim.Adamax(p, **k),
    "ASGD": lambda p, **k: torch.optim.ASGD(p, **k),
    "Rprop": lambda p, **k: torch.optim.Rprop(p, **k),
}


WAYS = {"default": {}, "for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


FUSED = ("SGD", "SGD momentum", "Adam", "Adam amsgrad", "AdamW", "Adagrad")


def model():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def gradients(parameters, seed):
    """The same gradients wherever the parameters are: what is compared is the step."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = gradient.to(parameter.device)


def steps(make, count=3, dtype=torch.float32):
    def run(device):
        net = model().to(dtype).to(device)
        optimizer = make(net.parameters())
        for k in range(count):
            gradients(net.parameters(), k)
            optimizer.step()
        for state in optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim() > 0:
                    assert value.device.type == device.type, name
        return list(net.parameters()), [list(s.values()) for s in optimizer.state.values()]

    return run


@pytest.mark.parametrize(
    ("name", "way"),
    [(n, w) for n in OPTIMIZERS for w in WAYS if w != "fused" or n in FUSED],
)
def test_steps(name, way):
    same(steps(lambda p: OPTIMIZERS[name](p, **WAYS[way])), truth=CPU)


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_dtypes(way, dtype):
    same(steps(lambda p: torch.optim.AdamW(p, **WAYS[way]), dtype=dtype), truth=CPU)


def test_training_is_the_plain_devices():
    """Forward and backward where the activations are, the step on the host."""

    def run(device):
        net = model().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)  # exact in every order of rounding
        losses = []
        for k in range(4):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(k)).to(COMPUTE)
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, list(net.parameters())

    same(run)


def test_lbfgs():
    def run(device):
        torch.manual_seed(0)
        net = model().to(device)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        x = torch.randn(6, 5).to(device)

        def closure():
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure), list(net.parameters())

    if not GPU:
        same(run, truth=CPU)
        return
    # What the closure computes has the GPU's bits, and the step the CPU's.
    (loss, parameters), (expected, plain) = run(OFFLOAD), run(COMPUTE)
    torch.testing.assert_close(loss.cpu(), expected.cpu())
    for parameter, truth in zip(parameters, plain, strict=True):
        torch.testing.assert_close(parameter.cpu(), truth.cpu())


def test_closure():
    def run(device):
        net = model().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        x = torch.randn(6, 5).to(COMPUTE)

        def closure():
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure) for _ in range(3)], list(net.parameters())

    same(run)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(norm_type, foreach):
    def run(device):
        net = model().to(device)
        net(torch.randn(6, 5).to(COMPUTE)).square().sum().backward()
        total = nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type=norm_type, foreach=foreach)
        return total, [p.grad for p in net.parameters()]

    same(run)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_grad_value(foreach):
    def run(device):
        net = model().to(device)
        net(torch.randn(6, 5).to(COMPUTE)).square().sum().backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.25, foreach=foreach)
        return [p.grad for p in net.parameters()]

    same(run)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    def run(device):
        net = model().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        x = torch.randn(6, 5).to(COMPUTE)
        results = []
        for _ in range(2):
            net(x).square().sum().backward()
            results += [p.grad.clone() for p in net.parameters()]
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all((p.grad is None) == set_to_none for p in net.parameters())
        return results, [p.grad for p in net.parameters()]

    same(run)


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_grad_scaler(bad):
    def run(device):
        net = model().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler(COMPUTE.type, init_scale=256.0, growth_interval=1)
        x = torch.randn(6, 5).to(COMPUTE)
        scales = []
        for k in range(3):
            optimizer.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            if bad is not None and k == 1:
                next(net.parameters()).grad[0, 0] = bad
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, list(net.parameters())

    same(run)


@pytest.mark.parametrize("use_buffers", [True, False])
def test_averaged_model(use_buffers):
    def run(device):
        net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).to(device)
        ema = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.75), use_buffers=use_buffers
        )
        for k in range(3):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0.25 * (k + 1))
            ema.update_parameters(net)
        return list(ema.parameters()), list(ema.buffers())

    same(run, truth=CPU)


@pytest.mark.parametrize("way", ["default", "foreach", "fused"])
def test_state_dict(way):
    def run(device):
        net = model().to(device)
        optimizer = torch.optim.AdamW(net.parameters(), **WAYS[way])
        gradients(net.parameters(), 0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        fresh = torch.optim.AdamW(net.parameters(), lr=1.0, **WAYS[way])
        fresh.load_state_dict(saved)
        gradients(net.parameters(), 1)
        fresh.step()
        return list(net.parameters()), [list(s.values()) for s in fresh.state.values()]

    same(run, truth=CPU)


def test_state_moves_to_the_parameters_device():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    gradients(net.parameters(), 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    net.to(OFFLOAD)
    fresh = torch.optim.AdamW(net.parameters())
    fresh.load_state_dict(saved)
    for parameter in net.parameters():
        assert fresh.state[parameter]["exp_avg"].device == parameter.device
        assert_same(fresh.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
    ids=["StepLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau"],
)
def test_schedulers(make):
    def run(device):
        net = model().to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        scheduler = make(optimizer)
        for k in range(3):
            gradients(net.parameters(), k)
            optimizer.step()
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(next(net.parameters()).sum())
            else:
                scheduler.step()
        return list(net.parameters()), [group["lr"] for group in optimizer.param_groups]

    same(run, truth=CPU)


@pytest.mark.parametrize("way", ["default", "foreach", "fused"])
def test_learning_rate_is_a_tensor(way):
    def run(device):
        net = model().to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1), **WAYS[way])
        gradients(net.parameters(), 0)
        optimizer.step()
        return list(net.parameters())

    if way == "foreach":
        with pytest.raises(ValueError, match="Tensor is not supported for capturable=False"):
            run(CPU)
        return
    same(run, truth=CPU)


def test_parameters_on_two_devices():
    """An adapter on the compute device beside a base on offload, in one optimizer."""

    def run(device):
        base, adapter = nn.Linear(5, 5).to(device), nn.Linear(5, 5).to(COMPUTE)
        optimizer = torch.optim.SGD([*base.parameters(), *adapter.parameters()], lr=0.5)
        x = torch.randn(6, 5).to(COMPUTE)
        for _ in range(3):
            optimizer.zero_grad()
            (base(x) + adapter(x)).square().mean().backward()
            nn.utils.clip_grad_norm_(list(base.parameters()), 1.0)
            optimizer.step()
        return list(base.parameters()), list(adapter.parameters())

    same(run)


def test_new_values_are_seen_and_old_ones_were():
    """A step writes host weights between a backward that read them and a forward that reads them."""

    def run(device):
        net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
        x = torch.randn(4, 16).to(COMPUTE)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, list(net.parameters())

    same(run)


def test_muon():
    def run(device):
        net = nn.Linear(6, 4, bias=False).to(device)
        optimizer = torch.optim.Muon(net.parameters(), lr=0.1)
        for k in range(2):
            gradients(net.parameters(), k)
            optimizer.step()
        return list(net.parameters())

    same(run, truth=CPU)


def test_parameters_as_one_vector():
    def run(device):
        net = model().to(device)
        flat = nn.utils.parameters_to_vector(net.parameters())
        assert flat.device.type == device.type
        nn.utils.vector_to_parameters(flat * 2, net.parameters())
        net(torch.ones(2, 5, device=COMPUTE)).sum().backward()
        return flat, list(net.parameters()), nn.utils.get_total_norm([p.grad for p in net.parameters()])

    same(run)


@pytest.mark.parametrize("way", ["for-loop", "foreach", "fused"])
def test_maximize_and_frozen_parameters(way):
    def make(parameters):
        parameters = list(parameters)
        parameters[1].requires_grad_(False)
        return torch.optim.AdamW(
            [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}], maximize=True, **WAYS[way]
        )

    def run(device):
        net = model().to(device)
        optimizer = make(net.parameters())
        for k in range(2):
            gradients(net.parameters(), k)
            list(net.parameters())[1].grad = None
            optimizer.step()
        return list(net.parameters())

    same(run, truth=CPU)


def test_step_hooks():
    """Hooks of the user's own, beside the ones that give the step its scope."""

    def run(device):
        net = model().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        calls = []
        optimizer.register_step_pre_hook(lambda o, a, k: calls.append("before"))
        optimizer.register_step_post_hook(lambda o, a, k: calls.append("after"))
        gradients(net.parameters(), 0)
        optimizer.step()
        return calls, list(net.parameters())

    same(run, truth=CPU)


def test_stepping_by_hand():
    def run(device):
        net = model().to(device)
        x = torch.randn(6, 5).to(COMPUTE)
        for _ in range(3):
            found = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), found, strict=True):
                    parameter -= 0.5 * gradient
        return list(net.parameters())

    same(run)


def test_weights_copied_from_another_device():
    def run(device):
        net, other = model().to(device), model().to(COMPUTE)
        with torch.no_grad():
            for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)
                mine.data.copy_(mine.data + theirs.data)
        return net(torch.randn(6, 5).to(COMPUTE)), list(net.parameters())

    same(run)
