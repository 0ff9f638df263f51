"""Gradients are read the moment backward returns, while their copies home are 50 ms late."""

import pytest
from helpers import GPU, passes

READS = {
    "sum": "[p.grad.sum().item() for p in model.parameters()]",
    "numpy": "[p.grad.cpu().numpy().tolist() for p in model.parameters()]",
    "clip": "clip_grad_norm_(model.parameters(), 0.01).item(), on_host(model)",
    "unscale": "unscaled(model), on_host(model)",
    "step": "stepped(model)",
}


@pytest.mark.memcheck
@pytest.mark.parametrize("budget", ["0", "auto"])
@pytest.mark.parametrize("read", READS)
def test_read_at_once(read, budget):
    """What is read of the plain device's gradients, on the host as of offload's."""
    told = passes(
        f"""
        import copy, torch, torch_offload
        from torch import nn
        from torch.nn.utils import clip_grad_norm_

        compute = "cuda" if torch.cuda.is_available() else "cpu"
        if compute == "cuda":
            torch.use_deterministic_algorithms(True)

        def on_host(model):
            return [p.grad.tolist() for p in model.parameters()]

        def unscaled(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            device = model[0].weight.device.type
            scaler = torch.amp.GradScaler("cpu" if device == "cpu" else compute, init_scale=4.0)
            scaler.scale(torch.ones((), device="cpu" if device == "cpu" else compute))
            with torch_offload.on_host():
                scaler.unscale_(optimizer)
            return sum(scaler._found_inf_per_device(optimizer).values()).item()

        def stepped(model):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            return [p.tolist() for p in model.parameters()]

        def read_of(model):
            with torch_offload.on_host():
                return {READS[read]}

        torch.manual_seed(0)
        plain = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())])
        model, reference = copy.deepcopy(plain).to("offload"), copy.deepcopy(plain).to(compute)
        x = torch.randn(8, 64).to(compute)
        model(x).square().sum().backward()
        actual = read_of(model)
        reference(x).square().sum().backward()
        for p, q in zip(plain.parameters(), reference.parameters()):
            p.grad = q.grad.cpu()
        print(actual == read_of(plain), len(str(actual)))
        """,
        TORCH_OFFLOAD_COPY_DELAY_US="50000",
        TORCH_OFFLOAD_LINK="auto" if GPU else "sim",
        TORCH_OFFLOAD_BUDGET=budget,
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )
    same, length = told.split()
    assert same == "True"
    assert int(length) > 10


def test_read_by_a_hook():
    told = passes(
        """
        import copy, torch, torch_offload
        from torch import nn

        compute = "cuda" if torch.cuda.is_available() else "cpu"
        if compute == "cuda":
            torch.use_deterministic_algorithms(True)

        def run(model, x):
            seen = {}
            for name, p in model.named_parameters():
                p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.tolist()}))
            model(x).square().sum().backward()
            return seen

        torch.manual_seed(0)
        plain = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())])
        model = copy.deepcopy(plain).to("offload")
        x = torch.randn(8, 64).to(compute)
        seen = run(model, x)
        print(seen == run(plain.to(compute), x), len(seen))
        """,
        TORCH_OFFLOAD_COPY_DELAY_US="50000",
        TORCH_OFFLOAD_LINK="auto" if GPU else "sim",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )
    assert told.split() == ["True", "8"]
